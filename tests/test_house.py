"""The plan of the house: who may import whom, who may know a model's family, and what an import costs."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "cutaway"
FILES = sorted(SOURCE.rglob("*.py"))

# A room imports only from rooms that stand before it; those of one line stand side by side.
ROOMS = (
    ("errors", "__version__"),
    ("progress", "places", "data", "reading"),
    ("examples",),
    ("spec",),
    ("text",),
    ("points",),
    ("engines",),
    ("forward",),
    ("checkpoints",),
    ("trace",),
    ("generate",),
    ("model",),
    ("lens",),
    ("embeddings",),
    ("train",),
    ("serve",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}

# Only these may know that there are families of models, and what they are called.
KNOW_FAMILIES = ("checkpoints", "text", "spec/catalog.py", "spec/builders.py", "cli")
FAMILY = re.compile(
    r"\b(gpt|llama(?!\.cpp)|mi[sx]tral|qwen|gemma|bert|deepseek|phi-?\d|neox|pythia|smollm)", re.IGNORECASE
)


def name(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def imports(source: str, package: tuple[str, ...] = ("cutaway",)) -> Iterator[tuple[str, int]]:
    """Every module of ours that a source imports, anywhere in it, with the line; relative imports made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{module}.{alias.name}" for alias in node.names] if module == "cutaway" else [module]
        else:
            continue
        yield from ((module, node.lineno) for module in found if module.split(".")[0] == "cutaway")


def wrong_imports(source: str, path: str) -> list[str]:
    """What a file at this place of the package imports from a room that does not stand before its own."""
    parts = path.removesuffix(".py").split("/")
    wrong = []
    for module, line in imports(source, ("cutaway", *parts[:-1])):
        names = module.split(".")
        # A name that `cutaway/__init__.py` hands out belongs to the roof.
        room = names[1] if len(names) > 1 and names[1] in FLOOR else "__init__"
        if room != parts[0] and FLOOR[room] >= FLOOR[parts[0]]:
            wrong.append(f"line {line}: {module}")
    return wrong


