"""A model with a LoRA adapter computes what PEFT computes with it, for every target, as an edit and merged."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import deviation, prompt
from decoders import Tiny, lifted, reloaded
from gguf_files import QTYPE, write_gguf
from llama_like import PHI3, QWEN2, SCALED, llama_like_lifted
from peft import LoraConfig, PeftModel, get_peft_model
from test_families_gguf import WIDE
from transformers import BertConfig, BertForMaskedLM

import cutaway

EXACT, SINGLE = 1e-9, 1e-5
GPT2 = Tiny(
    "gpt2 adapted",
    "gpt2",
    {
        "vocab_size": 67,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 300,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
ATTENTION, GATED = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "llama": (SCALED[2], [*ATTENTION, *GATED, "lm_head"]),
    "gpt2": (GPT2, ["c_attn", "c_proj", "c_fc"]),
    "qwen2": (QWEN2[1], [*ATTENTION, *GATED]),
    "phi3": (PHI3[0], ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
}
SIZES = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 14, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 512}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "moe_intermediate_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 10,
          "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1,
          "head_dim": 4}  # fmt: skip
SCALED_QUERIES = {"head_dim": 8, "query_pre_attn_scalar": 8}
LATENTS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
# Their norms, angles and softmaxes stay in float32 here: what is compared is what the adapter adds.
OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "mistral": ({}, "all-linear"),
    "qwen3": ({"head_dim": 8}, "all-linear"),
    "gemma2": (SCALED_QUERIES, "all-linear"),
    "gemma3_text": (SCALED_QUERIES, "all-linear"),
    "gpt_neox": ({"num_key_value_heads": ...}, "all-linear"),
    "phi": ({}, "all-linear"),
    "mixtral": ({"num_local_experts": 4}, ATTENTION),
    "qwen3_moe": ({"head_dim": 8, "moe_intermediate_size": 10, "num_experts": 8}, ATTENTION),
    "deepseek_v2": (LATENT, LATENTS),
    "deepseek_v3": (LATENT, LATENTS),
    "llama4_text": ({"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 20}, ATTENTION),
}
every_family = pytest.mark.parametrize("family", TARGETS)


def base(tiny: Tiny, folder: Path) -> Any:
    """The tiny model in float64, as transformers loads it from the folder that it is saved to."""
    tiny.build().save_pretrained(folder)
    return reloaded(folder)


def with_adapter(model: Any, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """PEFT's model with a random adapter of these settings, which is saved to the folder in this precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT says of Conv1D, and of the head that it saves too
        made = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False).eval()
        torch.manual_seed(seed)
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.data = torch.randn(parameter.shape).mul(0.3).to(dtype)
        made.save_pretrained(folder)
        for name, parameter in made.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.double()
    return made


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with lifted(), llama_like_lifted(), torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def off(model: cutaway.Model, expected: np.ndarray, ids: list[int], *adapters: Any) -> float:
    return deviation(model.trace(ids, ["logits"], edits=adapters)["logits"], expected)


@every_family
def test_every_target_computes_what_peft_computes(family: str, tmp_path: Path) -> None:
    tiny, targets = TARGETS[family]
    theirs = with_adapter(
        base(tiny, tmp_path / "base"), tmp_path / "adapter", r=3, lora_alpha=5, target_modules=targets
    )
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    merged = model.merged(tmp_path / "adapter")
    for length in (1, 41, 273):  # one row, padded blocks, past a chunk of 256 rows
        ids = prompt(67, length)
        expected = logits_of(theirs, ids)
        plain = model.trace(ids, ["logits"])["logits"]
        assert deviation(plain, expected) > 0.1  # the adapter is felt
        run = model.trace(ids, ["logits"], edits=[cutaway.edits.Adapter(tmp_path / "adapter")])
        assert deviation(run["logits"], expected) < EXACT
        assert run.edits[0].changed == run.edits[0].elements > 0
        assert off(merged, expected, ids) < EXACT
        np.testing.assert_array_equal(model.trace(ids, ["logits"])["logits"], plain)  # and off again, to the bit


