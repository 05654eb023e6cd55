"""How the benchmark speaks with its worker processes: one JSON line asks, one answers. The standard library alone.

A worker serves one contender. It is asked to `prepare` a job under a key, then to `run` it, again and again; each run
answers with its seconds, measured in the worker, so that the pipe is not counted.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SHORTEST = 0.25  # seconds of a turn

Job = Callable[[], float]  # one run; the seconds of what is measured


class WorkerFailed(Exception):
    """A worker could not do what it was asked, with its own words."""


def example_ids(length: int, vocabulary: int) -> list[int]:
    """The same ids on every side: what a pass costs does not hang on them."""
    return [(i * i + 7 * i + 3) % vocabulary for i in range(length)]


def _seconds(job: Job) -> float:
    """Of one run; a short one is repeated, and this is the mean: the clocks of other processes tick in hundredths."""
    seconds = [job()]
    while sum(seconds) < SHORTEST:
        seconds.append(job())
    return sum(seconds) / len(seconds)


def serve(about: Callable[[], dict[str, Any]], jobs: Mapping[str, Callable[..., Any]]) -> None:
    """Answer the questions on standard input until it ends.

    `jobs` are makers by name. One that gives a function has prepared a job, to be run later; what else a maker gives
    is the answer. Native libraries may print: that goes to standard error, the answers to the true standard output.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    prepared: dict[str, Job] = {}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["do"] == "about":
                answer: Any = about()
            elif question["do"] == "prepare":
                answer = jobs[question["job"]](**question["with"])
                if callable(answer):
                    prepared[question["key"]], answer = answer, None
            else:
                answer = _seconds(prepared[question["key"]])
            reply = {"answer": answer}
        except Exception as error:
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


class Worker:
    """One worker process. Raises WorkerFailed where it cannot answer."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        # Standard error goes to a file: a pipe that nobody reads would fill up.
        self._said = tempfile.TemporaryFile("w+b")  # noqa: SIM115 -- closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=dict(environment),
            text=True,
            encoding="utf-8",
        )
        self.id = self._process.pid

    def about(self) -> dict[str, Any]:
        return self._ask({"do": "about"})

    def prepare(self, key: str, job: str, settings: Mapping[str, Any]) -> Any:
        return self._ask({"do": "prepare", "key": key, "job": job, "with": dict(settings)})

    def run(self, key: str) -> float:
        return self._ask({"do": "run", "key": key})

    def close(self) -> None:
        """End the worker: its input ends, and it goes by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # it may have gone before it had read everything
                    pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise WorkerFailed(f"the process ended with status {self._process.wait()}: {self._last_words()}")
        reply = json.loads(line)
        if "failed" in reply:
            raise WorkerFailed(reply["failed"])
        return reply["answer"]

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def worker_command(python: str, script: str, *arguments: str) -> list[str]:
    """What starts a worker of this folder."""
    return [python, str(Path(__file__).with_name(script)), *arguments]
