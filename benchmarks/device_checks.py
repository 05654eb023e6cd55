"""One short run on the machine with the GPU: is the torch engine right there, in every precision, and how fast is it?

    python benchmarks/device_checks.py                           # the fastest device that torch has here
    python benchmarks/device_checks.py --device cpu --quick      # the checks alone, on two families
    python benchmarks/device_checks.py --json checks.json

A tiny model of each family's shape, with random weights, is run on the device in float64, float32, bfloat16 and float16
and held against the numpy engine in float64: every point by the stages, the logits by fused attention, decoding from
the cache, the gradients against those on the CPU, and the identities of `verify`. Then a model of SmolLM2-135M's shape
is timed: the pass over a prompt with attention fused and by the stages, and decoding. It ends with status 1 where a
check failed; never because of a time.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.checkpoints.load import Checkpoint
from cutaway.checkpoints.sources import Location
from cutaway.engines import make_engine
from cutaway.engines.protocol import Engine
from cutaway.engines.weights import Weight
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.model import Model
from cutaway.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
    parameter_shapes,
)
from cutaway.spec.catalog import catalog_spec

FAMILIES = (
    "gpt2",
    "llama-3.1-8b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen2.5-7b",
    "qwen3-8b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "llama-4-scout",
    "gemma-3-270m",
    "bert-base",
)
# How far rounding alone may carry a point from the float64 of the reference, as a part of its largest value.
WITHIN = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 0.1, "float16": 0.02}
LENGTH = 81
TIMED = "smollm2-135m"


def small(spec: ModelSpec) -> ModelSpec:
    """The same architecture in a size that takes milliseconds: two layers of each kind that the model has."""
    kinds: dict[LayerSpec, int] = {}
    chosen = []
    for layer in spec.layers:
        kinds[layer] = kinds.get(layer, 0) + 1
        if kinds[layer] <= 2:
            chosen.append(layer)
    positions = spec.positions and replace(spec.positions, n_max=spec.positions.n_max and 200)
    layers = tuple(map(small_layer, chosen))
    return replace(spec, vocab_size=61, d_model=32, layers=layers, positions=positions, context_length=200)


def small_layer(layer: LayerSpec) -> LayerSpec:
    attention = layer.attention
    n_kv_heads = min(attention.n_kv_heads, 2)
    heads = n_kv_heads * min(attention.n_heads // attention.n_kv_heads, 3)
    latent, d_value = attention.latent, None
    if latent is not None:
        heads = n_kv_heads = 3
        latent, d_value = LatentSpec(10, latent.q_rank and 14, 8, 4, latent.norm), 6
    d_head = 12
    rotary = attention.rotary and replace(attention.rotary, dims=4 if latent else d_head)
    attention = replace(
        attention,
        n_heads=heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        rotary=rotary,
        window=attention.window and 9,
        chunk=attention.chunk and 16,
        growth=attention.growth and replace(attention.growth, every=8),
        scale=attention.scale and d_head**-0.5,
        latent=latent,
        d_value=d_value,
    )
    return replace(layer, attention=attention, feed_forward=small_feed_forward(layer.feed_forward))


def small_feed_forward(spec: FeedForwardSpec | ExpertsSpec) -> FeedForwardSpec | ExpertsSpec:
    if isinstance(spec, FeedForwardSpec):
        return replace(spec, d_ff=40)
    router = replace(
        spec.router,
        n_active=min(spec.router.n_active, 3),
        n_groups=min(spec.router.n_groups, 2),
        top_groups=min(spec.router.top_groups, 1),
    )
    shared = spec.shared and replace(spec.shared, d_ff=14)
    return replace(spec, n_experts=8, expert=replace(spec.expert, d_ff=14), router=router, shared=shared)


def specs() -> dict[str, ModelSpec]:
    """The catalog's families, and two that have no published size in it: capped scores, and parallel blocks."""
    found = {name: small(catalog_spec(name)) for name in FAMILIES}
    gemma = found["gemma-3-270m"]
    capped = [replace(one, attention=replace(one.attention, cap=2.0, qk_norm=None)) for one in gemma.layers]
    found["gemma 2"] = replace(gemma, layers=tuple(capped), logit_cap=3.0)
    norm = NormSpec("layer", 1e-5, bias=True)
    attention = AttentionSpec(4, 2, 8, rotary=RotarySpec(1e4, 4), qkv_bias=True, out_bias=True)
    parallel = LayerSpec(attention, FeedForwardSpec(40, "gelu_tanh", bias=True), norm, parallel=True, shared_norm=True)
    found["phi"] = ModelSpec("phi", 61, 32, (parallel,) * 2, final_norm=norm, tied_head=False, head_bias=True)
    found["no rotary"] = replace(found["llama-3.1-8b"], layers=unturned(found), positions=PositionsSpec("sinusoidal"))
    return found


