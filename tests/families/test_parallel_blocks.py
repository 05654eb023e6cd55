"""GPT-NeoX (Pythia) and Phi compute what `transformers` computes: blocks side by side, heads turned in part."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared import EXACT, SINGLE, assert_verified, deviation, prompt
from safetensors.torch import load_file, save_file
from streams import assert_same, built, lifted, saved
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PhiConfig, PhiForCausalLM

import cutaway
from cutaway.checkpoints.families import family_of
from cutaway.checkpoints.families.config import Config
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer

LENGTHS = (1, 5, 17, 65, 273)  # 273 crosses a chunk of 256 rows and leaves a run of single rows


def neox(seed: int, **settings: Any) -> Any:
    usual = {"vocab_size": 73, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"intermediate_size": 40, "max_position_embeddings": 300}
    return built(GPTNeoXForCausalLM, GPTNeoXConfig(**{**usual, **more, **settings}), seed)


def phi(seed: int, **settings: Any) -> Any:
    usual = {"vocab_size": 67, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"intermediate_size": 40, "max_position_embeddings": 300}
    return built(PhiForCausalLM, PhiConfig(**{**usual, **more, **settings}), seed)


def turned(part: float, base: float = 10_000.0, **scaling: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part, **scaling}
    return {"rope_parameters": rope}


CASES = {
    "neox, a quarter turned": lambda: neox(1),
    "neox, one after the other, heads of 12": lambda: neox(
        2, hidden_size=36, num_attention_heads=3, use_parallel_residual=False, **turned(0.5, 500.0)
    ),
    "neox, no attention bias, tied, tanh": lambda: neox(
        3, attention_bias=False, tie_word_embeddings=True, hidden_act="gelu_fast", num_hidden_layers=3
    ),
    "neox, whole heads turned, stretched": lambda: neox(
        4, max_position_embeddings=100, layer_norm_eps=1e-3, **turned(1.0, 1e4, rope_type="linear", factor=4.0)
    ),
    "phi, half turned": lambda: phi(5),
    "phi, two queries a key, 40 % turned": lambda: phi(
        6, hidden_size=40, num_key_value_heads=2, **turned(0.4, 900.0), num_hidden_layers=3
    ),
    "phi, normed heads": lambda: phi(7, qk_layernorm=True, layer_norm_eps=1e-3, num_key_value_heads=1),
    "phi, tied, exact gelu": lambda: phi(8, tie_word_embeddings=True, hidden_act="gelu", **turned(0.75)),
}
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    made = {}
    for name, build in CASES.items():
        model = build()
        made[name] = saved(model, tmp_path_factory.mktemp("parallel")), model
    return made


def loaded(folder: Path) -> cutaway.Model:
    return cutaway.load(folder, engine="numpy", dtype="float64")


def in_single(reference: Any, folder: Path) -> tuple[Path, Any]:
    """The model saved in float32, and the float64 model of the saved numbers."""
    single = type(reference)(reference.config)
    single.load_state_dict(reference.state_dict())
    return saved(single, folder), single.double().eval()


@every_case
def test_streams_patterns_and_logits_are_those_of_transformers(name: str, cases: dict) -> None:
    folder, reference = cases[name]
    model = loaded(folder)
    assert model.spec.count().total == sum(p.numel() for p in reference.parameters())
    for length in LENGTHS:
        assert_same(model, reference, prompt(model.spec.vocab_size, length))


@every_case
def test_the_cpu_engine_computes_the_same_in_single_precision(name: str, cases: dict, tmp_path: Path) -> None:
    folder, exact = in_single(cases[name][1], tmp_path)
    model = cutaway.load(folder, engine="cpu")
    for length in LENGTHS:
        assert_same(model, exact, prompt(model.spec.vocab_size, length), SINGLE)


@every_case
def test_the_identities_hold(name: str, cases: dict) -> None:
    assert_verified(loaded(cases[name][0]))
    assert_verified(cutaway.load(cases[name][0], engine="cpu"))


@every_case
def test_decoding_from_the_cache_gives_the_logits_of_the_whole_pass(name: str, cases: dict) -> None:
    model = loaded(cases[name][0])
    ids = np.array(prompt(model.spec.vocab_size, 80))
    whole, cache = model.trace(ids).logits, KVCache(model.spec, model.engine)
    done = 0
    for size in (3, 62, *[1] * 15):
        piece = ids[done : done + size]
        ran = transformer(model.engine, model.spec, model.parameters, [piece], caches=[cache], rows=range(size))
        assert deviation(model.engine.numpy(ran.logits), whole[done : done + size]) < 1e-12
        done += size
    assert done == 80


@pytest.mark.parametrize("name", ("neox, a quarter turned", "phi, normed heads"))
def test_left_padded_batches_of_transformers_are_our_unpadded_runs(name: str, cases: dict) -> None:
    folder, reference = cases[name]
    model = loaded(folder)
    texts = [np.array(prompt(model.spec.vocab_size, length)) for length in (3, 70, 17)]
    ran = transformer(model.engine, model.spec, model.parameters, texts, rows=range(90))
    ours = np.split(model.engine.numpy(ran.logits), [3, 73])
    ids, mask = torch.zeros(3, 70, dtype=torch.long), torch.zeros(3, 70, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, 70 - len(text) :], mask[row, 70 - len(text) :] = torch.tensor(text), 1
    with torch.no_grad(), lifted():
        padded = reference(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    for row, text in enumerate(texts):
        assert deviation(ours[row], padded[row, 70 - len(text) :].numpy()) < EXACT


def test_the_layout_of_pythias_own_files_is_read(cases: dict, tmp_path: Path) -> None:
    """`embed_out`, mask and frequency buffers beside the weights, and the old names of the rotary settings."""
    reference = cases["neox, a quarter turned"][1]
    saved(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if "lm_head.weight" in tensors:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    for i in range(2):
        at = f"gpt_neox.layers.{i}.attention"
        tensors[f"{at}.bias"] = torch.tril(torch.ones(1, 1, 300, 300, dtype=torch.bool))
        tensors[f"{at}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{at}.rotary_emb.inv_freq"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    path.write_text(json.dumps(values | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "rope_scaling": None}))
    assert_same(loaded(tmp_path), reference, prompt(73, 65))


def test_q_k_and_v_are_taken_out_of_a_fused_matrix_without_a_copy(cases: dict) -> None:
    """Head by head, `[H, 3, d_head]`: three views of the same bytes, each with a third of the rows."""
    stored = loaded(cases["neox, a quarter turned"][0]).parameters.stored
    q, k, v = (stored[f"layers.0.attn.{letter}.weight"] for letter in "qkv")
    assert q.shape == (32, 32) and np.shares_memory(q.rows, v.rows) and np.shares_memory(q.rows, k.rows)
    assert q.nbytes + k.nbytes + v.nbytes == q.rows.nbytes


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    (
        ("neox, a quarter turned", {"hidden_act": "mish"}, "hidden_act"),
        ("neox, a quarter turned", {"use_shared_norm": True}, "use_shared_norm"),
        ("neox, a quarter turned", {"rope_parameters": {"rope_type": "ring"}}, "ring"),
        ("neox, a quarter turned", {"rotary_pct": 0.4, "rope_parameters": None}, "rotary_pct"),
        ("neox, a quarter turned", {"rotary_emb_base": 5000, "rope_theta": 10000}, "rope_theta"),
        ("phi, half turned", {"head_dim": 16}, "head_dim"),
        ("phi, half turned", {"sliding_window": 8}, "sliding_window"),
        ("phi, half turned", {"num_attention_heads": 5}, "equal heads"),
    ),
)
def test_settings_that_would_change_the_pass_are_refused_by_name(
    name: str, changes: dict, named: str, cases: dict, tmp_path: Path
) -> None:
    saved(cases[name][1], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CutawayError, match=named):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ("neox, no attention bias, tied, tanh", "phi, normed heads"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_files_in_one_or_many_are_computed_with_as_stored(
    name: str, dtype: torch.dtype, cases: dict, tmp_path: Path
) -> None:
    reference = cases[name][1]
    half = type(reference)(reference.config).to(dtype)
    half.load_state_dict(reference.state_dict())
    one, many = saved(half, tmp_path / "one"), saved(half, tmp_path / "many", max_shard_size="4KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    exact, ids = half.double().eval(), prompt(reference.config.vocab_size, 65)
    for folder in (one, many):
        assert_same(loaded(folder), exact, ids)
        assert_same(cutaway.load(folder, engine="cpu"), exact, ids, SINGLE)


_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
}
_PHI = {
    "_name_or_path": "microsoft/phi",
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "hidden_act": "gelu_new",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "qk_layernorm": False,
    "resid_pdrop": 0.0,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.37.0",
    "use_cache": True,
    "vocab_size": 51200,
}


def _sizes(hidden: int, layers: int, heads: int, **more: object) -> dict[str, object]:
    widths = {"hidden_size": hidden, "intermediate_size": 4 * hidden}
    return {**widths, "num_hidden_layers": layers, "num_attention_heads": heads, **more}


PUBLISHED = {  # the configuration, its parameters, how many coordinates of a head turn, its activation
    "pythia-160m": (
        _NEOX | _sizes(768, 12, 12, vocab_size=50304, hidden_act="gelu", use_parallel_residual=True),
        (162_322_944, 16, "gelu"),
    ),
    "gpt-neox-20b": (
        _NEOX | _sizes(6144, 44, 64, vocab_size=50432, hidden_act="gelu_fast", attention_probs_dropout_prob=0,
                       hidden_dropout_prob=0),
        (20_554_567_680, 24, "gelu_tanh"),
    ),
    "phi-1_5": (_PHI | _sizes(2048, 24, 32, partial_rotary_factor=0.5), (1_418_270_720, 32, "gelu_tanh")),
    "phi-2": (_PHI | _sizes(2560, 32, 32, partial_rotary_factor=0.4), (2_779_683_840, 32, "gelu_tanh")),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_counts_its_published_parameters(name: str) -> None:
    values, (total, turned_dims, activation) = PUBLISHED[name]
    family = family_of(str(values["model_type"]), "config.json", "MODEL_TYPES")
    spec = family.spec_from_config(Config(values, "config.json"), name)
    layer = spec.layers[0]
    assert spec.count().total == total
    assert layer.attention.rotary.dims == turned_dims and layer.feed_forward.activation == activation
    assert layer.parallel and layer.shared_norm == name.startswith("phi")
