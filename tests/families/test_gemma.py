"""Gemma 2 and Gemma 3 compute what `transformers` computes: every intermediate, at every position."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import SINGLE, prompt
from decoder_cases import GEMMA, GEMMA_SIZES, gemma2, gemma3, two_tables
from decoders import (
    Tiny,
    assert_same,
    edited,
    reloaded,
    write_gguf,
)
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

import cutaway
from cutaway.checkpoints.families.gemma2 import embedding_scale
from cutaway.checkpoints.load import spec_of
from cutaway.errors import CutawayError
from cutaway.spec import LinearScaling, NormSpec, RotarySpec
from cutaway.spec.catalog import catalog_spec


def test_the_embedding_is_scaled_by_the_root_of_d_in_the_precision_of_the_checkpoint(
    made_tiny: Any, tmp_path: Path
) -> None:
    scales = {case.name: cutaway.load(made_tiny(case)[0]).spec.embed_scale for case in GEMMA}
    assert scales[GEMMA[0].name] == sqrt(20)
    assert scales[GEMMA[3].name] == 4.90625 != float(np.float32(sqrt(24)))
    assert scales[GEMMA[7].name] == float(np.float16(sqrt(20)))
    # A configuration that names no precision means that of its weights.
    for number, case in enumerate((GEMMA[0], GEMMA[3], GEMMA[7])):
        unsaid = edited(made_tiny(case)[0], tmp_path / str(number), dtype=...)
        assert cutaway.load(unsaid).spec.embed_scale == scales[case.name]


def test_the_published_sizes_round_to_the_numbers_that_they_were_trained_with() -> None:
    assert embedding_scale(3072, "bfloat16") == 55.5
    for d_model in (640, 1152, 2304, 2560, 3072, 3584, 3840, 4608, 5376):
        expected = float(torch.tensor(d_model**0.5, dtype=torch.bfloat16))
        assert embedding_scale(d_model, "bfloat16") == expected


def test_the_published_configuration_of_gemma_3_270m_is_that_of_the_catalog(tmp_path: Path) -> None:
    kinds = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)]
    config = {
        "model_type": "gemma3_text", "_sliding_window_pattern": 6, "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "intermediate_size": 2048,
        "layer_types": kinds, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
        "use_bidirectional_attention": False, "use_cache": True, "vocab_size": 262144,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec, listed = spec_of(tmp_path), catalog_spec("gemma-3-270m")
    assert spec.embed_scale == 25.25  # √640 in bfloat16, in which it is published
    assert replace(spec, name=listed.name, embed_scale=listed.embed_scale) == listed
    assert spec.count().total == 268_098_176


def test_gemma_3_in_its_old_spelling_is_the_same_model(made_tiny: Any, tmp_path: Path) -> None:
    folder, reference = made_tiny(GEMMA[5])
    old = edited(
        folder,
        tmp_path / "old",
        rope_parameters=...,
        layer_types=...,
        dtype=...,
        _sliding_window_pattern=...,
        torch_dtype="float64",
        cache_implementation="hybrid",
        rope_theta=1e4,
        rope_local_base_freq=30.0,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window_pattern=2,
    )
    one, other = (cutaway.load(path, engine="numpy", dtype="float64") for path in (folder, old))
    assert replace(one.spec, name="") == replace(other.spec, name="")
    assert_same(other, reference, prompt(61, 80))


def test_what_a_configuration_leaves_out_is_what_transformers_takes_for_it(tmp_path: Path) -> None:
    """Google's own configurations leave most of the text part out."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gemma3",
                "text_config": {
                    "hidden_size": 2560,
                    "intermediate_size": 10240,
                    "model_type": "gemma3_text",
                    "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024,
                },
                "torch_dtype": "bfloat16",
                "vision_config": {"hidden_size": 1152},
                "mm_tokens_per_image": 256,
            }
        )
    )
    spec = spec_of(tmp_path)
    near, far = spec.layers[0].attention, spec.layers[5].attention
    assert (spec.vocab_size, near.n_heads, near.n_kv_heads, near.d_head) == (262_208, 8, 4, 256)
    assert (near.window, far.window) == (1024, None)
    assert near.rotary == RotarySpec(10_000.0, 256)
    assert far.rotary == RotarySpec(1_000_000.0, 256, scaling=LinearScaling(8.0))
    assert (near.scale, near.cap, spec.logit_cap, spec.embed_scale) == (256**-0.5, None, None, 50.5)
    assert spec.tied_head and spec.final_norm == NormSpec("rms", 1e-6)


