"""A server in this process, with the toy; and a small model that speaks, for servers of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from following import Rows
from live_server import write_speaker
from starlette.testclient import TestClient

import cutaway
from cutaway.model import Model
from cutaway.serve import make_app


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(make_app(hosts=("testserver",), longest=20)) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(client: TestClient) -> dict:
    """The manifest of a run of the lecture's prompt."""
    answer = client.post("/api/run", json={"model": "toy", "prompt": "<BOS> dragon drinks"})
    assert answer.status_code == 200
    return answer.json()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model that speaks is."""
    folder = tmp_path_factory.mktemp("models") / "speaker"
    write_speaker(folder)
    return folder


@pytest.fixture(scope="module")
def speaker(folder) -> Model:
    return cutaway.load(folder)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Counts the rows that passes compute."""
    return Rows(monkeypatch)
