"""How fast a sweep is beside a loop over TransformerLens' run_with_cache that keeps the same: every layer's stream.

    python benchmarks/sweep.py --rivals OTHER/bin/python                  # 64 prompts of 64 tokens: 2 to 4 minutes
    python benchmarks/sweep.py --rivals OTHER/bin/python --prompts 1000   # half an hour

Either side's time grows in proportion to the prompts, but for what is done once: 64 prompts (two passes of ours) give
the ratio of 1,000.

Both sides run the same ids, in processes of their own and in turns (see run.py), and hold every prompt's streams, as
NumPy arrays or tensors, until the next one comes. TransformerLens runs the same weights in float32, one prompt after
another, as people loop over it; its names_filter takes the streams only, and a run in which it took any other number of
them fails. It works out all logits of each prompt besides, as run_with_cache does when it is called so; the sweep works
out those of the last token, which its traces hold. --batch gives it several prompts of equal length to a pass, which a
loop over a real dataset, whose prompts differ, can do with padding only. The bar: a third of its time. It measures; it
never fails on a time.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from contenders import Contenders, environment
from cutaway.checkpoints.sources import locate
from cutaway.errors import CutawayError
from cutaway.places import cache_folder
from lines import WorkerFailed
from pairing import in_turns
from rows import Side

BAR = 3.0  # times as fast


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    settings = _arguments()
    model = locate(settings.model).path
    work = Path(settings.work) if settings.work else cache_folder() / "benchmarks"
    contenders = Contenders(model, settings.rivals, work, environment(settings.threads, settings.isa), told)
    size = {"prompts": settings.prompts, "length": settings.length}
    ours = Side("cutaway", "sweep", size)
    theirs = Side("TransformerLens", "sweep", {**size, "batch": settings.batch}, "float32")
    try:
        runs = contenders.run(ours), contenders.run(theirs)
        turns = in_turns(
            *runs,
            settings.repeats,
            quiet=settings.quiet,
            most=settings.repeats * settings.patience,
            processes=[contenders.worker(side).id for side in (ours, theirs)],
            told=lambda kept, aside: told(f"  {kept} of {settings.repeats} pairs, {aside} set aside"),
        )
    except WorkerFailed as failure:
        raise CutawayError(f"The sweep was not measured: {failure}") from None
    finally:
        contenders.close()
    ratios = [turn.theirs / turn.ours for turn in turns.kept if turn.theirs is not None]
    figures = {
        **size,
        "batch": settings.batch,
        "ours_s": [turn.ours for turn in turns.kept],
        "theirs_s": [turn.theirs for turn in turns.kept],
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "elsewhere": turns.elsewhere,
        "bar": BAR,
        "contenders": contenders.about,
    }
    if settings.json:
        print(json.dumps(figures, indent=2))
        return 0
    own, other = statistics.median(figures["ours_s"]), statistics.median(figures["theirs_s"])
    tokens = settings.prompts * settings.length
    print(f"{settings.prompts:,} prompts of {settings.length} tokens, every layer's stream kept:")
    print(f"  model.sweep                       {own:8.2f} s  {tokens / own:8,.0f} tokens a second")
    print(
        f"  run_with_cache, {settings.batch} to a pass         {other:8.2f} s  {tokens / other:8,.0f} tokens a second"
    )
    busy = "" if turns.elsewhere is None else f"; others took {turns.elsewhere:.1f} processors"
    print(f"  ratio {figures['ratio']:.2f} ({ratios and min(ratios):.2f} to {max(ratios):.2f}), bar {BAR}{busy}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", default=sys.executable, help="the interpreter that has TransformerLens")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--work", help="where the float32 weights are made, once")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="prompts that TransformerLens runs at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=int, default=2, help="run up to so many times the repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=["avx2", "native"], default="avx2")
    parser.add_argument(
        "--quiet", type=float, default=0.15, help="processors that others may take in a pair that counts"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CutawayError as error:
        sys.exit(f"sweep.py: {error}")
