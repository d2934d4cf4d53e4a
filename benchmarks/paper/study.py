"""The study: one task per case, method and data set, saved as it finishes."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import xarray as xr
from joblib import Parallel, delayed, parallel_config
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.paper.cases import CASES, case_named
from benchmarks.paper.methods import METHODS, Effort
from benchmarks.paper.results import is_readable
from benchmarks.paper.summary import failed, summarise
from benchmarks.saving import finished

__all__ = ["Task", "fit", "path_of", "run", "tasks_of"]

BLOCKS = (0, 1, 5, 10, 30, 100)  # the study is whole, at some size, at every end of a block
DAY = 86_400


class Task(NamedTuple):
    """One fit."""

    case: str
    method: str
    replicate: int

    @property
    def seed(self) -> int:
        """The method's own seed; that of the data is ``replicate``."""
        index = [case.name for case in CASES].index(self.case)
        entropy = [index, int.from_bytes(self.method.encode(), "little"), self.replicate]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def tasks_of(cases: Sequence[str], methods: Sequence[str], replicates: int) -> list[Task]:
    """Return all fits, in blocks of data sets; within one, those that share a compilation.

    Parameters
    ----------
    cases, methods : sequence of str
        Names in ``CASES`` and ``METHODS``.
    replicates : int
        Data sets of every case.
    """
    ends = [end for end in BLOCKS if end < replicates] + [replicates]
    return [
        Task(case, method, replicate)
        for first, end in pairwise(ends)
        for case in cases
        for method in methods
        for replicate in range(first, end)
    ]


def path_of(task: Task, out: Path) -> Path:
    """Return where a fit is saved."""
    slug = case_named(task.case).slug
    return out / "fits" / f"{slug}_{task.method}_{task.replicate:03d}.nc"


def fit(task: Task, effort: Effort) -> tuple[Task, xr.Dataset]:
    """Fit and summarise; what goes wrong is a result too."""
    case = case_named(task.case)
    start = process_time()
    with _quiet():
        try:
            data = case.simulate(task.replicate)
            draws = METHODS[task.method](case, data, task.seed, effort)
            seconds = process_time() - start
            result = summarise(case, data, draws)
        except Exception as error:
            seconds = process_time() - start
            result = failed(case, f"{type(error).__name__}: {error}")
    result = result.assign(cpu_seconds=seconds, data_seed=task.replicate, method_seed=task.seed)
    return task, result.assign_attrs(task._asdict() | effort._asdict())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep thousands of fits from saying what their results say."""
    logger = logging.getLogger("pymc")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def run(
    tasks: Sequence[Task],
    out: Path,
    effort: Effort,
    *,
    n_jobs: int = 1,
    scheduler: str | None = None,
) -> None:
    """Fit what is not saved yet, or saved in a file that is broken.

    This process alone writes, so that workers elsewhere need no shared disk.
    What fits raise is their result; one that kills its process ends the run,
    and leaves those that had finished.

    Parameters
    ----------
    tasks : sequence of Task
        All fits of the study, in their order.
    out : Path
        Folder of the results.
    effort : Effort
        Lengths of chains.
    n_jobs : int
        Processes on this machine.
    scheduler : str, optional
        Address of a Dask scheduler, whose workers then do the work.

    Raises
    ------
    ValueError
        If the folder has fits with chains of other lengths.
    ImportError
        If what it needs to save them is missing.
    """
    try:
        import h5netcdf  # noqa: F401
        import h5py  # noqa: F401
    except ImportError as error:
        msg = "benchmarks.paper saves its fits with h5netcdf and h5py: pip install .[study]"
        raise ImportError(msg) from error
    (out / "fits").mkdir(parents=True, exist_ok=True)
    _keep_to_one(effort, out)
    missing = [task for task in tasks if not is_readable(path_of(task, out))]
    for task in missing:
        if (path := path_of(task, out)).exists():
            print(f"{path} is broken, and is fitted again.")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ExitStack() as stack:
        stack.enter_context(_backend(n_jobs, scheduler))
        # The time left by the mean of all fits so far: they differ much in length.
        progress = stack.enter_context(
            Progress("{task.description}", *columns, speed_estimate_period=30 * DAY)
        )
        bar = progress.add_task("Fitting", total=len(missing))
        parallel = Parallel(return_as="generator_unordered", batch_size=1)
        for task, result in parallel(delayed(fit)(task, effort) for task in missing):
            _save(result, path_of(task, out))
            progress.update(bar, advance=1, description=" ".join(map(str, task)))


@contextmanager
def _backend(n_jobs: int, scheduler: str | None) -> Iterator[None]:
    if scheduler is None:
        with parallel_config("loky", n_jobs=n_jobs, inner_max_num_threads=1):
            yield
        return
    try:
        from distributed import Client
    except ImportError as error:
        msg = "--scheduler needs Dask: pip install .[dask]"
        raise ImportError(msg) from error
    with Client(scheduler), parallel_config("dask"):
        yield


def _keep_to_one(effort: Effort, out: Path) -> None:
    path, given = out / "effort.json", effort._asdict()
    if not path.exists():
        path.write_text(json.dumps(given), "utf-8")
    there = json.loads(path.read_text("utf-8"))
    if there != given:
        msg = (
            f"the fits in {out} have chains of the lengths {there}, these would have {given}. "
            "Choose another folder (--out), so that no table mixes them."
        )
        raise ValueError(msg)


def _save(result: xr.Dataset, path: Path) -> None:
    with finished(path) as unfinished:
        result.to_netcdf(unfinished, engine="h5netcdf")
