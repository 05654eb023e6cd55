"""A progress bar on standard error for whatever takes over a second; silent where nobody watches."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextmanager
def progress(
    label: str, total: int | None, unit: str = "bytes", *, after: float = 0.0
) -> Iterator[Callable[[int], None]]:
    """Show `label` and a bar while the block runs; yields `advance(amount)`.

    `total` counts `unit`s ("bytes" are shown in MB and MB/s); None where it is not known, and then only the
    time that has passed is shown. Work that is mostly quick gives `after`: the bar appears with the first
    advance after so many seconds. Nothing is drawn when standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    with ExitStack() as shown:
        begun, done = time.monotonic(), 0
        move: Callable[[int], None] | None = None

        def advance(amount: int) -> None:
            nonlocal done, move
            done += amount
            if move is not None:
                move(amount)
            elif time.monotonic() - begun >= after:
                bars = shown.enter_context(_bars(total, unit))
                move = partial(bars.advance, bars.add_task(label, total=total, completed=done))

        if after == 0:
            advance(0)
        yield advance


def _bars(total: int | None, unit: str) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if total is None:
        columns = [SpinnerColumn(), *columns, TimeElapsedColumn()]
    else:
        amounts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
        columns += [BarColumn(), *amounts, TimeRemainingColumn()]
    return Progress(*columns, console=Console(stderr=True), transient=True)
