"""Forward pass, decoding and start-up, measured side by side with transformers on the same weights.

    python benchmarks/run.py                       # needs the test extra (torch, transformers)
    python benchmarks/run.py --lengths 5,64 --repeats 9 --json

Every figure is the median of `--repeats` runs, taken in turns (ours, theirs, ours, …) in one process, so that
whatever else the machine does falls on both; the spread is the smallest and the largest run. Run it on a
quiet machine. It measures; it never fails on a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import cutaway
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.model import Model

Timings = dict[str, list[float]]


def in_turns(contenders: dict[str, Callable[[], object]], repeats: int) -> Timings:
    """Seconds of each contender's runs, one after another in turns, after one unmeasured run each."""
    for run in contenders.values():
        run()
    times: Timings = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            begun = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begun)
    return times


def transformers_model(model: Model):
    """The same weights in transformers' LlamaForCausalLM, float32."""
    import torch
    import transformers

    spec = model.spec
    layer = spec.layers[0]
    attention, mlp = layer.attention, layer.feed_forward
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.d_model,
        intermediate_size=mlp.d_ff,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads,
        head_dim=attention.d_head,
        rms_norm_eps=layer.norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rotary.base},
        max_position_embeddings=spec.context_length,
        tie_word_embeddings=spec.tied_head,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {"embed.tokens": "model.embed_tokens.weight", "final.norm.gain": "model.norm.weight"}
    inside = {
        "attn.norm.gain": "input_layernorm.weight",
        "mlp.norm.gain": "post_attention_layernorm.weight",
        **{f"attn.{p}.weight": f"self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"mlp.{p}.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    }
    for i in range(spec.n_layers):
        names |= {f"layers.{i}.{ours}": f"model.layers.{i}.{other}" for ours, other in inside.items()}
    state = {
        other: torch.from_numpy(model.parameters.stored[ours].dequantise(np.float32).copy())
        for ours, other in names.items()
    }
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"The weights do not fit transformers' model: {missing}, {unexpected}.")
    theirs.tie_weights()
    return theirs


def forward(model: Model, theirs, lengths: list[int], repeats: int) -> list[dict]:
    """A whole pass with the logits of every position, at each length."""
    import torch

    rows = []
    for length in lengths:
        ids = np.random.default_rng(length).integers(0, model.spec.vocab_size, length)
        tensor = torch.from_numpy(ids)[None]

        def ours(ids: np.ndarray = ids) -> None:
            transformer(model.engine, model.spec, model.parameters, [ids], rows=range(len(ids)))

        def other(tensor: object = tensor) -> None:
            with torch.inference_mode():
                theirs(tensor, use_cache=False)

        rows.append(row(f"forward, T = {length}", in_turns({"cutaway": ours, "transformers": other}, repeats)))
    return rows


def decode(model: Model, theirs, tokens: int, repeats: int) -> list[dict]:
    """`tokens` greedy steps after a prompt of 16, with each side's cache."""
    import torch

    ids = np.arange(100, 116)

    def ours() -> None:
        cache = KVCache(model.spec, model.engine)
        pending = ids
        for _ in range(tokens):
            ran = transformer(model.engine, model.spec, model.parameters, [pending], caches=[cache])
            pending = np.array([int(np.argmax(model.engine.numpy(ran.logits)[-1]))])

    def other() -> None:
        pending, past = torch.from_numpy(ids)[None], None
        with torch.inference_mode():
            for _ in range(tokens):
                out = theirs(pending, past_key_values=past, use_cache=True)
                past, pending = out.past_key_values, out.logits[:, -1:].argmax(-1)

    return [row(f"prompt of 16 and {tokens} tokens", in_turns({"cutaway": ours, "transformers": other}, repeats))]


def start_up(repeats: int) -> list[dict]:
    """Whole processes: importing, the help, and from the start to the first token of the default model."""
    first_token = "import cutaway; cutaway.load('smollm2-135m').generate('The capital of France is', max_tokens=1)"
    commands = {
        "python -c pass": ["-c", "pass"],
        "import cutaway": ["-c", "import cutaway"],
        "cutaway --help": ["-m", "cutaway", "--help"],
        "load SmolLM2 and give the first token": ["-c", first_token],
    }

    def process(arguments: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    times = in_turns({name: process(arguments) for name, arguments in commands.items()}, repeats)
    return [{"what": name, **figures(seconds)} for name, seconds in times.items()]


def figures(seconds: list[float]) -> dict:
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


def row(what: str, times: Timings) -> dict:
    """Both sides' figures and how many times as fast ours is, as the median of the paired ratios."""
    ratios = [b / a for a, b in zip(times["cutaway"], times["transformers"], strict=True)]
    return {
        "what": what,
        **{name: figures(seconds) for name, seconds in times.items()},
        "times_as_fast": statistics.median(ratios),
        "times_as_fast_min": min(ratios),
        "times_as_fast_max": max(ratios),
    }


def show(results: dict) -> None:
    def ms(f: dict) -> str:
        return f"{f['median_s'] * 1e3:8.1f} ms ({f['min_s'] * 1e3:.1f} to {f['max_s'] * 1e3:.1f})"

    print(results["machine"])
    for r in results["side_by_side"]:
        print(
            f"{r['what']:<28} cutaway {ms(r['cutaway'])}   transformers {ms(r['transformers'])}   "
            f"{r['times_as_fast']:.2f} times as fast ({r['times_as_fast_min']:.2f} to {r['times_as_fast_max']:.2f})"
        )
    for r in results["start_up"]:
        print(f"{r['what']:<40} {ms(r)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="5,64,512", help="prompt lengths in tokens (default 5,64,512)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode (default 32)")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    settings = parser.parse_args()
    import torch

    model = cutaway.load("smollm2-135m")
    theirs = transformers_model(model)
    lengths = [int(length) for length in settings.lengths.split(",")]
    results = {
        "machine": f"{os.cpu_count()} cores, torch {torch.__version__} with {torch.get_num_threads()} threads, "
        f"{model.engine.name} engine, medians of {settings.repeats} (smallest to largest)",
        "side_by_side": [
            *forward(model, theirs, lengths, settings.repeats),
            *decode(model, theirs, settings.tokens, settings.repeats),
        ],
        "start_up": start_up(settings.repeats),
    }
    if settings.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
