"""A progress bar on standard error for whatever takes over a second; silent where nobody watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int | None, unit: str = "bytes") -> Iterator[Callable[[int], None]]:
    """Show `label` and a bar while the block runs; yields `advance(amount)`.

    `total` counts `unit`s ("bytes" are shown in MB and MB/s); None where it is not known. Nothing is
    drawn when standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total)
        yield lambda amount: bars.advance(task, amount)
