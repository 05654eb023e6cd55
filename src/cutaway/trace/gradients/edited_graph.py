"""Edits of a pass whose values stay connected: what stands there afterwards remembers how it was made.

A cell that an edit sets (`Zero`, `Replace`, a cut edge) is a constant: what stood there has no part in the result, and
its gradient is 0. A cell that an edit works out from what stood there (`Add`, `Scale`, `Mean` over this pass, a
function) is followed back through that. Values from other runs are constants, those of the unedited run too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.engines.protocol import Array, Engine
from cutaway.errors import CutawayError
from cutaway.trace.edits.applying import Here, Met, apply_edit, fitting, meets, refuse_blind_queries
from cutaway.trace.edits.editing import EditedPass
from cutaway.trace.edits.kinds import Add, Drop, Function, Knockout, Mean, PointEdit, Replace, Resample, Scale, Zero
from cutaway.trace.edits.without import put

if TYPE_CHECKING:
    import torch

CONSTANT = (Zero, Resample, Replace, Knockout, Drop)  # and what is one of them: Freeze, Keep


class EditedGraph(EditedPass):
    """The tap of a pass with edits whose tensors keep their graph."""

    def changed(self, edit: PointEdit, value: Array, here: Here, *, in_place: bool) -> tuple[Array, int, int]:
        if isinstance(value, np.ndarray):  # whole numbers, which have no gradient
            return apply_edit(edit, value, here, in_place=False)
        met = meets(edit, self.engine.numpy(value), here)
        if met is None:
            return value, 0, 0
        return _with(self.engine, value, _new(edit, value, met), met, edit, here)

    def instead(self, sources: list[Array], value: Array) -> tuple[Array, int, int]:
        import torch

        # A tensor of its own: the gradient here is not that of the value that it is a copy of, which others read too.
        after = put(sources, value).clone() if sources else torch.zeros_like(value)
        return after, value.numel(), int((after.detach() != value.detach()).count_nonzero())


def _with(
    engine: Engine, value: "torch.Tensor", new: "torch.Tensor", met: Met, edit: PointEdit, here: Here
) -> "tuple[torch.Tensor, int, int]":
    """`value` with `new` in the cells that are meant. Also where no number changes: what stood there is cut off."""
    import torch

    mesh = tuple(torch.as_tensor(index, device=value.device) for index in met.mesh)
    if met.meant is not None:
        meant = torch.as_tensor(np.ascontiguousarray(np.broadcast_to(met.meant, met.block.shape)), device=value.device)
        new = torch.where(meant, new, value[mesh].to(new.dtype))
    after = value.clone()
    after[mesh] = new.to(value.dtype)
    numbers = engine.numpy(after)
    changed = met.changed(numbers[met.mesh])
    if changed:
        refuse_blind_queries(edit, numbers, here)
    return after, met.elements, changed


def _new(edit: PointEdit, value: "torch.Tensor", met: Met) -> "torch.Tensor":
    """What an edit puts in the place of the block, made from the tensors where it is made from them."""
    import torch

    wide = torch.from_numpy(met.block[:0]).dtype  # half sizes are worked on in float32, as without gradients
    for kinds, work in _FOLLOWED:
        if isinstance(edit, kinds):
            mesh = tuple(torch.as_tensor(index, device=value.device) for index in met.mesh)
            found = work(edit, value, value[mesh].to(wide), met)
            if found is not None:
                return found.to(wide)
            break
    else:
        if not isinstance(edit, CONSTANT):
            raise CutawayError(f"{edit}: how its values hang on what stood there is not known; it has no gradient.")
    constant = fitting(edit, edit.new(met.block, met.place), met.block, met.place)
    return torch.tensor(constant, dtype=wide, device=value.device)


def _added(edit: Any, value: Any, block: Any, met: Met) -> Any:
    edit.new(met.block, met.place)  # refuses a vector that does not fit
    return block + _like(block, edit.scale * edit.vector)


def _scaled(edit: Any, value: Any, block: Any, met: Met) -> Any:
    return block * edit.factor


def _mean(edit: Any, value: Any, block: Any, met: Met) -> Any:
    """The mean over the rows of this pass hangs on all of them; of other traces, on none."""
    if edit.source is not None:
        return None
    import torch

    edit.new(met.block, met.place)  # refuses a value without rows
    rows = met.place.axis("T")
    summed = torch.float32 if value.device.type == "mps" else torch.float64
    means = value.to(summed).mean(dim=rows, keepdim=True)
    taken = np.ix_(*[np.arange(1) if axis == rows else index for axis, index in enumerate(met.place.indices)])
    return means[tuple(torch.as_tensor(index, device=value.device) for index in taken)].expand(block.shape)


def _function(edit: Any, value: Any, block: Any, met: Met) -> Any:
    """A function is given a tensor, so that what it computes with torch can be followed back."""
    import torch

    try:
        found = edit.function(block.clone(), met.place)
    except RuntimeError as error:
        if "requires grad" not in str(error):
            raise
        raise CutawayError(
            f"{edit}: with gradients=True the function is given a torch tensor that remembers how it was made, and "
            "must compute with torch, not with NumPy."
        ) from None
    if not isinstance(found, torch.Tensor):
        return _like(block, fitting(edit, found, met.block, met.place))
    fitting(edit, found.detach().float().cpu().numpy(), met.block, met.place)  # refuses a shape that does not fit
    return found.to(block.device, block.dtype).expand(block.shape)


def _like(block: Any, values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values), dtype=block.dtype, device=block.device)


# What is followed back: how the new values are made of the block `[…]`, in torch; None where they are a constant.
_FOLLOWED: tuple[tuple[type[PointEdit], Callable[[Any, Any, Any, Met], Any]], ...] = (
    (Add, _added),
    (Scale, _scaled),
    (Mean, _mean),
    (Function, _function),
)
