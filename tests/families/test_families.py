"""GPT-2 and Llama compute what `transformers` computes: every intermediate, at every position, from every file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import GPT2, LENGTHS, LLAMA
from compared import deviation, prompt
from torch_reference import Case, Made, lifted, run

import cutaway
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.points import parse_point

CASES = GPT2 + LLAMA
EXACT, SINGLE, UNLIFTED = 1e-9, 1e-5, 1e-6
CACHED = {"float64": 1e-12, "float32": 1e-5}
# What `transformers` does not show: the scores before their softmax, and each head's part of the output.
UNSHARED = ("tokens", "attn.dots", "attn.scores", "attn.masked", "attn.head_out", "attn.q_rot")

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def assert_same(model: cutaway.Model, reference: torch.nn.Module, ids: list[int], within: float) -> None:
    """Every point that both sides have is the same to `within` of its largest value."""
    trace = model.trace(ids, points=["*"])
    expected = run(reference, ids)
    passed = [name for name in model.points if not name.startswith("sample.")]  # the pass ends with the logits
    assert {name for name in passed if parse_point(name, model.spec).name not in UNSHARED} == set(expected)
    off = {name: deviation(trace[name], value) for name, value in expected.items()}
    assert max(off.values()) < within, {name: value for name, value in off.items() if not value < within}
    assert deviation(trace.last_logits, expected["logits"][-1]) < within


@every_case
def test_every_intermediate_is_that_of_transformers(case: Case, made: Made) -> None:
    folder, reference = made(case)
    model = cutaway.load(folder, engine="numpy", dtype="float64")
    assert model.spec.count().total == sum(p.numel() for p in reference.parameters())
    with lifted():
        for length in LENGTHS:
            assert_same(model, reference, prompt(model.spec.vocab_size, length), EXACT)


@every_case
def test_the_cpu_engine_computes_the_same_in_single_precision(case: Case, made: Made) -> None:
    folder, reference = made(case, torch.float32)
    model = cutaway.load(folder, engine="cpu")
    with lifted():
        for length in LENGTHS:
            assert_same(model, reference, prompt(model.spec.vocab_size, length), SINGLE)


@pytest.mark.parametrize("case", (GPT2[0], LLAMA[0], LLAMA[1]), ids=lambda case: case.name)
def test_without_lifting_transformers_to_float64_streams_and_logits_still_agree_to_single_precision(
    case: Case, made: Made
) -> None:
    folder, reference = made(case)
    model = cutaway.load(folder, engine="numpy", dtype="float64")
    for length in (5, 65):
        ids = prompt(model.spec.vocab_size, length)
        trace, expected = model.trace(ids), run(reference, ids)
        for name in ("logits", *(f"layers.{i}.resid_post" for i in range(model.spec.n_layers))):
            assert deviation(trace[name], expected[name]) < UNLIFTED


@pytest.mark.parametrize("case", (GPT2[1], GPT2[0], LLAMA[1], LLAMA[4]), ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_every_way_of_saving_gives_the_same_model(case: Case, dtype: torch.dtype, made: Made) -> None:
    """One file or many, at every precision: the numbers of the file are exactly those that are computed with."""
    ids = prompt(case.settings["vocab_size"], 17)
    single, reference = made(case, dtype)
    sharded, _ = made(case, dtype, max_shard_size="3KB")
    assert len(list(single.glob("*.safetensors"))) == 1 < len(list(sharded.glob("*.safetensors")))
    one, many = (cutaway.load(folder, engine="numpy", dtype="float64") for folder in (single, sharded))
    assert np.array_equal(one.trace(ids).logits, many.trace(ids).logits)
    with lifted():
        assert_same(one, reference, ids, EXACT)
    cpu = [cutaway.load(folder, engine="cpu").trace(ids).logits for folder in (single, sharded)]
    assert np.array_equal(*cpu)
    with lifted():
        assert deviation(cpu[0], run(reference, ids)["logits"]) < SINGLE


@pytest.mark.parametrize("case", (GPT2[1], LLAMA[2]), ids=lambda case: case.name)
def test_a_checkpoint_of_the_bare_model_is_read_as_well(case: Case, tmp_path: Path) -> None:
    """Some checkpoints (OpenAI's own GPT-2) were saved without the head around the model, so without a prefix."""
    model = Case(case.name, case.family, case.settings | {"tie_word_embeddings": True}).build()
    model.base_model.save_pretrained(tmp_path)
    ids = prompt(case.settings["vocab_size"], 17)
    with lifted():
        assert_same(cutaway.load(tmp_path, engine="numpy", dtype="float64"), model, ids, EXACT)


@pytest.mark.parametrize(("engine", "dtype"), (("numpy", "float64"), ("numpy", "float32"), ("cpu", "float32")))
@pytest.mark.parametrize("case", (GPT2[5], LLAMA[4]), ids=lambda case: case.name)
def test_decoding_from_the_cache_gives_the_logits_of_the_whole_pass(
    case: Case, engine: str, dtype: str, made: Made
) -> None:
    folder, reference = made(case, torch.float32)
    model = cutaway.load(folder, engine=engine, dtype=dtype)
    ids = np.array(prompt(model.spec.vocab_size, 270))
    whole = model.trace(ids).logits
    with lifted():
        assert deviation(whole, run(reference, ids.tolist())["logits"]) < (EXACT if dtype == "float64" else SINGLE)
    # Token by token from the start; a prompt, a second turn, and tokens across position 256; odd pieces.
    for pieces in ([1] * 20, [64, 1, 1, 100, 86, *[1] * 8], [17, 65, 3, 128, 57], [250, 20]):
        cache, done = KVCache(model.spec, model.engine), 0
        for size in pieces:
            piece = ids[done : done + size]
            ran = transformer(
                model.engine, model.spec, model.parameters, [piece], caches=[cache], rows=range(len(piece))
            )
            assert deviation(model.engine.numpy(ran.logits), whole[done : done + size]) < CACHED[dtype]
            done += size
            assert cache.length == done


@pytest.mark.parametrize(("engine", "dtype"), (("numpy", "float64"), ("numpy", "float32"), ("cpu", "float32")))
@pytest.mark.parametrize("case", (GPT2[1], LLAMA[4]), ids=lambda case: case.name)
def test_company_changes_no_bit_and_every_sequence_counts_its_own_positions(
    case: Case, engine: str, dtype: str, made: Made
) -> None:
    folder, reference = made(case, torch.float32)
    model = cutaway.load(folder, engine=engine, dtype=dtype)
    sequences = [np.array(prompt(model.spec.vocab_size, n, seed)) for seed, n in enumerate((5, 300, 1, 65, 64, 16, 17))]
    for order in (range(7), (4, 1, 6, 0, 2), (2, 2, 1)):
        together = [sequences[i] for i in order]
        ran = transformer(model.engine, model.spec, model.parameters, together, rows=range(sum(map(len, together))))
        parts = np.split(model.engine.numpy(ran.logits), np.cumsum([len(s) for s in together])[:-1])
        for sequence, part in zip(together, parts, strict=True):
            assert np.array_equal(part, model.trace(sequence).logits)
    with lifted():
        for sequence in sequences:
            expected = run(reference, sequence.tolist())["logits"]
            assert deviation(model.trace(sequence).logits, expected) < (EXACT if dtype == "float64" else SINGLE)


@pytest.mark.parametrize("engine", ("numpy", "cpu"))
@pytest.mark.parametrize("case", (GPT2[1], LLAMA[4]), ids=lambda case: case.name)
def test_sequences_that_go_on_from_their_caches_side_by_side_are_as_if_alone(
    case: Case, engine: str, made: Made
) -> None:
    folder, _ = made(case, torch.float32)
    model = cutaway.load(folder, engine=engine)
    prompts = [np.array(prompt(model.spec.vocab_size, n, seed)) for seed, n in enumerate((7, 130, 1))]
    more = [np.array(prompt(model.spec.vocab_size, n, 9 + seed)) for seed, n in enumerate((1, 20, 3))]

    def go_on(which: list[int]) -> list[np.ndarray]:
        caches = [KVCache(model.spec, model.engine) for _ in which]
        for texts in (prompts, more):
            ran = transformer(model.engine, model.spec, model.parameters, [texts[i] for i in which], caches=caches)
        return list(model.engine.numpy(ran.logits))

    for together, i in zip(go_on([0, 1, 2]), range(3), strict=True):
        assert np.array_equal(together, go_on([i])[0])


@every_case
def test_the_identities_hold(case: Case, made: Made) -> None:
    folder, _ = made(case)
    for check in cutaway.load(folder, engine="numpy", dtype="float64").verify():
        assert check.holds, check


@pytest.mark.parametrize("case", (GPT2[1], LLAMA[4]), ids=lambda case: case.name)
def test_the_identities_hold_on_the_cpu_engine(case: Case, made: Made) -> None:
    folder, _ = made(case, torch.bfloat16)
    for check in cutaway.load(folder, engine="cpu").verify(prompt(case.settings["vocab_size"], 81)):
        assert check.holds, check
