"""GGUF files of both families, plain and quantised, compute what `transformers` computes with the same numbers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from cases import GPT2, LLAMA
from compared import deviation, prompt
from gguf_files import QTYPE, write_gguf
from torch_reference import Case, lifted, run

import cutaway
from cutaway.errors import CutawayError

EXACT, SINGLE = 1e-9, 1e-5
WIDE = {
    "gpt2": Case("gpt2 wide", "gpt2", {"vocab_size": 50, "n_positions": 90, "n_layer": 2, "n_embd": 64, "n_head": 4}),
    "llama": Case(
        "llama wide",
        "llama",
        {
            "vocab_size": 50,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
}
# What llama.cpp's recipes mix: the head and some projections in a finer type than the rest.
MIXED = {"output.": QTYPE.Q8_0, "token_embd": QTYPE.F16, "ffn_down": QTYPE.Q5_1, "": QTYPE.Q4_0}


def build(case: Case) -> Any:
    if case.family == "llama" and "head_dim" not in case.settings:
        settings = case.settings
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
        case = Case(case.name, case.family, settings | {"head_dim": head_dim})
    return case.build(torch.float64)


def assert_same(path: Path, reference: Any, length: int = 70) -> None:
    """Every shared point in float64, and the logits of the cpu engine, which keeps the blocks as they are."""
    ids = prompt(reference.config.vocab_size, length)
    trace = cutaway.load(path, engine="numpy", dtype="float64").trace(ids, points=["*"])
    with lifted():
        expected = run(reference, ids)
    off = {name: deviation(trace[name], value) for name, value in expected.items()}
    assert max(off.values()) < EXACT, {name: value for name, value in off.items() if not value < EXACT}
    found = cutaway.load(path, engine="cpu").trace(ids).logits
    assert deviation(found, expected["logits"]) < SINGLE


# Of GPT-2 the converter knows one activation, one scale and no head of its own.
GGUF_CASES = (GPT2[0], GPT2[4], LLAMA[0], LLAMA[1], LLAMA[2], LLAMA[4])


@pytest.mark.parametrize("case", GGUF_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", (QTYPE.F32, QTYPE.F16, QTYPE.BF16), ids=lambda kind: kind.name)
def test_plain_files(case: Case, kind: QTYPE, tmp_path: Path) -> None:
    reference = build(case)
    assert_same(write_gguf(tmp_path / "tiny.gguf", reference, {"": kind}), reference)


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("kind", ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
def test_quantised_files(family: str, kind: str, tmp_path: Path) -> None:
    reference = build(WIDE[family])
    assert_same(write_gguf(tmp_path / "tiny.gguf", reference, {"": QTYPE[kind]}), reference)


@pytest.mark.parametrize("family", WIDE)
def test_files_that_mix_types(family: str, tmp_path: Path) -> None:
    reference = build(WIDE[family])
    assert_same(write_gguf(tmp_path / "tiny.gguf", reference, MIXED), reference)


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("kind", ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
def test_files_in_blocks_of_256(family: str, kind: str, tmp_path: Path) -> None:
    """As llama.cpp's own recipes make them: one of these types, and Q6_K where it matters most."""
    sizes = {
        "gpt2": {"n_embd": 256, "n_head": 4, "n_layer": 1},
        "llama": {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 1},
    }
    reference = build(Case(f"{family} of 256", family, WIDE[family].settings | sizes[family]))
    kinds = {"token_embd": QTYPE.Q6_K, "ffn_down": QTYPE.Q6_K, "": QTYPE[kind]}
    assert_same(write_gguf(tmp_path / "tiny.gguf", reference, kinds), reference, length=20)


def test_a_block_whose_scale_is_no_number_is_found_out(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", build(WIDE["llama"]), {"": QTYPE.Q8_0})
    file = gguf.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in file.tensors if tensor.name == "blk.1.ffn_up.weight")
    tensor.data[5, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    file.data.flush()
    for engine in ("numpy", "cpu"):
        with pytest.raises(CutawayError, match=r"layers\.1\.mlp\.up is nan .* layers\.1\.mlp\.up\.weight holds"):
            cutaway.load(path, engine=engine).trace([1, 2, 3])


@pytest.mark.parametrize("family", WIDE)
def test_a_tied_head_that_old_converters_wrote_out_is_used_as_it_is(family: str, tmp_path: Path) -> None:
    case = Case(WIDE[family].name, family, WIDE[family].settings | {"tie_word_embeddings": True})
    reference = build(case)
    path = write_gguf(tmp_path / "tiny.gguf", reference, {"": QTYPE.Q8_0}, head_too=True)
    assert not cutaway.load(path).spec.tied_head
    assert_same(path, reference)


def test_what_a_file_leaves_unsaid_is_the_formats_own_default(tmp_path: Path) -> None:
    """No head sizes, no number of key heads, no base: d/H, as many as query heads, 10,000."""
    reference = build(LLAMA[0])
    left_out = ("key_length", "value_length", "dimension_count", "head_count_kv", "freq_base", "vocab_size")
    assert_same(write_gguf(tmp_path / "tiny.gguf", reference, {"": QTYPE.F32}, leave_out=left_out), reference)


def test_decimal_settings_mean_what_was_written_not_their_float32(tmp_path: Path) -> None:
    spec = cutaway.load(write_gguf(tmp_path / "tiny.gguf", build(LLAMA[7]), {"": QTYPE.F32})).spec
    assert spec.final_norm is not None and spec.final_norm.eps == 1e-2
    assert spec.layers[0].attention.rotary is not None and spec.layers[0].attention.rotary.base == 37.5


@pytest.mark.parametrize(
    ("more", "named"),
    (
        ({"rope__scaling__alpha": 8.0}, "rope.scaling.alpha"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"attention__sliding_window": 64}, "attention.sliding_window"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ),
    ids=lambda value: str(value),
)
def test_settings_that_would_change_the_pass_are_refused_by_name(
    more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", build(LLAMA[0]), {"": QTYPE.F32}, **more)
    with pytest.raises(CutawayError, match=named):
        cutaway.load(path)


def test_angles_that_turn_only_part_of_a_head_are_refused(tmp_path: Path) -> None:
    """The file's order of rows pairs the coordinates of whole heads: a part of them cannot be undone."""
    path = write_gguf(
        tmp_path / "tiny.gguf", build(LLAMA[0]), {"": QTYPE.F32}, leave_out=("dimension_count",),
        rope__dimension_count=4,
    )  # fmt: skip
    with pytest.raises(CutawayError, match=r"rope\.dimension_count"):
        cutaway.load(path)