@pytest.mark.parametrize("inside", (False, True), ids=("as saved", "as transformers names it inside"))
def test_of_a_model_that_sees_images_the_text_part_is_loaded_and_said_so(inside: bool, tmp_path: Path) -> None:
    text = Gemma3TextConfig(**GEMMA[5].settings)
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    torch.manual_seed(1)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    model.save_pretrained(tmp_path, save_original_format=not inside)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = list(file.keys())
    assert any(name.startswith("model.language_model." if inside else "language_model.model.") for name in names)
    reference = Gemma3ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager", dtype="auto")
    ours = cutaway.load(tmp_path, engine="numpy", dtype="float64")
    assert ours.spec.count().total == sum(p.numel() for p in reference.model.language_model.parameters())
    assert_same(ours, reference.eval(), prompt(61, 80))
    vision_tensors = sum("vision_tower" in name or "projector" in name for name in names)
    assert ours.origin.endswith(f"its vision tower ({vision_tensors} tensors) is left out")


@pytest.mark.parametrize("same", (True, False))
def test_beside_a_vision_tower_too_a_tied_head_that_is_stored_must_be_the_embedding(
    same: bool, made_tiny: Any, tmp_path: Path
) -> None:
    folder = edited(made_tiny(GEMMA[4])[0], tmp_path / "whole", model_type="gemma3", text_config=GEMMA[4].settings)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in ("model_type", "text_config")}))
    tensors = {f"language_model.{name}": array for name, array in load_file(folder / "model.safetensors").items()}
    head = tensors["language_model.model.embed_tokens.weight"].copy()
    head[3, 4] += 0 if same else 1
    save_file(tensors | {"language_model.lm_head.weight": head}, folder / "model.safetensors")
    if same:
        ids = prompt(61, 30)
        assert np.array_equal(
            cutaway.load(folder).trace(ids).logits, cutaway.load(made_tiny(GEMMA[4])[0]).trace(ids).logits
        )
        return
    with pytest.raises(CutawayError, match=r"language_model\.lm_head\.weight that differs"):
        cutaway.load(folder)


