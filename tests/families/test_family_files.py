"""A family's file says what it must under the names that are asked for; a misspelt hook does not pass unseen."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cutaway import CutawayError
from cutaway.checkpoints.families import FAMILIES, FILES
from cutaway.checkpoints.families.family import HOOKS, registered

FOLDER = Path(__file__).parents[2] / "src" / "cutaway" / "checkpoints" / "families"
SHARED = {"__init__", "config", "family", "gguf_rope", "mixtures", "names", "rope", "windows"}  # no families


def short(file: Any) -> str:
    return file.__name__.rpartition(".")[2]


EVERY_FILE = pytest.mark.parametrize("file", FILES, ids=short)


def used(source: str) -> Iterator[str]:
    """Every name that a source reads, of its own or of another file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def made(file: Any) -> set[str]:
    """The public names that a file gives a value or a function of its own."""
    names: set[str] = set()
    for node in ast.parse(Path(file.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def test_every_file_of_the_folder_is_a_registered_family_or_shared_by_them():
    assert {path.stem for path in FOLDER.glob("*.py")} == SHARED | {short(file) for file in FILES}


@EVERY_FILE
def test_a_public_name_of_a_family_is_a_hook_or_somebody_reads_it(file):
    """So a hook under a name that nothing asks for is found, whatever it is called."""
    read = {name for path in FOLDER.glob("*.py") for name in used(path.read_text(encoding="utf-8"))}
    assert made(file) - set(HOOKS) - read == set()


@EVERY_FILE
def test_what_a_family_hands_on_by_name_is_all_that_it_defines(file):
    assert set(getattr(file, "__all__", HOOKS)) & set(HOOKS) >= {hook for hook in HOOKS if hasattr(file, hook)}


@pytest.mark.parametrize(("file", "family"), [*zip(FILES, FAMILIES, strict=True)], ids=map(short, FILES))
def test_a_family_is_what_its_file_says_and_the_defaults_for_the_rest(file, family):
    plain = registered([family_file()])[0]
    assert {hook: getattr(family, hook) for hook in HOOKS} == {
        hook: getattr(file, hook, getattr(plain, hook)) for hook in HOOKS
    }


def spec_from_config(config, name):
    raise AssertionError("nobody runs it")


def two(spec, tensors):
    raise AssertionError("nobody runs it")


def family_file(*without: str, **more: Any) -> Any:
    """The file of a made-up family: what it must have, without some of it, and what else."""
    file = ModuleType("made_up")
    least = {"MODEL_TYPES": ("made_up",), "spec_from_config": spec_from_config, "sources": two}
    vars(file).update({name: value for name, value in (least | more).items() if name not in without})
    return file


def test_a_family_that_says_only_what_it_must_has_these_defaults():
    family = registered([family_file()])[0]
    assert (family.GGUF_ARCHITECTURES, family.HARMLESS, family.GGUF_HARMLESS, family.IGNORED) == ((), (), (), ())
    assert (family.STORED_HEAD, family.LEFT_OUT) == ("lm_head.weight", {})
    spec: Any = object()
    assert family.as_stored(spec, None) is spec  # type: ignore[arg-type]
    assert family.unused(spec, None) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["MODEL_TYPES", "spec_from_config", "sources"])
def test_a_file_without_what_it_must_have_is_refused(name):
    with pytest.raises(CutawayError, match=f"made_up lacks {name}, which a family must define"):
        registered([family_file(name)])


def test_a_file_that_claims_gguf_files_must_read_them():
    with pytest.raises(CutawayError, match="made_up lacks spec_from_gguf, gguf_sources"):
        registered([family_file(GGUF_ARCHITECTURES=("made_up",))])


@pytest.mark.parametrize(
    ("misspelt", "right"),
    [
        ("as_storred", "as_stored"),
        ("un_used", "unused"),
        ("LEFTOUT", "LEFT_OUT"),
        ("Stored_Head", "STORED_HEAD"),
        ("IGNORE", "IGNORED"),
        ("GGUF_ARCHITECTURE", "GGUF_ARCHITECTURES"),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_name_that_was_meant(misspelt, right):
    with pytest.raises(CutawayError, match=f"made_up defines {misspelt}, .* and no {right}: is that meant"):
        registered([family_file(**{misspelt: two})])


def test_a_misspelt_hook_that_must_be_there_is_named_rather_than_called_missing():
    with pytest.raises(CutawayError, match="defines spec_from_confg, which nothing asks for, and no spec_from_config"):
        registered([family_file("spec_from_config", spec_from_confg=spec_from_config)])


@pytest.mark.parametrize(
    ("hook", "value", "said"),
    [
        ("MODEL_TYPES", "made_up", "must be a tuple of texts"),
        ("IGNORED", (r"(",), "is no pattern"),
        ("LEFT_OUT", {"vision(": "its vision tower"}, "is no pattern"),
        ("LEFT_OUT", ("vision",), "must map patterns"),
        ("STORED_HEAD", None, "must be the name of a tensor"),
        ("as_stored", lambda tensors, spec: spec, r"must be a function of \(spec, tensors\)"),
        ("unused", {}, r"must be a function of \(spec, tensors\)"),
    ],
)
def test_a_hook_of_the_wrong_kind_is_refused(hook, value, said):
    with pytest.raises(CutawayError, match=f"{hook} of made_up .*{said}"):
        registered([family_file(**{hook: value})])


def test_no_two_families_claim_one_architecture():
    other = family_file()
    other.__name__ = "another"
    with pytest.raises(CutawayError, match="made_up and another both have 'made_up' in their MODEL_TYPES"):
        registered([family_file(), other])
