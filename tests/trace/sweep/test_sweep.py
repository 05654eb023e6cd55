"""A sweep gives each prompt what it has alone, packed with any others, edited or not, in an iterator."""

import gc
import json
import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.numpy import NumpyEngine
from cutaway.points import points_of
from cutaway.spec.catalog import llama_like
from cutaway.trace.edits import Add, Drop, Freeze, Function, Knockout, Mean, Replace, Scale, Without, Zero
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, specs

LENGTHS = [7, 1, 70, 3, 19, 130]


def prompts_for(spec, lengths=LENGTHS):
    return [random_ids(spec, length, seed) for seed, length in enumerate(lengths)]


def assert_alike(alone, packed):
    assert packed.points == alone.points
    for point in alone.points:
        assert packed[point].dtype == alone[point].dtype
        assert np.array_equal(packed[point], alone[point], equal_nan=packed[point].dtype.kind == "f"), point
    assert packed.has_logits == alone.has_logits
    if alone.has_logits:
        assert np.array_equal(packed.last_logits, alone.last_logits)
    assert packed.prompt == alone.prompt and np.array_equal(packed.rows, alone.rows)
    assert [str(report) for report in packed.edits] == [str(report) for report in alone.edits]


@settings(max_examples=25)
@given(specs(), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([1, 30, 2048]))
def test_every_point_of_every_prompt_has_the_bits_of_its_trace_alone(spec, lengths, tokens_per_pass):
    model, prompts = random_model(spec, engine=NumpyEngine("float32")), prompts_for(spec, lengths)
    swept = model.sweep(prompts, ["*"], tokens_per_pass=tokens_per_pass)
    for prompt, trace in zip(prompts, swept, strict=True):
        assert_alike(model.trace(prompt, ["*"]), trace)


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_the_engines_agree_with_themselves_in_any_company(like, engine):
    spec = LIKE[like]
    model = random_model(spec, engine=make_engine(engine, "float32"), dtype="float32")
    points = ["*", "layers.*.resid_post | mean"]
    for prompt, trace in zip(prompts_for(spec), model.sweep(prompts_for(spec), points), strict=True):
        assert_alike(model.trace(prompt, points), trace)


def test_positions_heads_and_reductions_are_those_of_each_prompt():
    model, prompts = random_model(LLAMA), prompts_for(LLAMA)
    asked = {"positions": [-1, 0], "heads": [2]}
    points = ["*", "layers.*.attn.pattern | top(3)", "logits | norm"]
    for prompt, trace in zip(prompts, model.sweep(prompts, points, **asked), strict=True):
        assert_alike(model.trace(prompt, points, **asked), trace)


EDITS = {
    "zero": [Zero("layers.0.attn.z", heads=[1])],
    "the last position": [Add("layers.1.resid_post", np.arange(12.0), positions=[-1]), Scale("logits", 2.0)],
    "a pattern": [Drop("layers.0.attn.masked", keys=[0]), Knockout("layers.1.attn.pattern", [[0, 0]])],
    "the whole text": [Mean("layers.0.mlp.out")],
    "the unedited run": [Zero("layers.0.attn.out"), Freeze("layers.1.attn.pattern"), Replace("layers.1.mlp.out")],
    "a part": [Without("attn.norm", layers="1")],
    "the heads' parts": [Scale("layers.1.attn.head_out", 0.5, heads=[0])],
    "a function": [Function("layers.*.mlp.act", function=lambda values, place: values + place.positions[:, None])],
    "one embedding only": [Zero("embed.out", positions=[0])],
}


@pytest.mark.filterwarnings("ignore:.*changed nothing")
@pytest.mark.parametrize("which", EDITS)
def test_edits_act_in_each_prompt_by_its_own_positions(which):
    model, prompts = random_model(LLAMA), prompts_for(LLAMA, [7, 2, 70, 3, 19, 130])
    points = ["*"] if "part" not in which else ["layers.*.resid_post"]
    for prompt, trace in zip(prompts, model.sweep(prompts, points, edits=EDITS[which]), strict=True):
        alone = model.trace(prompt, points, edits=EDITS[which])
        assert_alike(alone, trace)
        assert trace.edits[0].moved == alone.edits[0].moved


def test_an_edit_of_a_sweep_outlives_nothing():
    model, prompts = random_model(LLAMA), prompts_for(LLAMA)
    before = [model.trace(prompt, ["*"]) for prompt in prompts]
    list(model.sweep(prompts, ["*"], edits=[Zero("layers.0.attn.z")]))
    for alone, prompt in zip(before, prompts, strict=True):
        assert_alike(alone, model.trace(prompt, ["*"]))