def unturned(found: dict[str, ModelSpec]) -> tuple[LayerSpec, ...]:
    layers = found["llama-3.1-8b"].layers
    return tuple(replace(layer, attention=replace(layer.attention, rotary=None)) for layer in layers)


def model_of(spec: ModelSpec, engine: Engine, dtype: str = "float64") -> Model:
    """A model of this spec with random weights, of a size at which nothing saturates."""
    random = np.random.default_rng(0)
    weights = {}
    for name, shape in parameter_shapes(spec).items():
        values = random.standard_normal(shape, np.float32)
        if name.endswith("gain"):
            values = 1 + 0.2 * values
        elif len(shape) == 1:
            values = 0.3 * values
        elif not name.startswith("embed"):
            values = values / np.sqrt(shape[1], dtype=np.float32)
        weights[name] = Weight.of(values.astype(dtype))
    return Model(Checkpoint(spec, weights, None, Location(Path("nowhere"), "folder", spec.name, "random")), engine)


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a part of the largest value; infinite where other cells are not finite."""
    known = np.isfinite(expected)
    if found.shape != expected.shape or not np.array_equal(np.isfinite(found), known):
        return float("inf")
    difference = np.abs(found[known].astype(np.float64) - expected[known]).max(initial=0)
    return float(difference / max(np.abs(expected[known]).max(initial=0), 1e-30))


def checks(name: str, spec: ModelSpec, device: str, dtype: str) -> Iterator[tuple[str, float, float]]:
    """What is checked of a family in one precision: how far it is off, and how far it may be."""
    model, reference = model_of(spec, make_engine(f"torch:{device}", dtype)), model_of(spec, make_engine("numpy"))
    engine, within = model.engine, WITHIN[dtype]
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, LENGTH)
    expected = reference.trace(ids, ["*"])
    trace = model.trace(ids, ["*"])
    points = list(expected)
    # 16 bits may send a token to another expert than float64 does; nothing after that can be compared.
    routed = dtype in ("bfloat16", "float16") and any("moe." in point for point in points)
    if routed:
        points = points[: next(i for i, point in enumerate(points) if point.endswith("moe.scores"))]
    worst = max(((off(trace[point], expected[point]), point) for point in points), key=lambda pair: pair[0])
    yield f"{'points up to the router' if routed else 'every point'}; the worst is {worst[1]}", worst[0], within
    if dtype == "float64":
        there, here = gradients(model, ids), gradients(model_of(spec, make_engine("torch:cpu", dtype)), ids)
        yield "gradients, against those on the CPU", max(off(there[point], here[point]) for point in here), within
    if routed:
        return
    if not spec.headless:
        ran = transformer(engine, spec, model.parameters, [ids], rows=range(LENGTH))
        yield "logits of a pass that nobody looks into", off(engine.numpy(ran.logits), expected.logits), within
    if not spec.headless and spec.causal:
        cache, rows = KVCache(spec, engine), []
        for piece in np.split(ids, [20, 21, 22, 70]):
            count = range(len(piece))
            ran = transformer(engine, spec, model.parameters, [piece], caches=[cache], rows=count)
            rows.append(engine.numpy(ran.logits))
        yield "decoding from the cache", off(np.concatenate(rows), expected.logits), within
    failed = [check for check in model.verify() if not check.holds]
    yield "verify" + "".join(f"; {check.name}: {check.deviation:.2g}" for check in failed), float(len(failed)), 0.0


def gradients(model: Model, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Those of a number made from the last row, at the points where there are any."""
    last = "logits" if not model.spec.headless else f"layers.{model.spec.n_layers - 1}.resid_post"
    run = model.trace(ids, ["embed.tokens", "layers.0.attn.pattern", "layers.*.resid_post"], gradients=True)
    run.backward(lambda run: (run[last][-1] ** 2).sum())
    return {point: slope for point, slope in run.grad.items() if slope.any()}


