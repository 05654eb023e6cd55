"""Loaded and having run a prompt, a model holds little more private memory than its file has bytes."""

import json
import subprocess
import sys

import pytest

MEASURE = """
import json, re
from pathlib import Path
import cutaway

model = cutaway.load("smollm2-135m")
trace = model.trace([(i * i) % model.spec.vocab_size for i in range(64)])
assert trace.logits.shape == (64, model.spec.vocab_size)

# The file is mapped: its pages are the system's to keep or to drop, although smaps counts them as private
# as long as no other process looks at the same file.
private, file = {True: 0, False: 0}, str(model.path.resolve())
ours = False
for line in Path("/proc/self/smaps").read_text().splitlines():
    if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
        ours = line.endswith(file)
    elif line.startswith(("Private_Clean:", "Private_Dirty:")):
        private[ours] += 1024 * int(line.split()[1])
print(json.dumps({"private": private[False], "mapped": private[True], "file": model.path.stat().st_size}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process which of its memory is its own")
def test_smollm2_holds_at_most_half_as_much_again_as_its_file_and_200_mb() -> None:
    run = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    assert measured["private"] <= 1.5 * measured["file"] + 200e6, measured
