"""Everything that can be said of a configuration without its weights, as plain data (what `cutaway count` prints)."""

from collections.abc import Mapping
from typing import Any

from cutaway.points import POINTS, Point, shape_symbols
from cutaway.spec import ModelSpec, describe, parameter_shapes
from cutaway.spec.count import BITS_PER_WEIGHT
from cutaway.spec.work import TRAINING, pass_work, total_flops
from cutaway.trace.capture.bill import activation_bytes, activation_shapes


def counted(spec: ModelSpec, tokens: int, context: int) -> dict[str, Any]:
    """Parameters, work at T and 2T, bytes of weights, cache and activations. `tokens` is T, `context` cached tokens."""
    count = spec.count()
    once, twice = pass_work(spec, tokens), pass_work(spec, 2 * tokens)
    return {
        "name": spec.name,
        "spec": describe(spec),
        "parameters": {
            "total": count.total,
            "active": count.active,
            "active_without_input_embedding": count.active_without_embedding,
            "parts": {part: size for part, size in count.parts.items() if size},
            "active_parts": {part: size for part, size in count.active_parts.items() if size},
            "lecture_formula": count.lecture,
            "lecture_differs": _beyond_the_lecture(spec, count.total, count.lecture),
        },
        "work": {
            "tokens": tokens,
            "forward_flops": total_flops(spec, tokens),
            "training_flops": TRAINING * total_flops(spec, tokens),
            "parts": [
                {
                    "part": one.part,
                    "flops": one.flops,
                    "growth": one.growth,
                    "quadratic": one.quadratic,
                    "times_at_twice_T": two.flops / one.flops if one.flops else None,
                }
                for one, two in zip(once, twice, strict=True)
            ],
            "next_token_flops": total_flops(spec, 1, past=context) if spec.causal else None,
        },
        "bytes": {
            "weights": {kind: count.weight_bytes(kind) for kind in BITS_PER_WEIGHT},
            "context": context,
            "kv_cache_float32": count.kv_bytes(context),
            "kv_cache_float16": count.kv_bytes(context, 2),
            "kv_cache_float16_saved_by_latents": count.kv_bytes(context, 2, unfolded=True) - count.kv_bytes(context, 2),
            "activations_of_a_full_trace": activation_bytes(spec, tokens),
        },
    }


def _beyond_the_lecture(spec: ModelSpec, total: int, formula: int | None) -> str | None:
    """What a model has besides what the lecture's formula counts (see `Count.lecture`), in words."""
    if formula is None or formula == total:
        return None
    biases, final = 4 * spec.d_model * spec.n_layers, 2 * spec.d_model
    named = {biases: "the attention biases (4d a layer)", final: "the final norm (2d)"}
    both = f"{named[biases]} and {named[final]}"
    return f"the {total - formula:,} more here are {named.get(total - formula, both)}"


def speed_bounds(spec: ModelSpec, context: int, bytes_per_second: float, flops_per_second: float) -> dict[str, Any]:
    """The most tokens a second that decoding could reach, by memory and by arithmetic, at each weight precision.

    Every active weight and the cache are read once a token; of the input embedding only one row is, unless a
    tied head multiplies by it.
    """
    count = spec.count()
    flops = total_flops(spec, 1, past=context)
    cache = count.kv_bytes(context, 2)
    by_memory = {
        kind: bytes_per_second / (count.active_without_embedding * bits / 8 + cache)
        for kind, bits in BITS_PER_WEIGHT.items()
    }
    return {
        "bytes_per_second": bytes_per_second,
        "flops_per_second": flops_per_second,
        "tokens_per_second_by_arithmetic": flops_per_second / flops,
        "tokens_per_second_by_memory": by_memory,
    }


def shapes(spec: ModelSpec, tokens: int) -> dict[str, Any]:
    """The proof that T is in no weight (chapter 13.4): every weight, and every activation at T and at 2T.

    Layers whose shapes equal those of the layer before are left out.
    """
    once, twice = activation_shapes(spec, tokens), activation_shapes(spec, 2 * tokens)
    shown = [point for point in once if point.layer is None or not _as_before(point, once)]
    weights = parameter_shapes(spec)
    return {
        "weights": {name: list(shape) for name, shape in weights.items() if not _repeats(name, weights)},
        "activations": [
            {
                "point": str(point),
                "symbols": list(shape_symbols(point, spec)),
                "at_T": list(once[point]),
                "at_2T": list(twice[point]),
                "changed": [a != b for a, b in zip(once[point], twice[point], strict=True)],
                "meaning": POINTS[point.name].meaning,
            }
            for point in shown
        ],
    }


def _as_before(point: Point, shapes_: Mapping[Point, tuple[int, ...]]) -> bool:
    before = Point(point.name, (point.layer or 0) - 1)
    return shapes_.get(before) == shapes_[point]


def _repeats(name: str, weights: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the layer before has a weight of this name and shape, or an earlier expert of the layer has."""
    if not name.startswith("layers."):
        return False
    _, layer, rest = name.split(".", 2)
    if rest.startswith("moe.experts.") and not rest.startswith("moe.experts.0."):
        return True
    return int(layer) > 0 and weights.get(f"layers.{int(layer) - 1}.{rest}") == weights[name]