def test_a_text_model_says_nothing_of_a_vision_tower(made_tiny: Any) -> None:
    assert "vision" not in cutaway.load(made_tiny(GEMMA[4])[0]).origin


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    (
        (GEMMA[0], {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA[4], {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA[4], {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA[0], {"hidden_activation": "silu"}, "hidden_activation"),
        (GEMMA[0], {"sliding_window": None}, "sliding_window"),
        (GEMMA[0], {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA[0], {"layer_types": ["full_attention", "full_attention", "chunked_attention"]}, "chunked_attention"),
        (GEMMA[0], {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA[0], {"attn_logit_softcapping": -1.0}, "cap"),
        (GEMMA[0], {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (GEMMA[4], {"altup_num_inputs": 4}, "altup_num_inputs"),
        (GEMMA[4], {"rope_parameters": {"strided_attention": {"rope_theta": 5.0}}}, "strided_attention"),
        (GEMMA[0], {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (GEMMA[0], {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ),
    ids=lambda value: value.name if isinstance(value, Tiny) else str(value),
)
def test_what_is_not_computed_is_refused_by_name(
    case: Tiny, changes: dict[str, Any], named: str, made_tiny: Any, tmp_path: Path
) -> None:
    folder = edited(made_tiny(case)[0], tmp_path / "changed", **changes)
    with pytest.raises(CutawayError, match=named):
        cutaway.load(folder)


def test_a_tied_head_that_is_stored_all_the_same_must_be_the_embedding(made_tiny: Any, tmp_path: Path) -> None:
    folder, _ = made_tiny(GEMMA[1])
    with pytest.raises(CutawayError, match=r"lm_head\.weight"):
        cutaway.load(edited(folder, tmp_path / "changed", tie_word_embeddings=True))


GGUF_NAMES = {  # as llama.cpp's converter writes them
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """The converter's layout: its own names, and 1 added to the weights of every norm."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    tensors = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy().astype(np.float32)
        if name not in whole:
            _, _, layer, rest = name.split(".", 3)
            whole[name] = f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"
        tensors[whole[name]] = array + np.float32(1) if name.endswith("norm.weight") else array
    return tensors


def _gguf_settings(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
    }


def _assert_gguf_is_its_model(tiny: Tiny, path: Path, architecture: str, more: dict[str, Any]) -> None:
    model = tiny.build().float()
    write_gguf(path, architecture, _gguf_settings(model.config) | more, _gguf_tensors(model))
    model.save_pretrained(path.parent / "folder")
    reference = reloaded(path.parent / "folder")
    ids = prompt(61, 130)
    assert_same(cutaway.load(path, engine="cpu"), reference, ids, SINGLE)
    # 1 + w was rounded to float32 before it was written: nothing closer is in the file.
    assert_same(cutaway.load(path, engine="numpy", dtype="float64"), reference, ids, 1e-6)
    from_folder = cutaway.load(path.parent / "folder", engine="numpy", dtype="float64")
    assert np.array_equal(
        from_folder.trace(ids).logits, cutaway.load(path, engine="numpy", dtype="float64").trace(ids).logits
    )


def test_gguf_files_of_gemma_2(tmp_path: Path) -> None:
    tiny = gemma2("gguf", sliding_window=7, query_pre_attn_scalar=6, torch_dtype="float32")
    more = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    _assert_gguf_is_its_model(tiny, tmp_path / "tiny.gguf", "gemma2", more)


def test_gguf_files_of_gemma_2_with_caps_of_their_own(tmp_path: Path) -> None:
    tiny = gemma2("gguf caps", sliding_window=70, query_pre_attn_scalar=6, attn_logit_softcapping=2.5,
                   final_logit_softcapping=3.5, num_hidden_layers=2)  # fmt: skip
    more = {"attn_logit_softcapping": 2.5, "final_logit_softcapping": 3.5, "rope.dimension_count": 6}
    _assert_gguf_is_its_model(tiny, tmp_path / "tiny.gguf", "gemma2", more)


def test_gguf_files_of_gemma_3(tmp_path: Path) -> None:
    tiny = gemma3("gguf", num_hidden_layers=7, sliding_window=9, query_pre_attn_scalar=6)
    _assert_gguf_is_its_model(tiny, tmp_path / "tiny.gguf", "gemma3", {"rope.freq_base": 1e6})


def test_gguf_files_of_gemma_3_with_a_factor_and_another_pattern(tmp_path: Path) -> None:
    rope = two_tables(500.0, {"rope_theta": 1e5, "rope_type": "linear", "factor": 8.0})
    tiny = gemma3("gguf factor", sliding_window=65, query_pre_attn_scalar=6, sliding_window_pattern=2,
                   rope_parameters=rope)  # fmt: skip
    more = {"rope.freq_base": 1e5, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 500.0, "attention.sliding_window_pattern": 2}  # fmt: skip
    _assert_gguf_is_its_model(tiny, tmp_path / "tiny.gguf", "gemma3", more)


@pytest.mark.parametrize(("architecture", "largest"), (("gemma2", 46), ("gemma3", 62)))
def test_files_of_the_largest_size_scale_scores_by_the_width_over_the_heads(
    architecture: str, largest: int, tmp_path: Path
) -> None:
    """No key says so; as in llama.cpp it is known by its depth."""
    scales = {}
    for layers in (2, largest):
        case = Tiny(
            "deep", architecture.replace("3", "3_text"), {**GEMMA_SIZES, "num_hidden_layers": layers, "vocab_size": 9}
        )
        model = case.build()
        path = write_gguf(tmp_path / f"{layers}.gguf", architecture, _gguf_settings(model.config), _gguf_tensors(model))
        scales[layers] = cutaway.load(path).spec.layers[0].attention.scale
    assert scales == {2: 6**-0.5, largest: (20 // 4) ** -0.5}


def test_gguf_settings_that_would_change_the_pass_are_refused_by_name(tmp_path: Path) -> None:
    model = gemma2("gguf refused").build()
    settings = _gguf_settings(model.config) | {"attention.causal": False}
    with pytest.raises(CutawayError, match=r"attention\.causal"):
        cutaway.load(write_gguf(tmp_path / "tiny.gguf", "gemma2", settings, _gguf_tensors(model)))
