"""What generation costs beside the passes, and what batches, guesses and kept caches save.

    python benchmarks/sampling.py                    # SmolLM2-135M; about a minute
    python benchmarks/sampling.py --only stages,batch --repeats 9 --json

Every figure is the median of `--repeats` runs taken in turns, with the smallest and the largest beside it. Run it on
a quiet machine. It measures; it never fails on a time.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import cutaway
from cutaway.engines.layout import CHUNK
from cutaway.generate import Basic, History, Recording, Sampling
from cutaway.generate.candidates import Candidates, Scratch
from cutaway.generate.passes import Passes, Work
from cutaway.generate.record import taken
from cutaway.generate.sampling import run_stages
from cutaway.model import Model

PROMPT = "Once upon a time there was a little fox who lived at the edge of a wide, dark forest."
REPETITIVE = "The cat sat on the mat. The cat sat on the mat. The cat sat"
EVERYTHING = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.02,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {260: 0.5, 28: -0.5},
}
WIDE = EVERYTHING | {"temperature": 1.5, "top_k": 4000, "min_p": 0.0001}
Row = tuple[str, list[float], str]


def in_turns(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contender's runs, one after another in turns, after one unmeasured run each."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    return times


def stages(model: Model, repeats: int) -> list[Row]:
    """One token picked, with and without a record, beside one token computed."""
    logits = model.trace(PROMPT, points=[]).last_logits.astype(np.float32)
    history, scratch = History(model.tokenizer.encode(PROMPT * 12), model.tokenizer.encode(PROMPT * 6)), Scratch()

    def pick(settings: Sampling, recording: Recording | None) -> None:
        scratch.begin()
        own = Candidates.of(logits, scratch)
        if recording is None:
            run_stages(own, settings.stages, history).draw(0.4)
        else:
            taken(own, logits, settings, 0.4, history, 0, recording)

    passes = Passes(model.engine, model.spec, model.parameters)
    cache = passes.cache()
    passes.run([Work(cache, model.tokenizer.encode(PROMPT), 1)])
    contenders: dict[str, Callable[[], object]] = {
        "a pass for one token": lambda: passes.run([Work(cache, [28], 1)]),
        "sorting the vocabulary, for comparison": lambda: np.argsort(-logits, kind="stable"),
    }
    chains = {"no stage but T = 1": {}, "T, top-k, top-p": {"temperature": 0.8, "top_k": 40, "top_p": 0.95}}
    chains |= {"all ten stages": EVERYTHING, "all ten stages, wide (T = 1.5, top-k 4,000)": WIDE}
    for name, settings in chains.items():
        sampling = Sampling(**settings)  # type: ignore[arg-type]
        contenders[name] = lambda sampling=sampling: pick(sampling, None)
        contenders[f"{name}, recorded"] = lambda sampling=sampling: pick(sampling, Recording())
    times = in_turns(contenders, 20 * repeats)
    whole = statistics.median(times["a pass for one token"])
    return [
        (name, taken_, f"{100 * statistics.median(taken_) / whole:.1f} % of a pass") for name, taken_ in times.items()
    ]


def batch(model: Model, repeats: int) -> list[Row]:
    """Tokens a second of one stream and of eight at once."""
    length = 32
    prompts = [f"{PROMPT} Its {word}" for word in ("name", "den", "tail", "nose", "paw", "mother", "friend", "dream")]

    def run(count: int) -> None:
        model.generate_many(prompts[:count], length, temperature=1.0, seed=1, at_once=count)

    times = in_turns({f"{count} at once": lambda count=count: run(count) for count in (1, 2, 4, 8)}, repeats)
    alone = statistics.median(times["1 at once"])
    rows = []
    for name, seconds in times.items():
        count = int(name.split()[0])
        speed = count * length / statistics.median(seconds)
        rows.append((name, seconds, f"{speed:.1f} tokens/s, {speed * alone / length:.2f} times one alone"))
    return rows


def guesses(model: Model, repeats: int) -> list[Row]:
    """Greedy continuations with and without guesses, of a text that repeats itself and of one that does not."""
    rows: list[Row] = []
    for title, prompt in (("repetitive text", REPETITIVE), ("a story", PROMPT)):
        outs = {}

        def run(guess: int, prompt: str = prompt, outs: dict = outs) -> None:
            outs[guess] = model.generate(prompt, 64, 0, guess=guess)

        times = in_turns({f"{title}, guess {guess}": lambda guess=guess: run(guess) for guess in (0, 3, 5)}, repeats)
        assert outs[0].tokens == outs[3].tokens == outs[5].tokens
        plain = statistics.median(times[f"{title}, guess 0"])
        for (name, seconds), out in zip(times.items(), outs.values(), strict=True):
            gain = plain / statistics.median(seconds)
            rows.append((name, seconds, f"{out.tokens_per_pass:.2f} tokens a pass, {gain:.2f} times as fast"))
    return rows


def turns(model: Model, repeats: int) -> list[Row]:
    """The first token of a chat's first turn, of 1,000 tokens, and of its second."""
    ids = (model.tokenizer.encode(PROMPT) * 100)[:1000]
    new = model.tokenizer.encode("<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
    first: list[float] = []
    second: list[float] = []
    for _ in range(repeats):
        cache = Passes(model.engine, model.spec, model.parameters).cache()
        out = model.generate(ids, 8, 0, cache=cache)
        first.append(out.prompt_seconds)
        second.append(model.generate([*ids, *out.tokens, *new], 1, 0, cache=cache).prompt_seconds)
    ratio = statistics.median(first) / statistics.median(second)
    return [("first turn, 1,000 tokens", first, ""), (f"second, {len(new)} more", second, f"{ratio:.1f} times sooner")]


def long_prompt(model: Model, repeats: int) -> list[Row]:
    """A prompt in one pass and in chunks: the same bits, and less memory at once."""
    ids = (model.tokenizer.encode(PROMPT) * 100)[: 4 * CHUNK]

    def read(rows: int) -> None:
        passes = Passes(model.engine, model.spec, model.parameters)
        from cutaway.generate.batch import Batch

        chunked = Batch(passes, model.tokenizer, prompt_rows=rows)
        chunked.submit(model.request(ids, Basic(1, 0)))
        while chunked.step():
            pass

    times = in_turns({f"in chunks of {rows}": lambda rows=rows: read(rows) for rows in (1024, 512, 256)}, repeats)
    return [(name, seconds, "") for name, seconds in times.items()]


SECTIONS = {"stages": stages, "batch": batch, "guesses": guesses, "turns": turns, "chunks": long_prompt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name not in SECTIONS]:
        sys.exit(f"There is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}.")
    model = cutaway.load(options.model)
    told: dict[str, list] = {}
    for name in options.only.split(","):
        rows = SECTIONS[name](model, options.repeats)
        told[name] = [{"what": what, "seconds": seconds, "told": note} for what, seconds, note in rows]
        if not options.json:
            print(f"\n{(SECTIONS[name].__doc__ or '').strip()}")
            for what, seconds, note in rows:
                low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
                print(f"  {what:46} {1e3 * middle:9.2f} ms  ({1e3 * low:.2f} to {1e3 * high:.2f})  {note}")
    if options.json:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
