"""What the benchmark measures: the rows, and the bar of each. Bars hold for SmolLM2-135M on two cores with AVX2."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

# What TransformerLens' run_with_cache keeps of such a model when nothing is filtered, as our points. Besides these it
# keeps the norms' scales, the rotary tables, and most values a second and third time under other names (views).
TRANSFORMER_LENS = [
    "embed.tokens",
    *(
        f"layers.*.{name}"
        for name in (
            "resid_pre",
            "attn.norm",
            "attn.q",
            "attn.k",
            "attn.v",
            "attn.q_rot",
            "attn.k_rot",
            "attn.masked",  # its hook_attn_scores: with −∞ on the future
            "attn.pattern",
            "attn.z",
            "attn.out",
            "resid_mid",
            "mlp.norm",
            "mlp.gate",
            "mlp.up",
            "mlp.act",
            "mlp.out",
            "resid_post",
        )
    ),
    "final.norm",
    "logits",
]
RESIDUALS = ["embed.out", "layers.*.resid_pre", "layers.*.resid_mid", "layers.*.resid_post"]
PATTERNS = ["layers.*.attn.pattern"]


@dataclass(frozen=True)
class Side:
    """One contender's job: who (`cutaway`, or a name of rivals.CONTENDERS), on which file, what."""

    who: str
    job: str
    settings: dict[str, Any]
    file: str = "model"  # "model", "Q4_0", …, "float32", "int8"


@dataclass(frozen=True)
class Row:
    """Two sides in turns. How it is judged:

    "faster": their seconds ÷ ours, at least the bar; "slower": ours ÷ theirs − 1, at most the bar (both are Cutaway:
    with and without looking); "kept": like "faster", of two of our own. `tokens` run in one turn; `reads` is how
    often the file's weights have to be read for that: once a step, once a pass.
    """

    group: str
    what: str
    ours: Side
    theirs: Side | None
    tokens: int
    reads: int
    judged: Literal["faster", "slower", "kept"] = "faster"
    bar: float | None = None
    busy: bool = False


@dataclass(frozen=True)
class Sizes:
    """How long prompts and responses are, and what the model is."""

    tokens: int = 32
    context: int = 2000
    prompt: int = 512
    lengths: tuple[int, ...] = (5, 64, 512)
    layers: int = 30
    reach: int = 8192  # no prompt and response together may be longer
    variants: tuple[str, ...] = ("Q4_0", "Q8_0", "Q4_K_M")

    @property
    def short(self) -> int:
        """The length of a short prompt."""
        return 16 if self.reach > 16 + self.tokens else 2


GROUPS = {
    "decode": "tokens after a short prompt, against llama.cpp on four files and transformers",
    "context": "tokens after a long prompt",
    "busy": "tokens with one busy process beside",
    "watched": "tokens with residuals and patterns of every layer kept",
    "prefill": "a prompt of 512, against llama.cpp and CTranslate2",
    "logits": "a pass with the logits of every position, against transformers",
    "capture": "everything that TransformerLens keeps, against it",
    "looking": "what one layer, all residuals, all patterns cost",
    "start": "from the start of the process to the first printed token",
    "memory": "private memory while decoding",
}


def rows(sizes: Sizes) -> Iterator[Row]:
    """Every paired row that the model reaches, in order."""
    for row in _all_rows(sizes):
        longest = max((row.ours.settings.get(k, 0) for k in ("context", "prompt", "length")), default=0)
        grown = row.tokens + 1 if "tokens" in row.ours.settings else 0
        if longest + grown <= sizes.reach:
            yield row


def _all_rows(sizes: Sizes) -> Iterator[Row]:
    n = sizes.tokens
    yield _decode("decode", "decode", "model", sizes.short, n, bar=1.3)
    for variant in sizes.variants:
        yield _decode("decode", f"decode, as {variant}", variant, sizes.short, n, bar=1.1)
    job = {"context": sizes.short, "tokens": n}
    rival = Side("transformers", "decode", job, "float32")
    yield Row("decode", "decode ÷ transformers", Side("cutaway", "decode", job), rival, n, n)
    yield _decode("context", f"decode at {sizes.context} tokens", "model", sizes.context, n, bar=1.2)
    yield _decode("busy", "decode beside a busy process", "model", sizes.short, n, bar=1.0, busy=True)
    asked = {"prompt": sizes.short, "tokens": n}
    watched = Side("cutaway", "stream", asked | {"points": [*RESIDUALS, *PATTERNS]})
    plain = Side("cutaway", "stream", asked | {"points": []})
    yield Row("watched", "decode, residuals and patterns kept", watched, plain, n, n, "kept", 0.6)
    yield from _passes(sizes)
    yield from _looking(sizes)


def _decode(
    group: str, what: str, file: str, context: int, tokens: int, *, bar: float | None, busy: bool = False
) -> Row:
    job = {"context": context, "tokens": tokens}
    ours, theirs = (Side(who, "decode", job, file) for who in ("cutaway", "llama.cpp"))
    return Row(group, what, ours, theirs, tokens, tokens, bar=bar, busy=busy)


def _passes(sizes: Sizes) -> Iterator[Row]:
    t = sizes.prompt
    for file, bar in (("model", 2.5), *((v, 1.3) for v in sizes.variants if v == "Q4_0")):
        sides = Side("cutaway", "prefill", {"length": t}, file), Side("llama.cpp", "prefill", {"length": t}, file)
        what = f"prefill {t}" + (f", as {file}" if file != "model" else "")
        yield Row("prefill", what, *sides, t, 1, bar=bar if t == 512 else None)
    ours, rival = Side("cutaway", "prefill", {"length": t}), Side("CTranslate2", "prefill", {"length": t}, "int8")
    yield Row("prefill", f"prefill {t} ÷ CTranslate2 int8", ours, rival, t, 1, bar=0.9 if t == 512 else None)
    bars = {5: 4.0, 64: 1.8, 512: 1.5}
    for t in sizes.lengths:
        ours, rival = Side("cutaway", "logits", {"length": t}), Side("transformers", "logits", {"length": t}, "float32")
        yield Row("logits", f"pass with all logits, T = {t}", ours, rival, t, 1, bar=bars.get(t))
    for t in sizes.lengths[1:]:
        rival = Side("TransformerLens", "capture", {"length": t}, "float32")
        ours = Side("cutaway", "capture_all", {"length": t, "points": TRANSFORMER_LENS})
        yield Row("capture", f"run_with_cache, T = {t}", ours, rival, t, 1, bar=2.5 if t in bars else None)


def _looking(sizes: Sizes) -> Iterator[Row]:
    middle = sizes.layers // 2
    one_layer = [f"layers.{middle}.*"]
    share = 1 / sizes.layers + 0.05
    for t in sizes.lengths[1:]:
        plain = Side("cutaway", "capture", {"length": t, "points": [], "read": False})
        looked = (
            (f"one layer of {sizes.layers} captured", one_layer, False, share),
            (f"one layer of {sizes.layers} captured and read", one_layer, True, share),
            ("all residuals captured", RESIDUALS, True, 0.05),
            ("all patterns captured and read", PATTERNS, True, 0.40 if t == 512 else None),
        )
        for what, points, read, bar in looked:
            job = {"length": t, "points": points, "read": read}
            yield Row("looking", f"{what}, T = {t}", Side("cutaway", "capture", job), plain, t, 1, "slower", bar)
