"""What the server refuses, and that it says why."""

import pytest
from starlette.testclient import TestClient

from cutaway.serve import make_app
from cutaway.serve.models import Models
from cutaway.serve.owner import Busy, Owner


def refused(answer, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    told = answer.json()
    assert set(told) == {"error", "kind"}
    for word in words:
        assert word in told["error"], told["error"]


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "testserver.evil"])
def test_another_host_is_refused(client, host):
    refused(client.get("/", headers={"host": host}), 403, "host")
    refused(client.get("/api/models", headers={"host": host}), 403, "host")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://testserver:1", "http://[::1", "http://testserver.evil"]
)
def test_a_page_of_another_origin_is_refused(client, origin):
    asked = {"model": "toy", "prompt": "<BOS>"}
    refused(client.post("/api/run", json=asked, headers={"origin": origin}), 403, "may not use")


def test_the_servers_own_page_is_not_refused(client):
    asked = {"model": "toy", "prompt": "<BOS>"}
    assert client.post("/api/run", json=asked, headers={"origin": "http://testserver"}).status_code == 200


def test_a_form_of_another_site_cannot_post(client):
    answer = client.post("/api/run", content='{"model": "toy"}', headers={"content-type": "text/plain"})
    refused(answer, 415, "application/json")


def test_a_large_body_is_refused_before_it_is_read(client):
    refused(client.post("/api/run", json={"model": "toy", "prompt": "a" * 2_000_000}), 413, "1,000,000 bytes")


def test_a_body_that_does_not_say_how_long_it_is_is_refused(client):
    answer = client.post("/api/run", content=iter([b"{}"]), headers={"content-type": "application/json"})
    refused(answer, 411, "how long")


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/routes.py",
        "/assets/../../routes.py",
        "/assets/",
        "/routes.py",
        "//etc/passwd",
    ],
)
def test_no_file_but_the_pages_own_is_served(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert "There is nothing at" in answer.json()["error"]


def test_the_page_allows_itself_no_other_host(client):
    headers = client.get("/").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("model", ["nothing", "/etc/passwd", "../toy", "hf:owner/name", "", None, 3, ["toy"]])
def test_only_models_of_the_list_are_loaded(client, model):
    refused(client.post("/api/run", json={"model": model, "prompt": "<BOS>"}), 400, "There is no model", "toy")


def test_a_model_that_is_not_here_is_not_fetched_for_a_page(client, monkeypatch):
    from cutaway.checkpoints.sources import KnownModel

    absent = KnownModel("far", "Far away", "none", 1, "`cutaway pull far` fetches it.", None)
    monkeypatch.setattr("cutaway.checkpoints.sources.known_models", lambda: [absent])
    refused(client.post("/api/run", json={"model": "far", "prompt": "x"}), 400, "not on this machine", "cutaway pull")


def test_a_model_that_cannot_be_loaded_says_why(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUFnonsense")
    with TestClient(make_app(Models([str(broken)]), default="broken.gguf", hosts=("testserver",))) as client:
        answer = client.post("/api/run", json={"model": "broken.gguf", "prompt": "x"})
        assert answer.status_code == 400 and "broken.gguf" in answer.json()["error"]
        states = {entry["name"]: entry["state"] for entry in client.get("/api/models").json()["models"]}
        assert states["broken.gguf"] == "failed"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "toy"}, ["Give a prompt or ids"]),
        ({"model": "toy", "prompt": "<BOS>", "ids": [0]}, ["one of the two"]),
        ({"model": "toy", "prompt": 7}, ["must be a text"]),
        ({"model": "toy", "prompt": ""}, ["empty"]),
        ({"model": "toy", "prompt": "<BOS> unheard"}, ["unheard"]),
        ({"model": "toy", "ids": [0, 99]}, ["99", "vocabulary"]),
        ({"model": "toy", "ids": [0, True]}, ["whole numbers"]),
        ({"model": "toy", "ids": "0 1"}, ["whole numbers"]),
        ({"model": "toy", "prompt": "<BOS>", "extra": 1}, ["'extra'"]),
        ([], ["JSON object"]),
        ({"model": "toy", "prompt": "<BOS>", "edits": [{"zero": "nope"}]}, ["No point 'nope'"]),
        ({"model": "toy", "prompt": "<BOS>", "edits": {"zero": "layers.0.attn.z"}}, ["must be a list"]),
        ({"model": "toy", "prompt": "<BOS>", "edits": ["zero"]}, ["JSON object"]),
        ({"model": "toy", "prompt": "<BOS>", "edits": [{"function": "layers.0.attn.z"}]}, ["no kind of edit"]),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_the_reason(client, body, words):
    refused(client.post("/api/run", json=body), 400, *words)


