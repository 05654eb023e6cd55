"""What a view of every head's pattern costs on a long prompt: the peak of memory, beside the bill and the plain pass.

    python benchmarks/long_prompts.py                        # 8,000 tokens of docs/: minutes for each line
    python benchmarks/long_prompts.py --tokens 2000

Each line is a process of its own. Memory is what the process has for itself (not the mapped file), looked at 20 times a
second; its peak is told over what was there before the pass. Linux only. It measures; it never fails on a figure.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

REDUCTIONS = ("", "top(5)", "pool(64)")  # "": the pass alone, nothing kept
LOOKS = 0.05  # seconds between two looks at the memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.one is not None:
        print(json.dumps(measured(settings.model, settings.tokens, settings.one)))
        return 0
    for reduction in REDUCTIONS:
        command = [sys.executable, __file__, "--model", settings.model, "--tokens", str(settings.tokens)]
        told = json.loads(subprocess.run([*command, "--one", reduction], check=True, capture_output=True).stdout)
        name = f"layers.*.attn.pattern | {reduction}" if reduction else "nothing kept"
        print(
            f"{name:<36} peak {told['peak'] / 1e6:8.1f} MB   bill {told['bill'] / 1e6:6.1f} MB and a block of "
            f"{told['block'] / 1e6:5.1f} MB   {told['seconds']:7.1f} s",
            flush=True,
        )
    return 0


def measured(name: str, tokens: int, reduction: str) -> dict[str, float]:
    """One pass: its peak over what was there before, the bill, the seconds."""
    import cutaway

    warnings.simplefilter("ignore")  # the prompt is longer than the model was made for
    model = cutaway.load(name)
    texts = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    ids = model.tokenizer.encode("\n".join(text.read_text(encoding="utf-8") for text in texts))[:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"docs/ holds {len(ids)} tokens only.")
    points = [f"layers.*.attn.pattern | {reduction}"] if reduction else []
    model.trace(ids[:300], points)  # kernels are compiled, scratch is there
    bill, before = model.plan(ids, points), private_memory()
    peak, done = [before], threading.Event()

    def look() -> None:
        while not done.wait(LOOKS):
            peak[0] = max(peak[0], private_memory())

    looking = threading.Thread(target=look)
    looking.start()
    begun = time.perf_counter()
    run = model.trace(ids, points)
    seconds = time.perf_counter() - begun
    done.set()
    looking.join()
    kept = sum(run[point].nbytes for point in run.points)
    return {"peak": peak[0] - before, "bill": bill.bytes, "block": bill.block, "kept": kept, "seconds": seconds}


def private_memory() -> int:
    """Bytes that this process has for itself."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024


if __name__ == "__main__":
    sys.exit(main())
