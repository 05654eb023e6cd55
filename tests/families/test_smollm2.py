"""The real model: SmolLM2's published next tokens, its identities, and `transformers` on the very same weights."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from compared import deviation
from transformers import LlamaConfig, LlamaForCausalLM

import cutaway

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
LIKELIEST = {" Paris": 17.3713, " the": 14.8886, " London": 13.245, " Le": 13.0095, " New": 12.9515}
TEXT = (
    "Once upon a time there was a small dragon who could not breathe fire. Every morning it climbed the hill, "
    "looked down at the village, and wondered what the people there had for breakfast and why."
)


@pytest.fixture(scope="module", params=("cpu", "numpy"))
def model(request: pytest.FixtureRequest) -> Iterator[cutaway.Model]:
    yield cutaway.load("smollm2-135m", engine=request.param, dtype="float32")


def test_the_likeliest_next_tokens_and_their_logits(model: cutaway.Model) -> None:
    trace = model.trace("The capital of France is")
    assert list(trace.prompt.ids) == PROMPT
    found = {token.text: token.logit for token in trace.next_tokens(5)}
    assert list(found) == list(LIKELIEST)
    assert found == pytest.approx(LIKELIEST, abs=0.002)


def test_its_identities_hold(model: cutaway.Model) -> None:
    # The numpy engine is written to be read: the whole run of 90 tokens would take it a minute.
    checks = list(model.verify(PROMPT if model.engine.name == "numpy" else None))
    assert len(checks) > 10
    for check in checks:
        assert check.holds, check


def test_transformers_computes_the_same_from_the_same_weights(model: cutaway.Model) -> None:
    """Built from the dequantised weights in float32: every stream and the logits of 40 tokens."""
    reference = built_from(model)
    ids = model.tokenizer.encode(TEXT)[:40]
    assert len(ids) == 40
    with torch.no_grad():
        out = reference(torch.tensor([ids]), output_hidden_states=True)
    trace = model.trace(ids)
    assert deviation(trace.logits, out.logits[0].numpy()) < 1e-4
    streams = [trace["embed.out"], *(trace[f"layers.{i}.resid_post"] for i in range(model.spec.n_layers - 1))]
    for ours, theirs in zip([*streams, trace["final.norm"]], out.hidden_states, strict=True):
        assert deviation(ours, theirs[0].numpy()) < 1e-4
    assert np.array_equal(trace.logits.argmax(-1), out.logits[0].numpy().argmax(-1))


def built_from(model: cutaway.Model) -> LlamaForCausalLM:
    """SmolLM2 in `transformers`, with our spec's settings and our weights."""
    spec, attention = model.spec, model.spec.layers[0].attention
    assert attention.rotary is not None and spec.final_norm is not None
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.d_model,
        intermediate_size=spec.layers[0].feed_forward.d_ff,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads,
        rms_norm_eps=spec.final_norm.eps,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rotary.base},
        tie_word_embeddings=spec.tied_head,
        max_position_embeddings=spec.context_length,
    )
    with torch.device("meta"):
        reference = LlamaForCausalLM(config)
    parts = {
        "attn.norm.gain": "input_layernorm",
        "mlp.norm.gain": "post_attention_layernorm",
        **{f"attn.{part}.weight": f"self_attn.{part}_proj" for part in "qkvo"},
        **{f"mlp.{part}.weight": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    names = {"embed.tokens": "model.embed_tokens", "final.norm.gain": "model.norm"}
    names |= {
        f"layers.{i}.{ours}": f"model.layers.{i}.{theirs}"
        for i in range(spec.n_layers)
        for ours, theirs in parts.items()
    }
    stored = model.parameters.stored
    weights = {f"{names[ours]}.weight": torch.tensor(w.dequantise(np.float32)) for ours, w in stored.items()}
    reference.load_state_dict(weights, strict=False, assign=True)
    reference.tie_weights()
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)  # its angles are no weights
    assert not any(tensor.is_meta for tensor in (*reference.parameters(), *reference.buffers()))
    return reference.eval()