def loaded_with(module: str, sources: Mapping[str, str], faces: Iterable[str] = ()) -> set[str]:
    """The modules among `sources` that this one's code loads, as it is imported or when a function of it runs."""
    package = tuple(module.split("."))[: None if module in faces else -1]
    found = set()
    for node in run_nodes(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            inside = {alias.name: f"{source}.{alias.name}" for alias in node.names}
            found |= {inside[name] if inside[name] in sources else source for name in inside}
    return found & set(sources) - {module}


def run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All of a tree but what stands under `if TYPE_CHECKING`, which never runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            children: list[ast.AST] = list(child.orelse)
        else:
            children = [child]
        for one in children:
            yield one
            yield from run_nodes(one)


def needed(sources: Mapping[str, str], faces: Iterable[str] = ()) -> dict[str, set[str]]:
    """What each module needs; `faces` are the modules that are the `__init__.py` of their package."""
    return {module: loaded_with(module, sources, faces) for module in sources}


def rooms_needed(package: str, needs: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """What the files and rooms that stand in a package need of one another, each room taken whole."""

    def room(module: str) -> str:
        return module.removeprefix(f"{package}.").split(".")[0]

    found: dict[str, set[str]] = {}
    for module in needs:
        if module.startswith(f"{package}."):
            others = {room(other) for other in needs[module] if other.startswith(f"{package}.")}
            found.setdefault(room(module), set()).update(others - {room(module)})
    return found


def circle(needs: Mapping[str, set[str]]) -> list[str]:
    """Those that need one another, from one round to itself; none where there is an order to read all of them in."""
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # each needs the next
    return []


def dotted(file: Path) -> str:
    return ".".join(("cutaway", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def texts(file: Path) -> Iterator[tuple[str, int]]:
    """The strings that a file computes with: no docstrings, no list of what it exports."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.Assign) and _assigns_all(node))]
    told = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value, node.lineno


def _assigns_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def test_every_room_of_the_package_has_its_place_in_the_plan():
    assert {name(file).split("/")[0].removesuffix(".py") for file in FILES} <= set(FLOOR)


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_module_imports_only_from_rooms_that_stand_before_its_own(file):
    assert wrong_imports(file.read_text(encoding="utf-8"), name(file)) == []


@pytest.mark.parametrize(
    ("source", "path", "wrong"),
    [
        ("from cutaway.model import load", "spec/count.py", ["line 1: cutaway.model"]),
        ("def f():\n    import cutaway.cli.trace", "engines/cpu/sums.py", ["line 2: cutaway.cli.trace"]),
        ("from cutaway import load", "forward/norm.py", ["line 1: cutaway.load"]),
        ("from ...trace import Trace", "engines/cpu/sums.py", ["line 1: cutaway.trace"]),
        ("from cutaway import progress\nimport numpy", "spec/count.py", []),
        ("from cutaway.forward import norm", "forward/block.py", []),
        ("from cutaway.spec import ModelSpec", "forward/block.py", []),
    ],
)
def test_a_wrong_import_would_be_noticed(source, path, wrong):
    assert wrong_imports(source, path) == wrong


FACES = [dotted(file) for file in FILES if file.name == "__init__.py"]


@cache
def needed_here() -> dict[str, set[str]]:
    return needed({dotted(file): file.read_text(encoding="utf-8") for file in FILES}, FACES)


def test_no_modules_need_one_another_in_a_circle_not_even_from_inside_a_function():
    assert circle(needed_here()) == []


@pytest.mark.parametrize("package", FACES)
def test_no_rooms_need_one_another_in_a_circle_each_taken_whole(package):
    assert circle(rooms_needed(package, needed_here())) == []


def test_a_circle_of_rooms_would_be_noticed_where_no_modules_make_one():
    sources = {
        "cutaway.trace.edits.kinds": "from cutaway.trace.trace import Trace",
        "cutaway.trace.edits.told": "",
        "cutaway.trace.trace": "from cutaway.trace.edits.told import told",
        "cutaway.points": "",
    }
    needs = needed(sources)
    assert circle(needs) == []
    assert sorted(set(circle(rooms_needed("cutaway.trace", needs)))) == ["edits", "trace"]
    assert circle(rooms_needed("cutaway", needs)) == []


@pytest.mark.parametrize("face", sorted((SOURCE / "trace").rglob("__init__.py")), ids=name)
def test_the_face_of_a_room_of_trace_says_what_stands_where(face):
    said = ast.get_docstring(ast.parse(face.read_text(encoding="utf-8"))) or ""
    standing = {p.stem for p in face.parent.glob("*.py")} | {p.parent.name for p in face.parent.glob("*/__init__.py")}
    assert {inside for inside in standing - {"__init__"} if f"`{inside}`" not in said} == set()


@pytest.mark.parametrize(
    ("needs", "of"),
    [
        ("from cutaway.trace.draw import draw", ["cutaway.trace.draw", "cutaway.trace.trace"]),
        (
            "class Trace:\n    def show(self):\n        from .draw import draw",
            ["cutaway.trace.draw", "cutaway.trace.trace"],
        ),
        ("def show():\n    import cutaway.trace.draw as d", ["cutaway.trace.draw", "cutaway.trace.trace"]),
        ("from cutaway.trace import draw", ["cutaway.trace.draw", "cutaway.trace.trace"]),
        ("from cutaway.trace import Trace", ["cutaway.trace", "cutaway.trace.trace"]),
        ("from . import Trace", ["cutaway.trace", "cutaway.trace.trace"]),
        ("if TYPE_CHECKING:\n    from cutaway.trace.draw import draw", []),
        ("from cutaway.points import Point", []),
    ],
)
def test_a_circle_would_be_noticed(needs, of):
    sources = {
        "cutaway.points": "import numpy",
        "cutaway.trace": "from .trace import Trace",
        "cutaway.trace.draw": "from cutaway.trace.trace import Trace",
        "cutaway.trace.trace": needs,
    }
    found = circle(needed(sources, ["cutaway.points", "cutaway.trace"]))
    assert sorted(set(found)) == of and found[:1] == found[-1:]


@pytest.mark.parametrize("file", [f for f in FILES if not name(f).startswith(KNOW_FAMILIES)], ids=name)
def test_no_stage_engine_or_trace_names_a_family_of_models(file):
    named = [(text, line) for text, line in texts(file) if FAMILY.search(text)]
    if file == SOURCE / "model.py":  # the model that is loaded where none is named
        named = [(text, line) for text, line in named if text != "smollm2-135m"]
    assert named == []


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_file_is_longer_than_400_lines(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("word", ["util", "helper", "misc", "common", "manager"])
def test_no_file_is_called_after_what_it_might_hold(word):
    assert [name(file) for file in FILES if word in file.stem.lower()] == []


def test_no_two_test_files_bear_one_name():
    """Python would take the second for the first, and none of the tests would run."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


HEAVY = ("numpy", "numba", "llvmlite", "tokenizers", "safetensors", "jinja2", "huggingface_hub", "rich", "torch")


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import cutaway", "import cutaway.cli"])
def test_importing_the_package_imports_nothing_heavy(statement):
    assert loaded_by(statement) & set(HEAVY) == set()


def test_the_core_never_imports_torch():
    """A model is loaded, traced and run; torch, which the tests have, stays out."""
    run = (
        "import cutaway; m = cutaway.load('toy'); t = m.trace('<BOS> dragon'); t.next_tokens(3); "
        "m.generate('<BOS>', max_tokens=3, seed=0); list(m.verify())"
    )
    assert loaded_by(run) & {"torch", "transformers", "gguf"} == set()


def test_the_reference_engine_runs_on_numpy_alone():
    """As in a browser, where nothing else of the list is to be had."""
    run = "import cutaway; m = cutaway.load('toy', engine='numpy'); m.trace('<BOS> dragon')['layers.0.attn.pattern']"
    assert loaded_by(run) & set(HEAVY) == {"numpy"}


def written_files() -> list[Path]:
    places = ("src", "tests", "docs", "benchmarks", "notebooks", "examples", ".ci", "web/src")
    inside = [file for place in places for file in (ROOT / place).rglob("*") if file.is_file()]
    kinds = {
        ".py",
        ".md",
        ".toml",
        ".txt",
        ".cfg",
        ".yml",
        ".yaml",
        ".json",
        ".ts",
        ".svelte",
        ".html",
        ".sh",
        ".svg",
        "",
    }
    return [f for f in [*inside, *ROOT.glob("*.*")] if f.suffix in kinds and f.is_file() and f != Path(__file__)]


FOREIGN = {
    "a path of somebody's machine": r"(?<![\w.~-])/(?:work|home|root|Users)/\w",
    "the host of a package registry": r"(?:pypi\.org|pythonhosted\.org|registry\.npmjs|registry\.yarnpkg)",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_holds(what):
    pattern = re.compile(FOREIGN[what])
    found = []
    for file in written_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}: {hit[0]}" for hit in pattern.finditer(text)]
    assert found == []
