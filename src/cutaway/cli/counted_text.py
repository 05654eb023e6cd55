"""What `cutaway count` prints, line by line: plain text that reads well in a terminal and in a file."""

from typing import Any

from cutaway.cli.arguments import megabytes
from cutaway.points import LECTURE

_BAR = 30


def lines(facts: dict[str, Any]) -> list[str]:
    """One configuration."""
    out = _head(facts)
    out += ["", "parameters", *_parts(facts)]
    out += ["", *_work(facts)]
    out += ["", *_bytes(facts)]
    if "speed" in facts:
        out += ["", *_speed(facts["speed"])]
    if "shapes" in facts:
        out += ["", *_shapes(facts["shapes"])]
    return out


def compared(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Two configurations side by side, with how many times the second is the first."""
    rows: list[tuple[str, int, int]] = []
    for key in ("total", "active"):
        rows.append((f"parameters, {key}", one["parameters"][key], other["parameters"][key]))
    parts = dict.fromkeys([*one["parameters"]["parts"], *other["parameters"]["parts"]])
    rows += [(f"  {p}", one["parameters"]["parts"].get(p, 0), other["parameters"]["parts"].get(p, 0)) for p in parts]
    rows.append(("FLOPs of the pass", one["work"]["forward_flops"], other["work"]["forward_flops"]))
    rows += [
        ("bytes of float16 weights", one["bytes"]["weights"]["float16"], other["bytes"]["weights"]["float16"]),
        ("bytes of the float16 cache", one["bytes"]["kv_cache_float16"], other["bytes"]["kv_cache_float16"]),
        ("bytes of a full trace", *(f["bytes"]["activations_of_a_full_trace"] for f in (one, other))),
    ]
    width = max(len(name) for name, *_ in rows)
    out = [f"{'':<{width}}  {one['name']:>24}  {other['name']:>24}  second ÷ first"]
    for name, a, b in rows:
        out.append(f"{name:<{width}}  {a:>24,}  {b:>24,}  {f'{b / a:.3g}' if a else '–'}")
    return out


def _head(facts: dict[str, Any]) -> list[str]:
    spec, first = facts["spec"], facts["spec"]["layers"][0]
    attention = first["attention"]
    kinds = "" if len(spec["layers"]) == 1 else f" in {len(spec['layers'])} runs of equal ones"
    return [
        f"{facts['name']}: {spec['n_layers']} layers{kinds}, d = {spec['d_model']:,}, H = {attention['n_heads']}, "
        f"H_kv = {attention['n_kv_heads']}, d_head = {attention['d_head']}, V = {spec['vocab_size']:,}"
    ]


def _parts(facts: dict[str, Any]) -> list[str]:
    parameters = facts["parameters"]
    total = parameters["total"]
    width = max(len(part) for part in parameters["parts"])
    out = []
    for part, size in parameters["parts"].items():
        share = size / total
        out.append(f"  {part:<{width}}  {size:>19,}  {share:>6.1%}  {'█' * round(share * _BAR)}".rstrip())
    out.append(f"  {'total':<{width}}  {total:>19,}")
    if parameters["active"] != total:
        out.append(
            f"  active for one token: {parameters['active']:,} "
            f"({parameters['active_without_input_embedding']:,} without the input embedding)"
        )
    if parameters["lecture_formula"] is not None:
        differs = parameters["lecture_differs"] or "that is all of them"
        out += [
            f"  chapter 13.3 of the lecture “{LECTURE}” counts",
            f"  V·d + n_max·d + N(12d² + 9d) = {parameters['lecture_formula']:,}; {differs}",
        ]
    return out


def _work(facts: dict[str, Any]) -> list[str]:
    work = facts["work"]
    out = [f"work of a pass over T = {work['tokens']:,} tokens, in FLOPs"]
    width = max(len(row["part"]) for row in work["parts"])
    for row in work["parts"]:
        times = row["times_at_twice_T"]
        mark = "  ← quadratic in T" if row["quadratic"] else ""
        out.append(
            f"  {row['part']:<{width}}  {row['flops']:>12.4g}  {row['flops'] / work['forward_flops']:>6.1%}  "
            f"{row['growth']:<13}  × {times:.2f} at 2T{mark}"
        )
    out.append(f"  {'forward':<{width}}  {work['forward_flops']:>12.4g}")
    out.append(f"  {'training':<{width}}  {work['training_flops']:>12.4g}  (backward counts twice)")
    if work["next_token_flops"] is not None:
        out.append(f"  {'one more token':<{width}}  {work['next_token_flops']:>12.4g}  (with a cache)")
    return out


def _bytes(facts: dict[str, Any]) -> list[str]:
    sizes = facts["bytes"]
    weights = [f"{kind} {megabytes(size)}" for kind, size in sizes["weights"].items()]
    return [
        "bytes",
        *(
            f"  {'weights: ' if i == 0 else '         '}{'   '.join(weights[i : i + 5])}"
            for i in range(0, len(weights), 5)
        ),
        f"  KV cache of {sizes['context']:,} tokens: float16 {megabytes(sizes['kv_cache_float16'])}, "
        f"float32 {megabytes(sizes['kv_cache_float32'])}" + _saved(sizes["kv_cache_float16_saved_by_latents"]),
        f"  every activation of the pass, float32: {megabytes(sizes['activations_of_a_full_trace'])}",
    ]


def _saved(size: int) -> str:
    return f"; latents in place of keys and values save {megabytes(size)} of float16" if size else ""


def _speed(speed: dict[str, Any]) -> list[str]:
    memory = [f"{kind} {rate:,.3g}" for kind, rate in speed["tokens_per_second_by_memory"].items()]
    return [
        f"at most, on this machine ({speed['bytes_per_second'] / 1e9:.1f} GB/s read, "
        f"{speed['flops_per_second'] / 1e9:.0f} GFLOP/s multiplied), in tokens a second",
        *(
            f"  {'by memory: ' if i == 0 else '           '}{'   '.join(memory[i : i + 5])}"
            for i in range(0, len(memory), 5)
        ),
        f"  by arithmetic: {speed['tokens_per_second_by_arithmetic']:,.3g}",
    ]


def _shapes(shapes: dict[str, Any]) -> list[str]:
    out = ["weights: T is in none of them"]
    width = max(len(name) for name in shapes["weights"])
    out += [f"  {name:<{width}}  {shape}" for name, shape in shapes["weights"].items()]
    out += ["", "activations at T and at 2T: what changed is marked ·"]
    rows = shapes["activations"]
    width = max(len(row["point"]) for row in rows)
    for row in rows:
        symbols = f"[{', '.join(row['symbols'])}]"
        marked = ", ".join(f"{n}{'·' if moved else ''}" for n, moved in zip(row["at_2T"], row["changed"], strict=True))
        out.append(f"  {row['point']:<{width}}  {symbols:<18}  {row['at_T']!s:<20}  [{marked}]")
    return out
