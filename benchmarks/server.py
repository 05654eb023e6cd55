"""What the OpenAI-compatible server does with many clients at once, and with clients that misbehave.

    python benchmarks/server.py                        # SmolLM2-135M for speed, the toy in the storm; two minutes
    python benchmarks/server.py --only storm --requests 500 --json

*speed*: tokens a second of eight concurrent streams beside those of one, in turns, the median with the smallest and
the largest. *storm*: requests of which some leave, some are malformed and some are given up, and what became of the
others, of the server's memory, and of the work that nobody waits for.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROMPT = "Once upon a time there was a little fox who lived at the edge of a wide, dark forest."
WORDS = ["dragon", "drinks", "potion", "mixes", "fire", "glowing", "smashes", "troll"]
SECONDS = 60.0  # within which every request must have an end
MALFORMED = (
    b"{",
    b"[]",
    b'{"model": "toy"}',
    b'{"model": "toy", "prompt": ""}',
    b'{"model": "nobody", "prompt": "<BOS>"}',
    b'{"model": "toy", "prompt": "<BOS> unheard"}',
    b'{"model": "toy", "prompt": "<BOS>", "temperature": NaN}',
    b'{"model": "toy", "prompt": "<BOS>", "max_tokens": 5000}',
    b'{"model": "toy", "prompt": "<BOS>", "tools": [1]}',
    b'{"model": "toy", "prompt": [0, 99]}',
    b'{"model": "toy", "prompt": "\\ud800"}',
    b'{"model": "toy", "prompt": "<BOS>", "logit_bias": {"a": 1}}',
)


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server in a process of its own, and its port; ended as a supervisor ends it."""
    command = [sys.executable, "-m", "cutaway", "serve", "--port", "0", "--no-browser", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = process.stdout.readline()
            found = re.search(r":(\d+)/", told)
            if found is None:
                raise SystemExit(f"The server did not start: {told}")
            asyncio.run(_ready(int(found[1])))
            yield process, int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


async def _ready(port: int) -> None:
    """Wait until the model is loaded."""
    for _ in range(1200):
        try:
            if (await call(port, "GET", "/health")).status == 200:
                return
        except OSError:  # nobody listens yet
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("The server's model was not loaded within two minutes.")


@dataclass
class Heard:
    """An answer: its status and its body, chunks joined."""

    status: int
    body: bytes

    @property
    def events(self) -> list[dict]:
        """What a stream told."""
        lines = self.body.decode("utf-8").split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + body


async def call(port: int, method: str, path: str, body: bytes = b"") -> Heard:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request(method, path, body))
        head, _, rest = (await asyncio.wait_for(reader.read(-1), SECONDS)).partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            chunks = []
            while rest:
                size, _, rest = rest.partition(b"\r\n")
                chunks.append(rest[: int(size, 16)])
                rest = rest[int(size, 16) + 2 :]
            rest = b"".join(chunks)
        return Heard(int(head.split(b" ", 2)[1]), rest)
    finally:
        writer.close()


async def leave(port: int, path: str, body: bytes, after: int, seconds: float) -> None:
    """Ask, read `after` bytes of the answer at most or for so many `seconds`, and hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_request("POST", path, body))
        await asyncio.wait_for(reader.read(after), seconds)
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()


@dataclass
class Storm:
    """What became of a storm."""

    ended: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Bytes of the server, after each of ten parts."""
    left_over: int = 0
    """Responses under way once everybody has gone."""


def asked(number: int, *, stream: bool) -> bytes:
    """The request of this number: the same prompt, length and seed every time."""
    chance = random.Random(number)
    prompt = " ".join(["<BOS>", *chance.choices(WORDS, k=chance.randint(1, 60))])
    told = {"model": "toy", "prompt": prompt, "max_tokens": chance.randint(1, 60), "seed": number, "stream": stream}
    return json.dumps(told).encode()