@pytest.mark.filterwarnings("ignore:.*changed nothing")
def test_a_trace_leaves_nothing_behind_when_it_is_let_go():
    """Without waiting for Python to look for rings of references."""
    model = random_model(LLAMA)
    edits = [Scale("layers.1.attn.z", 2.0), Freeze("layers.1.attn.pattern", positions=[0]), Zero("layers.0.mlp.out")]
    runs = [
        lambda: model.trace([1, 2, 3], ["*"]),
        lambda: model.trace([1, 2, 3], ["*"], edits=edits),
        lambda: next(model.sweep([[1, 2, 3], [1, 2]], ["*"])),
        lambda: next(model.sweep([[1, 2, 3], [1, 2]], ["*"], edits=edits)),
    ]
    gc.collect()
    gc.disable()
    try:
        for run in runs:
            trace = run()
            held = [weakref.ref(trace[point].base) for point in ("layers.0.mlp.act", "layers.1.resid_post")]
            del trace
            assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_a_kept_trace_keeps_no_other_prompts_rows_alive():
    model = random_model(LLAMA)
    for trace in model.sweep(prompts_for(LLAMA), ["layers.*.resid_post", "layers.*.attn.z"]):
        for point in trace.points:
            owner = trace[point]
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            assert owner.nbytes == trace[point].nbytes


def test_prompts_are_taken_one_pass_at_a_time_from_an_iterator():
    model, taken = random_model(LLAMA), []

    def endless():
        while True:
            taken.append(len(taken))
            yield random_ids(LLAMA, 10, len(taken))

    swept = model.sweep(endless(), ["layers.1.resid_post"], tokens_per_pass=40)
    for _ in range(6):
        next(swept)
    assert len(taken) <= 9


def test_a_reduction_for_all_points_and_a_function_of_the_trace():
    model, prompts = random_model(LLAMA), prompts_for(LLAMA)
    for trace in model.sweep(prompts, ["layers.*.resid_post", "layers.0.attn.pattern | top(2)"], reduce="mean"):
        means = {f"layers.{layer}.resid_post | mean" for layer in (0, 1)}
        assert set(trace.points) == means | {"layers.0.attn.pattern | top(2)"}
    found = list(model.sweep(prompts, [], reduce=lambda trace: {"gap": np.ptp(trace.last_logits)}))
    assert [float(one["gap"]) for one in found] == [float(np.ptp(model.trace(p, []).last_logits)) for p in prompts]


def test_prompts_come_from_text_and_from_json_lines(tmp_path, toy):
    lines = tmp_path / "prompts.txt"
    lines.write_text("<BOS> dragon drinks\n\n<BOS> dragon\r\n", encoding="utf-8", newline="")
    assert [trace.prompt.text for trace in toy.sweep(lines, [])] == ["<BOS> dragon drinks", "<BOS> dragon"]
    told = [{"text": "<BOS> dragon"}, "<BOS>", [0, 5, 6], {"input_ids": [0, 5]}]
    objects = tmp_path / "prompts.jsonl"
    objects.write_text("".join(json.dumps(one) + "\n" for one in told), encoding="utf-8")
    assert [trace.prompt.ids for trace in toy.sweep(str(objects), [])] == [(0, 5), (0,), (0, 5, 6), (0, 5)]
    for file in (lines, objects):
        plain = [trace.prompt for trace in toy.sweep(file, [])]
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        assert [trace.prompt for trace in toy.sweep(file, [])] == plain
    lines.write_bytes("<BOS>".encode("utf-16"))
    with pytest.raises(CutawayError, match="from line 1 on: it is UTF-16 text; save it as UTF-8"):
        toy.sweep(lines, [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Line 2 of .* is no JSON"),
        ("[" * 100_000, "Line 2 of .* is no JSON: it is nested too deeply"),
        ('{"text": "a", "text": "b"}', "Line 2 of .* is no JSON: 'text' is given twice"),
        ('{"texts": "a"}', "must have one of text, prompt, ids, input_ids; it has none of them"),
        ('{"text": "a", "ids": [0]}', "it has text and ids"),
        ("7", "holds 7; a prompt is a text or a list of ids"),
    ],
)
def test_a_line_that_holds_no_prompt_is_told_by_its_number(tmp_path, toy, line, said):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"<BOS>"\n{line}\n', encoding="utf-8")
    with pytest.raises(CutawayError, match=said):
        list(toy.sweep(file, []))


