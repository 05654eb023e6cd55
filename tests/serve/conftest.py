"""A server in this process, with the toy."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

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
