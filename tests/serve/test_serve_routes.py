"""What the page asks for is what a trace of the same prompt holds."""

import json

import numpy as np
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

import cutaway
from cutaway.serve import make_app
from cutaway.serve.models import Models

PROMPT = "<BOS> dragon drinks"


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


def tensors(client: TestClient, run: str, *slices: dict) -> list[tuple[dict, np.ndarray]]:
    answer = client.post(f"/api/runs/{run}/tensors", json={"slices": list(slices)})
    assert answer.status_code == 200, answer.text
    return unframed(answer.content)


def unframed(data: bytes) -> list[tuple[dict, np.ndarray]]:
    """The tensors of an answer, each with its header."""
    found = []
    while data:
        length = int.from_bytes(data[:4], "little")
        header = json.loads(data[4 : 4 + length])
        kind = "<f4" if header["format"] == "f32" else "u1"
        count = int(np.prod(header["shape"]))
        values = np.frombuffer(data, kind, count, 4 + length).reshape(header["shape"])
        size = values.nbytes + -values.nbytes % 8
        data = data[4 + length + size :]
        found.append((header, values))
    return found


def test_a_run_tells_its_tokens_and_what_comes_next(run, trace):
    assert [token["id"] for token in run["tokens"]] == [0, 5, 6]
    assert [token["piece"] for token in run["tokens"]] == ["<BOS>", "dragon", "drinks"]
    assert run["text"] == PROMPT and run["captured"] == "all"
    best = trace.next_tokens(10)
    assert [token["id"] for token in run["next"]] == [token.id for token in best]
    assert run["next"][0]["p"] == pytest.approx(best[0].probability)
    assert run["work"]["step"] < run["work"]["whole"]


def test_every_point_arrives_as_the_trace_has_it(client, run, trace):
    wanted = [point for point in trace.points if point != "tokens"]
    for start in range(0, len(wanted), 50):
        names = wanted[start : start + 50]
        for (header, values), name in zip(
            tensors(client, run["run"], *({"point": name, "format": "f32"} for name in names)), names, strict=True
        ):
            expected = np.asarray(trace[name], dtype=np.float64)
            expected = expected.reshape((1, *expected.shape) if expected.ndim == 2 else expected.shape)
            hidden = np.isnan(values)
            assert header["point"] == name and values.shape == expected.shape
            np.testing.assert_allclose(values[~hidden], expected[~hidden], rtol=1e-6)
            if name.endswith(("masked", "pattern")):
                assert (hidden == np.triu(np.ones((3, 3), bool), 1)).all()
            else:
                assert not hidden.any()


def test_a_slice_is_the_part_that_was_asked_for(client, run, trace):
    (header, values), *_ = tensors(
        client,
        run["run"],
        {"point": "layers.1.attn.q", "head": 1, "rows": [1, 3], "columns": [0, 2], "format": "f32"},
    )
    assert header["start"] == [1, 1, 0]
    np.testing.assert_allclose(values[0], trace["layers.1.attn.q"][1, 1:3, 0:2], rtol=1e-6)


def test_the_atlas_holds_every_pattern_and_what_its_heads_do(client, run, trace):
    answer = client.get(f"/api/runs/{run['run']}/atlas", params={"first": 0, "stop": 3})
    length = int.from_bytes(answer.content[:4], "little")
    header = json.loads(answer.content[4 : 4 + length])
    codes = np.frombuffer(answer.content, np.uint8, 6 * 6, 4 + length).reshape(3, 2, 6)
    rows, columns = np.tril_indices(3)
    for layer in range(3):
        pattern = trace[f"layers.{layer}.attn.pattern"]
        np.testing.assert_allclose((codes[layer] - 1.0) / 254, pattern[:, rows, columns], atol=0.5 / 254)
        for head in range(2):
            scores = header["scores"][2 * layer + head]
            assert scores["previous"] == pytest.approx((pattern[head, 1, 0] + pattern[head, 2, 1]) / 2, abs=1e-4)
            assert scores["first"] == pytest.approx((pattern[head, 1, 0] + pattern[head, 2, 0]) / 2, abs=1e-4)
            assert scores["induction"] is None  # no token repeats