def times(device: str, dtype: str) -> Iterator[tuple[str, float, str]]:
    """Speeds of a model of SmolLM2-135M's shape: what, how many, of what."""
    spec = catalog_spec(TIMED)
    model = model_of(spec, make_engine(f"torch:{device}", dtype), "float32")
    engine: Any = model.engine
    for length in (512, 2048):
        ids = np.arange(length) % spec.vocab_size
        for fused in (True, False):
            engine.fused = fused
            seconds = least(lambda ids=ids: engine.numpy(transformer(engine, spec, model.parameters, [ids]).logits))
            yield (
                f"pass over {length} tokens, attention {'fused' if fused else 'by stages'}",
                length / seconds,
                "tokens/s",
            )
    engine.fused = True
    for past, count in ((64, 64), (2048, 64)):
        cache = KVCache(spec, engine)
        transformer(engine, spec, model.parameters, [np.arange(past)], caches=[cache])
        begun = time.perf_counter()
        for token in range(count):
            engine.numpy(transformer(engine, spec, model.parameters, [np.array([token])], caches=[cache]).logits)
        yield f"decoding after {past} tokens", count / (time.perf_counter() - begun), "tokens/s"


def least(run: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the quickest of a few runs, after one that is not measured."""
    run()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return min(taken)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help='as in engine="torch:DEVICE"; the fastest that is here, if not given')
    parser.add_argument("--dtypes", default=",".join(WITHIN), help="precisions, with commas between")
    parser.add_argument("--quick", action="store_true", help="two families, and no times")
    parser.add_argument("--times-only", action="store_true", help="no checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to this file")
    options = parser.parse_args(arguments)
    from cutaway.engines.torch.devices import described, device_of

    device = str(device_of(options.device))
    told: dict[str, Any] = {"devices": described(), "device": device, "checks": [], "times": []}
    print(f"torch engine on {device}; here are {', '.join(told['devices'])}")
    dtypes = options.dtypes.split(",")
    families = dict(list(specs().items())[:2]) if options.quick else specs()
    for name, spec in {} if options.times_only else families.items():
        for dtype in dtypes:
            for what, found, within in checks(name, spec, device, dtype):
                good = found <= within
                told["checks"].append({"family": name, "dtype": dtype, "what": what, "off": found, "within": within})
                print(
                    f"{'ok   ' if good else 'WRONG'} {name:<18} {dtype:<9} {found:9.2g} of {within:<6g} {what}",
                    flush=True,
                )
    for dtype in [] if options.quick else dtypes:
        for what, speed, unit in times(device, dtype):
            told["times"].append({"dtype": dtype, "what": what, unit: speed})
            print(f"      {dtype:<9} {speed:10.1f} {unit}  {what}", flush=True)
    wrong = [check for check in told["checks"] if not check["off"] <= check["within"]]
    print(f"{len(told['checks'])} checks, {len(wrong)} wrong")
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
