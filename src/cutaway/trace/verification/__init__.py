"""Does a pass hold together, and is it the right one?

`identities` lists what must be true inside every trace, with the parts of a layer in `attention` and `feedforward`;
`check` is one result, and the float64 arithmetic that results are compared with, which no engine lends. `verify` adds
what must be true between passes of one model; `against` holds the same checkpoint in transformers beside ours.
"""