def test_a_heads_row_and_column_are_those_of_its_pattern(client, run, trace):
    answer = client.get(f"/api/runs/{run['run']}/row", params={"layer": 1, "head": 0, "position": 1})
    both = np.frombuffer(answer.content, "<f4").reshape(2, 3)
    pattern = trace["layers.1.attn.pattern"][0]
    np.testing.assert_allclose(both, [pattern[1], pattern[:, 1]], rtol=1e-6)


def test_norms_are_the_lengths_of_the_stream_and_of_what_is_added(client, run, trace):
    found = np.frombuffer(client.get(f"/api/runs/{run['run']}/norms").content, "<f4").reshape(13, 3)
    names = ["embed.out", *(f"layers.{i}.resid_post" for i in range(3))]
    names += [f"layers.{i}.{name}" for name in ("attn.out", "mlp.out", "resid_mid") for i in range(3)]
    np.testing.assert_allclose(found, [np.linalg.norm(trace[name], axis=-1) for name in names], rtol=1e-6)


def test_the_numbers_of_a_seed_are_those_that_generate_draws_with(client, toy):
    uniforms = client.get("/api/uniforms", params={"seed": 5, "count": 3}).json()["uniforms"]
    ids = [0, 5, 6]
    for uniform in uniforms:
        line = np.cumsum(toy.trace(ids, points=()).probabilities)
        ids.append(int(np.searchsorted(line, uniform * line[-1], side="right")))
    assert ids[3:] == toy.generate([0, 5, 6], max_tokens=3, seed=5).tokens


def test_a_continuation_is_what_generate_gives(client, toy):
    asked = {"model": "toy", "ids": [0, 5, 6], "steps": 4, "temperature": 0}
    told = client.post("/api/continue", json=asked).json()
    expected = toy.generate([0, 5, 6], max_tokens=4, temperature=0)
    assert [token["id"] for token in told["tokens"]] == expected.tokens and told["finish"] == expected.finish


def test_an_edit_changes_the_run_and_says_what_it_did(client, run, toy):
    edit = {"zero": "layers.0.attn.z", "heads": [1]}
    asked = {"model": "toy", "prompt": PROMPT, "edits": [edit]}
    edited = client.post("/api/run", json=asked).json()
    expected = toy.trace(PROMPT, points=["layers.0.attn.z"], edits=[edit])
    assert edited["next"][0]["id"] == expected.next_tokens(1)[0].id != run["next"][0]["id"]
    (card,) = edited["edits"]
    assert card["edit"] == edit and card["points"] == ["layers.0.attn.z"] and card["changed"] == 9
    ((_, z),) = tensors(client, edited["run"], {"point": "layers.0.attn.z", "format": "f32"})
    assert (z[1] == 0).all() and (z[0] != 0).any()


def test_a_run_without_its_mask_shows_weights_on_the_future(client):
    asked = {"model": "toy", "prompt": PROMPT, "edits": [{"without": "mask"}]}
    edited = client.post("/api/run", json=asked).json()
    ((_, pattern),) = tensors(client, edited["run"], {"point": "layers.0.attn.pattern", "format": "f32"})
    assert not np.isnan(pattern).any()
    np.testing.assert_allclose(pattern.sum(-1), 1, rtol=1e-6)


def test_a_model_tells_which_parts_a_run_can_be_without(client):
    parts = client.get("/api/card", params={"model": "toy"}).json()["parts"]
    assert {"mask", "scale", "positions", "residuals", "norms"} <= set(parts)
    assert "head norms" not in parts  # the toy has none


@pytest.mark.parametrize("point", ["layers.0.attn.pattern", "logits", "layers.2.mlp.act", "tokens"])
def test_a_csv_holds_every_number(client, run, trace, point):
    answer = client.get(f"/api/runs/{run['run']}/export", params={"point": point, "format": "csv"})
    assert f'filename="{point}.csv"' in answer.headers["content-disposition"]
    lines = [line.split(",") for line in answer.text.splitlines()[1:]]
    first = 3 if trace[point].ndim == 3 else 2
    numbers = np.array([[float(number) for number in line[first:]] for line in lines])
    np.testing.assert_allclose(numbers.ravel(), np.asarray(trace[point], dtype=float).ravel(), rtol=1e-12)


