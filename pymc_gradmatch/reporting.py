"""Words for what takes long: one line on the terminal, after the first second."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Timer

import pandas as pd
from rich.console import Console
from rich.errors import LiveError
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

DELAY = 1.0  # seconds; what is done by then needs no words


@contextmanager
def reporting(doing: str, *, enabled: object = True) -> Iterator[Callable[[str], None]]:
    """Show what is being done, and for how long, while a block runs; gone when it ends.

    Parameters
    ----------
    doing : str
        What the block does, for example ``"finding the mode"``.
    enabled : object, default True
        False, or a ``progressbar`` that is: shows nothing.

    Yields
    ------
    callable
        Takes what is being done from now on.

    Examples
    --------
    >>> from pymc_gradmatch.reporting import reporting
    >>> with reporting("finding the mode", enabled=False) as say:
    ...     say("finding the mode: the second climb")
    """
    display = Progress(
        SpinnerColumn(),
        "{task.description}",
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not enabled,
    )
    task = display.add_task(doing, total=None)

    def show():
        with suppress(LiveError):  # before rich 14.1, where another display is on
            display.start()

    timer = Timer(DELAY, show)
    timer.daemon = True
    timer.start()
    try:
        yield lambda words: display.update(task, description=words)
    finally:
        timer.cancel()
        timer.join()
        display.stop()


def furthest(moved: pd.Series, decimals: int = 1) -> str:
    """Name the three largest moves, with their sizes."""
    most = moved[moved.abs().sort_values(ascending=False).index[:3]]
    return ", ".join(f"{name} by {value:+.{decimals}f}" for name, value in most.items())


def printed(verdict: str, table: pd.DataFrame) -> str:
    """Return a verdict and its table as text."""
    return f"{verdict}\n\n{table.to_string(float_format='{:.3g}'.format)}"