@pytest.mark.parametrize("kind", ["replace", "freeze", "mean", "adapter"])
def test_an_edit_of_a_page_reads_no_file(client, kind, tmp_path):
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes(b"secret")
    point = "layers.0.attn.pattern" if kind == "freeze" else "layers.0.attn.z"
    edit = {kind: str(secret)} if kind == "adapter" else {kind: point, "source": str(secret)}
    answer = client.post("/api/run", json={"model": "toy", "prompt": "<BOS>", "edits": [edit]})
    refused(answer, 400, "another run")


def test_a_prompt_longer_than_the_server_takes_is_refused(client):
    answer = client.post("/api/run", json={"model": "toy", "ids": [0] * 21})
    refused(answer, 413, "21 tokens", "takes 20")
    assert answer.json()["kind"] == "too long"


@pytest.mark.parametrize("body", ["{", "nul", "[" * 100_000, "\xff"])
def test_what_is_no_json_is_refused(client, body):
    answer = client.post("/api/run", content=body.encode("latin-1"), headers={"content-type": "application/json"})
    refused(answer, 400)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"point": "layers.9.attn.q"}, ["layers 0 to 2"]),
        ({"point": "layers.*.attn.q"}, ["an address"]),
        ({"point": 3}, ["an address"]),
        ({"point": "layers.0.attn.q", "head": 2}, ["heads 0 to 1"]),
        ({"point": "layers.0.attn.q", "rows": [0, 4]}, ["0:3"]),
        ({"point": "layers.0.attn.q", "rows": [2, 2]}, ["rows are 2:2"]),
        ({"point": "layers.0.attn.q", "columns": "all"}, ["[first, stop]"]),
        ({"point": "layers.0.attn.q", "most_rows": 0}, ["most_rows"]),
        ({"point": "layers.0.attn.q", "format": "f64"}, ["'f64'"]),
        ({"point": "layers.0.attn.q", "size": 1}, ["'size'"]),
    ],
)
def test_a_part_of_a_tensor_that_does_not_exist_is_refused(client, run, asked, words):
    refused(client.post(f"/api/runs/{run['run']}/tensors", json={"slices": [asked]}), 400, *words)


@pytest.mark.parametrize("count", [0, 65])
def test_the_number_of_tensors_in_a_request_is_limited(client, run, count):
    slices = [{"point": "embed.out"}] * count
    refused(client.post(f"/api/runs/{run['run']}/tensors", json={"slices": slices}), 400, "1 to 64")


@pytest.mark.parametrize("at", ["", "1", "0,0,0,0", "0,0,9", "-1,0,0", "a,b,c", "0,0,99999999999"])
def test_a_cell_that_does_not_exist_is_refused(client, run, at):
    asked = {"point": "layers.0.attn.q", "at": at}
    refused(client.get(f"/api/runs/{run['run']}/cell", params=asked), 400)


def test_a_run_that_is_not_held_is_said_to_be_gone(client):
    for path in ("norms", "atlas?first=0&stop=1", "cell?point=embed.out&at=0,0", "export?point=embed.out"):
        refused(client.get(f"/api/runs/unknown/{path}"), 404, "no longer held")


@pytest.mark.parametrize("path", ["atlas?first=2&stop=2", "atlas?first=0&stop=9", "row?layer=0&head=5&position=0"])
def test_numbers_outside_their_bounds_are_refused(client, run, path):
    refused(client.get(f"/api/runs/{run['run']}/{path}"), 400, "whole number from")


def test_a_fault_of_the_server_is_told_in_a_sentence_and_logged(client, caplog, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("cutaway.serve.cards.model_card", broken)
    refused(client.get("/api/card", params={"model": "toy"}), 500, "its log says where")
    assert "a fault of ours" in caplog.text


def test_a_wrong_method_is_told_so(client):
    refused(client.get("/api/run"), 405, "GET")


def test_past_a_number_of_waiting_passes_more_are_refused():
    import anyio

    async def crowd() -> None:
        owner = Owner(waiting=1)
        gate = anyio.Event()
        import threading

        hold = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owner.run, hold.wait)
            tasks.start_soon(owner.run, hold.wait)
            await anyio.sleep(0.05)
            with pytest.raises(Busy, match="waiting already"):
                await owner.run(lambda: None)
            hold.set()
            gate.set()
        assert await owner.run(lambda: 7) == 7
        owner.close()

    anyio.run(crowd)


@pytest.mark.parametrize("value", ["a" * 5000, [0.5], True, {}, 10**400])
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_a_setting_that_is_no_number_is_refused_in_a_short_sentence(client, name, value):
    answer = client.post("/api/continue", json={"model": "toy", "ids": [0], "steps": 1, name: value})
    refused(answer, 400, name)
    assert len(answer.text) < 200


@pytest.mark.parametrize("after", [3, ["x"], "x" * 41, {}])
def test_a_former_run_that_is_no_id_is_refused(client, after):
    refused(client.post("/api/run", json={"model": "toy", "prompt": "<BOS>", "after": after}), 400, "id of a run")
