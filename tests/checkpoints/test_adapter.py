"""What of an adapter is not honoured is refused by name, and so is whatever does not fit the model."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import cutaway
from adapters import EXPERTS, adaptable, of_llama, pair, with_magnitudes, without_head, write_adapter
from cutaway.checkpoints import adapter_lengths
from cutaway.checkpoints.adapter import read_adapter
from cutaway.checkpoints.adapter_names import modules_of
from cutaway.checkpoints.families import FAMILIES
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.model import Model
from cutaway.spec.catalog import catalog_spec
from cutaway.trace.edits import Adapter
from random_models import LLAMA


def refusal(folder: Path, model: Model | None = None) -> str:
    with pytest.raises(CutawayError) as refused:
        (model or adaptable()).trace([1, 2, 3], edits=[Adapter(folder)])
    return str(refused.value)


def adapter(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    return write_adapter(folder / "given", of_llama() if tensors is None else tensors, **config)


NOT_HONOURED: dict[str, tuple[Any, str]] = {
    "peft_type": ("IA3", "only 'LORA' can be computed"),
    "bias": ("lora_only", "only 'none' can be computed: the base model's biases"),
    "use_qalora": (True, "averages the inputs"),
    "lora_bias": (True, "a bias on the narrow matrix"),
    "modules_to_save": (["lm_head"], "these modules are replaced"),
    "target_parameters": (["mlp.experts.gate_up_proj"], "stacked matrices of experts"),
    "trainable_token_indices": ([1, 2], "rows of the embedding"),
    "layer_replication": ([[0, 2], [1, 2]], "other layers"),
    "alora_invocation_tokens": ([1], "from those tokens on"),
    "init_lora_weights": ("pissa", "the base model's own matrices"),
    "loftq_config": ({"loftq_bits": 4}, "a base model that it rounded"),
    "megatron_config": ({"a": 1}, "split over devices"),
    "arrow_config": ({"top_k": 3}, "choose among adapters"),
    "corda_config": ({"a": 1}, "changed at the start"),
    "kasa_config": ({"a": 1}, "changed at the start"),
    "use_something_new": (True, "does not know"),
}


@pytest.mark.parametrize("key", NOT_HONOURED)
def test_a_setting_that_is_not_honoured_is_refused_by_its_name_and_value(key: str, tmp_path: Path) -> None:
    value, why = NOT_HONOURED[key]
    said = refusal(adapter(tmp_path, **{key: value}))
    assert f"'{key}'" in said
    assert why in said
    assert "adapter_config.json of given" in said
    assert key == "use_something_new" or repr(value) in said


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no targets": ({"target_modules": ...}, "lacks 'target_modules'"),
    "targets of numbers": ({"target_modules": [3]}, r"'target_modules' is [3]"),
    "a pattern that is none": ({"target_modules": "(q_proj"}, "'target_modules' in"),
    "a rank pattern that is none": ({"rank_pattern": {"(": 3}}, "'rank_pattern' in"),
    "no rank": ({"r": 0}, "'r' is 0"),
    "a rank of text": ({"r": "8"}, "'r' is '8'"),
    "a rank of 0 in a pattern": ({"rank_pattern": {"q_proj": 0}}, "'rank_pattern' gives 'q_proj' the rank 0"),
    "a rank of a half": ({"rank_pattern": {"q_proj": 1.5}}, "'rank_pattern' gives 'q_proj' the value 1.5"),
    "an alpha of text": ({"alpha_pattern": {"q_proj": "much"}}, "'alpha_pattern' gives 'q_proj' the value 'much'"),
    "layers of text": ({"layers_to_transform": ["1"]}, "'layers_to_transform' is ['1']"),
    "another rank than the file's": ({"r": 4}, "lora_A has shape [2, 20], but small-llama with rank 4"),
    "targets that the file lacks": ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "self_attn.v_proj"),
    "targets that leave some out": (
        {"target_modules": ["q_proj"]},
        "model.layers.1.mlp.down_proj, which 'target_modules' = ['q_proj']",
    ),
    "a layer that is left out": ({"layers_to_transform": [1]}, "holds model.layers.0"),
    "a layer that is excluded": ({"exclude_modules": r".*\.1\..*"}, "holds model.layers.1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_contradicts_itself_or_the_file_is_refused(name: str, tmp_path: Path) -> None:
    config, said = WRONG[name]
    told = refusal(adapter(tmp_path, **config))
    assert said in told


def test_shapes_that_do_not_fit_are_told_both_ways(tmp_path: Path) -> None:
    tensors = of_llama()
    tensors |= pair("model.layers.0.self_attn.q_proj", 32, 12)
    said = refusal(adapter(tmp_path, tensors))
    assert "model.layers.0.self_attn.q_proj.lora_B has shape [32, 2]" in said
    assert "needs [24, 2]" in said
    tensors |= pair("model.layers.0.self_attn.q_proj", 24, 16)
    said = refusal(adapter(tmp_path, tensors))
    assert "lora_A has shape [2, 16]" in said
    assert "needs [2, 12]" in said


UNKNOWN: dict[str, tuple[str, str]] = {
    "model.layers.7.self_attn.q_proj.lora_A.weight": ("no matrix 'model.layers.7.self_attn.q_proj'", "another model"),
    "model.layers.0.self_attn.q_proj.bias": ("q_proj.bias' is neither lora_A nor lora_B", "biases"),
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": ("is neither lora_A nor lora_B", "magnitudes"),
    "model.embed_tokens.lora_embedding_A": ("changes an embedding", "only matrices that are multiplied"),
    "model.embed_tokens.lora_A.weight": ("model.embed_tokens is an embedding", "only matrices that are multiplied"),
    "score.weight": ("'base_model.model.score.weight' is neither", "replaced modules"),
}


@pytest.mark.parametrize("tensor", UNKNOWN)
def test_a_tensor_that_has_no_place_is_refused_by_name(tensor: str, tmp_path: Path) -> None:
    said = refusal(adapter(tmp_path, of_llama() | {tensor: np.ones((2, 12), np.float32)}))
    assert all(part in said for part in UNKNOWN[tensor])


def test_half_a_pair_is_an_incomplete_file(tmp_path: Path) -> None:
    tensors = of_llama()
    del tensors["model.layers.1.mlp.down_proj.lora_B.weight"]
    assert "holds only lora_A of model.layers.1.mlp.down_proj" in refusal(adapter(tmp_path, tensors))


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    tensors = of_llama()
    tensors["model.layers.1.mlp.down_proj.lora_B.weight"][3, 1] = np.nan
    assert "down_proj.lora_B.weight' holds values that are not finite" in refusal(adapter(tmp_path, tensors))


def test_the_same_matrix_twice_is_refused(tmp_path: Path) -> None:
    tensors = of_llama() | {"model.layers.0.self_attn.q_proj.lora_A.default.weight": np.ones((2, 12), np.float32)}
    assert "holds lora_A of model.layers.0.self_attn.q_proj twice" in refusal(adapter(tmp_path, tensors))
    both = ["model.layers.0.self_attn.q_proj", "layers.0.self_attn.q_proj"]  # with the head, and without
    folder = adapter(tmp_path, pair(both[0], 24, 12) | pair(both[1], 24, 12), target_modules=both)
    assert "changes layers.0.attn.q twice" in refusal(folder)


LENGTH = "model.layers.1.mlp.down_proj.lora_magnitude_vector"
LENGTHS: dict[str, tuple[Any, str]] = {
    "none": (None, "the two matrices of model.layers.1.mlp.down_proj, not all three"),
    "too many": (np.ones(13, np.float32), "has 13 magnitudes for model.layers.1.mlp.down_proj, which has 12 outputs"),
    "one number": (np.ones(1, np.float32), "has 1 magnitudes for"),
    "a matrix": (np.ones((12, 1), np.float32), "has shape [12, 1]; one length for each output is needed"),
    "no number": (np.full(12, np.nan, np.float32), "lora_magnitude_vector' holds values that are not finite"),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_of_rows_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    lengths, said = LENGTHS[case]
    tensors = with_magnitudes(of_llama()) | {LENGTH: lengths}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    assert said in refusal(adapter(tmp_path, tensors, use_dora=True))


def test_lengths_without_matrices_and_rows_without_a_length_are_refused(tmp_path: Path) -> None:
    tensors = with_magnitudes(of_llama())
    extra = tensors | {LENGTH.replace("down", "up"): np.ones(20, np.float32)}
    assert "model.layers.1.mlp.up_proj, not all three" in refusal(adapter(tmp_path, extra, use_dora=True))
    assert "'use_dora' is 'yes'" in refusal(adapter(tmp_path, tensors, use_dora="yes"))
    model = adaptable()
    name = "model.layers.1.mlp.down_proj.lora_B.weight"
    tensors[name][3] = 0
    model.parameters.stored["layers.1.mlp.down.weight"].rows[3] = 0
    said = refusal(adapter(tmp_path, tensors, use_dora=True), model)
    assert said == "Row 3 of layers.1.mlp.down is all zeros with the adapter: it has no length."


def test_the_lengths_of_rows_are_worked_out_once_for_the_same_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    whole, worked = adapter_lengths._lengths_of, []
    monkeypatch.setattr(adapter_lengths, "_lengths_of", lambda *given: worked.append(given) or whole(*given))
    model, tensors = adaptable(), with_magnitudes(of_llama())
    folder = adapter(tmp_path, tensors, use_dora=True)
    first, again = (model.trace([1, 2], ["logits"], edits=[Adapter(folder)])["logits"] for _ in range(2))
    assert np.array_equal(first, again) and len(worked) == 4
    tensors[LENGTH] = 2 * tensors[LENGTH]
    other = model.trace([1, 2], ["logits"], edits=[Adapter(adapter(tmp_path, tensors, use_dora=True))])["logits"]
    assert not np.array_equal(first, other) and len(worked) == 5
    adaptable().trace([1, 2], edits=[Adapter(folder)])  # another model has rows of its own
    assert len(worked) == 9


def test_lengths_told_under_two_names_are_refused(tmp_path: Path) -> None:
    tensors = with_magnitudes(of_llama())
    folder = adapter(tmp_path, tensors | {f"{LENGTH}.default": tensors[LENGTH]}, use_dora=True)
    assert "holds the lengths of model.layers.1.mlp.down_proj twice" in refusal(folder)


@pytest.mark.parametrize("size", [1e-200, 1e-160, 1.0, 1e160, 1e300])
def test_rows_whose_squares_no_number_can_hold_have_their_lengths(size: float, tmp_path: Path) -> None:
    model, tensors = adaptable(), with_magnitudes(of_llama())
    stored = {name: Weight.of(w.dequantise(np.float64) * size) for name, w in model.parameters.stored.items()}
    checkpoint = replace(model._checkpoint, weights=stored)
    far = read_adapter(adapter(tmp_path, tensors, use_dora=True, lora_alpha=3 * size), checkpoint)
    near = read_adapter(adapter(tmp_path, tensors, use_dora=True), model._checkpoint)
    for name, part in far.parts.items():
        np.testing.assert_allclose(part.gain * size, near.parts[name].gain, rtol=1e-12)


@pytest.mark.parametrize(("value", "said"), [(0.0, "is all zeros"), (np.nan, "holds numbers that are not finite")])
def test_a_row_without_a_length_is_refused(value: float, said: str, tmp_path: Path) -> None:
    model, tensors = adaptable(), with_magnitudes(of_llama())
    tensors["model.layers.0.mlp.down_proj.lora_B.weight"][5] = 0
    matrix = model.parameters.stored["layers.0.mlp.down.weight"].dequantise(np.float64)
    matrix[5] = value
    checkpoint = replace(
        model._checkpoint, weights=dict(model.parameters.stored) | {"layers.0.mlp.down.weight": Weight.of(matrix)}
    )
    with pytest.raises(CutawayError, match=f"Row 5 of layers.0.mlp.down {said} with the adapter"):
        read_adapter(adapter(tmp_path, tensors, use_dora=True), checkpoint)


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [0, 1], "layers_pattern": "(layers)"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["blocks", "(?i)LAYERS"]},
        {"layers_to_transform": [0, 1]},
        {"rank_pattern": {"(?i)Q_PROJ": 2}, "alpha_pattern": {"(d)own_proj": 3}},
        {"target_modules": r"(\w+\.)*(q_proj|down_proj)"},
    ],
    ids=str,
)
def test_patterns_may_be_any(config: dict[str, Any], tmp_path: Path) -> None:
    plain = adaptable().trace([1, 2, 3], edits=[Adapter(adapter(tmp_path / "plain"))]).last_logits
    found = adaptable().trace([1, 2, 3], edits=[Adapter(adapter(tmp_path, **config))]).last_logits
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"])
def test_a_pattern_that_could_take_for_ever_does_not(key: str, tmp_path: Path) -> None:
    slow: Any = {"(.*)*x": 2} if key == "rank_pattern" else "(.*)*x"
    layers = {"layers_to_transform": [0, 1]} if key == "layers_pattern" else {}
    folder = adapter(tmp_path, **{key: slow}, **layers)
    if key in ("target_modules", "layers_pattern"):  # it matches nothing
        assert "does not name" in refusal(folder)
    else:
        assert adaptable().trace([1, 2, 3], edits=[Adapter(folder)]).edits[0].changed > 0


def test_lengths_of_rows_belong_to_the_whole_adapter(tmp_path: Path) -> None:
    folder = adapter(tmp_path, with_magnitudes(of_llama()), use_dora=True)
    for taken in (lambda: adaptable().trace([1], edits=[Adapter(folder, 0.5)]), lambda: adaptable().merged(folder, -1)):
        with pytest.raises(CutawayError, match=r"\(DoRA\), so that it cannot be had .* times; its scale must be 1"):
            taken()


def test_a_tied_head_cannot_be_changed_by_itself(tmp_path: Path) -> None:
    folder = adapter(tmp_path, of_llama() | pair("lm_head", 23, 12), target_modules=["q_proj", "down_proj", "lm_head"])
    said = refusal(folder, adaptable(without_head(LLAMA)))
    assert "the head of small-llama is its embedding, so lm_head cannot be changed by itself" in said


def test_a_copy_of_the_base_may_lie_in_the_file_if_it_is_one(tmp_path: Path) -> None:
    """PEFT saves the embedding and the head beside an adapter of the head."""
    model = adaptable()
    table = model.parameters.stored["embed.tokens"].dequantise(np.float64)
    folder = adapter(tmp_path, of_llama() | {"model.embed_tokens.weight": table})
    assert model.trace([1, 2, 3], edits=[Adapter(folder)]).edits[0].changed > 0
    folder = adapter(tmp_path, of_llama() | {"model.embed_tokens.weight": table + 0.5})
    assert "holds a base_model.model.model.embed_tokens.weight that differs from embed.tokens" in refusal(folder)
    folder = adapter(tmp_path, of_llama() | {"model.embed_tokens.weight": np.ones((25, 12))})
    assert "has shape [25, 12], that of small-llama [23, 12]" in refusal(folder)


def test_what_is_missing_of_the_folder_is_told(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "as a pickle (adapter_model.bin), which can run any code" in refusal(folder)
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(folder)
    assert "There is no folder" in refusal(tmp_path / "nowhere")


def test_a_damaged_file_is_refused_as_of_any_checkpoint(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    whole = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(whole[:-40])
    assert "is cut short" in refusal(folder)
    (folder / "adapter_model.safetensors").write_bytes(whole)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "r": 4}')
    assert "'r' is given twice" in refusal(folder)


def test_an_adapter_without_tensors_is_none(tmp_path: Path) -> None:
    assert "holds no tensors" in refusal(adapter(tmp_path, {}))


@pytest.mark.parametrize(
    ("base", "warned"),
    [
        ("mistralai/Mistral-7B-v0.1", True),
        ("someone/small-Llama-instruct", False),
        ("./runs/stage-1", False),
        ("/data/models/mistral", False),
        (None, False),
    ],
)
def test_a_base_of_quite_another_name_is_warned_of(base: str | None, warned: bool, tmp_path: Path) -> None:
    folder = adapter(tmp_path, base_model_name_or_path=base)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        adaptable().trace([1, 2, 3], edits=[Adapter(folder)])
    assert [str(one.message).startswith(f"The adapter was trained on {base!r}") for one in told] == [True] * warned


def test_names_with_the_adapters_own_name_in_them_are_read_too(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    path = folder / "adapter_model.safetensors"
    plain = adaptable().trace([1, 2, 3], edits=[Adapter(folder)]).last_logits
    save_file({name.replace(".weight", ".default.weight"): array for name, array in load_file(path).items()}, path)
    np.testing.assert_array_equal(adaptable().trace([1, 2, 3], edits=[Adapter(folder)]).last_logits, plain)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.MODEL_TYPES[0])
def test_every_family_names_every_matrix_of_every_layer_once(family: Any) -> None:
    """All but those that its files hold as stacks, which are no modules of their own."""
    name = {"gpt2": "gpt2", "bert": "bert-base", "gemma3_text": "gemma-3-270m", "mixtral": "mixtral-8x7b",
            "qwen3_moe": "qwen3-235b-a22b", "deepseek_v3": "deepseek-v3", "llama4": "llama-4-scout",
            "qwen3": "qwen3-0.6b", "qwen2": "qwen2.5-0.5b"}  # fmt: skip
    known = [name[kind] for kind in family.MODEL_TYPES if kind in name]
    spec = catalog_spec(known[0] if known else "llama-2-7b")
    if family.MODEL_TYPES[0] in ("phi", "gpt_neox"):  # none of them is in the catalog
        spec = catalog_spec("gpt2")
    modules = modules_of(spec, family)
    prefixed = [module for module in modules.values() if module.parts[0].name.startswith("layers.1.attn.")]
    named = {part.name for module in prefixed for part in module.parts}
    assert {"layers.1.attn.q", "layers.1.attn.o"} <= named
    assert all(module.d_out > 0 and len({part.shape[1] for part in module.parts}) == 1 for module in modules.values())


def test_experts_of_their_own_are_modules_and_the_router_is_one(tmp_path: Path) -> None:
    mixtral = next(family for family in FAMILIES if "mixtral" in family.MODEL_TYPES)
    names = modules_of(EXPERTS, mixtral)
    assert names["model.layers.1.block_sparse_moe.experts.3.w2"].parts[0].name == "layers.1.moe.experts.3.down"
    assert names["model.layers.1.block_sparse_moe.gate"].parts[0].name == "layers.1.moe.router"


def test_a_folder_with_an_adapter_says_how_it_is_used(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"holds an adapter.*edits\.Adapter.*merged"):
        cutaway.load(adapter(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize("key", ["lora_alpha", "alpha_pattern"])
def test_a_strength_that_is_no_finite_number_is_refused_by_its_key(key: str, value: float, tmp_path: Path) -> None:
    told = refusal(adapter(tmp_path, **{key: value if key == "lora_alpha" else {"q_proj": value}}))
    assert key in told
    assert "finite" in told or "number" in told


def test_a_configuration_that_is_far_too_long_is_not_read(tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    with (folder / "adapter_config.json").open("r+b") as file:
        file.truncate(1 << 36)  # a hole on disk, but 64 GB to whoever reads it
    assert "68,719,476,736 bytes long" in refusal(folder)


@pytest.mark.parametrize("scale", ["x", True, None, [1], 1j, np.complex64(1), float("nan"), 10**400])
def test_a_scale_that_is_no_finite_number_is_refused_in_an_edit_and_in_a_merge(scale: Any, tmp_path: Path) -> None:
    folder = adapter(tmp_path)
    for taken in (lambda: Adapter(folder, scale), lambda: adaptable().merged(folder, scale)):
        with pytest.raises(CutawayError, match="scale of an adapter must be") as refused:
            taken()
        assert len(str(refused.value)) < 300
