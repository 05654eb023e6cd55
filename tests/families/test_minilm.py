"""The real sentence encoder: its ids and its vectors are those of `transformers`."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import cutaway
from cutaway.checkpoints import fetch

pytestmark = pytest.mark.network

TEXTS = [
    "The cat sat on it.",
    "A cat was sitting on the mat.",
    "Naïve façade: déjà-vu, 東京 and Ελλάδα — 3.14159 (π)!",
    "electroencephalographically unbelievable",
    "  spaces   and\ttabs\n\nand lines ",
    "Transformers read whole sentences at once, in both directions, and give a vector for every token. " * 9,
    "ok",
    "don't you're it's, [MASK] and [SEP] in it",
]


@pytest.fixture(scope="module")
def models() -> tuple[cutaway.Model, cutaway.Model, AutoTokenizer, AutoModel]:
    folder = fetch.fetch("minilm-l6-v2")
    reference = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    exact = cutaway.load("minilm-l6-v2", engine="numpy", dtype="float64")
    return cutaway.load("minilm-l6-v2"), exact, AutoTokenizer.from_pretrained(folder), reference


def expected(tokenizer, reference, double: bool = False) -> np.ndarray:
    """As its users have it: one right-padded batch, the mean over what the mask lets through."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        rows = (reference.double() if double else reference.float())(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(rows.dtype)
    return ((rows * mask).sum(1) / mask.sum(1)).numpy()


def test_the_ids_of_every_text_are_those_of_transformers(models) -> None:
    model, _, tokenizer, _ = models
    for text in TEXTS:
        assert model.tokenizer.encode(text) == tokenizer(text)["input_ids"], text


def test_mean_pooled_vectors_in_one_batch_of_unequal_lengths(models) -> None:
    model, exact, tokenizer, reference = models
    lengths = {len(model.tokenizer.encode(text)) for text in TEXTS}
    assert min(lengths) <= 3 and max(lengths) > 150
    vectors = model.embed(TEXTS)
    assert vectors.shape == (8, 384) and vectors.dtype == np.float32
    theirs = expected(tokenizer, reference)
    assert np.abs(vectors - theirs).max() < 1e-5
    unit = model.embed(TEXTS, unit=True)
    assert np.abs(unit - theirs / np.linalg.norm(theirs, axis=1, keepdims=True)).max() < 1e-5
    assert np.abs(exact.embed(TEXTS) - expected(tokenizer, reference, double=True)).max() < 1e-9


def test_company_changes_no_bit_and_meaning_is_near(models) -> None:
    model = models[0]
    together = model.embed(TEXTS, unit=True)
    for text, vector in zip(TEXTS, together, strict=True):
        assert np.array_equal(model.embed([text], unit=True)[0], vector)
    cat, mat, *others = together
    assert cat @ mat > max(cat @ other for other in others)


def test_every_stream_is_that_of_transformers_and_the_identities_hold(models) -> None:
    model, exact, tokenizer, reference = models
    batch = tokenizer(TEXTS[5], return_tensors="pt")
    with torch.no_grad():
        out = reference.double()(**batch, output_hidden_states=True, output_attentions=True)
    for tried, within in ((exact, 1e-9), (model, 1e-5)):
        trace = tried.trace(TEXTS[5])
        for i in range(6):
            stream, pattern = out.hidden_states[i + 1][0].numpy(), out.attentions[i][0].numpy()
            assert np.abs(trace[f"layers.{i}.resid_post"] - stream).max() < within * np.abs(stream).max()
            assert np.abs(trace[f"layers.{i}.attn.pattern"] - pattern).max() < within
        assert np.abs(trace["pooler.out"] - out.pooler_output.numpy()).max() < within
    for check in model.verify(TEXTS[2]):
        assert check.holds, check
