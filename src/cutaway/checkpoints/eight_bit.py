"""8-bit floats with a scale for every block of 128 × 128, as DeepSeek-V3 is published (arXiv:2412.19437, 3.3).

The file keeps a matrix's numbers (F8_E4M3, a byte each) and its scales apart, in `NAME` and `NAME_scale_inv`. The
engines read rows, so each row's 128 numbers and their scale are laid side by side, once, when a matrix is asked
for: 132 bytes for 128 weights, in memory of our own.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.engines.blocks import BLOCKS
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError

SUFFIX = "_scale_inv"
KIND = "F8_E4M3_128"
SIDE = BLOCKS[KIND].weights
_LAYOUT = np.dtype([("scale", "<f4"), ("codes", "u1", SIDE)])


def check_quantisation(settings: Mapping[str, Any], where: str) -> None:
    """Refuse the `quantization_config` of any other format than this one, by the setting that differs."""
    known: dict[str, tuple[object, ...]] = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "weight_block_size": ([SIDE, SIDE],),
        "activation_scheme": ("dynamic", None),  # how rows of x would be rounded for the same arithmetic; ours are not
    }
    for key, allowed in known.items():
        value = settings.get(key)
        if value not in allowed:
            raise CutawayError(
                f"{key!r} is {quoted(value)} in the 'quantization_config' of {where}; of quantised safetensors only "
                f"8-bit floats with a scale for every {SIDE} × {SIDE} block are read ({key} {allowed[0]!r}). "
                "Use the original or a GGUF file of the model."
            )
    harmless = {"modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize"}
    unknown = [key for key in settings if key not in known and key not in harmless]
    if unknown:
        raise CutawayError(
            f"The 'quantization_config' of {where} has {', '.join(map(quoted, unknown[:5]))}, which Cutaway does not "
            "know: it may change what the stored numbers mean, so the checkpoint is refused."
        )


def joined(tensors: Tensors) -> Tensors:
    """The same tensors, each 8-bit matrix that has scales put together with them as it is asked for.

    Raises CutawayError, when such a matrix is asked for, if the scales are not one per block.
    """
    with_scales = {name: tensors[name + SUFFIX] for name in tensors.codes if dict.__contains__(tensors, name + SUFFIX)}
    taken = {*with_scales, *(name + SUFFIX for name in with_scales)}
    return Tensors(
        tensors.source,
        {name: weight for name, weight in tensors.items() if name not in taken},
        {name: kind for name, kind in tensors.unreadable.items() if name not in taken},
        codes={name: codes for name, codes in tensors.codes.items() if name not in taken},
        made={
            name: partial(_weight, f"{tensors.source}: {name}", tensors.codes[name], scales)
            for name, scales in with_scales.items()
        },
    )


def _weight(what: str, codes: np.ndarray, scales: Weight) -> Weight:
    d_out, d_in = codes.shape
    expected = (-(-d_out // SIDE), -(-d_in // SIDE))
    if scales.shape != expected:
        raise CutawayError(
            f"{what}{SUFFIX} has shape {list(scales.shape)}; a matrix {list(codes.shape)} has a scale for every "
            f"{SIDE} × {SIDE} numbers, {list(expected)}."
        )
    if d_in % SIDE:
        raise CutawayError(f"{what} has rows of {d_in} 8-bit numbers; only whole blocks of {SIDE} can be read.")
    return side_by_side(codes, scales.dequantise(np.float32))


def side_by_side(codes: np.ndarray, scales: np.ndarray) -> Weight:
    """uint8 `[d_out, d_in]` and float32 `[d_out / 128 rounded up, d_in / 128]` as one weight: a copy of both."""
    d_out, d_in = codes.shape
    blocks = np.empty((d_out, d_in // SIDE), _LAYOUT)
    blocks["scale"] = np.repeat(scales, SIDE, axis=0)[:d_out]
    blocks["codes"] = codes.reshape(d_out, -1, SIDE)
    return Weight(KIND, (d_out, d_in), blocks.view(np.uint8).reshape(d_out, -1))