@every_family
@pytest.mark.parametrize("engine", ("cpu", "torch:cpu", "numpy"))
def test_every_engine_computes_it_in_single_precision(family: str, engine: str, tmp_path: Path) -> None:
    tiny, targets = TARGETS[family]
    theirs = with_adapter(
        base(tiny, tmp_path / "base"), tmp_path / "adapter", r=3, lora_alpha=5, target_modules=targets
    )
    model = cutaway.load(tmp_path / "base", engine=engine, dtype="float32")
    merged = model.merged(tmp_path / "adapter")
    for length in (7, 65):
        ids = prompt(67, length)
        expected = logits_of(theirs, ids)
        assert off(model, expected, ids, cutaway.edits.Adapter(tmp_path / "adapter")) < SINGLE
        assert off(merged, expected, ids) < SINGLE


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_adapted_by_their_own_names(family: str, tmp_path: Path) -> None:
    more, targets = OTHERS[family]
    settings = {key: value for key, value in (SIZES | more).items() if value is not ...}
    tiny = Tiny(f"{family} adapted", family, settings)
    theirs = with_adapter(
        base(tiny, tmp_path / "base"), tmp_path / "adapter", r=3, lora_alpha=5, target_modules=targets
    )
    ids = prompt(67, 40)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    assert off(model, expected, ids) > 0.1
    assert off(model, expected, ids, cutaway.edits.Adapter(tmp_path / "adapter")) < SINGLE
    assert off(model.merged(tmp_path / "adapter"), expected, ids) < SINGLE


def test_an_encoder_is_adapted_to_its_head(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=67, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
    torch.manual_seed(3)
    plain = BertForMaskedLM(config).double().eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    plain.save_pretrained(tmp_path / "base")
    targets = ["query", "key", "value", "dense"]  # the last one in the head's own layer too
    theirs = with_adapter(plain, tmp_path / "adapter", r=3, lora_alpha=5, target_modules=targets)
    ids = prompt(67, 40)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    run = model.trace(ids, ["logits"], edits=[cutaway.edits.Adapter(tmp_path / "adapter")])
    assert deviation(run["logits"], expected) < EXACT
    assert run.edits[0].fired["logits"] == 24  # of the one row that the pass itself works out
    assert off(model, expected, ids) > 0.1
    assert off(model.merged(tmp_path / "adapter"), expected, ids) < EXACT


SETTINGS: dict[str, dict[str, Any]] = {
    "ranks and alphas of their own": {
        "target_modules": [*ATTENTION, "down_proj"],
        "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\.down_proj": 1, "layers.0.self_attn.k_proj": 4},
        "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 2, "down_proj": 9},
    },
    "ranks that are stable": {"target_modules": ATTENTION, "use_rslora": True, "r": 6},
    "one layer": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "one layer, by the name of the list": {
        "target_modules": GATED,
        "layers_to_transform": 0,
        "layers_pattern": "layers",
    },
    "a pattern of modules": {"target_modules": r".*\.1\.(self_attn\.[qv]_proj|mlp\.up_proj)"},
    "all but some": {"target_modules": ATTENTION, "exclude_modules": ["k_proj", "model.layers.0.self_attn.v_proj"]},
    "all that multiplies": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_every_setting_that_is_honoured_means_what_peft_means(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = with_adapter(
        base(SCALED[2], tmp_path / "base"), tmp_path / "adapter", **{"r": 3, "lora_alpha": 5, **settings}
    )
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    ids = prompt(67, 30)
    assert off(model, logits_of(theirs, ids), ids, cutaway.edits.Adapter(tmp_path / "adapter")) < EXACT


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32), ids=str)
def test_adapters_of_half_precision_are_read_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    settings = {"r": 3, "lora_alpha": 5, "target_modules": TARGETS["phi3"][1]}
    theirs = with_adapter(base(PHI3[0], tmp_path / "base"), tmp_path / "adapter", dtype=dtype, **settings)
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    ids = prompt(67, 30)
    expected = logits_of(theirs, ids)
    assert off(model, expected, ids, cutaway.edits.Adapter(tmp_path / "adapter")) < EXACT
    assert off(model.merged(tmp_path / "adapter"), expected, ids) < EXACT