@pytest.mark.parametrize(
    ("prompts", "settings", "said"),
    [
        ([[1, 2], [3, 99]], {}, "Prompt 1: Token id 99 at position 1 is outside"),
        ([[1, 2, 3], [1]], {"positions": [2]}, "Prompt 1: Position 2 was asked for"),
        ([[1, 2, 3], [1]], {"edits": [Zero("layers.0.attn.z", positions=[2])]}, "Prompt 1: .*osition"),
        ([[1, 2]] * 3, {"limit": 3}, "Prompt 0: This capture keeps"),
        ([1, 2], {}, r"not one prompt as a list of ids; write \[\[0, 5, 6\]\]"),
        ("the cat", {}, "'the cat' is no file. A single prompt is a list of one"),
        (7, {}, "not int"),
        ([], {}, "There are no prompts"),
        ([[1]], {"tokens_per_pass": 0}, "tokens_per_pass is 0; it must be a whole number, at least 1"),
        ([[1]], {"reduce": "median"}, "'median' is no reduction"),
        ([[1]], {"reduce": 5}, "reduce is 5"),
        ([[1]], {"reduce": lambda trace: 5}, "Prompt 0: the function given as reduce returned int"),
        ([[1]], {"layout": "rows"}, "layout is about files; say where they go"),
        ([[1]], {"position": [0]}, "A sweep knows no 'position'; it takes positions, "),
        ([[1]], {"points": None, "reduce": "mean"}, "Which points are to be reduced by 'mean'"),
        ([[1]], {"points": ["layers.*.nothing"]}, "layers.\\*.nothing"),
        ([[1]], {"heads": [0]}, "resid_post is .* has no heads to choose from"),
    ],
)
def test_what_cannot_be_swept_is_refused_and_the_prompt_is_named(prompts, settings, said):
    given_points = settings.pop("points", ["layers.*.resid_post"]) if "points" in settings else ["layers.*.resid_post"]
    with pytest.raises(CutawayError, match=said):
        list(random_model(LLAMA).sweep(prompts, given_points, **settings))


@pytest.mark.filterwarnings("ignore:.*changed nothing")
def test_a_prompt_whose_numbers_break_is_named():
    model = random_model(GPT2)
    edits = [
        Function("layers.0.mlp.out", function=lambda values, place: values + np.where(len(values) == 3, np.inf, 0))
    ]
    with pytest.raises(CutawayError, match=r"Prompt 4: .* computes no usable numbers with these edits"):
        list(model.sweep([[1, 2]] * 4 + [[1, 2, 3]], ["logits"], edits=edits, tokens_per_pass=7))


def test_memory_does_not_grow_with_the_number_of_prompts():
    spec = llama_like("wide", vocab_size=50, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64)
    model = random_model(spec, engine=NumpyEngine("float32"), dtype="float32")

    def peak(count):
        tracemalloc.start()
        for _ in model.sweep((random_ids(spec, 20, i) for i in range(count)), ["*"], tokens_per_pass=100):
            pass
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(10)
    few, many = peak(20), peak(100)
    assert many < 1.3 * few, (few, many)


def test_the_torch_engine_sweeps_to_its_rounding():
    model, prompts = random_model(LLAMA, engine=make_engine("torch", "float64")), prompts_for(LLAMA)
    points = [str(point) for point in points_of(LLAMA) if point.name not in ("attn.dots", "attn.scores", "attn.masked")]
    edits = [Scale("layers.0.mlp.out", 0.5)]
    for prompt, trace in zip(prompts, model.sweep(prompts, points, edits=edits), strict=True):
        alone = model.trace(prompt, points, edits=edits)
        for point in points:
            np.testing.assert_allclose(trace[point], alone[point], rtol=1e-9, atol=1e-11, err_msg=point)


TYPED = replace(POST, name="typed", token_types=3)


def test_vectors_in_the_place_of_tokens_are_swept_as_they_are_traced():
    model = random_model(LLAMA, engine=NumpyEngine("float32"))
    table = np.random.default_rng(5).standard_normal((23, LLAMA.d_model))
    vectors = [table[random_ids(LLAMA, length)].astype(kind) for length, kind in [(5, "f4"), (1, "f8"), (80, "f2")]]
    mixed = [[1, 2, 3], vectors[0], vectors[1], [4, 5], vectors[2]]
    edits = [Scale("layers.0.resid_post", 0.5, positions=[-1]), Replace("layers.1.attn.z", heads=[1])]
    for asked in ({}, {"edits": edits}, {"positions": [-1]}):
        swept = list(model.sweep(mixed, ["layers.*.resid_post", "layers.0.attn.pattern", "logits"], **asked))
        for prompt, trace in zip(mixed, swept, strict=True):
            assert_alike(
                model.trace(prompt, ["layers.*.resid_post", "layers.0.attn.pattern", "logits"], **asked), trace
            )
    [trace] = model.sweep([vectors[0]], edits=edits)  # the summary, in which the tokens are missing
    assert trace.prompt.ids == (-1,) * 5 and "tokens" not in trace
    assert trace.edits[0].moved == model.trace(vectors[0], (), edits=edits).edits[0].moved


