"""The study: one task per case, method and data set, saved as it finishes."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from time import process_time
from typing import NamedTuple

import numpy as np
import xarray as xr
from joblib import parallel_config
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import runner
from benchmarks.cases import PAPER, named
from benchmarks.paper.methods import METHODS, Effort
from benchmarks.paper.results import NETCDF
from benchmarks.paper.summary import failed, summarise
from pymc_gradmatch.sampling import in_parallel

__all__ = ["Task", "fit", "run", "saved_in", "tasks_of"]

ENDS = (1, 5, 10, 30, 100)
DAY = 86_400


class Task(NamedTuple):
    """One fit."""

    case: str
    method: str
    replicate: int

    @property
    def seed(self) -> int:
        """The method's own seed; that of the data is ``replicate``."""
        index = [case.name for case in PAPER].index(self.case)
        entropy = [index, int.from_bytes(self.method.encode(), "little"), self.replicate]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    @property
    def file(self) -> str:
        """Name of the file that it is saved in."""
        return f"{named(PAPER, self.case).slug}_{self.method}_{self.replicate:03d}"


def tasks_of(cases: Sequence[str], methods: Sequence[str], replicates: int) -> list[Task]:
    """Return all fits, in blocks of data sets; within one, those that share a compilation.

    Parameters
    ----------
    cases, methods : sequence of str
        Names in ``PAPER`` and ``METHODS``.
    replicates : int
        Data sets of every case.
    """
    keys = runner.keys_of(cases, methods, replicates=range(replicates), ends=ENDS)
    return [Task(*key) for key in keys]


def saved_in(out: Path) -> runner.Saved:
    """Return the fits that a folder has."""
    return runner.Saved(out / "fits", NETCDF, name=lambda task: task.file)


def fit(task: Task, effort: Effort) -> xr.Dataset:
    """Fit and summarise; what goes wrong is a result too."""
    case = named(PAPER, task.case)
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
    return result.assign_attrs(task._asdict() | effort._asdict())


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
    What fits raise is their result; one that kills its process is begun again, and ends the
    run when it has done so three times and all others are finished.

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
    """
    out.mkdir(parents=True, exist_ok=True)
    _keep_to_one(effort, out)
    runner.run(
        tasks,
        partial(fit, effort=effort),
        saved_in(out),
        workers=partial(_side_by_side, n_jobs=n_jobs, scheduler=scheduler),
    )


def _side_by_side(work, tasks, *, n_jobs, scheduler) -> Iterator[tuple[Task, xr.Dataset]]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # The time left by the mean of all fits so far: they differ much in length.
    progress = Progress("{task.description}", *columns, speed_estimate_period=30 * DAY)
    jobs = {task: (task,) for task in tasks}
    running = in_parallel(work, jobs, n_jobs=n_jobs, scheduler=scheduler)
    with parallel_config("loky", inner_max_num_threads=1), progress, closing(running):
        bar = progress.add_task("Fitting", total=len(tasks))
        for task, result in running:
            if isinstance(result, Exception):
                raise result
            yield task, result
            progress.update(bar, advance=1, description=" ".join(map(str, task)))


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
