"""One runner for the long studies: a file for each job, so that a killed run goes on.

A job is a key, such as ``("LV low", "refined", 3)``.  What is saved is whole or not
there; a file that was damaged later is named, and its job is done again.  So are the jobs
whose files another state of the package made: each has a folder of its own.
"""

import json
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import pairwise, product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple
from zipfile import BadZipFile

import pandas as pd

from benchmarks import PACKAGE

__all__ = [
    "JSON",
    "Format",
    "Saved",
    "code",
    "finished",
    "in_processes",
    "in_turn",
    "kept_in",
    "keys_of",
    "known_from",
    "run",
    "table_of",
]

type Key = tuple[str | int, ...]
type Work = Callable[[Any], Any]
type Workers = Callable[[Work, Sequence[Key]], Iterator[tuple[Key, Any]]]


@contextmanager
def finished(path: Path) -> Iterator[Path]:
    """Yield a path to write to; what is there at the end, without an error, gets its name."""
    unfinished = path.with_suffix(".unfinished")
    yield unfinished
    os.replace(unfinished, path)


@cache
def code() -> str:
    """Return what tells the package's source from any other."""
    sources = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return sha256(sources).hexdigest()[:12]


@contextmanager
def kept_in(folder: Path, *, quick: bool) -> Iterator[Path]:
    """Yield the folder for results; that of a quick run is new, and gone at the end."""
    if not quick:
        yield folder
        return
    with TemporaryDirectory() as name:
        yield Path(name)


class Format(NamedTuple):
    """How a result becomes a file, and a file a result."""

    suffix: str
    write: Callable[[Any, Path], Any]
    open: Callable[[Path], Any]

    def read(self, path: Path):
        """Return what a file holds.

        Raises
        ------
        ValueError
            If it cannot be read, with its name.
        """
        try:
            return self.open(path)
        except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
            msg = (
                f"{path} cannot be read: {error}. Run the study again: it makes anew what is "
                "missing or broken."
            )
            raise ValueError(msg) from error


JSON = Format(
    ".json",
    write=lambda row, path: path.write_text(json.dumps(row)),
    open=lambda path: json.loads(path.read_text()),
)


def _name(key: Key) -> str:
    return "-".join(str(part).replace(" ", "-") for part in key)