def test_a_safetensors_file_holds_the_tensor_and_the_prompt(client, run, trace):
    from safetensors.numpy import load

    answer = client.get(f"/api/runs/{run['run']}/export", params={"point": "layers.0.attn.z", "format": "safetensors"})
    np.testing.assert_array_equal(load(answer.content)["layers.0.attn.z"], trace["layers.0.attn.z"])


def test_the_python_line_of_a_point_gives_its_tensor(client, trace):
    asked = {"model": "toy", "point": "layers.1.attn.pattern", "prompt": PROMPT}
    told = client.get("/api/lineage", params=asked).json()
    *lines, last = told["code"].splitlines()
    names: dict = {}
    exec("\n".join(lines), names)
    np.testing.assert_allclose(eval(last, names), trace["layers.1.attn.pattern"])
    assert told["inputs"] == ["layers.1.attn.masked"] and told["consumers"] == ["layers.1.attn.z"]


def test_a_long_prompt_keeps_the_overview_and_computes_the_rest_when_it_is_opened(monkeypatch, toy):
    monkeypatch.setattr("cutaway.serve.passes.ALL_AT_ONCE", 1)
    with TestClient(make_app(hosts=("testserver",))) as client:
        run = client.post("/api/run", json={"model": "toy", "prompt": PROMPT}).json()
        assert run["captured"] == "overview"
        ((_, act),) = tensors(client, run["run"], {"point": "layers.2.mlp.act", "format": "f32"})
        assert client.get(f"/api/runs/{run['run']}/norms").status_code == 200
    np.testing.assert_allclose(act[0], toy.trace(PROMPT, points=["layers.2.mlp.act"])["layers.2.mlp.act"], rtol=1e-6)


