"""What a spec can say and neither GPT-2 nor Llama does: each feature, alone and mixed, against torch in float64."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch_model import Weights, random_weights, run

from cutaway.engines import make_engine
from cutaway.engines.layout import Layout
from cutaway.engines.protocol import Engine
from cutaway.engines.weights import Weight
from cutaway.forward.cache import KVCache
from cutaway.forward.parameters import Parameters
from cutaway.forward.transformer import transformer
from cutaway.points import points_of
from cutaway.spec import (
    ACTIVATIONS,
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
)
from cutaway.trace.capture.recorder import Recorder
from cutaway.trace.verification.identities import deviation

EXACT, SINGLE = 1e-10, 1e-5
LENGTHS = (1, 6, 70)
LAYER_NORM, RMS_NORM = NormSpec("layer", 1e-5, bias=True), NormSpec("rms", 1e-6)

BASE = LayerSpec(AttentionSpec(4, 4, 6), FeedForwardSpec(40, "gelu"), LAYER_NORM)
PLAIN = ModelSpec("plain", 31, 24, (BASE, BASE), PositionsSpec("learned", 80), final_norm=LAYER_NORM)


def everywhere(spec: ModelSpec, attention: dict | None = None, mlp: dict | None = None, **layer: object) -> ModelSpec:
    """The spec with these fields set in every layer."""
    layers = [
        replace(
            old,
            attention=replace(old.attention, **attention or {}),
            feed_forward=replace(old.feed_forward, **mlp or {}),
            **layer,
        )
        for old in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


ROTARY = RotarySpec(10_000.0, 6)
FEATURES = {
    "plain": PLAIN,
    "sinusoidal positions": replace(PLAIN, positions=PositionsSpec("sinusoidal")),
    "no positions": replace(PLAIN, positions=None),
    "post-norm": replace(everywhere(PLAIN, placement="post"), final_norm=None),
    "post-norm with a final norm and an embedding norm": replace(
        everywhere(PLAIN, placement="post"), embed_norm=LAYER_NORM
    ),
    "no norms": replace(everywhere(PLAIN, norm=None), final_norm=None),
    "no norms in the layers, one at the end": everywhere(PLAIN, norm=None, placement="post"),
    "RMSNorm after": everywhere(PLAIN, norm=RMS_NORM, placement="post"),
    "RMSNorm with a shift": everywhere(PLAIN, norm=NormSpec("rms", 1e-3, bias=True)),
    "LayerNorm without a shift": everywhere(PLAIN, norm=NormSpec("layer", 1e-12)),
    "bidirectional": everywhere(PLAIN, {"causal": False}),
    "bidirectional, rotary": replace(everywhere(PLAIN, {"causal": False, "rotary": ROTARY}), positions=None),
    "ReLU": everywhere(PLAIN, mlp={"activation": "relu", "bias": True}),
    "GeGLU with biases": everywhere(PLAIN, mlp={"activation": "gelu", "gated": True, "bias": True}),
    "GeGLU by tanh": everywhere(PLAIN, mlp={"activation": "gelu_tanh", "gated": True}),
    "a gate of ReLU": everywhere(PLAIN, mlp={"activation": "relu", "gated": True}),
    "SiLU without a gate": everywhere(PLAIN, mlp={"activation": "silu"}),
    "multi-query": everywhere(PLAIN, {"n_kv_heads": 1}),
    "grouped, biased on q, k and v only": everywhere(PLAIN, {"n_kv_heads": 2, "qkv_bias": True}),
    "biased on the way out only": everywhere(PLAIN, {"out_bias": True}),
    "heads wider than the stream": everywhere(PLAIN, {"n_heads": 3, "n_kv_heads": 3, "d_head": 13}),
    "another scale": everywhere(PLAIN, {"scale": 0.9}),
    "rotary, adjacent pairs": everywhere(PLAIN, {"rotary": replace(ROTARY, pairing="adjacent")}),
    "rotary on a part of each head": everywhere(PLAIN, {"rotary": RotarySpec(500.0, 4)}),
    "rotary on a part, adjacent": everywhere(PLAIN, {"rotary": RotarySpec(1e6, 2, "adjacent")}),
    "scaled embedding": replace(PLAIN, embed_scale=24**0.5),
    "untied head with a bias": replace(PLAIN, tied_head=False, head_bias=True),
    "tied head with a bias": replace(PLAIN, head_bias=True),
    "layers that differ": replace(
        PLAIN,
        layers=(
            BASE,
            LayerSpec(AttentionSpec(2, 1, 8, rotary=RotarySpec(50.0, 8)), FeedForwardSpec(9, "silu", True), RMS_NORM),
            # Unscaled, its scores are so large that float32 itself is 1.2e-5 off in the pattern, in plain NumPy too.
            LayerSpec(AttentionSpec(3, 3, 5, scale=0.1), FeedForwardSpec(33, "relu", bias=True), LAYER_NORM, "post"),
            LayerSpec(AttentionSpec(1, 1, 1, causal=False), FeedForwardSpec(1, "gelu_tanh"), None),
        ),
    ),
}


def pick(seed: int) -> ModelSpec:
    """A spec in which everything is drawn by lot."""
    lot = random.Random(seed)

    def some_norm() -> NormSpec | None:
        kind = lot.choice(("layer", "rms", None))
        return kind and NormSpec(kind, lot.choice((1e-5, 1e-2)), bias=lot.random() < 0.5)

    def layer() -> LayerSpec:
        n_kv_heads, d_head = lot.choice((1, 2, 3)), lot.choice((1, 2, 5, 6, 10))
        turns = lot.random() < 0.5 and d_head > 1
        pairing = lot.choice(("halves", "adjacent"))
        dims = 2 * lot.randint(1, d_head // 2) if turns else 2
        return LayerSpec(
            AttentionSpec(
                n_kv_heads * lot.choice((1, 2, 3)),
                n_kv_heads,
                d_head,
                causal=lot.random() < 0.7,
                rotary=RotarySpec(lot.choice((7.0, 10_000.0, 5e5)), dims, pairing) if turns else None,
                qkv_bias=lot.random() < 0.5,
                out_bias=lot.random() < 0.5,
                scale=lot.choice((None, 0.3)),
            ),
            FeedForwardSpec(
                lot.choice((1, 7, 40)), lot.choice(ACTIVATIONS), lot.random() < 0.5, bias=lot.random() < 0.5
            ),
            some_norm(),
            lot.choice(("pre", "post")),
        )

    return ModelSpec(
        f"lot {seed}",
        lot.choice((1, 2, 29)),
        lot.choice((2, 8, 22)),
        tuple(layer() for _ in range(lot.choice((1, 2, 4)))),
        lot.choice((None, PositionsSpec("sinusoidal"), PositionsSpec("learned", 70))),
        embed_scale=lot.choice((1.0, 2.5)),
        embed_norm=some_norm(),
        final_norm=some_norm(),
        tied_head=lot.random() < 0.5,
        head_bias=lot.random() < 0.5,
    )


LOTS = {spec.name: spec for spec in map(pick, range(40))}


def product(spec: ModelSpec, weights: Weights, ids: np.ndarray, engine: Engine) -> dict[str, np.ndarray]:
    """Every point that the product shows, and the logits at all positions."""
    parameters = Parameters(spec, {name: Weight.of(w.numpy()) for name, w in weights.items()}, engine)
    recorder = Recorder(engine, Layout.of([len(ids)]), points_of(spec))
    ran = transformer(engine, spec, parameters, [ids], tap=recorder, rows=range(len(ids)))
    kept = {str(point): value[0] if isinstance(value, dict) else value for point, value in recorder.kept.items()}
    return kept | {"logits": engine.numpy(ran.logits)}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], within: float) -> None:
    off = {name: deviation(found[name], value) for name, value in expected.items()}
    assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}


def some_ids(spec: ModelSpec, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, spec.vocab_size, length)


@pytest.mark.parametrize("spec", (FEATURES | LOTS).values(), ids=(FEATURES | LOTS).keys())
def test_each_feature_is_computed_as_torch_computes_it(spec: ModelSpec) -> None:
    weights = random_weights(spec, len(spec.name))
    for length in LENGTHS:
        ids = some_ids(spec, length)
        expected = run(spec, weights, ids)
        assert_same(product(spec, weights, ids, make_engine("numpy", "float64")), expected, EXACT)


@pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES.keys())
def test_the_cpu_engine_has_every_feature_too(spec: ModelSpec) -> None:
    weights = {name: w.float() for name, w in random_weights(spec, 7).items()}
    ids = some_ids(spec, 70)
    expected = run(spec, {name: w.double() for name, w in weights.items()}, ids)
    assert_same(product(spec, weights, ids, make_engine("cpu")), expected, SINGLE)


@pytest.mark.parametrize("spec", (FEATURES | LOTS).values(), ids=(FEATURES | LOTS).keys())
def test_every_causal_spec_decodes_from_its_cache_as_in_one_pass(spec: ModelSpec) -> None:
    if not spec.causal:
        with pytest.raises(Exception, match="both directions"):
            KVCache(spec, make_engine("numpy", "float64"))
        return
    engine = make_engine("numpy", "float64")
    weights = random_weights(spec, 3)
    ids = some_ids(spec, 70)
    whole = run(spec, weights, ids)["logits"]
    parameters = Parameters(spec, {name: Weight.of(w.numpy()) for name, w in weights.items()}, engine)
    cache = KVCache(spec, engine)
    for piece in np.split(ids, (40, 41, 42, 64, 65, 66)):
        ran = transformer(engine, spec, parameters, [piece], caches=[cache])
        assert deviation(ran.logits[-1], whole[cache.length - 1]) < EXACT


@pytest.mark.parametrize("norm_first", (False, True), ids=("after", "before"))
@pytest.mark.parametrize("activation", ("relu", "gelu"))
@pytest.mark.parametrize("causal", (False, True), ids=("bidirectional", "causal"))
def test_a_stack_of_torchs_own_encoder_layers(norm_first: bool, activation: str, causal: bool) -> None:
    """torch.nn.TransformerEncoderLayer: somebody else's pre- and post-norm blocks, with a fused q, k, v."""
    torch.manual_seed(5)
    d, heads, d_ff, length = 30, 5, 44, 70
    layers = [
        torch.nn.TransformerEncoderLayer(
            d, heads, d_ff, 0.0, activation, 1e-5, batch_first=True, norm_first=norm_first, dtype=torch.float64
        ).eval()
        for _ in range(3)
    ]
    block = LayerSpec(
        AttentionSpec(heads, heads, d // heads, causal=causal, qkv_bias=True, out_bias=True),
        FeedForwardSpec(d_ff, activation, bias=True),
        LAYER_NORM,
        "pre" if norm_first else "post",
    )
    spec = ModelSpec("torch's", 17, d, (block,) * 3)
    weights = {"embed.tokens": torch.randn(17, d, dtype=torch.float64)}
    ids = some_ids(spec, length)
    expected = {}
    x = weights["embed.tokens"][torch.from_numpy(ids)]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64) if causal else None
    for i, layer in enumerate(layers):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 0, 1.0 if parameter.dim() == 1 else d**-0.5)
        fused_weight, fused_bias = layer.self_attn.in_proj_weight.chunk(3), layer.self_attn.in_proj_bias.chunk(3)
        theirs = {f"attn.{part}.weight": fused_weight[j] for j, part in enumerate("qkv")}
        theirs |= {f"attn.{part}.bias": fused_bias[j] for j, part in enumerate("qkv")}
        for ours, module in (
            ("attn.o", layer.self_attn.out_proj),
            ("mlp.up", layer.linear1),
            ("mlp.down", layer.linear2),
        ):
            theirs |= {f"{ours}.weight": module.weight, f"{ours}.bias": module.bias}
        for ours, module in (("attn.norm", layer.norm1), ("mlp.norm", layer.norm2)):
            theirs |= {f"{ours}.gain": module.weight, f"{ours}.bias": module.bias}
        weights |= {f"layers.{i}.{name}": weight.detach() for name, weight in theirs.items()}
        with torch.no_grad():
            x = layer(x[None], src_mask=mask)[0]
        expected[f"layers.{i}.resid_post"] = x.numpy()
    expected["logits"] = (x @ weights["embed.tokens"].T).numpy()
    assert_same(product(spec, weights, ids, make_engine("numpy", "float64")), expected, EXACT)