def test_types_of_sentences_are_each_prompts_own():
    model = random_model(TYPED, engine=NumpyEngine("float32"))
    prompts = prompts_for(TYPED)
    types = [None if len(prompt) == 3 else np.arange(len(prompt)) % 3 for prompt in prompts]
    vectors = np.random.default_rng(6).standard_normal((4, TYPED.d_model))
    prompts, types = [*prompts, vectors, vectors], [*types, [2, 2, 0, 1], None]
    for told in (types, iter(types)):
        swept = list(model.sweep(prompts, ["*"], types=told, edits=[Scale("embed.types", 2.0)]))
        for prompt, kinds, trace in zip(prompts, types, swept, strict=True):
            alone = model.trace(
                prompt, [p for p in model.points if p in trace], types=kinds, edits=[Scale("embed.types", 2.0)]
            )
            assert_alike(alone, trace)
    pairs = list(model.sweep([[1, 2, 3]] * 2, types=[[0, 1, 2], None]))
    assert not np.array_equal(pairs[0]["embed.out"], pairs[1]["embed.out"])


@pytest.mark.parametrize(
    ("prompts", "types", "why"),
    [
        ([[1], [2]], [[0]], "There are 2 prompts and types of 1; there must be one entry for each"),
        (iter([[1], [2]]), [[0]], "Prompt 1: there are types of 1 prompts only"),
        (iter([[1]]), iter([[0], [1]]), "types of more than the 1 prompts"),
        ([[1, 2]], [[0]], r"Prompt 0: `types` must be whole numbers, one for each of the 2 tokens"),
        ([[1, 2]], [[0, 3]], "Prompt 0: The type 3 at position 1 is unknown: typed has types 0 to 2"),
        ([[1, 2]], [[[0], [0, 1]]], "Prompt 0: `types` must be whole numbers"),
        ([[1, 2]], "01", "types of a sweep are a list with one entry for each prompt"),
        ([[1, 2]], 5, "types of a sweep are a list with one entry for each prompt"),
        ([[1, 2], np.ones((3, 5))], None, r"Prompt 1: The vectors are \[3, 5\]; typed reads \[T, 12\]"),
        ([np.full((3, 12), np.nan)], None, "Prompt 0: The vectors must be finite"),
        (np.ones((3, 12)), None, r"not one prompt as vectors; write \[vectors\]"),
        ({"a": 1}, None, "takes a list of prompts, in order, not a dict"),
    ],
)
def test_vectors_and_types_that_cannot_be_are_refused(prompts, types, why):
    with pytest.raises(CutawayError, match=why):
        list(random_model(TYPED).sweep(prompts, types=types))


def test_types_mean_nothing_to_a_model_that_tells_no_kinds_apart():
    with pytest.raises(CutawayError, match="Prompt 1: small-llama tells no kinds of sentences apart"):
        list(random_model(LLAMA).sweep([[1, 2], [3]], types=[None, [0]]))


def test_a_file_may_tell_types_beside_its_prompts(tmp_path):
    model, path = random_model(TYPED), tmp_path / "pairs.jsonl"
    path.write_text('{"ids": [1, 2, 3], "types": [0, 1, 1]}\n[4, 5]\n{"input_ids": [6], "token_type_ids": [2]}\n')
    swept = list(model.sweep(path, ["embed.out"]))
    for (prompt, kinds), trace in zip([([1, 2, 3], [0, 1, 1]), ([4, 5], None), ([6], [2])], swept, strict=True):
        assert np.array_equal(trace["embed.out"], model.trace(prompt, types=kinds)["embed.out"])
    with pytest.raises(CutawayError, match="Prompt 0: its types stand in the file, and are given besides"):
        list(model.sweep(path, ["embed.out"], types=[[0, 0, 0], None, None]))
    with pytest.raises(CutawayError, match="Text 0 tells the types of its tokens, which mean nothing here"):
        list(random_model(LLAMA).scores(path))
