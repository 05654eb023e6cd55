"""`cutaway pull`, `models`, `verify` and `doctor`, as a person types them."""

import json
import math

import pytest

from cutaway.cli import doctor
from cutaway.engines.numpy import NumpyEngine
from cutaway.model import Model
from cutaway.trace.verification.identities import Check


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A machine on which nothing was fetched and nothing may be."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUTAWAY_OFFLINE", "1")
    return tmp_path / "cache"


def test_models_says_what_is_here_with_size_and_licence(here):
    out = here("models").out
    line = next(line for line in out.splitlines() if line.startswith("toy "))
    assert "here" in line and "Apache-2.0" in line and "20 kB" in line
    assert any(line.startswith("smollm2-135m") and "98 MB" in line for line in out.splitlines())


def test_models_says_what_can_be_fetched_and_how(here, empty_cache):
    told = {model["name"]: model for model in json.loads(here("models", "--json").out)["models"]}
    assert told["toy"]["here"] is True
    assert told["smollm2-135m"]["here"] is False
    assert told["smollm2-135m"]["path"] is None
    assert "cutaway pull smollm2-135m" in told["smollm2-135m"]["where"]


def test_pull_of_what_is_here_says_where_it_is(here):
    told = json.loads(here("pull", "toy", "--json").out)
    assert told["path"].endswith("toy.npz")
    assert here("pull", "toy").out == f"toy is here: {told['path']} ({told['bytes'] / 1000:.0f} kB).\n"


@pytest.mark.parametrize(
    ("name", "sentence"), [("smollm3", "'smollm3'"), ("smollm2-135m", "CUTAWAY_OFFLINE"), ("hf:x", "names no model")]
)
def test_pull_of_what_cannot_be_had_is_refused_with_a_sentence(here, empty_cache, name, sentence):
    ended = here("pull", name)
    assert (ended.code, ended.out) == (2, "")
    assert sentence in ended.err


@pytest.mark.parametrize("engine", [["--engine", "cpu"], ["--engine", "numpy"], ["--dtype", "float64"]])
def test_verify_finds_that_the_toy_computes_what_it_says(here, engine):
    ended = here("verify", "toy", *engine)
    lines = ended.out.splitlines()
    checks = [line for line in lines if line.startswith("ok ")]
    assert ended.code == 0
    assert len(checks) > 10
    assert lines[-1] == f"All {len(checks)} identities hold."


def test_verify_tells_its_numbers_to_programs(here):
    told = json.loads(here("verify", "toy", "--json").out)
    assert told["holds"] is True
    assert all(check["deviation"] <= check["tolerance"] for check in told["checks"])


@pytest.mark.parametrize("deviation", [0.5, math.nan])
def test_verify_ends_with_code_1_where_an_identity_fails(here, monkeypatch, deviation):
    monkeypatch.setattr(
        Model,
        "verify",
        lambda self: iter([Check("one holds", 0.0, 0.0), Check("one fails", deviation, 1e-5, "layer 1")]),
    )
    ended = here("verify", "toy")
    assert ended.code == 1
    assert any(line.startswith("FAILED") and "one fails (layer 1)" in line for line in ended.out.splitlines())
    assert ended.out.splitlines()[-1] == "1 of 2 identities do not hold."
    assert json.loads(here("verify", "toy", "--json").out)["holds"] is False


def test_verify_of_no_model_is_refused(here):
    assert here("verify", "nothing-here").code == 2


def test_doctor_finds_nothing_wrong_here(here):
    ended = here("doctor")
    assert ended.code == 0, ended.out
    assert "nothing" in ended.out.splitlines()[-1]
    told = json.loads(here("doctor", "--json").out)
    assert told["problems"] == []
    assert told["engine"]["name"] == "cpu"
    assert told["engine"]["threads"] >= 1
    assert told["torch_engine"]["devices"][-1].startswith("cpu (")
    assert "torch engine" in ended.out
    assert "toy" in told["models"]
    assert all(told["packages"].values())


def test_doctor_tells_of_a_model_that_is_not_what_it_should_be_with_the_mend(here, empty_cache):
    from cutaway.checkpoints.fetch import PUBLISHED

    model = PUBLISHED["smollm2-135m"]
    folder = empty_cache / "models"
    folder.mkdir(parents=True)
    (folder / model.file).write_bytes(b"GGUF, but not that one")
    told = json.loads(here("doctor", "--json").out)
    wrong = next(problem for problem in told["problems"] if "sha256" in problem["what"])
    assert wrong["mend"] == "cutaway pull smollm2-135m --force"
    assert here("doctor").code == 1


def test_doctor_tells_that_the_default_model_may_not_be_fetched(here, empty_cache, monkeypatch):
    monkeypatch.setattr("cutaway.checkpoints.fetch.find", lambda model: None)
    ended = here("doctor")
    assert ended.code == 1
    assert "CUTAWAY_OFFLINE forbids" in ended.out


def test_doctor_tells_of_a_cache_that_cannot_be_written(here, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "file"))
    told = json.loads(here("doctor", "--json").out)
    assert any("cannot be written" in problem["what"] for problem in told["problems"])


def test_doctor_tells_that_numpy_must_do_without_numba(here, monkeypatch):
    engine = NumpyEngine("float32")
    engine.note = "Numba cannot be imported, so NumPy computes."
    monkeypatch.setattr("cutaway.engines.make_engine", lambda *_: engine)
    told = json.loads(here("doctor", "--json").out)
    assert told["engine"]["name"] == "numpy"
    assert any("Numba" in problem["what"] for problem in told["problems"])


def test_doctor_says_how_to_get_the_torch_engine_and_what_keeps_it_from_starting(here, monkeypatch):
    monkeypatch.setattr("cutaway.engines.torch.devices.described", lambda: 1 / 0)
    told = json.loads(here("doctor", "--json").out)
    assert any("torch is installed and does not start" in problem["what"] for problem in told["problems"])
    found = doctor.util.find_spec
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None if name == "torch" else found(name))
    ended = here("doctor")
    assert ended.code == 0 and 'pip install "cutaway[torch]"' in ended.out


def test_doctor_outlives_whatever_breaks(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler today")

    monkeypatch.setattr("cutaway.engines.make_engine", broken)
    monkeypatch.setattr("cutaway.model.load", broken)
    problems = doctor.examine()["problems"]
    assert len([problem for problem in problems if "no compiler today" in problem["what"]]) == 2
