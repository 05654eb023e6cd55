"""Many prompts, watched: each gets what it has alone, however many share a pass.

`sweeping` is what people ask for, its settings checked. `prompts` takes them one at a time from a list, an iterator or
a file; `packing` puts several into a pass and hands the results out in order; `packed_pass` runs one such pass. On
disk, `files` writes shards and an index so that a killed sweep goes on where it was; `layout` says how results lie in
a shard; `folder` reads them back.
"""
