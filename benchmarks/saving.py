"""Files that are whole or not there, so that an interrupted run can go on where it stopped."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["finished"]


@contextmanager
def finished(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there at the end, without an error, gets its name."""
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    os.replace(unfinished, path)
