"""The same checkpoint in transformers, beside ours, layer by layer: where do the two first part?"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec
from cutaway.trace.trace import Trace
from cutaway.trace.verification.check import Check, deviation

# transformers works in float32 in some places even in a float64 model (norms, rotations, softmaxes).
AGAINST_TOLERANCE = {"float32": 1e-4, "float64": 1e-5, "bfloat16": 0.1, "float16": 0.02}


def points_to_compare(spec: ModelSpec) -> list[str]:
    """The points that transformers can show as well: the stream after each layer, the patterns, the logits."""
    last = "final.norm" if spec.final_norm is not None else f"layers.{spec.n_layers - 1}.resid_post"
    streams = [f"layers.{i}.resid_post" for i in range(spec.n_layers - 1)]
    patterns = [f"layers.{i}.attn.pattern" for i in range(spec.n_layers)]
    return ["embed.out", *streams, *patterns, last, *([] if spec.headless else ["logits"])]


def against_transformers(trace: Trace, path: Path) -> Iterator[Check]:
    """Run the checkpoint at `path` in transformers on the trace's ids; one Check per compared point, in order.

    The trace must hold `points_to_compare`. Deviations are relative to the largest value of the point.
    Raises CutawayError where transformers is missing or cannot read the checkpoint.
    """
    spec, tolerance = trace.spec, AGAINST_TOLERANCE[trace.dtype]
    streams, patterns, logits = _their_pass(trace, path)
    yield Check("embed.out", deviation(trace["embed.out"], streams[0]), tolerance)
    for i in range(spec.n_layers):
        if i < len(patterns) and patterns[i] is not None:
            at = f"layers.{i}.attn.pattern"
            yield Check(at, deviation(trace[at], patterns[i]), tolerance)
        last = i == spec.n_layers - 1
        at = "final.norm" if last and spec.final_norm is not None else f"layers.{i}.resid_post"
        yield Check(at, deviation(trace[at], streams[i + 1]), tolerance)
    if logits is not None and not spec.headless:
        yield Check("logits", deviation(trace.logits, logits), tolerance)


def _their_precision(dtype: str) -> Any:
    """Theirs is ours, but for 16 bits, whose rounding is measured against float32."""
    import torch

    return torch.float64 if dtype == "float64" else torch.float32


def _their_pass(trace: Trace, path: Path) -> tuple[Sequence[np.ndarray], Sequence[Any], np.ndarray | None]:
    """Streams `[T, d]` (embedding, then after each layer, the last normed), patterns `[H, T, T]`, logits `[T, V]`."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # no bars where nobody watches
    try:
        import torch
        import transformers
    except ImportError as error:
        raise CutawayError(
            f"Comparing needs transformers and torch, which cannot be imported ({error}); "
            'install them with `pip install "cutaway[test]"`.'
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModel if trace.spec.headless else transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {"dtype": _their_precision(trace.dtype), "attn_implementation": "eager"}
    folder = path
    if path.is_file():
        folder, settings["gguf_file"] = path.parent, path.name
    if not trace.spec.causal and trace.spec.head_transform is not None:
        kind = transformers.AutoModelForMaskedLM
    try:
        theirs = kind.from_pretrained(str(folder), local_files_only=True, **settings).eval()
    except Exception as error:  # whatever transformers raises: its reason is what people need
        raise CutawayError(
            f"transformers cannot load {path}: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None
    with torch.inference_mode():
        out = theirs(torch.tensor([trace.prompt.ids]), output_hidden_states=True, output_attentions=True)
    streams = [stream[0].numpy() for stream in out.hidden_states]
    patterns = [None if pattern is None else pattern[0].numpy() for pattern in out.attentions or ()]
    logits = getattr(out, "logits", None)
    return streams, patterns, None if logits is None else logits[0].numpy()