def test_two_adapters_are_summed(tmp_path: Path) -> None:
    made = with_adapter(base(SCALED[2], tmp_path / "base"), tmp_path / "one", r=3, target_modules=["q_proj", "up_proj"])
    fresh = base(SCALED[2], tmp_path / "base")
    with_adapter(fresh, tmp_path / "two", seed=1, r=2, target_modules=["q_proj", "o_proj"])
    made.load_adapter(tmp_path / "two", adapter_name="two", autocast_adapter_dtype=False)
    made.base_model.set_adapter(["default", "two"])
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    both = [cutaway.edits.Adapter(tmp_path / "one"), cutaway.edits.Adapter(tmp_path / "two")]
    ids = prompt(67, 30)
    expected = logits_of(made, ids)
    assert off(model, expected, ids, *both) < EXACT
    assert off(model.merged(both), expected, ids) < EXACT
    assert off(model.merged(tmp_path / "one").merged(tmp_path / "two"), expected, ids) < EXACT


@pytest.mark.parametrize("family", ("llama", "gpt2"))
@pytest.mark.parametrize("kind", (QTYPE.F32, QTYPE.Q8_0, QTYPE.Q4_0), ids=lambda kind: kind.name)
def test_a_gguf_base_takes_the_adapter_in_the_order_of_hugging_face(family: str, kind: QTYPE, tmp_path: Path) -> None:
    """GGUF holds the rows of Llama's q and k in another order; the adapter has them in the original's."""
    reference = WIDE[family].build(torch.float64)
    path = write_gguf(tmp_path / "base.gguf", reference, {"": kind})
    theirs = with_adapter(reference, tmp_path / "adapter", r=4, lora_alpha=6, target_modules=_all(TARGETS[family][1]))
    ids = prompt(50, 40)
    expected = logits_of(theirs, ids)
    adapter = cutaway.edits.Adapter(tmp_path / "adapter")
    exact = cutaway.load(path, engine="numpy", dtype="float64")
    assert off(exact, expected, ids, adapter) < EXACT
    for engine in ("numpy", "cpu"):
        model = cutaway.load(path, engine=engine, dtype="float32")
        assert off(model, expected, ids, adapter) < SINGLE
        assert off(model.merged(adapter), expected, ids) < SINGLE


def _all(targets: list[str]) -> list[str]:
    return [name for name in targets if name != "lm_head"]


def test_an_adapter_of_the_model_without_its_head_is_the_same(tmp_path: Path) -> None:
    whole = base(SCALED[2], tmp_path / "base")
    theirs = with_adapter(whole.model, tmp_path / "adapter", r=3, target_modules=ATTENTION)
    assert isinstance(theirs, PeftModel)
    ids = prompt(67, 20)
    with lifted(), llama_like_lifted(), torch.no_grad():
        expected = whole.lm_head(theirs(torch.tensor([ids])).last_hidden_state)[0].numpy()
    model = cutaway.load(tmp_path / "base", engine="numpy", dtype="float64")
    assert off(model, expected, ids, cutaway.edits.Adapter(tmp_path / "adapter")) < EXACT


def test_the_configuration_that_peft_writes_today_is_known_in_every_key(tmp_path: Path) -> None:
    with_adapter(base(GPT2, tmp_path / "base"), tmp_path / "adapter", target_modules=["c_attn"])
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["fan_in_fan_out"] is True
    assert len(written) > 30
    model = cutaway.load(tmp_path / "base", engine="numpy")
    assert model.trace([1, 2, 3], edits=[{"adapter": str(tmp_path / "adapter")}]).edits[0].changed > 0
