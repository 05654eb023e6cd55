"""What is told of a model and of a run, in the records of the protocol."""

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.points import POINTS, Point, dot_inputs, layer_names, points_of, shape_symbols
from cutaway.serve.edits import parts_of, told
from cutaway.serve.lineage import consumers_of, formula_of, inputs_of, weights_of
from cutaway.serve.offered import offered
from cutaway.serve.protocol import (
    Kind,
    LayerKind,
    Lineage,
    Manifest,
    ModelCard,
    NextTokenCard,
    PassWork,
    PointCard,
    Token,
)
from cutaway.serve.runs import Run
from cutaway.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec
from cutaway.spec.work import total_flops
from cutaway.trace.next_tokens import softmax

if TYPE_CHECKING:
    from cutaway.model import Model
    from cutaway.trace import Prompt

TOLD = 256  # likeliest tokens that come with a run; what the page draws of a distribution
_WEIGHTS = ("attn.pattern", "moe.scores")  # numbers from 0 to 1
_IDS = ("tokens", "moe.chosen")


def model_card(model: "Model", name: str, longest: int) -> ModelCard:
    """What a page needs to know of a model before it runs it."""
    spec = model.spec
    sizes = {"V": spec.vocab_size, "d": spec.d_model, "N": spec.n_layers}
    most = min(longest, spec.n_max or longest)
    stops: list[int] = []
    with suppress(CutawayError):  # a checkpoint may come without a tokenizer
        stops = sorted(model.tokenizer.stop_ids)
    return ModelCard(
        name,
        model.origin,
        model.engine.name,
        model.engine.dtype.name,
        spec.count().total,
        sizes,
        [_point_card(point, spec) for point in points_of(spec) if point.layer is None],
        _layer_kinds(spec),
        spec.context_length,
        most,
        spec.causal and not spec.headless,
        offered(model, most),
        stops,
        parts_of(spec),
    )


def kind_of(point: Point) -> Kind:
    """How a point's numbers are drawn."""
    return "weights" if point.name in _WEIGHTS else "ids" if point.name in _IDS else "signed"


def manifest(run: Run, name: str, seconds: float) -> Manifest:
    """The answer to a run."""
    trace, model = run.trace, run.model
    prompt = run.prompt
    spec = model.spec
    cached = sum(layer.attention.cached_values for layer in spec.layers) * model.engine.dtype.itemsize
    generates = spec.causal and not spec.headless
    candidates = trace.next_tokens(min(TOLD, spec.vocab_size)) if generates else []
    rows = 1 if not spec.headless else None
    return Manifest(
        run.id,
        name,
        [Token(ident, piece) for ident, piece in zip(prompt.ids, prompt.pieces, strict=True)],
        prompt.added,
        _text(model, prompt),
        told(trace),
        round(seconds, 4),
        run.captured,
        [NextTokenCard(one.id, model.piece(one.id), one.logit, one.probability) for one in candidates],
        PassWork(
            total_flops(spec, run.length, logits=rows),
            total_flops(spec, 1, past=run.length - 1, logits=rows),
            cached * run.length if spec.causal else 0,
            cached if spec.causal else 0,
        ),
    )


def _text(model: "Model", prompt: "Prompt") -> str | None:
    """The prompt as a text, also where it was given as ids; None where there is no tokenizer to ask."""
    if prompt.text is not None:
        return prompt.text
    with suppress(CutawayError):
        return model.tokenizer.decode(list(prompt.ids))
    return None


def candidate(run: Run, token: int) -> NextTokenCard:
    """One token of the vocabulary as the next one."""
    logits = run.trace.last_logits
    return NextTokenCard(token, run.model.piece(token), float(logits[token]), float(softmax(logits)[token]))


def lineage(point: Point, spec: ModelSpec, load: str, prompt: str) -> Lineage:
    """Where a point comes from and goes to, and the Python that fetches it."""
    code = f'import cutaway\n\nmodel = cutaway.load({load})\ntrace = model.trace({prompt}, points=["{point}"])\n'
    return Lineage(
        str(point),
        [str(source) for source in inputs_of(point, spec)],
        [str(consumer) for consumer in consumers_of(point, spec)],
        weights_of(point, spec),
        f'{code}trace["{point}"]',
    )


def _point_card(point: Point, spec: ModelSpec) -> PointCard:
    info = POINTS[point.name]
    symbols = list(shape_symbols(point, spec))
    return PointCard(
        point.name, symbols, info.meaning, info.reason, info.chapter, kind_of(point), formula_of(point, spec)
    )


def _layer_kinds(spec: ModelSpec) -> list[LayerKind]:
    kinds: list[LayerKind] = []
    for i, layer in enumerate(spec.layers):
        if i > 0 and spec.layers[i - 1] == layer:
            kinds[-1] = replace(kinds[-1], stop=i + 1)
            continue
        a, fed = layer.attention, layer.feed_forward
        inner = fed.expert if isinstance(fed, ExpertsSpec) else fed
        points = [_point_card(Point(name, i), spec) for name in layer_names(spec, i)]
        kinds.append(
            LayerKind(
                i,
                i + 1,
                _sizes(layer),
                points,
                _facts(layer, a),
                list(dot_inputs(a)),
                layer.parallel,
                layer.placement,
                inner.gated,
                inner.activation,
                isinstance(fed, ExpertsSpec) and fed.router.gate_input,
            )
        )
    return kinds


def _sizes(layer: LayerSpec) -> dict[str, int]:
    a, fed = layer.attention, layer.feed_forward
    sizes = {"H": a.n_heads, "H_kv": a.n_kv_heads, "d_head": a.d_head, "d_value": a.value_width}
    if isinstance(fed, ExpertsSpec):
        sizes |= {"E": fed.n_experts, "k": fed.router.n_active, "d_ff": fed.expert.d_ff}
    else:
        sizes |= {"d_ff": fed.d_ff}
    if a.latent is not None:
        sizes |= {"kv_rank": a.latent.kv_rank, "d_rope": a.latent.d_rope}
        if a.latent.q_rank is not None:
            sizes |= {"q_rank": a.latent.q_rank}
    return sizes


def _facts(layer: LayerSpec, a: AttentionSpec) -> list[str]:
    """What sets this kind of layer apart, in a few words each."""
    fed = layer.feed_forward
    facts = []
    if layer.norm is not None:
        facts.append(f"{'RMSNorm' if layer.norm.kind == 'rms' else 'LayerNorm'} {layer.placement}")
    if a.rotary is not None:
        facts.append("rotary positions")
    if a.latent is not None:
        facts.append("latent keys and values")
    elif a.n_kv_heads < a.n_heads:
        facts.append(f"{a.n_heads // a.n_kv_heads} query heads share a key head")
    if a.window is not None:
        facts.append(f"window of {a.window}")
    if isinstance(fed, ExpertsSpec):
        facts.append(f"{fed.router.n_active} of {fed.n_experts} experts")
    elif fed.gated:
        facts.append({"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU"}.get(fed.activation, "gated"))
    if layer.parallel:
        facts.append("attention and feed-forward side by side")
    return facts
