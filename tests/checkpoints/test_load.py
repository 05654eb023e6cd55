"""A checkpoint that is broken, contradictory or hostile is refused with a sentence that names what is wrong with it."""

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import (
    GGUF_METADATA,
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gguf_tensors,
    gpt2_tensors,
    llama_tensors,
    write_folder,
    write_gguf,
)

import cutaway
from cutaway.errors import CutawayError

PROMPT = [1, 2, 3]
HOSTILE = (
    None, True, False, -1, 0, 1, 3, 7, 10**9, 10**12, -(10**12), 10**400, 1.5, 8.0, float("nan"), float("inf"),
    -1e-5, 1e300, "", "8", "silu", [], [8], {}, {"type": "linear"},
)  # fmt: skip


def refusal(path: Path, run: Callable[[Path], Any] | None = None) -> str:
    """The sentence with which the model at `path` is refused; any other exception fails the test."""
    with pytest.raises(CutawayError) as caught:
        (run or (lambda where: cutaway.load(where, engine="numpy")))(path)
    sentence = str(caught.value)
    assert sentence.endswith(".") and "\n" not in sentence and 20 < len(sentence.replace(str(path), "")) < 400, sentence
    return sentence


def traced(path: Path) -> np.ndarray:
    return cutaway.load(path, engine="numpy", dtype="float64").trace(PROMPT).logits


def llama(folder: Path, *without: str, **changed: Any) -> Path:
    """The tiny Llama with these settings changed and left out."""
    config = {key: value for key, value in (LLAMA_CONFIG | changed).items() if key not in without}
    return write_folder(folder, config, llama_tensors())


def test_the_tiny_models_are_whole(tmp_path: Path) -> None:
    """What is refused below is refused for its fault, not for something else that is wrong with it."""
    for name, folder in (
        ("llama", llama(tmp_path / "llama")),
        ("gpt2", write_folder(tmp_path / "gpt2", GPT2_CONFIG, gpt2_tensors())),
        ("gguf", write_gguf(tmp_path / "tiny.gguf")),
    ):
        assert traced(folder).shape == (3, 11), name