@pytest.mark.parametrize("length", [600])
def test_a_head_of_a_long_prompt_is_worked_out_alone_with_the_same_numbers(length):
    from cutaway.points import Point
    from cutaway.serve.heads import atlas
    from cutaway.serve.runs import Run
    from cutaway.serve.tensors import head_row
    from random_models import LLAMA, random_ids, random_model

    model = random_model(LLAMA)
    run = Run(model, model.prompt(random_ids(LLAMA, length).tolist()))
    pattern = run.trace["layers.1.attn.pattern"]
    np.testing.assert_array_equal(run.look().one_head(Point("attn.pattern", 1), 3), pattern[3])
    np.testing.assert_allclose(head_row(run.look(), 1, 2, 300), [pattern[2, 300], pattern[2, :, 300]])
    data = atlas(run.trace, 1, 2)
    start = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:start])
    assert header["side"] == 64
    codes = np.frombuffer(data, np.uint8, 4 * 64 * 65 // 2, start).reshape(4, -1)
    starts = np.arange(64) * length // 64
    tiles = np.maximum.reduceat(np.maximum.reduceat(pattern, starts, axis=1), starts, axis=2)
    np.testing.assert_allclose((codes - 1.0) / 254, tiles[:, *np.tril_indices(64)], atol=0.51 / 254)


def test_a_run_that_follows_another_gives_what_it_gives_alone(client, run):
    longer = {"model": "toy", "ids": [0, 5, 6, 7]}
    alone, after = (
        client.post("/api/run", json=longer).json(),
        client.post("/api/run", json=longer | {"after": run["run"]}).json(),
    )
    varying = {"run", "seconds"}
    assert {k: v for k, v in after.items() if k not in varying} == {k: v for k, v in alone.items() if k not in varying}
    gone = client.post("/api/run", json=longer | {"after": "not-held-any-more"})
    assert gone.json()["next"] == alone["next"]


def test_a_run_may_bring_all_that_is_drawn_first(client, run, trace):
    asked = {"model": "toy", "prompt": PROMPT, "slices": [{"point": "layers.1.attn.q", "format": "f32"}]}
    data = client.post("/api/run", json=asked).content
    length = int.from_bytes(data[:4], "little")
    manifest = json.loads(data[4 : 4 + length])
    assert manifest["tokens"] == run["tokens"] and manifest["next"] == run["next"]
    (norms, lengths), (medians, middle), (logits, last), (_, q) = unframed(data[4 + length :])
    assert norms["point"] == "norms" and logits["point"] == "logits" and logits["start"] == [0, 2, 0]
    assert client.get(f"/api/runs/{manifest['run']}/norms").content == lengths.tobytes()
    assert norms["largest"] == lengths.max() and medians["point"] == "medians"
    np.testing.assert_array_equal(middle[0, :, 0], np.median(lengths[0], axis=1))
    np.testing.assert_allclose(last[0, 0], trace.last_logits, rtol=1e-6)
    np.testing.assert_allclose(q, trace["layers.1.attn.q"], rtol=1e-6)
    for slices in ([], [{"point": "layers.9.attn.q"}], "x"):
        assert client.post("/api/run", json=asked | {"slices": slices}).status_code == 400


def test_the_same_prompt_again_is_the_same_run(client, run):
    asked = {"model": "toy", "prompt": PROMPT, "after": run["run"]}
    assert client.post("/api/run", json=asked).json()["run"] == run["run"]
    edit = {"zero": "layers.0.attn.z", "heads": [1]}
    assert client.post("/api/run", json=asked | {"edits": [edit]}).json()["run"] != run["run"]


def test_a_page_that_closes_lets_go_of_its_runs_and_of_no_others():
    with TestClient(make_app(hosts=("testserver",))) as client:
        asked = {"model": "toy", "ids": [0, 5, 6]}
        mine, other = (client.post("/api/run", json=asked).json()["run"] for _ in range(2))
        later = client.post("/api/run", json={"model": "toy", "ids": [0, 5, 6, 7], "after": mine}).json()["run"]
        assert client.delete(f"/api/runs/{later}").status_code == 204
        assert [client.get(f"/api/runs/{one}/norms").status_code for one in (mine, later, other)] == [404, 404, 200]
        assert client.delete(f"/api/runs/{later}").status_code == 204  # it is gone already
        foreign = client.delete(f"/api/runs/{other}", headers={"origin": "http://evil.example"})
        assert foreign.status_code == 403


def test_runs_are_let_go_of_past_their_bytes_and_the_latest_stays():
    with TestClient(make_app(hosts=("testserver",), most_bytes=1)) as client:
        asked = {"model": "toy", "prompt": PROMPT}
        first, second = (client.post("/api/run", json=asked).json()["run"] for _ in range(2))
        gone = client.get(f"/api/runs/{first}/norms")
        assert gone.status_code == 404 and "run the prompt again" in gone.json()["error"]
        assert client.get(f"/api/runs/{second}/norms").status_code == 200


def test_the_app_takes_further_routes():
    async def hello(request):
        from starlette.responses import PlainTextResponse

        return PlainTextResponse("hello")

    with TestClient(make_app(hosts=("testserver",), more=[Route("/v1/hello", hello)])) as client:
        assert client.get("/v1/hello").text == "hello"


def test_the_toy_answers_while_another_model_is_loading(monkeypatch):
    import threading

    loading, go_on = threading.Event(), threading.Event()
    real = cutaway.model.load

    def slow(source, **settings):
        if source != "toy":
            loading.set()
            assert go_on.wait(30)
        return real("toy", engine="numpy")

    monkeypatch.setattr("cutaway.model.load", slow)
    with TestClient(make_app(Models(["other"]), default="other", hosts=("testserver",))) as client:
        assert loading.wait(30)
        states = {entry["name"]: entry["state"] for entry in client.get("/api/models").json()["models"]}
        assert states["other"] == "loading" and states["toy"] == "ready"
        assert client.post("/api/run", json={"model": "toy", "prompt": PROMPT}).status_code == 200
        go_on.set()
        assert client.post("/api/run", json={"model": "other", "prompt": PROMPT}).status_code == 200


def test_a_run_of_a_model_in_memory_asks_nothing_of_the_disk(client, monkeypatch):
    def asked():
        raise AssertionError("the models on the disk were looked for")

    assert client.post("/api/run", json={"model": "toy", "prompt": PROMPT}).status_code == 200
    monkeypatch.setattr("cutaway.checkpoints.sources.known_models", asked)
    assert client.post("/api/run", json={"model": "toy", "prompt": PROMPT}).status_code == 200
