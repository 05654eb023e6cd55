"""The worker processes of a run: which there are, in which interpreter, held to the same threads and instructions."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from files import Files
from lines import Worker, WorkerFailed, worker_command
from rows import Side

HASWELL = (
    "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+sahf,+cmov,+fxsr,+mmx,+xsave,+movbe,+lzcnt,+bmi,+bmi2,"
    "+avx,+avx2,+fma,+f16c"
)
# What holds each library to AVX2; NumPy's names of what lies above it differ by version, and it skips unknown ones.
AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": HASWELL,
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
    "OPENBLAS_CORETYPE": "Haswell",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CT2_FORCE_CPU_ISA": "AVX2",
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def environment(threads: int, isa: str) -> dict[str, str]:
    """What every process of a run is started with."""
    counted = ("OMP", "MKL", "OPENBLAS", "NUMBA")
    own = {f"{name}_NUM_THREADS": str(threads) for name in counted} | {"CUTAWAY_THREADS": str(threads)}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **own, **offline, **(AVX2 if isa == "avx2" else {})}


class Contenders:
    """Starts workers when they are first asked for, and ends them. `rivals` is an interpreter, or None for none."""

    def __init__(
        self, model: Path, rivals: str | None, folder: Path, around: dict[str, str], told: Callable[[str], None]
    ) -> None:
        self._rivals, self._environment = rivals, around
        self._files = Files(model, folder, self._start, told)
        self._missing = self._ask_missing()
        self._workers: dict[tuple[str, str], Worker] = {}
        self._prepared: set[tuple[Worker, str]] = set()
        self.about: dict[str, dict[str, Any]] = {}

    def why_not(self, side: Side) -> str | None:
        """Why a side cannot be measured, if so."""
        return None if side.who == "cutaway" else self._missing.get(side.who)

    def run(self, side: Side) -> Callable[[], float]:
        """One run of a side's job, prepared now. Raises WorkerFailed where it cannot be."""
        worker = self.worker(side)
        key = json.dumps([side.job, side.settings])
        if (worker, key) not in self._prepared:
            worker.prepare(key, side.job, side.settings)
            self._prepared.add((worker, key))
        return lambda: worker.run(key)

    def worker(self, side: Side) -> Worker:
        place = (side.who, side.file)
        if place not in self._workers:
            self._workers[place] = self._start(side.who, self._files.place(side.file))
            if side.who not in self.about:
                self.about[side.who] = self._workers[place].about()
        return self._workers[place]

    def bytes_of(self, side: Side) -> int:
        return self._files.place(side.file).stat().st_size

    def close(self, but: Iterable[Side] = ()) -> None:
        """End all workers but those that serve these sides."""
        stay = {(side.who, side.file) for side in but}
        for place in [place for place in self._workers if place not in stay]:
            worker = self._workers.pop(place)
            self._prepared = {(one, key) for one, key in self._prepared if one is not worker}
            worker.close()

    def _start(self, who: str, file: Path | str) -> Worker:
        if who == "cutaway":
            return Worker(worker_command(sys.executable, "ours.py", str(file)), self._environment)
        if (why := self._missing.get(who)) is not None:
            raise WorkerFailed(why)
        assert self._rivals is not None
        return Worker(worker_command(self._rivals, "rivals.py", who, str(file)), self._environment)

    def _ask_missing(self) -> dict[str, str]:
        from rivals import CONTENDERS

        if self._rivals is None:
            return dict.fromkeys(CONTENDERS, "left out (--rivals none)")
        command = worker_command(self._rivals, "rivals.py", "missing")
        try:
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            return dict.fromkeys(CONTENDERS, f"{self._rivals} does not run rivals.py: {error}")
        return {name: f"not installed ({line})" for name, line in json.loads(told).items()}
