"""A name that no file can have, too long or with a NUL in it, is refused like any other that leads nowhere."""

from collections.abc import Callable
from pathlib import Path

import pytest

import cutaway
from cutaway import CutawayError
from cutaway.trace.edits import Adapter, Replace
from random_models import LLAMA, random_model

TAKEN: dict[str, Callable[[cutaway.Model, str], object]] = {
    "open_trace": lambda model, name: cutaway.open_trace(name),
    "open_sweep": lambda model, name: cutaway.open_sweep(name),
    "save": lambda model, name: model.trace([1]).save(name),
    "spill": lambda model, name: model.trace([1], ["embed.out"], spill=name),
    "sweep of": lambda model, name: list(model.sweep(name, ["embed.out"])),
    "sweep to": lambda model, name: model.sweep([[1]], ["embed.out"], to=name),
    "source": lambda model, name: model.trace([1], edits=[Replace("embed.out", name)]),
    "adapter": lambda model, name: model.trace([1], edits=[Adapter(name)]),
    "merged": lambda model, name: model.merged(name),
}


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "a\0b.safetensors"], ids=["long", "NUL", "NUL, a file"])
@pytest.mark.parametrize("taken", TAKEN)
def test_a_name_that_no_file_can_have_is_refused(
    taken: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CutawayError):
        TAKEN[taken](random_model(LLAMA), name)
    assert not list(tmp_path.iterdir())
