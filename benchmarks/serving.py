"""The three bars of generation, in one run of under three minutes: sampling, eight streams, a chat's second turn.

    python benchmarks/serving.py
    python benchmarks/serving.py --only streams,turns --rounds 9 --json

*sampling*: what one token's choice costs with all nine stages in use and recorded, as a share of the pass that gave its
logits; the bar is below 10 %. *streams*: tokens a second of eight concurrent streams of a server, over those of one; at
least 2. *turns*: how long a streamed chat of about 1,000 tokens takes to its first token, over how long its second turn
takes, whose beginning was read before; at least 10.

In every round both sides are measured one after the other; a bar is judged by the median of the rounds' ratios, the
smallest and the largest stand beside it. Each part gets `--seconds` and then ends, after at least three rounds. Run it
on a quiet machine. It measures; it never fails on a time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

import cutaway
from cutaway.generate import History, Recording, Sampling
from cutaway.generate.candidates import Candidates, Scratch
from cutaway.generate.passes import Passes, Work
from cutaway.generate.record import taken
from sampling import EVERYTHING, PROMPT
from server import SECONDS, call, serving

FEWEST = 3
STREAMS = 8
CHAT_TOKENS = 1000
SUBJECTS = ("fox", "owl", "cat", "bee", "elk", "hen", "ram", "eel")
Round = tuple[float, float]  # seconds, or tokens a second, of both sides


def rounds(most: int, seconds: float, run: Callable[[int], Round]) -> Iterator[Round]:
    """`run` one round after another: a first one that is not counted, then up to `most` while the time lasts."""
    run(-1)
    begun = time.perf_counter()
    for number in range(most):
        if number >= FEWEST and time.perf_counter() - begun > seconds:
            return
        yield run(number)


def sampling(model_name: str, most: int, seconds: float) -> list[Round]:
    """Seconds of a recorded choice through all stages, and of the pass before it."""
    model = cutaway.load(model_name)
    prompt = [token % model.spec.vocab_size for token in range(3, 33)]
    settings = EVERYTHING | {"logit_bias": {1: 0.5, 2: -0.5}}
    chain, history, scratch = Sampling(**settings), History(prompt * 8, prompt * 4), Scratch()  # type: ignore[arg-type]
    passes = Passes(model.engine, model.spec, model.parameters)
    cache = passes.cache()
    logits = np.array(passes.run([Work(cache, prompt, 1)])[0][0])

    def one(number: int) -> Round:
        begun = time.perf_counter()
        passes.run([Work(cache, [3], 1)])
        passed = time.perf_counter()
        scratch.begin()
        taken(Candidates.of(logits, scratch), logits, chain, 0.4, history, 0, Recording())
        chosen = time.perf_counter() - passed
        cache.truncate(len(prompt))
        return chosen, passed - begun

    return list(rounds(20 * most, seconds, one))


async def rate(port: int, model: str, count: int, tokens: int, seed: int) -> float:
    """Tokens a second of `count` concurrent streams together, each with a prompt of its own, prompts included."""
    bodies = [
        {"model": model, "prompt": PROMPT.replace("fox", subject), "max_tokens": tokens, "seed": seed, "stream": True}
        | {"logprobs": 0, "logit_bias": {str(end): -100 for end in (0, 2)}}  # none ends early
        for subject in SUBJECTS[:count]
    ]
    begun = time.perf_counter()
    answers = await asyncio.gather(*(call(port, "POST", "/v1/completions", json.dumps(b).encode()) for b in bodies))
    took = time.perf_counter() - begun
    heard = sum(len(part["choices"][0]["logprobs"]["tokens"]) for a in answers for part in a.events if part["choices"])
    if heard != count * tokens:
        raise SystemExit(f"{count} streams gave {heard} tokens, not {count * tokens}.")
    return heard / took


def streams(model: str, most: int, seconds: float, tokens: int = 48) -> list[Round]:
    """Tokens a second of eight streams, and of one."""
    with serving("--model", model) as (_, port):

        def one(number: int) -> Round:
            alone = asyncio.run(rate(port, model, 1, tokens, number + 1))
            return asyncio.run(rate(port, model, STREAMS, tokens, number + 1)), alone

        return list(rounds(most, seconds, one))


async def first_token(port: int, model: str, messages: list[dict]) -> tuple[float, str]:
    """Seconds until the first text of a streamed answer has come, and the whole answer."""
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
    said, first = [], 0.0
    try:
        while line := await asyncio.wait_for(reader.readline(), SECONDS):
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if delta.get("content"):
                    first = first or time.perf_counter() - begun
                    said.append(delta["content"])
    finally:
        writer.close()
    if not said:
        raise SystemExit("The chat's answer was empty.")
    return first, "".join(said)


def turns(model: str, most: int, seconds: float) -> list[Round]:
    """Seconds to the first token of a chat's first turn, and of its second."""
    tokenizer = cutaway.load(model).tokenizer
    sentences = CHAT_TOKENS // len(tokenizer.encode(PROMPT, bos=False))
    with serving("--model", model) as (_, port):

        def one(number: int) -> Round:
            story = f"Story {number + 2}. " + " ".join([PROMPT] * sentences)  # no round begins as another did
            messages = [{"role": "user", "content": story}]
            first, said = asyncio.run(first_token(port, model, messages))
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
            return first, asyncio.run(first_token(port, model, messages))[0]

        return list(rounds(most, seconds, one))