@pytest.mark.parametrize(
    ("text", "named"),
    (
        ("{", "JSON"),
        ("", "JSON"),
        ("\xff\xfe", "JSON"),
        ("[" * 100_000, "nested"),
        ("[1, 2]", "a list"),
        ('"llama"', "a text"),
        ("null", "null"),
        ('{"vocab_size": 3, "vocab_size": 4}', "'vocab_size' is given twice"),
        ("\xff\xfe{\0}\0", "UTF-16"),
        ("{}", "'model_type'"),
        ('{"model_type": null}', "'model_type'"),
        ('{"model_type": 7}', "'model_type'"),
        ('{"model_type": "mamba"}', "'mamba'"),
        ('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}", "JSON"),
    ),
    ids=lambda text: text[:30],
)
def test_a_config_that_is_none(text: str, named: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "{}", llama_tensors())
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert named in refusal(folder)


def test_an_unknown_architecture_is_named_beside_the_known_ones(tmp_path: Path) -> None:
    sentence = refusal(llama(tmp_path / "model", model_type="mamba" * 1000))
    assert "'mambamamba" in sentence and "gpt2" in sentence and "llama" in sentence
    sentence = refusal(write_gguf(tmp_path / "tiny.gguf", architecture="mamba"))
    assert "'mamba'" in sentence and "gpt2" in sentence and "llama" in sentence


def test_a_folder_without_config(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)
    (folder / "config.json").mkdir()
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("changed", "named"),
    (
        ({"sliding_window": 128}, "'sliding_window'"),
        ({"rope_scaling": {"rope_type": "no such", "factor": 8.0}}, "'no such'"),
        ({"rope_scaling": {"type": "default", "factor": 8.0}}, "factor"),
        ({"rope_parameters": {"rope_theta": "many"}}, "'rope_theta'"),
        ({"rope_scaling": "linear"}, "'rope_scaling'"),
        ({"hidden_act": "mish"}, "'mish'"),
        ({"num_attention_heads": 3, "head_dim": None}, "hidden_size = 8"),
        ({"num_key_value_heads": 3}, "n_kv_heads"),
        ({"head_dim": 3}, "rotary dims"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings'"),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"mlp_bias": True}, "gate_proj.bias"),
        ({"vocab_size": 12}, "embed_tokens"),
        ({"intermediate_size": 13}, "gate_proj"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({f"key {i}": i for i in range(1000)}, "995 more"),
    ),
    ids=str,
)  # fmt: skip
def test_settings_that_are_unknown_or_contradict_the_weights(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert named in refusal(llama(tmp_path / "model", **changed))


@pytest.mark.parametrize(
    "key",
    ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
)
@pytest.mark.parametrize(
    "value", (-1, 0, 10**9, 10**12, 10**400, True, 8.0, "8", [8], None, float("nan")), ids=lambda value: str(value)[:9]
)
def test_sizes_that_no_model_has_are_refused_by_name_at_once(key: str, value: object, tmp_path: Path) -> None:
    folder = llama(tmp_path / "model", **{key: value})
    tracemalloc.start()
    try:
        sentence = refusal(folder)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert key in sentence or "000000" in sentence, sentence  # a size that could be does not fit the tensors


@pytest.mark.parametrize("config", (LLAMA_CONFIG, GPT2_CONFIG), ids=("llama", "gpt2"))
def test_no_value_of_any_setting_ends_in_a_traceback(config: dict[str, Any], tmp_path: Path) -> None:
    """Each is computed with, or refused with a sentence."""
    tensors = llama_tensors() if config is LLAMA_CONFIG else gpt2_tensors()
    folder = write_folder(tmp_path / "model", config, tensors)
    keys = {*config, "rope_scaling", "rope_parameters", "scale_attn_weights", "quantization_config"}
    for key in sorted(keys - {"model_type"}):
        for value in HOSTILE:
            (folder / "config.json").write_text(json.dumps(config | {key: value}))
            try:
                assert traced(folder).shape == (3, 11)
            except CutawayError as error:
                assert str(error).endswith(".") and len(str(error)) < 600


def test_no_value_of_any_metadata_ends_in_a_traceback(tmp_path: Path) -> None:
    for key in (*GGUF_METADATA, "general.alignment", "llama.vocab_size", "llama.rope.scaling.type"):
        for value in HOSTILE:
            if value is None or isinstance(value, dict) or value in ([], 10**400):  # the format has none of these
                continue
            path = write_gguf(tmp_path / "tiny.gguf", GGUF_METADATA | {key: value})
            try:
                assert traced(path).shape == (3, 11)
            except CutawayError as error:
                assert str(error).endswith(".") and len(str(error)) < 600


@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_every_tensor_is_needed_in_its_shape_and_no_other_is_taken(family: str, tmp_path: Path) -> None:
    config, tensors = {"llama": (LLAMA_CONFIG, llama_tensors()), "gpt2": (GPT2_CONFIG, gpt2_tensors())}[family]
    for name, array in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        assert name in refusal(write_folder(tmp_path / "model", config, rest))
        for wrong in (array[:-1], array[..., :-1], array.ravel()[:, None, None], array.astype(np.int64)):
            sentence = refusal(write_folder(tmp_path / "model", config, rest | {name: np.ascontiguousarray(wrong)}))
            assert name in sentence
    extra = tensors | {"another.weight": np.zeros((2, 2), np.float32)}
    assert "another.weight" in refusal(write_folder(tmp_path / "model", config, extra))
    extra = tensors | {"another.weight": np.zeros((2, 2), np.int8)}
    assert "another.weight" in refusal(write_folder(tmp_path / "model", config, extra))


def test_every_tensor_of_a_gguf_is_needed_and_no_other_is_taken(tmp_path: Path) -> None:
    tensors = gguf_tensors()
    for name, array in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        if name != "output.weight":  # without it the head is tied
            assert name in refusal(write_gguf(tmp_path / "tiny.gguf", tensors=rest))
        for wrong in (array[:-1], array[..., :-1], array.ravel()[:, None, None]):
            broken = rest | {name: np.ascontiguousarray(wrong)}
            sentence = refusal(write_gguf(tmp_path / "tiny.gguf", tensors=broken))
            assert name in sentence or name == "token_embd.weight", sentence
    extra = tensors | {"rope_freqs.weight": np.ones(1, np.float32)}
    sentence = refusal(write_gguf(tmp_path / "tiny.gguf", tensors=extra | {"another.weight": extra["output.weight"]}))
    assert "another.weight" in sentence or "rope_freqs.weight" in sentence


def test_a_type_of_weights_that_cannot_be_computed_with_is_named(tmp_path: Path) -> None:
    name = "blk.0.ffn_down.weight"
    blocks = np.zeros((8, 18), np.uint8)  # one IQ4_NL block of 32 numbers a row
    kind = gguf.GGMLQuantizationType.IQ4_NL
    sentence = refusal(write_gguf(tmp_path / "tiny.gguf", kinds={name: (blocks, kind)}))
    assert "IQ4_NL" in sentence and name in sentence and "Q4_K" in sentence


def test_a_gain_that_is_no_number_is_refused_at_loading(tmp_path: Path) -> None:
    for name in ("model.layers.1.input_layernorm.weight", "model.norm.weight"):
        for value in (np.nan, np.inf):
            tensors = llama_tensors()
            tensors[name][3] = value
            sentence = refusal(write_folder(tmp_path / "model", LLAMA_CONFIG, tensors))
            assert str(value) in sentence and "index 3" in sentence
            assert ("layers.1.attn.norm.gain" if "layers" in name else "final.norm.gain") in sentence


@pytest.mark.filterwarnings("error")  # NumPy's own warnings would stand before the sentence
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf), ids=str)
@pytest.mark.parametrize("engine", ("numpy", "cpu"))
@pytest.mark.parametrize(
    ("name", "ours", "point"),
    (
        ("model.embed_tokens.weight", "embed.tokens", "embed.tokens"),
        ("model.layers.1.self_attn.k_proj.weight", "layers.1.attn.k.weight", "layers.1.attn.k"),
        ("model.layers.0.self_attn.o_proj.weight", "layers.0.attn.o.weight", "layers.0.attn.raw"),
        ("model.layers.1.mlp.down_proj.weight", "layers.1.mlp.down.weight", "layers.1.mlp.raw"),
        ("lm_head.weight", "head.weight", "logits"),
    ),
)
def test_a_matrix_with_a_number_that_is_none_is_named_with_the_point_that_it_breaks(
    name: str, ours: str, point: str, engine: str, value: float, tmp_path: Path
) -> None:
    tensors = llama_tensors()
    tensors[name][2 if "embed" in name else 0] = value
    model = cutaway.load(write_folder(tmp_path / "model", LLAMA_CONFIG, tensors), engine=engine)
    for compute in (model.trace, model.generate):
        with pytest.raises(CutawayError) as caught:
            compute(PROMPT)
        assert f" {point} is " in str(caught.value) and f" {ours} holds" in str(caught.value)


def test_whether_the_head_is_tied_is_what_the_config_says(tmp_path: Path) -> None:
    config = LLAMA_CONFIG | {"tie_word_embeddings": True}
    tensors = llama_tensors()
    assert "lm_head.weight" in refusal(write_folder(tmp_path / "model", config, tensors))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    twice = traced(write_folder(tmp_path / "model", config, tensors))
    assert np.array_equal(twice, traced(write_folder(tmp_path / "model", LLAMA_CONFIG, tensors)))
    del tensors["lm_head.weight"]
    assert np.array_equal(twice, traced(write_folder(tmp_path / "model", config, tensors)))
    assert "lm_head.weight" in refusal(write_folder(tmp_path / "model", LLAMA_CONFIG, tensors))


def test_shards_that_are_missing_or_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    items = list(llama_tensors().items())
    shards = {"model-1.safetensors": dict(items[:9]), "model-2.safetensors": dict(items[9:])}
    for name, part in shards.items():
        save_file(part, folder / name)
    index = {tensor: name for name, part in shards.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert traced(folder).shape == (3, 11)
    for name in ("config.json", "model.safetensors.index.json"):  # a byte order mark is no part of either
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert traced(folder).shape == (3, 11)
    os.truncate(folder / "model-2.safetensors", (folder / "model-2.safetensors").stat().st_size - 5)
    assert "model-2.safetensors" in refusal(folder) and "cut short" in refusal(folder)
    (folder / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refusal(folder)


class Bomb:
    """What anybody can put into a pickle: a program that runs when it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.trace,))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"
    pickle.loads(pickle.dumps(Bomb(exploded)))
    assert exploded.exists()
    exploded.unlink()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(exploded)))
    assert "pickle" in refusal(folder)
    assert "pickle" in refusal(folder / "pytorch_model.bin")
    for disguise in ("model.safetensors", "toy.npz", "model.gguf"):
        path = folder / disguise
        path.write_bytes(pickle.dumps(Bomb(exploded)))
        refusal(path)
        path.unlink()
    assert not exploded.exists()


def test_archives_of_arrays_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    np.savez(path, embed=np.zeros((2, 2)))
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[:100], whole[:-30], b"\x93NUMPY" + bytes(50)):
        path.write_bytes(content)
        assert "toy.npz" in refusal(path)
    path.write_bytes(whole)
    refusal(path)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    save_file({"lora_A.weight": np.zeros((8, 8), np.float32)}, tmp_path / "adapter_model.safetensors")
    refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    assert "adapter" in refusal(tmp_path)


def test_a_tokenizer_that_knows_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    vocabulary = {f"word{i}": i for i in range(12)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "word0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = refusal(folder)
    assert "12 tokens" in sentence and "11" in sentence
    del vocabulary["word11"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert cutaway.load(folder, engine="numpy").trace("word3 word10").prompt.ids == (3, 10)


@pytest.mark.parametrize("prompt", ([], [[1], [2, 3]], [[1, 2]], [1.5], ["a"], [11], [-1], [10**30], None, 7), ids=str)
def test_prompts_that_are_no_list_of_this_models_ids(prompt: Any, tmp_path: Path) -> None:
    model = cutaway.load(llama(tmp_path / "model"), engine="numpy")
    refusal(tmp_path, lambda _: model.trace(prompt))
    refusal(tmp_path, lambda _: model.generate(prompt))


def test_a_prompt_longer_than_the_learned_positions(tmp_path: Path) -> None:
    model = cutaway.load(write_folder(tmp_path / "model", GPT2_CONFIG, gpt2_tensors()), engine="numpy")
    assert model.trace([1] * 16).logits.shape == (16, 11)
    sentence = refusal(tmp_path, lambda _: model.trace([1] * 17))
    assert "17" in sentence and "16" in sentence
    assert len(model.generate([1] * 10, max_tokens=50, temperature=0).tokens) <= 7