@dataclass(frozen=True)
class Saved:
    """The results of a study, one file each.

    Attributes
    ----------
    folder : Path
        Where they are, those of each state of the package in a folder of their own.
    format : Format
        How they are saved.
    name : callable
        Maps a key to the name of its file, without the suffix.
    known : pandas.DataFrame, optional
        A table with rows of jobs whose files need not be there, by key.
    """

    folder: Path
    format: Format
    name: Callable[[Any], str] = _name
    known: pd.DataFrame | None = None

    @property
    def here(self) -> Path:
        """Where the present package's results are."""
        return self.folder / code()

    def left_aside(self) -> int:
        """Return how many results are those of another package."""
        every = self.folder.rglob(f"*{self.format.suffix}")
        return sum(path.parent != self.here for path in every)

    def path(self, key: Key) -> Path:
        """Return where the result of a job is, or would be."""
        return self.here / f"{self.name(key)}{self.format.suffix}"

    def save(self, key: Key, result):
        """Write a result, all of the file or nothing."""
        self.here.mkdir(parents=True, exist_ok=True)
        with finished(self.path(key)) as unfinished:
            self.format.write(result, unfinished)

    def items(self, keys: Iterable[Key]) -> Iterator[tuple[Key, Any]]:
        """Iterate over the jobs that have results."""
        there = [key for key in keys if self.path(key).exists()]
        if not there:
            msg = f"there are no results in {self.here}; run the study first."
            raise FileNotFoundError(msg)
        for key in there:
            yield key, self.format.read(self.path(key))

    def table(
        self, keys: Sequence[Key], table_of: Callable[[Iterator[tuple[Key, Any]]], pd.DataFrame]
    ) -> pd.DataFrame:
        """Return the table of the jobs that have results, with the known rows of others."""
        if self.known is None:
            return table_of(self.items(keys))
        done = {key for key in keys if self.path(key).exists()}
        # By job: one that failed has fewer rows than the known one that it replaces.
        known = self.known[[job not in done for job in self._known_jobs(keys)]]
        return pd.concat([table_of(self.items(keys)), known]) if done else known

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Return the jobs without a result, and those whose file is broken, which is said."""
        known = set(self._known_jobs(keys))
        return [
            key
            for key in keys
            if not (self._is_whole(key) if self.path(key).exists() else key in known)
        ]

    def _known_jobs(self, keys: Sequence[Key]) -> list[Key]:
        """Return the job of each known row: several rows of one have more levels than its key."""
        size = max(map(len, keys), default=0)
        return [] if self.known is None else [row[:size] for row in self.known.index]

    def _is_whole(self, key: Key) -> bool:
        try:
            self.format.read(self.path(key))
        except ValueError:
            print(f"{self.path(key)} is broken, and is made again.")
            return False
        return True


def keys_of(*names: Sequence[str], replicates: Sequence[int], ends: Sequence[int]) -> list[Key]:
    """Return the keys of a study, block by block: it is whole, at some size, at every end.

    Parameters
    ----------
    *names : sequence of str
        What varies beside the data set; a key has one of each.
    replicates : sequence of int
        Numbers of the data sets, the last part of a key.
    ends : sequence of int
        How many data sets there are at the end of each block.
    """
    bounds = [0, *(end for end in ends if end < len(replicates)), len(replicates)]
    return [
        (*name, replicate)
        for first, end in pairwise(bounds)
        for name in product(*names)
        for replicate in replicates[first:end]
    ]


def known_from(csv: Path, index: Sequence[str]) -> pd.DataFrame | None:
    """Return the table in a file, if it is there."""
    return pd.read_csv(csv, index_col=index) if csv.exists() else None


def table_of(rows: Iterable[tuple[Key, dict]], index: Sequence[str]) -> pd.DataFrame:
    """Return a table of the rows of some keys."""
    rows = dict(rows)
    return pd.DataFrame(rows.values(), index=pd.MultiIndex.from_tuples(rows, names=index))


def run(
    keys: Sequence[Key],
    work: Work,
    saved: Saved,
    *,
    workers: Workers | None = None,
    report: Callable[[Key, Any], None] = lambda key, result: None,
):
    """Do the jobs that have no result yet.  This process alone writes.

    Parameters
    ----------
    keys : sequence of tuple
        All jobs of the study, in their order.
    work : callable
        Maps a key to its result.
    saved : Saved
        What has been done, and where results go.
    workers : callable, optional
        Does many jobs: maps the work and the missing keys to pairs of a key and its
        result.  One after the other in this process unless given.
    report : callable, optional
        Told of every key and result that was saved.
    """
    if aside := saved.left_aside():
        print(f"{aside} results of another state of the package are left aside in {saved.folder}.")
    with closing((workers or in_turn)(work, saved.missing(keys))) as results:
        for key, result in results:
            saved.save(key, result)
            report(key, result)


def in_turn(work: Work, keys: Sequence[Key]) -> Iterator[tuple[Key, Any]]:
    """Do one job after the other, in this process."""
    for key in keys:
        yield key, work(key)


def in_processes(seconds: int, given_up: Callable[[Any, int, int | None], Any]) -> Workers:
    """Return workers that do every job in a process of its own, within some CPU seconds.

    The work is called with a key and with a function, which takes what is known of the
    result so far.  A job that ends without a result has that of ``given_up``, called with
    what was known last, the seconds and the exit code.
    """

    def workers(work, keys):
        for key in keys:
            yield key, _alone(work, key, seconds, given_up)

    return workers


def _alone(work, key: Key, seconds: int, given_up):
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_limited, args=(work, key, seconds, sender))
    process.start()
    sender.close()
    is_result, known = False, None
    # The end of the process, not that of the pipe: a child of its own may hold that open.
    while receiver in wait([receiver, process.sentinel]):
        try:
            is_result, known = receiver.recv()
        except (EOFError, OSError):  # killed, perhaps while it sent
            break
    process.join()
    if known is None:
        msg = f"the process of {key} ended before its job began (exit code {process.exitcode})."
        raise ChildProcessError(msg)
    return known if is_result else given_up(known, seconds, process.exitcode)


def _limited(work, key: Key, seconds: int, sender: Connection):
    end = round(process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, end))
    sender.send((True, work(key, lambda known: sender.send((False, known)))))