# What is measured, its unit, the bar for the ratio of both sides, and whether it must stay below.
BARS: dict[str, tuple[Callable[..., list[Round]], str, float, bool]] = {
    "sampling": (sampling, "ms", 0.10, True),
    "streams": (streams, "tokens/s", 2.0, False),
    "turns": (turns, "ms", 10.0, False),
}


def judged(name: str, found: list[Round]) -> dict:
    """The median of the rounds' ratios with its spread, both sides' medians, and whether the bar is met."""
    _, unit, bar, below = BARS[name]
    ratios = [one / other for one, other in found]
    middle = statistics.median(ratios)
    scale = 1e3 if unit == "ms" else 1.0
    sides = [scale * statistics.median(side) for side in zip(*found, strict=True)]
    return {
        "ratio": middle,
        "smallest": min(ratios),
        "largest": max(ratios),
        "rounds": len(ratios),
        "bar": bar,
        "met": middle < bar if below else middle >= bar,
        "medians": sides,
        "unit": unit,
    }


def told(name: str, found: dict) -> str:
    """One line of a bar."""
    told_as = {"sampling": "a recorded choice and its pass", "streams": "eight streams and one"}
    what = told_as.get(name, "a chat's first turn and its second")
    one, other = found["medians"]
    wanted = f"below {found['bar']:g}" if BARS[name][3] else f"at least {found['bar']:g}"
    return (
        f"{what:34} {one:9.2f} and {other:9.2f} {found['unit']:9} ratio {found['ratio']:6.3f} "
        f"({found['smallest']:.3f} to {found['largest']:.3f}, {found['rounds']} rounds), {wanted}: "
        f"{'met' if found['met'] else 'missed'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", default=",".join(BARS), help=f"some of {', '.join(BARS)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=40.0, help="for each part, after its first three rounds (40)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in BARS]:
        sys.exit(f"There is no part {unknown[0]!r}; there are {', '.join(BARS)}.")
    if options.rounds < 1:
        sys.exit(f"--rounds is {options.rounds}; it must be at least 1.")
    all_found = {}
    for name in options.only.split(","):
        all_found[name] = judged(name, BARS[name][0](options.model, options.rounds, options.seconds))
        if not options.json:
            print(told(name, all_found[name]), flush=True)
    if options.json:
        print(json.dumps(all_found))


if __name__ == "__main__":
    main()