async def storm(port: int, process: int, requests: int, at_once: int = 24, seed: int = 0) -> Storm:
    """Send `requests`, `at_once` at a time: some wait for their answer, which must be what it is alone."""
    found = Storm()
    path = "/v1/completions"
    numbers = range(12)
    alone = {}
    for number in numbers:
        answer = json.loads((await call(port, "POST", path, asked(number, stream=False))).body)
        alone[number] = answer["choices"][0]["text"]
    chance = random.Random(seed)
    plan = [
        (chance.choice(["whole", "stream", "leave", "give up", "malformed"]), chance.choice(numbers), chance.random())
        for _ in range(requests)
    ]

    async def one(kind: str, number: int, share: float) -> None:
        if kind == "leave":
            await leave(port, path, asked(number, stream=True), int(1 + 6000 * share), 5)
        elif kind == "give up":
            await leave(port, path, asked(number, stream=False), 1 << 20, 0.05 * share)
        elif kind == "malformed":
            body = MALFORMED[int(share * len(MALFORMED))]
            answer = await call(port, "POST", path, body)
            if not 400 <= answer.status < 500 or not json.loads(answer.body)["error"]["message"]:
                found.wrong.append(f"{body!r} was answered with {answer.status}: {answer.body!r}")
        else:
            answer = await call(port, "POST", path, asked(number, stream=kind == "stream"))
            while answer.status == 429:
                found.ended["429"] += 1
                await asyncio.sleep(0.05)
                answer = await call(port, "POST", path, asked(number, stream=kind == "stream"))
            parts = answer.events if kind == "stream" else [json.loads(answer.body)]
            text = "".join(part["choices"][0]["text"] for part in parts if "choices" in part)
            if text != alone[number]:
                found.wrong.append(f"Request {number} said {text!r} ({answer.status}); alone it says {alone[number]!r}")
        found.ended[kind] += 1

    for part in range(10):
        waiting = plan[part * requests // 10 : (part + 1) * requests // 10][::-1]

        async def client(waiting: list[tuple[str, int, float]] = waiting) -> None:
            while waiting:
                await one(*waiting.pop())

        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(at_once))), SECONDS * 10)
        found.memory.append(resident(process))
    for _ in range(100):
        told = json.loads((await call(port, "GET", "/health")).body)
        found.left_over = told["running"] + told["waiting"]
        if not found.left_over:
            break
        await asyncio.sleep(0.05)
    return found


def resident(process: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def streams(port: int, model: str, count: int, tokens: int) -> float:
    """Tokens a second of `count` concurrent streams together, prompts included in the time."""
    bodies = [
        {"model": model, "prompt": PROMPT, "max_tokens": tokens, "seed": seed, "stream": True, "logprobs": 0}
        | {"logit_bias": {str(end): -100 for end in (0, 2)}}  # none ends early
        for seed in range(count)
    ]
    begun = time.perf_counter()
    answers = await asyncio.gather(*(call(port, "POST", "/v1/completions", json.dumps(b).encode()) for b in bodies))
    seconds = time.perf_counter() - begun
    told = [sum(len(part["choices"][0]["logprobs"]["tokens"]) for part in answer.events) for answer in answers]
    if told != [tokens] * count:
        raise SystemExit(f"The streams told {told} tokens, not {tokens} each.")
    return count * tokens / seconds


def measured_speed(model: str, repeats: int, tokens: int) -> dict:
    """One stream and eight, in turns."""
    rates: dict[int, list[float]] = {1: [], 8: []}
    with serving("--model", model) as (_, port):
        for turn in range(repeats + 1):
            for count, told in rates.items():
                rate = asyncio.run(streams(port, model, count, tokens))
                if turn:  # the first warms up
                    told.append(rate)
    medians = {count: statistics.median(told) for count, told in rates.items()}
    spread = {count: (min(told), max(told)) for count, told in rates.items()}
    return {"tokens a second": medians, "smallest and largest": spread, "eight / one": medians[8] / medians[1]}


def measured_storm(requests: int) -> dict:
    """The storm, with the memory after its first fifth as the measure of the rest."""
    with serving("--model", "toy", "--waiting", "8") as (process, port):
        asyncio.run(storm(port, process.pid, max(50, requests // 5), seed=1))  # what is held once is held
        begun = time.perf_counter()
        found = asyncio.run(storm(port, process.pid, requests))
        seconds = time.perf_counter() - begun
    return {
        "requests": dict(found.ended),
        "seconds": seconds,
        "wrong": found.wrong,
        "left over": found.left_over,
        "memory": found.memory,
        "growth": found.memory[-1] / found.memory[0] - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["speed", "storm"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told = {}
    if options.only != "storm":
        told["speed"] = measured_speed(options.model, options.repeats, options.tokens)
    if options.only != "speed":
        told["storm"] = measured_storm(options.requests)
    if options.json:
        print(json.dumps(told))
        return
    for name, found in told.items():
        print(name)
        for key, value in found.items():
            print(f"  {key}: {value}")


if __name__ == "__main__":
    main()
