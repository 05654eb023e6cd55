"""GPT-3's layers, dense and locally banded in turn, against the same model written out in torch.

No GPT-3 checkpoint is published, nor how wide its band is: the weights here are random and the width is a number.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.spec.builders import alternately_banded, gpt2_like
from cutaway.spec.catalog import gpt3
from random_models import random_ids, random_model, random_weights

HEADS = 3
BANDS = (1, 5, 64, 100)
DENSE = gpt2_like("gpt3-shaped", vocab_size=29, d_model=12, n_layers=4, n_heads=HEADS, n_max=320)


def written_out(weights: Mapping[str, torch.Tensor], ids: torch.Tensor, band: int) -> dict[str, torch.Tensor]:
    """Pre-LayerNorm blocks one line after another; in odd layers query t sees keys t − band + 1 to t."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.gain"], weights[f"{name}.bias"], eps=1e-5
        )

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    length, points = len(ids), {}
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    x = weights["embed.tokens"][ids] + weights["embed.positions"][:length]
    for i in range(4):
        at = f"layers.{i}"
        read = norm(f"{at}.attn.norm", x)
        q, k, v = (linear(f"{at}.attn.{part}", read).reshape(length, HEADS, -1).transpose(0, 1) for part in "qkv")
        seen = (distance >= 0) & (distance < band) if i % 2 else distance >= 0
        scores = (q @ k.transpose(1, 2) / sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
        points[f"{at}.attn.pattern"] = pattern = scores.softmax(-1)
        x = x + linear(f"{at}.attn.o", (pattern @ v).transpose(0, 1).reshape(length, -1))
        wide = linear(f"{at}.mlp.up", norm(f"{at}.mlp.norm", x))
        wide = 0.5 * wide * (1 + torch.tanh(sqrt(2 / torch.pi) * (wide + 0.044715 * wide**3)))
        points[f"{at}.resid_post"] = x = x + linear(f"{at}.mlp.down", wide)
    points["logits"] = norm("final.norm", x) @ weights["embed.tokens"].T
    return points


@pytest.mark.parametrize("band", BANDS)
def test_every_stream_pattern_and_logit_is_that_of_the_model_written_out(band: int) -> None:
    spec = alternately_banded(DENSE, band)
    weights = {n: torch.from_numpy(w.dequantise(np.float64)) for n, w in random_weights(spec).items()}
    models = {1e-12: random_model(spec), 1e-5: random_model(spec, engine=make_engine("cpu", None))}
    for length in (1, 5, 17, 65, 300):
        ids = random_ids(spec, length)
        expected = written_out(weights, torch.from_numpy(ids), band)
        for within, model in models.items():
            trace = model.trace(ids, points=[*expected])
            for name, value in expected.items():
                assert np.abs(trace[name] - value.numpy()).max() < within * value.abs().max(), (name, length)


@pytest.mark.parametrize("band", BANDS)
def test_decoding_from_the_cache_gives_the_whole_pass_and_the_identities_hold(band: int) -> None:
    model = random_model(alternately_banded(DENSE, band))
    ids = random_ids(model.spec, 120)
    whole, cache, done = model.trace(ids).logits, KVCache(model.spec, model.engine), 0
    for size in (70, *[1] * 50):
        ran = transformer(
            model.engine, model.spec, model.parameters, [ids[done : done + size]], caches=[cache], rows=range(size)
        )
        assert np.abs(ran.logits - whole[done : done + size]).max() < 1e-12 * np.abs(whole).max()
        done += size
    for check in model.verify():
        assert check.holds, check


def test_what_left_the_band_reaches_a_token_through_the_dense_layers_only() -> None:
    """With every layer banded, two layers of width 5 reach back 8 tokens and not one further."""
    banded = alternately_banded(DENSE, 5)
    narrow = replace(banded, layers=banded.layers[1:2] * 2)
    ids, changed = random_ids(narrow, 30), random_ids(narrow, 30)
    changed[0] = (ids[0] + 1) % 29
    changed[1:] = ids[1:]
    for spec, reach in ((narrow, 8), (banded, 29)):
        model = random_model(spec)
        differs = (model.trace(ids).logits != model.trace(changed).logits).any(axis=1)
        assert np.flatnonzero(differs).max() == reach


def test_the_catalogs_gpt_3_is_dense_until_a_width_is_named_and_counts_the_same() -> None:
    dense, banded = gpt3(), gpt3(band=256)
    assert {layer.attention.window for layer in dense.layers} == {None}
    assert [layer.attention.window for layer in banded.layers] == [None, 256] * 48
    assert dense.count().total == banded.count().total == 174_604_259_328
    with pytest.raises(CutawayError, match="window"):
        gpt3(band=0)
