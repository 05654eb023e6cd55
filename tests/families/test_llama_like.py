"""Llama with scaled angles, Mistral, Qwen2, Qwen3 and Phi-3 compute what `transformers` computes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import SINGLE, assert_verified, deviation, exact, prompt
from decoders import Tiny, assert_cached_is_whole, assert_padding_on_the_left_changes_nothing, assert_same, reloaded
from llama_like import EVERY, MISTRAL, PHI3, QWEN2, QWEN3, SCALED, llama_like_lifted, unfused

import cutaway
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer

LENGTHS = (1, 17, 41, 65, 273)  # past every window and every original length; 273 crosses a chunk of 256 rows
every_model = pytest.mark.parametrize("tiny", EVERY, ids=lambda tiny: tiny.name)
_made: dict[str, tuple[Path, Any]] = {}


@pytest.fixture
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(tiny: Tiny) -> tuple[Path, Any]:
        if tiny.name not in _made:
            folder, reference = tiny.save(tmp_path_factory.mktemp("model"))
            _made[tiny.name] = folder, unfused(reference)
        return _made[tiny.name]

    return make


def looks_at_the_length(tiny: Tiny) -> bool:
    return tiny.settings.get("rope_parameters", {}).get("rope_type") in ("dynamic", "longrope")


@every_model
def test_every_intermediate_is_that_of_transformers(tiny: Tiny, made: Any) -> None:
    folder, reference = made(tiny)
    model = exact(folder)
    with llama_like_lifted():
        for length in LENGTHS:
            assert_same(model, reference, prompt(model.spec.vocab_size, length))


@every_model
def test_the_cpu_engine_computes_the_same_in_single_precision(tiny: Tiny, tmp_path: Path) -> None:
    folder, reference = replace(tiny, dtype=torch.float32).save(tmp_path)
    model, reference = cutaway.load(folder, engine="cpu"), unfused(reference)
    with llama_like_lifted():
        for length in (7, 65, 273):
            assert_same(model, reference, prompt(model.spec.vocab_size, length), SINGLE)


@every_model
def test_cached_decoding_is_the_whole_pass(tiny: Tiny, made: Any) -> None:
    model = exact(made(tiny)[0])
    if not looks_at_the_length(tiny):
        return assert_cached_is_whole(model, 1e-12)
    # Where angles depend on the length, each length has a whole pass of its own.
    ids, cache = np.array(prompt(67, 70)), KVCache(model.spec, model.engine)
    for piece in (ids[:28], *(ids[t : t + 1] for t in range(28, 70))):
        due = cache.due(piece)
        row = transformer(model.engine, model.spec, model.parameters, [due], caches=[cache]).logits[-1]
        assert deviation(row, model.trace(ids[: cache.length]).last_logits) < 1e-12


@every_model
def test_the_identities_hold(tiny: Tiny, made: Any) -> None:
    assert_verified(exact(made(tiny)[0]))
    if tiny in (SCALED[0], SCALED[3], MISTRAL[0], QWEN2[2], QWEN3[0], PHI3[2]):
        assert_verified(cutaway.load(made(tiny)[0], engine="cpu", dtype="float32"))


@every_model
def test_padding_on_the_left_changes_nothing(tiny: Tiny, made: Any) -> None:
    folder, reference = made(tiny)
    # transformers looks at the longest text of a batch, we at each text by itself: compared below one length.
    if tiny in (SCALED[3], PHI3[1], PHI3[3]):
        return None
    with llama_like_lifted():
        assert_padding_on_the_left_changes_nothing(exact(folder), reference)


@pytest.mark.parametrize("tiny", (SCALED[3], PHI3[1]), ids=lambda tiny: tiny.name)
def test_company_does_not_change_the_angles_of_a_short_text(tiny: Tiny, made: Any) -> None:
    model = exact(made(tiny)[0])
    texts = [np.array(prompt(67, length)) for length in (9, 60)]
    together = transformer(model.engine, model.spec, model.parameters, texts).logits
    for row, text in zip(together, texts, strict=True):
        assert np.array_equal(row, model.trace(text).last_logits)


@pytest.mark.parametrize("tiny", (SCALED[3], PHI3[1], PHI3[2]), ids=lambda tiny: tiny.name)
def test_a_cache_whose_angles_no_longer_hold_is_refused_and_generation_begins_it_anew(tiny: Tiny, made: Any) -> None:
    model = exact(made(tiny)[0])
    ids, cache = np.array(prompt(67, 66)), KVCache(model.spec, model.engine)
    transformer(model.engine, model.spec, model.parameters, [ids[:36]], caches=[cache])
    with pytest.raises(CutawayError, match="36 in the cache"):
        transformer(model.engine, model.spec, model.parameters, [ids[36:]], caches=[cache])
    assert cache.length == 36
    told = model.generate(ids[:36].tolist(), max_tokens=32, temperature=0.0, points=["logits"])
    now = ids[:36].tolist()
    for step in told.steps:
        assert step.trace is not None and deviation(step.trace.last_logits, model.trace(now).last_logits) < 1e-12
        now.append(step.token)


@pytest.mark.parametrize("tiny", (MISTRAL[0], QWEN2[0], QWEN3[0], PHI3[1]), ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_files(tiny: Tiny, dtype: torch.dtype, tmp_path: Path) -> None:
    folder, reference = replace(tiny, dtype=dtype).save(tmp_path, max_shard_size="6KB")
    with llama_like_lifted():
        assert_same(exact(folder), unfused(reference), prompt(67, 41))


def test_windows_are_where_the_configuration_puts_them(made: Any) -> None:
    windows = {
        tiny.name: [layer.attention.window for layer in exact(made(tiny)[0]).spec.layers]
        for tiny in (MISTRAL[0], MISTRAL[1], QWEN2[0], QWEN2[2], QWEN2[3], QWEN3[3])
    }
    assert list(windows.values()) == [[7, 7], [None] * 2, [None] * 2, [None, 9, 9], [64, None, 64], [None, None, 17]]


def rewritten(folder: Path, tmp_path: Path, changes: dict[str, Any], without: tuple[str, ...] = ()) -> Path:
    """The same checkpoint with other words in its config.json."""
    config = json.loads((folder / "config.json").read_text()) | changes
    for key in without:
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("tiny", "new"),
    (
        (SCALED[0], {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1,
                     "high_freq_factor": 4, "original_max_position_embeddings": 64}}),
        (QWEN2[1], {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4,
                    "original_max_position_embeddings": 50}, "use_mrope": False}),
        (PHI3[1], {"rope_theta": 1e4, "rope_scaling": {"type": "su",
                   **{k: v for k, v in PHI3[1].settings["rope_parameters"].items() if k.endswith("factor")}}}),
        (PHI3[4], {"rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5, "attention_bias": False,
                   "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),
    ),
    ids=lambda value: value.name if isinstance(value, Tiny) else "",
)  # fmt: skip
def test_the_older_spelling_says_the_same(tiny: Tiny, new: dict[str, Any], made: Any, tmp_path: Path) -> None:
    folder, _ = made(tiny)
    older = exact(rewritten(folder, tmp_path, new, without=("rope_parameters",)))
    spec = exact(folder).spec
    assert older.spec == replace(spec, name=older.spec.name)


@pytest.mark.parametrize("tiny", (QWEN2[0], QWEN2[2], QWEN3[3]), ids=lambda tiny: tiny.name)
def test_without_a_list_the_last_layers_have_the_windows(tiny: Tiny, made: Any, tmp_path: Path) -> None:
    """transformers 5 lists the layers; the published configurations say from which layer on, if at all."""
    folder, reference = made(tiny)
    model = exact(rewritten(folder, tmp_path, {}, without=("layer_types",)))
    with llama_like_lifted():
        assert_same(model, reference, prompt(67, 65))


def test_an_absent_window_of_mistral_is_the_first_models_and_null_is_none(made: Any, tmp_path: Path) -> None:
    folder, _ = made(MISTRAL[1])
    absent = rewritten(folder, tmp_path, {}, without=("sliding_window",))
    assert {layer.attention.window for layer in exact(absent).spec.layers} == {4096}
    assert reloaded(absent).config.sliding_window == 4096


@pytest.mark.parametrize(
    ("tiny", "changes", "named"),
    (
        (MISTRAL[0], {"attention_bias": True}, "attention_bias"),
        (MISTRAL[0], {"sliding_window": 0}, "sliding_window"),
        (MISTRAL[0], {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (QWEN2[0], {"use_mrope": True}, "use_mrope"),
        (QWEN2[0], {"qk_layernorm": True}, "qk_layernorm"),
        (QWEN2[0], {"layer_types": ["sliding_attention", "full_attention"]}, "layer 0 a window"),
        (QWEN2[0], {"layer_types": ["full_attention"]}, "names 1 layers"),
        (QWEN3[0], {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        (QWEN3[0], {"dual_chunk_attention_config": {"chunk_size": 4}}, "dual_chunk_attention_config"),
        (PHI3[1], {"full_attn_mod": 2}, "full_attn_mod"),
        (PHI3[1], {"lm_head_bias": True}, "lm_head_bias"),
        (PHI3[1], {"intermediate_size": 38}, "gate_up_proj"),
        (PHI3[1], {"num_key_value_heads": 1}, "qkv_proj"),
        (PHI3[4], {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.49}}, "turn in pairs"),
        (SCALED[0], {"quantization_config": {"bits": 4}}, "quantization_config"),
        (SCALED[0], {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "16 coordinates"),
        (SCALED[0], {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}}, "'proportional'"),
    ),
    ids=lambda value: value.name if isinstance(value, Tiny) else "",
)
def test_what_cannot_be_computed_is_refused_by_name(
    tiny: Tiny, changes: dict[str, Any], named: str, made: Any, tmp_path: Path
) -> None:
    with pytest.raises(CutawayError, match=named):
        cutaway.load(rewritten(made(tiny)[0], tmp_path, changes))
