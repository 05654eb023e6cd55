"""How fast Cutaway is beside other programs: the same files, the same threads, measured in turns within one run.

    python benchmarks/run.py --rivals OTHER/bin/python            # everything; about a quarter of an hour
    python benchmarks/run.py --rows decode,prefill --repeats 9
    python benchmarks/run.py --isa native --json > figures.json

llama.cpp, transformers, TransformerLens and CTranslate2 run in the interpreter that --rivals names (if not given: this
one); what is not installed there is listed with the line that installs it, and ours is measured alone. The model's
file is read by both sides as it lies; the same model as Q4_0, Q8_0 and Q4_K_M is made by llama.cpp's own library, its
weights as float32 for transformers and as int8 for CTranslate2, all once, in --work.

Each side is a process of its own. They take turns: ours, theirs, ours, theirs, …; a row's ratio is the median of the
pairs' ratios. A pair during which other processes took more than --quiet processors is set aside and run again. What
reading the file alone would allow stands beside every row. It measures; it never fails on a time.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders import IS_X86, Contenders, environment
from cutaway.checkpoints.sources import locate
from cutaway.errors import CutawayError
from cutaway.places import cache_folder
from lines import WorkerFailed
from pairing import busy_process, in_turns
from report import figures, head, line, single, table
from rows import GROUPS, Row, Side, Sizes, rows
from start import first_token

JUDGED = "smollm2-135m"  # the model that the bars are stated for
OURS = Side("cutaway", "", {})


def told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Benchmark:
    """One run of the command."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self._settings = settings
        model = locate(settings.model).path
        rivals = None if settings.rivals == "none" else settings.rivals
        work = Path(settings.work) if settings.work else cache_folder() / "benchmarks"
        self._environment = environment(settings.threads, settings.isa)
        self._contenders = Contenders(model, rivals, work, self._environment, told)
        ours = self._contenders.worker(OURS).about()
        is_gguf = model.suffix == ".gguf"
        self._sizes = Sizes(
            settings.tokens,
            settings.context,
            settings.prompt,
            settings.lengths,
            ours["layers"],
            ours["reach"],
            Sizes.variants if is_gguf else (),
        )
        reading = self._contenders.worker(OURS).prepare("", "read", {"threads": settings.threads, "repeats": 15})
        self._read_s, self._file_bytes = sorted(reading), ours["file_bytes"]
        self._contenders.close()  # whose memory is measured must not have compiled what the others need

    def results(self) -> Iterator[dict[str, Any]]:
        """Every row that was asked for, as it is measured."""
        asked = [row for row in rows(self._sizes) if row.group in self._settings.rows]
        for index, row in enumerate(asked):
            told(f"[{index + 1} of {len(asked)}] {row.what}")
            yield self._measured(row)
            later = asked[index + 1 : index + 2]
            self._contenders.close(but=[side for next in later for side in (next.ours, next.theirs) if side])
        if "start" in self._settings.rows:
            yield self._start()
        if "memory" in self._settings.rows:
            yield from self._memory()
        self._contenders.close()

    def machine(self) -> dict[str, Any]:
        """What was measured with, and on what."""
        read, size = self._read_s, self._file_bytes
        return {
            "processor": _processor(),
            "processors": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
            "threads": self._settings.threads,
            "isa": self._settings.isa,
            "file_bytes": size,
            "read_bytes_per_s": size / read[0],
            "read_bytes_per_s_median": size / read[len(read) // 2],
            "contenders": self._contenders.about,
        }

    def close(self) -> None:
        self._contenders.close()

    def _measured(self, row: Row) -> dict[str, Any]:
        judged = row if self._settings.model == JUDGED else replace(row, bar=None)
        why_not = None if row.theirs is None else self._contenders.why_not(row.theirs)
        theirs = None
        try:
            if row.theirs is not None and why_not is None:
                try:
                    theirs = self._contenders.run(row.theirs)
                except WorkerFailed as failure:
                    why_not = f"{row.theirs.who}: {failure}"
            ours = self._contenders.run(row.ours)
            with busy_process() if row.busy else nullcontext() as beside:
                sides = [row.ours] if theirs is None or row.theirs is None else [row.ours, row.theirs]
                processes = {self._contenders.worker(side).id for side in sides}
                turns = in_turns(
                    ours,
                    theirs,
                    self._settings.repeats,
                    quiet=self._settings.quiet,
                    most=self._settings.repeats * self._settings.patience,
                    processes=processes | ({beside} if beside else set()),
                    told=_pairs_told,
                )
        except WorkerFailed as failure:
            return head(judged) | {"failed": str(why_not or failure)}
        size = self._contenders.bytes_of(row.ours)
        result = figures(judged, turns, size, self._file_bytes / self._read_s[0])
        return result if why_not is None else result | {"failed": why_not}

    def _start(self) -> dict[str, Any]:
        told("start of the process to the first token")

        def run() -> float:
            return first_token(self._settings.model, self._settings.text, self._environment)

        s, what = self._settings, "process start to first printed token"
        try:
            turns = in_turns(run, None, s.repeats, quiet=s.quiet, most=s.repeats * s.patience, processes=[])
        except RuntimeError as failure:
            return {"group": "start", "what": what, "judged": "", "bar": None, "failed": str(failure)}
        return single("start", what, "s", [turn.ours for turn in turns.kept], self._bar(1.0))

    def _memory(self) -> Iterator[dict[str, Any]]:
        told("private memory while decoding")
        own = []
        for _ in range(self._settings.repeats):
            measured = self._contenders.worker(OURS).prepare("", "private_memory", {"tokens": self._settings.tokens})
            self._contenders.close()
            if measured is None:
                return
            own.append(measured["private"] / 1e6)
        yield single("memory", "private memory, decoding", "MB", own, self._bar(350))

    def _bar(self, bar: float) -> float | None:
        return bar if self._settings.model == JUDGED else None


def _pairs_told(kept: int, set_aside: int) -> None:
    if sys.stderr.isatty():
        print(f"\r  {kept} quiet, {set_aside} disturbed ", end="", file=sys.stderr, flush=True)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        family, number, mhz = (named.get(key, "?") for key in ("cpu family", "model", "cpu MHz"))
        return f"{named['model name']}, family {family}, model {number}, {mhz} MHz"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def show(machine: dict[str, Any], results: list[dict[str, Any]]) -> None:
    best, usual = (machine[key] / 1e9 for key in ("read_bytes_per_s", "read_bytes_per_s_median"))
    print(
        f"{machine['processor']}; {machine['processors']} processors, {machine['threads']} threads each; "
        f"instructions: {machine['isa']}; {machine['system']}.\n"
        f"Reading the {machine['file_bytes'] / 1e6:.1f} MB file: {best:.1f} GB/s at best, {usual:.1f} usually; "
        f"so at most {machine['read_bytes_per_s'] / machine['file_bytes']:.0f} tokens a second, one by one.\n"
    )
    print(table(results) + "\n")
    for who, about in machine["contenders"].items():
        print(f"{who}: {about['version']}; {about['instructions']}")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", default=",".join(GROUPS), metavar="NAMES", help="; ".join(f"{k}: {v}" for k, v in GROUPS.items()))
    add("--rivals", default=sys.executable, metavar="PYTHON", help='the interpreter that has them, or "none"')
    add("--model", default=JUDGED, help=f"a name, or a file; the bars are those of {JUDGED}, which is the default")
    add("--isa", choices=["avx2", "native"], default="avx2" if IS_X86 else "native", help="hold all sides to AVX2, or")
    add("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every process (2)")
    add("--repeats", type=int, default=5, help="pairs that count, of every row (5)")
    add("--quiet", type=float, default=0.15, metavar="PROCESSORS", help="that others may take during a pair (0.15)")
    add("--patience", type=int, default=3, metavar="N", help="at most N times as many pairs as --repeats (3)")
    add("--tokens", type=int, default=32, help="to decode in a turn (32)")
    add("--context", type=int, default=2000, help="tokens of the long context (2000)")
    add("--prompt", type=int, default=512, help="tokens of the prompt that is prefilled (512)")
    add("--lengths", default="5,64,512", type=_numbers, help="of whole passes (5,64,512)")
    add("--text", default="The capital of France is", help="the prompt of the row `start`")
    add("--work", metavar="FOLDER", help="where files are made (if not given: in the user's cache)")
    add("--json", action="store_true", help="print one JSON document")
    settings = parser.parse_args(arguments)
    settings.rows = settings.rows.split(",")
    if unknown := sorted(set(settings.rows) - set(GROUPS)):
        parser.error(f"there are no rows {unknown[0]!r}; there are {', '.join(GROUPS)}")
    if min(settings.repeats, settings.threads, settings.patience, settings.tokens, *settings.lengths) < 1:
        parser.error("--repeats, --threads, --patience, --tokens and --lengths must be at least 1")
    if settings.isa == "avx2" and not IS_X86:
        parser.error("this machine has no AVX2; give --isa native")
    return settings


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main() -> None:
    settings = parsed()
    try:
        benchmark = Benchmark(settings)
    except (CutawayError, WorkerFailed) as error:
        raise SystemExit(f"run.py: {error}") from None
    results = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is not lost
    try:
        for result in benchmark.results():
            results.append(result)
            told("  " + line(result))
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
        told("\nstopped; this is what was measured")
    finally:
        benchmark.close()
    if settings.json:
        print(json.dumps({"machine": benchmark.machine(), "rows": results}, indent=2))
    else:
        show(benchmark.machine(), results)


if __name__ == "__main__":
    main()
