"""Edits act while a text is generated, one pass a token, as they do in one pass over the whole of it."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines.layout import Layout
from cutaway.engines.numpy import NumpyEngine
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer
from cutaway.points import Unwatched, points_of
from cutaway.spec import LatentSpec, NormSpec, RotarySpec
from cutaway.trace.edits import Add, Drop, Freeze, Keep, Knockout, Mean, Replace, Resample, Scale, Zero
from cutaway.trace.edits.editing import Editing
from cutaway.trace.edits.without import Without
from random_models import GPT2, LLAMA, CountingEngine, random_ids, random_model, specs, with_attention

POINTS = ["layers.*.attn.pattern", "layers.*.resid_post", "layers.*.attn.k_rot", "logits"]


def edits_of(model):
    source = model.trace(random_ids(LLAMA, 20, 7), points=["layers.0.attn.pattern", "layers.1.attn.z"])
    return {
        "a head": [Zero("layers.1.attn.z", heads=[1])],
        "keys": [Scale("layers.0.attn.k", 0.5, positions=[1, 6])],
        "steering from a position on": [Add("layers.0.resid_post", np.ones(12), 2.0, positions="5:")],
        "a dropped key": [Drop("layers.*.attn.masked", keys=[2])],
        "an edge to come": [Knockout("layers.0.attn.masked", [[7, 3], [4, 1]])],
        "a frozen pattern": [Freeze("layers.0.attn.pattern", source)],
        "a patch": [Replace("layers.1.attn.z", source, heads=[0], positions="3:")],
        "resampling": [Resample("layers.1.attn.z", source, 3)],
        "heads' parts": [Keep("layers.1.attn.head_out", heads=[2])],
        "logits": [Scale("logits", 0.5)],
        "no positions, no scale": [Without("positions"), Without("scale")],
        "several": [Zero("layers.0.mlp.out", positions=[0]), Scale("layers.1.attn.scores", 2.0)],
    }


@pytest.mark.parametrize("name", edits_of(random_model(LLAMA)))
def test_token_by_token_an_edit_does_what_it_does_in_one_pass(name):
    model, prompt = random_model(LLAMA), random_ids(LLAMA, 5).tolist()
    edits = edits_of(model)[name]
    out = model.generate(prompt, max_tokens=6, temperature=0, points=POINTS, edits=edits)
    whole = model.trace(prompt + out.tokens[:-1], points=POINTS, edits=edits)
    for step in out.steps:
        here = slice(step.trace.past, step.trace.past + len(step.trace.prompt.ids))
        np.testing.assert_allclose(step.trace.logits, whole.logits[here], atol=1e-11)
        for layer in range(2):
            found, expected = (t[f"layers.{layer}.attn.pattern"] for t in (step.trace, whole))
            np.testing.assert_allclose(found, expected[:, here, : here.stop], atol=1e-12)
            found, expected = (t[f"layers.{layer}.resid_post"] for t in (step.trace, whole))
            np.testing.assert_allclose(found, expected[here], atol=1e-11)
    plain = model.trace(prompt + out.tokens[:-1], points=["logits"])
    assert not np.allclose(plain.logits, whole.logits)


@given(specs(causal=True), st.lists(st.integers(1, 12), min_size=2, max_size=4), st.data())
def test_from_a_cache_an_edit_does_what_it_does_in_one_pass_whatever_the_model(spec, pieces, data):
    names = ("resid_pre", "attn.z", "attn.q", "attn.scores", "attn.pattern", "mlp.out", "mlp.norm", "resid_post")
    model, ids = random_model(spec), random_ids(spec, sum(pieces))
    point = data.draw(st.sampled_from([str(p) for p in points_of(spec) if p.name in names]))
    edits = [Scale(point, 0.5)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where all there is happens to be 0
        whole = model.trace(ids, points=["logits"], edits=edits)
    editing, engine = Editing(edits, spec, pieces[0], grows=True), NumpyEngine("float64")
    cache, at, rows = KVCache(spec, engine), 0, []
    for length in pieces:
        piece = cache.due(ids[at : at + length])
        layout = Layout.of([len(piece)], [cache.length])
        tap = editing.tap(engine, layout, Unwatched(), layout.last_rows)
        rows.append(transformer(engine, spec, model.parameters, [piece], caches=[cache], tap=tap).logits[-1])
        at += length
    scale = max(1, np.abs(whole.logits).max())
    np.testing.assert_allclose(rows[-1], whole.logits[-1], rtol=0, atol=1e-10 * scale)


def test_an_edited_generation_computes_each_token_once():
    engine = CountingEngine()
    model = random_model(LLAMA, engine=engine)
    model.generate([1, 2, 3], max_tokens=5, temperature=0, edits=[Zero("layers.0.attn.z")], points=["layers.*.attn.z"])
    assert engine.rows_through(model.parameters.layers[0]["attn.q"].weight) == [3, 1, 1, 1, 1]


def test_without_points_the_steps_still_tell_what_the_edits_did():
    out = random_model(LLAMA).generate([1, 2, 3], max_tokens=3, temperature=0, edits=[Zero("layers.0.attn.z")])
    assert [step.trace.edits[0].elements for step in out.steps] == [3 * 24, 24, 24]
    assert len(out.steps[0].trace) == 0
    assert out.steps[2].trace.edits[0].moved.largest > 0


def test_an_edit_is_gone_after_its_generation():
    model = random_model(LLAMA)
    plain = model.generate([1, 2, 3], max_tokens=6, temperature=0)
    edited = model.generate([1, 2, 3], max_tokens=6, temperature=0, edits=[Scale("layers.*.mlp.out", -3.0)])
    again = model.generate([1, 2, 3], max_tokens=6, temperature=0)
    assert (plain.tokens, plain.logprobs) == (again.tokens, again.logprobs)
    assert plain.logprobs != edited.logprobs


def test_an_edit_for_a_position_that_is_not_reached_is_told_at_the_end():
    model = random_model(LLAMA)
    with pytest.warns(UserWarning, match=r"zero at embed\.out, positions \[40:\] never acted in this generation"):
        model.generate([1, 2, 3], max_tokens=3, temperature=0, edits=[Zero("embed.out", positions="40:")])
    with pytest.raises(CutawayError, match="fired nowhere"):
        model.generate([1, 2, 3], max_tokens=3, edits=[Knockout("layers.0.attn.masked", [[1, 2]])])


LATENT = with_attention(
    LLAMA,
    n_heads=3,
    n_kv_heads=3,
    d_head=6,
    rotary=RotarySpec(10_000.0, 2, "adjacent"),
    latent=LatentSpec(5, None, 4, 2, NormSpec("rms", 1e-6)),
    d_value=4,
)


@pytest.mark.parametrize("point", ["attn.k", "attn.v", "attn.k_rot"])
def test_what_a_cache_of_latents_would_lose_is_refused_while_generating_and_holds_in_a_trace(point):
    model, ids = random_model(LATENT), random_ids(LATENT, 6)
    edit = Scale(f"layers.0.{point}", 0.5)
    with pytest.raises(CutawayError, match="the cache of layer 0 keeps latents"):
        model.generate(ids, max_tokens=2, edits=[edit])
    trace = model.trace(ids, points=["*"], edits=[edit])
    assert trace.edits[0].moved.largest > 0
    if point == "attn.k":  # the edit of the keys reaches the keys that are turned
        plain = model.trace(ids, points=["layers.0.attn.k_rot"])
        np.testing.assert_allclose(trace["layers.0.attn.k_rot"], plain["layers.0.attn.k_rot"] * 0.5, atol=1e-12)


@pytest.mark.parametrize("point", ["attn.kv_latent", "attn.k_shared"])
def test_edited_latents_are_cached_as_edited(point):
    model, prompt = random_model(LATENT), random_ids(LATENT, 4).tolist()
    edits = [Scale(f"layers.0.{point}", 0.5)]
    out = model.generate(prompt, max_tokens=4, temperature=0, points=["logits"], edits=edits)
    whole = model.trace(prompt + out.tokens[:-1], points=["logits"], edits=edits)
    np.testing.assert_allclose(out.steps[-1].trace.logits[-1], whole.logits[-1], atol=1e-11)


def test_what_needs_the_whole_text_at_once_is_refused_before_a_token_is_made():
    model = random_model(GPT2)
    for edit in (Mean("layers.0.attn.z"), Freeze("layers.0.attn.pattern"), Replace("layers.0.attn.z")):
        with pytest.raises(CutawayError, match="which is not there yet while it is generated; give it a source"):
            model.stream([1, 2], edits=[edit])
    with pytest.raises(CutawayError, match="every new token changes all earlier rows"):
        model.stream([1, 2], edits=[Without("mask")])
    with pytest.raises(CutawayError, match="names no kind of edit"):
        model.stream([1, 2], edits=['{"zap": 1}'])
