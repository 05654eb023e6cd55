"""The files that both sides read: the model's own, and what is made of it once, in a folder of the user's."""

from collections.abc import Callable
from pathlib import Path

from lines import Worker, WorkerFailed

Start = Callable[[str, Path | str], Worker]  # who, on which file


class Files:
    """`place(kind)` gives the file of a kind, made first where it is not there.

    Kinds: "model"; "Q4_0", "Q8_0", "Q4_K_M" by llama.cpp's own library, from the model's file; "float32", the
    dequantised weights for transformers; "int8", those as CTranslate2 converts them.
    """

    def __init__(self, model: Path, folder: Path, start: Start, told: Callable[[str], None]) -> None:
        self._model, self._start, self._told = model, start, told
        self._folder = folder / f"{model.stem}-{model.stat().st_size}"

    def place(self, kind: str) -> Path:
        """Raises WorkerFailed where the file cannot be made."""
        if kind == "model":
            return self._model
        name = {"float32": "float32", "int8": "ctranslate2-int8"}.get(kind, f"{kind}.gguf")
        target = self._folder / name
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._told(f"making {target}")
            self._make(kind, target)
        return target

    def _make(self, kind: str, target: Path) -> None:
        if kind == "float32":
            who, file, job, settings = "cutaway", self._model, "folder", {"path": str(target)}
        elif kind == "int8":
            who, file, job, settings = "CTranslate2", target, "convert", {"folder": str(self.place("float32"))}
        elif self._model.suffix == ".gguf":
            who, file, job, settings = "llama.cpp", self._model, "quantise", {"target": str(target), "kind": kind}
        else:
            raise WorkerFailed(f"only a GGUF file is quantised again, and {self._model.name} is none")
        worker = self._start(who, file)
        try:
            worker.prepare("make", job, settings)
        finally:
            worker.close()
