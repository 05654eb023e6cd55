"""Edits in shared passes: each response gets, bit for bit, what it gets alone, and a report of its own."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from cached_models import LATENT
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters import adaptable, of_experts, of_llama, pair, write_adapter
from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.layout import CHUNK
from cutaway.engines.numpy import NumpyEngine
from cutaway.generate import Basic, Batch, Generation, Passes, all_finished
from cutaway.model import Model
from cutaway.points import points_of
from cutaway.spec import ExpertsSpec, RouterSpec
from cutaway.trace.edits import (
    Adapter,
    Add,
    Drop,
    Edit,
    Freeze,
    Function,
    Keep,
    Knockout,
    Mean,
    Replace,
    Resample,
    Scale,
    Without,
    Zero,
)
from random_models import LLAMA, random_ids, random_model, specs, with_layers

ENGINES = pytest.mark.parametrize("engine", ["numpy", "cpu"])
EXPERTS = with_layers(LLAMA, feed_forward=ExpertsSpec(4, LLAMA.layers[0].feed_forward, RouterSpec(2)))
LENGTHS = (5, 70, 1, 300, 12, 3)


SOURCE = random_model(LLAMA).trace(random_ids(LLAMA, 80, 7), points=["layers.0.attn.pattern", "layers.1.attn.z"])
EDITS: dict[str, list[Edit]] = {
    "a head": [Zero("layers.1.attn.z", heads=[1])],
    "keys": [Scale("layers.0.attn.k", 0.5, positions=[0, -1])],
    "steering from a position on": [Add("layers.0.resid_post", np.ones(12), 2.0, positions="5:")],
    "a dropped key": [Drop("layers.*.attn.masked", keys=[2])],
    "an edge to come": [Knockout("layers.0.attn.masked", [[7, 3], [4, 1]])],
    "a frozen pattern": [Freeze("layers.0.attn.pattern", SOURCE, positions=":80")],
    "a patch": [Replace("layers.1.attn.z", SOURCE, heads=[0], positions="3:6")],
    "resampling": [Resample("layers.1.attn.z", SOURCE, 3)],
    "heads' parts": [Keep("layers.1.attn.head_out", heads=[2])],
    "logits": [Scale("logits", 0.5)],
    "a function": [Function("layers.0.mlp.act", lambda values, place: values * place.positions[:, None] / 10)],
    "no positions, no scale": [Without("positions"), Without("scale")],
    "several": [Zero("layers.0.mlp.out", positions=[0]), Scale("layers.1.attn.scores", 2.0)],
}


def on(engine: str, spec: Any = LLAMA) -> Model:
    return random_model(spec, engine=make_engine(engine, "float32"), dtype="float32")


def prompts_for(spec: Any, lengths: Iterable[int] = LENGTHS) -> list[list[int]]:
    return [random_ids(spec, length, seed).tolist() for seed, length in enumerate(lengths)]


def assert_alike(alone: Generation, shared: Generation) -> None:
    assert shared.tokens == alone.tokens
    assert shared.logprobs == alone.logprobs  # every bit
    assert [str(report.edit) for report in shared.edits] == [str(report.edit) for report in alone.edits]
    for mine, other in zip(shared.edits, alone.edits, strict=True):
        assert mine.fired == other.fired and mine.changed == other.changed
        assert mine.moved == other.moved
    assert shared.finish == alone.finish


def compare(model: Model, prompts: list[list[int]], edits: list[Any], tokens: int = 5, **how: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an edit that changed nothing, or waited in vain
        shared = model.generate_many(prompts, tokens, seed=3, edits=edits, **how)
        for index, (prompt, own, out) in enumerate(zip(prompts, edits, shared, strict=True)):
            assert_alike(model.generate(prompt, tokens, seed=3 + index, edits=own or ()), out)


@ENGINES
@pytest.mark.parametrize("name", EDITS)
def test_every_kind_of_edit_beside_others_and_beside_none(engine: str, name: str) -> None:
    model = on(engine)
    edits = [EDITS[name], None, EDITS["several"], EDITS[name], [], EDITS["a head"]]
    compare(model, prompts_for(LLAMA), edits)


@ENGINES
def test_edits_that_hold_for_all_address_each_sequences_own_positions(engine: str) -> None:
    model, prompts = on(engine), prompts_for(LLAMA)
    edits = [Zero("layers.0.resid_post", positions=[-1]), Scale("layers.1.attn.z", 0.5, positions="4:")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        shared = model.generate_many(prompts, 6, seed=3, edits=edits)
        for index, (prompt, out) in enumerate(zip(prompts, shared, strict=True)):
            assert_alike(model.generate(prompt, 6, seed=3 + index, edits=edits), out)
    assert shared[0].edits[0].fired == {"layers.0.resid_post": 12}  # one row: the prompt's last
    after = [max(0, len(prompt) + 5 - 4) for prompt in prompts]
    assert [sum(out.edits[1].fired.values()) for out in shared] == [rows * 24 for rows in after]


@settings(max_examples=25, deadline=None)
@given(specs(causal=True), st.lists(st.integers(1, 30), min_size=2, max_size=4), st.data())
def test_whatever_the_model(spec: Any, lengths: list[int], data: st.DataObject) -> None:
    names = ("embed.out", "resid_pre", "attn.z", "attn.q", "attn.scores", "attn.pattern", "attn.head_out", "mlp.out",
             "mlp.norm", "moe.gates", "resid_post", "final.norm", "logits")  # fmt: skip
    model = random_model(spec, engine=NumpyEngine("float32"))
    points = [str(point) for point in points_of(spec) if point.name in names]
    edits = [
        data.draw(st.sampled_from([None, [Scale(point, 0.5)], [Add(point, 0.25), Scale(points[0], 2.0)]]))
        for point in [data.draw(st.sampled_from(points)) for _ in lengths]
    ]
    compare(model, prompts_for(spec, lengths), edits, 3)


@ENGINES
@pytest.mark.filterwarnings("ignore:.*never acted")
@pytest.mark.parametrize("point", ["logits", "layers.1.attn.z", "layers.0.attn.masked"])
def test_a_prompt_that_is_read_in_parts_is_edited_and_counted_as_in_one(engine: str, point: str) -> None:
    model = on(engine)
    passes = Passes(model.engine, model.spec, model.parameters)
    prompts = prompts_for(LLAMA, (2 * CHUNK + 20, 3, CHUNK + 1, 40))
    kinds: list[list[Edit]] = [
        [Scale(point, 0.5)],
        [Scale(point, 0.25, positions=[-1])],
        [Scale(point, 2.0, positions=[7, CHUNK - 1, CHUNK, -2])],
        [Scale(point, 2.0, positions="30:")],
    ]
    for edits in zip(*[kinds[index:] + kinds[:index] for index in range(4)], strict=True):
        own = [
            one if len(prompt) > CHUNK or one is not kinds[2] else kinds[0]
            for one, prompt in zip(edits, prompts, strict=True)
        ]
        requests = [
            model.request(prompt, Basic(4, seed=1), None, one) for prompt, one in zip(prompts, own, strict=True)
        ]
        shared = all_finished(Batch(passes, None, prompt_rows=CHUNK), requests)
        for prompt, one, out in zip(prompts, own, shared, strict=True):
            assert_alike(model.generate(prompt, 4, seed=1, edits=one), out)


@ENGINES
def test_experts_are_left_out_where_they_are_chosen(engine: str) -> None:
    drop = Drop("layers.*.moe.expert_out", experts=[1, 2])
    compare(on(engine, EXPERTS), prompts_for(EXPERTS), [[drop], None, [drop], [drop], None, None])


@ENGINES
def test_adapters_and_parts_left_out_share_passes_with_their_like(engine: str, tmp_path: Any) -> None:
    model = adaptable(engine=engine, dtype="float32")
    french = [Adapter(write_adapter(tmp_path / "french", of_llama()))]
    german = [Zero("layers.0.mlp.out", positions=[0]), Adapter(write_adapter(tmp_path / "german", of_llama(seed=4)))]
    edits = [french, None, german, [*french, Scale("layers.0.attn.z", 0.5)], [Without("scale")], french]
    compare(model, prompts_for(LLAMA), edits)


def test_an_adapter_that_was_written_over_or_taken_away_meanwhile_is_still_the_one_that_was_read(tmp_path: Any) -> None:
    model, folder, basic = adaptable(engine="numpy"), tmp_path / "adapter", Basic(4, temperature=0)
    requests = []
    for seed in (0, 4):
        written = write_adapter(tmp_path / str(seed), of_llama(seed=seed))
        written.rename(folder)
        requests.append(model.request([1, 2, 3], basic, None, [Adapter(folder)]))
        folder.rename(tmp_path / f"{seed} gone")
    shared = all_finished(model.batch(), requests)
    for request, out in zip(requests, shared, strict=True):
        assert_alike(all_finished(model.batch(), [request])[0], out)
    assert shared[0].logprobs != shared[1].logprobs


@ENGINES
def test_an_adapter_of_experts_counts_in_each_response_what_it_changed_there(engine: str, tmp_path: Any) -> None:
    model = adaptable(EXPERTS, engine, "float32", family="mixtral")
    own = [Adapter(write_adapter(tmp_path / "experts", of_experts(), target_modules=["w1", "w2"]))]
    compare(model, prompts_for(EXPERTS, (5, 70, 1, 12)), [own, own, None, own])


@ENGINES
def test_an_adapter_of_latents_counts_each_row_once_however_often_it_is_unfolded(engine: str, tmp_path: Any) -> None:
    model, tensors = adaptable(LATENT, engine, "float32", family="deepseek_v3"), {}
    for layer in range(2):  # two heads of 3 + 3 outputs, out of latents of 6
        tensors |= pair(f"model.layers.{layer}.self_attn.kv_b_proj", 12, 6)
    own = [Adapter(write_adapter(tmp_path / "latents", tensors, target_modules=["kv_b_proj"]))]
    prompts = prompts_for(LATENT, (5, 70, 1, 12))
    compare(model, prompts, [own, own, None, own])
    fired = model.generate(prompts[0], 4, seed=1, edits=own).edits[0].fired
    assert fired == {f"layers.{layer}.attn.{name}": (5 + 3) * 2 * 3 for layer in range(2) for name in "kv"}


def test_an_edited_response_leaves_the_others_and_later_ones_as_they_are() -> None:
    model, [prompt] = on("cpu"), prompts_for(LLAMA, [40])
    before = model.generate(prompt, 5, temperature=0)
    batch = model.batch(at_once=4, retained=4)
    edit = [Scale("layers.0.attn.k", 3.0)]
    basic = Basic(5, temperature=0)
    asked = [model.request(prompt, basic), model.request(prompt, basic, None, edit), model.request(prompt, basic)]
    tickets = [batch.submit(request) for request in asked]
    while batch.step():
        pass
    plain, edited, again = (list(ticket) for ticket in tickets)
    assert [step.logprob for step in plain] == before.logprobs == [step.logprob for step in again]
    assert [step.logprob for step in edited] == model.generate(prompt, 5, temperature=0, edits=edit).logprobs
    assert edited[-1].edits[0].changed and not any(step.edits for step in (*plain, *again, *edited[:-1]))
    later = batch.submit(asked[1]), batch.submit(asked[0])  # edited rows are kept for nobody, and nobody's are for them
    while batch.step():
        pass
    assert later[0].reused == 0 and later[1].reused > 0
    assert [step.logprob for step in later[0]] == [step.logprob for step in edited]
    assert [step.logprob for step in later[1]] == before.logprobs


@pytest.mark.parametrize("spoil", [
    Scale("layers.0.resid_post", 1e30),
    Function("layers.0.attn.z", lambda values, place: values[:0]),
    Function("layers.0.attn.scores", lambda values, place: 1 // 0),
], ids=["numbers that end", "a wrong shape", "a function that fails"])  # fmt: skip
def test_what_goes_wrong_in_one_response_goes_wrong_in_no_other(spoil: Edit) -> None:
    model, prompts = on("numpy", EXPERTS), prompts_for(EXPERTS, (4, 30, 300))
    batch = model.batch()
    requests = [model.request(prompts[0], Basic(4, seed=1)), model.request(prompts[1], Basic(4, seed=1), None, [spoil])]
    requests.append(model.request(prompts[2], Basic(4, seed=1), None, [Scale("layers.0.attn.z", 0.5)]))
    tickets = [batch.submit(request) for request in requests]
    while batch.step():
        pass
    good, bad, other = tickets
    with pytest.raises((CutawayError, ZeroDivisionError)) as caught:
        list(bad)
    with pytest.raises(type(caught.value)) as alone:
        model.generate(prompts[1], 4, seed=1, edits=[spoil])
    assert str(caught.value) == str(alone.value)
    assert [s.logprob for s in good] == model.generate(prompts[0], 4, seed=1).logprobs
    edits = [Scale("layers.0.attn.z", 0.5)]
    assert [s.logprob for s in other] == model.generate(prompts[2], 4, seed=1, edits=edits).logprobs


def test_each_response_warns_of_what_did_nothing_in_it() -> None:
    model = on("numpy")
    with pytest.warns(UserWarning, match="never acted in this generation"):
        model.generate_many([[1, 2], [3]], 3, seed=0, edits=[None, [Zero("layers.0.attn.z", positions=[99])]])
    with pytest.warns(UserWarning, match="changed nothing"):
        model.generate_many([[1, 2], [3]], 3, seed=0, edits=[[Scale("layers.0.attn.z", 1.0)], None])


@pytest.mark.parametrize(
    ("edits", "settings", "why"),
    [
        ([[Zero("layers.0.mlp.out")]], {}, "one list for each of the 2; these are 1, of which 1 are lists"),
        ([[Zero("layers.0.mlp.out")], Zero("layers.0.mlp.out")], {}, "these are 2, of which 1 are lists"),
        ([None, [Zero("layers.7.mlp.out")]], {}, "Prompt 1: .*layers.7"),
        ([None, [{"zap": "layers.0.mlp.out"}]], {}, "Prompt 1: "),
        ([None, [Mean("layers.0.mlp.out")]], {}, "Prompt 1: .*from the whole text, which is not there yet"),
        (Freeze("layers.0.attn.pattern"), {}, "Prompt 0: .*from the whole text, which is not there yet"),
        (Without("mask"), {}, "Prompt 0: Without the mask every new token changes all earlier rows"),
        (Zero("layers.0.mlp.out"), {"guess": 2}, "Prompt 0: .*leave out guess and cache"),
        (Zero("layers.0.mlp.out"), {"cache": False}, "Prompt 0: .*leave out guess and cache"),
        (Zero("layers.0.mlp.out", positions=[-2]), {}, "Prompt 1: Position -2 was asked for; the prompt has"),
        (Knockout("layers.0.attn.masked", [[0, 0]]), {}, "Prompt 0: .*leaves query 0 of head 0 no key"),
        (5, {}, "5"),
    ],
)
def test_edits_that_cannot_be_are_refused_and_the_prompt_is_named(edits: Any, settings: Any, why: str) -> None:
    with pytest.raises(CutawayError, match=why):
        on("numpy").generate_many([[1, 2], [3]], 3, seed=0, edits=edits, **settings)


def test_edits_are_given_in_any_form_that_trace_takes() -> None:
    model, prompts = on("numpy"), prompts_for(LLAMA, (4, 9))
    zero = Zero("layers.0.attn.z", heads=[1])
    told = [zero, [zero], {"zero": "layers.0.attn.z", "heads": [1]}, '{"zero": "layers.0.attn.z", "heads": [1]}',
            [[zero], [zero]], [(zero,), [zero.to_json()]], iter([zero])]  # fmt: skip
    outs = [model.generate_many(prompts, 4, seed=0, edits=one) for one in told]
    assert all([out.logprobs for out in one] == [out.logprobs for out in outs[0]] for one in outs)
    assert outs[0][0].logprobs != model.generate(prompts[0], 4, seed=0).logprobs


def test_a_cache_of_another_run_is_refused_beside_edits() -> None:
    model = on("numpy")
    batch = model.batch()
    request = model.request([1, 2, 3], Basic(2), None, Zero("layers.0.mlp.out"))
    with pytest.raises(CutawayError, match="begins with a cache of its own"):
        batch.submit(request, cache=Passes(model.engine, model.spec, model.parameters).cache())
    assert batch.waiting == 0


def test_on_torch_it_is_the_same_to_rounding() -> None:
    model, prompts = on("torch:cpu"), prompts_for(LLAMA)
    edits = [[Scale("layers.0.attn.scores", 0.5)], None, [Zero("layers.1.attn.z", heads=[0])], None, None, None]
    shared = model.generate_many(prompts, 4, temperature=0, edits=edits)
    for prompt, own, out in zip(prompts, edits, shared, strict=True):
        alone = model.generate(prompt, 4, temperature=0, edits=own or ())
        assert alone.tokens == out.tokens
        np.testing.assert_allclose(alone.logprobs, out.logprobs, atol=1e-5)
