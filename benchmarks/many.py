"""A thousand data sets by ``gm.fit_many``, and what twenty thousand would cost on a cluster.

``python -m benchmarks.many`` fits data sets of Lotka-Volterra (``--data-sets``, 1 000, of which
every other lacks a time and every third a value) exactly, into a file: in one process, in two,
and on a Dask cluster of two processes, one of which is killed in the middle.  It prints wall
and CPU seconds and whether the results are the same.  Then it says, from what was measured,
what 20 000 would take on so many workers: a worker starts, then fits one data set after the
other; the process that hands out work and writes takes its share of each fit, one at a time.
``--quick`` fits six.  Run it with ``OMP_NUM_THREADS=1``.

``--beside-fit`` fits data sets of Lotka-Volterra, of protein transduction, and counts of an
epidemic (``--data-sets``, a hundred; ``--only`` some of these) in one process, compilation
included, the same ones by ``gm.fit``, one by one, and by NumPyro and diffrax, compiled once for
all and told the truth, in coordinates made for it; it prints CPU seconds, and how far means and
verdicts are apart (``--quick``: three, and no NumPyro).

``--backends`` fits them (``--data-sets``, 32; ``--quick``: three) by ``backend="numba"`` and by
``"jax"``, on the device that JAX finds.
"""

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import dask
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from distributed import LocalCluster
from joblib.externals.loky import get_reusable_executor

import pymc_gradmatch as gm
from benchmarks import none_failed, show
from benchmarks.cases import ACCURACY, named
from benchmarks.jax_rival import (
    LENGTHS,
    Length,
    compiled_chain,
    import_jax,
    nuts,
    right_hand_side,
    solved,
    until_agreed,
)
from pymc_gradmatch.sampling import in_parallel
from pymc_gradmatch.sampling.batched_fits import bind_data
from pymc_gradmatch.sampling.many import VERDICT_FIELDS
from pymc_gradmatch.sampling.stack import InFile, Stack, open_file

LV = named(ACCURACY, "LV low")
COUNTS = "SIR, counts"
BESIDE = ("LV low", "PT low", COUNTS)
PUPILS, DAYS = 763, np.linspace(0, 14, 15)
TRUTH = np.array([1.5, 0.5, 0.01])  # both rates, and the share that is infected at the start
ROOT = str(Path(__file__).parents[1])
WORKERS = (1, 2, 8, 64, 256, 1_000)
ON_PAPER = 20_000
N_DRAWS = 4_000
BEGIN = """
import pymc_gradmatch as gm
gm.fit, gm.fit_many
from time import process_time
print(process_time())
"""


class Run(NamedTuple):
    """What one call took."""

    wall_s: float
    cpu_s: float
    """Of the process that hands out work and writes; all of it where there is no other."""
    fits: xr.Dataset
    bytes: int


def data_sets(n: int) -> tuple[list, list]:
    """Return times and observations: some lack their last time, some a value."""
    times, ys = [], []
    for k in range(n):
        data = LV.simulate(k)
        y = data.y.copy()
        if k % 3 == 0:
            y[5, 1] = np.nan
        last = len(data.t) - k % 2
        times.append(data.t[:last])
        ys.append(y[:last])
    return times, ys


def run(times, ys, folder: Path, **settings) -> Run:
    """Fit all into a file, and measure."""
    out = folder / "fits.zarr"
    wall, cpu = perf_counter(), process_time()
    fits = gm.fit_many(
        LV.ode, times, ys, priors=LV.priors(), exact=True, random_seed=1, progressbar=False,
        out=out, **settings,
    )  # fmt: skip
    took = perf_counter() - wall, process_time() - cpu
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    fits = fits.load()
    shutil.rmtree(out)
    return Run(*took, fits, size)


@contextmanager
def a_kill_after(n: int, cluster: LocalCluster) -> Iterator[list[int]]:
    """Kill one of the cluster's processes when so many fits are written."""
    add, done, killed = Stack.add, [], []

    def add_and_kill(stack, place, posterior):
        add(stack, place, posterior)
        done.append(place)
        if len(done) == n:
            killed.append(cluster.workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    with patch.object(Stack, "add", add_and_kill):
        yield killed


@contextmanager
def two_processes(folder: Path) -> Iterator[LocalCluster]:
    """Start a Dask cluster, whose scheduler is this process."""
    here = {
        "distributed.nanny.pre-spawn-environ": {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
        "distributed.worker.profile.enabled": False,  # 1 MB a fit
    }
    with (
        dask.config.set(here),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, local_directory=str(folder)
        ) as cluster,
    ):
        yield cluster


def on_dask(times, ys, folder: Path) -> Run:
    """Fit on a cluster of two processes, one of which is killed in the middle."""
    with two_processes(folder) as cluster, a_kill_after(len(ys) // 2, cluster) as killed:
        result = run(times, ys, folder, scheduler=cluster.scheduler_address)
        assert killed
        return result


def share_of_each(folder: Path, n: int = 200, first: int = 50) -> float:
    """Return the CPU seconds of this process, scheduler and writer, for each fit of a cluster.

    Of fits that take no time: a posterior that is there already comes back.
    """
    data = LV.simulate(0)
    fit = gm.fit(LV.ode, data.t, data.y, priors=LV.priors(), n_draws=1_000, progressbar=False)
    verdict = {name: getattr(fit, name) for name in VERDICT_FIELDS}
    posterior = fit.idata["posterior"].dataset.assign_attrs(verdict)
    stack = Stack(n, InFile(open_file(folder / "share.zarr", {"random_seed": "1"})), VERDICT_FIELDS)
    jobs = {place: (place,) for place in range(n)}
    with two_processes(folder) as cluster:
        work = partial(_given, posterior)
        fits = in_parallel(work, jobs, scheduler=cluster.scheduler_address)
        for done, (place, result) in enumerate(fits):
            stack.add(place, result)
            if done == first:
                start = process_time()
        return (process_time() - start) / (n - 1 - first)


def start_of_a_worker() -> float:
    """Return the CPU seconds of a fresh process up to its first fit, imports included."""
    command = [sys.executable, "-c", BEGIN]
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def _given(posterior: xr.Dataset, _: int) -> xr.Dataset:
    return posterior.copy(deep=True)


def same(one: xr.Dataset, other: xr.Dataset) -> bool:
    """Tell whether two runs found the same, to the last bit."""
    names = set(one.variables) | set(other.variables)
    return all(
        np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f")
        for name in names
    )


def on_paper(fit_s: float, share_s: float, start_s: float, size: float) -> pd.DataFrame:
    """Return what many data sets would take on workers.

    Parameters
    ----------
    fit_s : float
        CPU seconds of one fit.
    share_s : float
        CPU seconds that the process which hands out work and writes takes for one fit.
    start_s : float
        CPU seconds until a worker begins its first fit.
    size : float
        Bytes of one fit.
    """
    rows = []
    for n in WORKERS:
        # The last worker to finish has one fit more than the first; the writer is never idle
        # where workers are so many that fits come faster than they are written.
        working = start_s + np.ceil(ON_PAPER / n) * fit_s
        wall = max(working, start_s + fit_s + ON_PAPER * share_s)
        rows.append(
            {
                "workers": n,
                "wall_h": wall / 3_600,
                "busy": ON_PAPER * fit_s / (n * wall),
                "scheduler_share": ON_PAPER * share_s / wall,
                "written_GB": ON_PAPER * size / 1e9,
            }
        )
    return pd.DataFrame(rows).set_index("workers")


class Problem(NamedTuple):
    """Data sets, and what they are fitted by."""

    ode: gm.ODE
    t: np.ndarray
    ys: list[np.ndarray]
    settings: dict[str, Any]


def _infections(t, x, theta):
    infected = theta.beta * x.S * x.I
    return [-infected, infected - theta.gamma * x.I]


def _counted(x, theta, y):
    pm.Poisson("cases", PUPILS * x.I, observed=y)


def problem(name: str, n: int) -> Problem:
    """Return data sets of a system of the accuracy study, or of counts of infected pupils."""
    if name != COUNTS:
        case = named(ACCURACY, name)
        ys = [case.simulate(k).y for k in range(n)]
        return Problem(case.ode, case.t, ys, {"priors": case.priors()})
    sir = gm.ODE(_infections, ["S", "I"], ["beta", "gamma"], positive=["S", "I"])
    share = sir.solve(DAYS, x0=[1 - TRUTH[2], TRUTH[2]], theta=TRUTH[:2])[:, 1]
    ys = [np.random.default_rng(k).poisson(PUPILS * share) for k in range(n)]
    priors = {"beta": pm.HalfNormal.dist(2), "gamma": pm.HalfNormal.dist(1)}
    start = {"S": lambda theta, x0: 1 - x0.I}
    return Problem(sir, DAYS, ys, {"priors": priors, "start": start, "likelihood": _counted})


@cache
def counted_chain(length: Length) -> Callable:
    """Return NumPyro's chain for the counts, compiled once for all data sets."""
    diffrax, jax, numpyro = import_jax()
    ode, _, ys, _ = problem(COUNTS, 1)
    f, distributions = right_hand_side(ode), numpyro.distributions
    scales = jax.numpy.array([2.0, 1.0])

    def log_p(u, y):
        theta, infected = jax.numpy.exp(u[:2]), jax.numpy.exp(u[2])
        x = solved(
            f, DAYS, jax.numpy.stack([1 - infected, infected]), theta, rtol=1e-6, atol=1e-8,
            solver=diffrax.Tsit5(), adjoint=diffrax.RecursiveCheckpointAdjoint(), max_steps=1_000,
        )  # fmt: skip
        log_prior = (distributions.HalfNormal(scales).log_prob(theta) + u[:2]).sum()
        log_prior += distributions.Normal(np.log(TRUTH[2]), 3.0).log_prob(u[2])
        return log_prior + distributions.Poisson(PUPILS * x[:, 1]).log_prob(y).sum()

    center, steps = np.log(TRUTH), 1e-4 * np.eye(3)
    slope = jax.jit(jax.grad(log_p))
    hessian = [(slope(center + one, ys[0]) - slope(center - one, ys[0])) / 2e-4 for one in steps]
    factor = np.linalg.inv(np.linalg.cholesky(-np.array(hessian))).T
    draw = nuts(log_p, length)

    def chain(key, y):
        draws, divergences = draw(key, center, factor, y)
        return (draws[:, :2], draws[:, 2:], draws[:, :0]), divergences

    return jax.jit(chain).lower(jax.random.key(0), ys[0]).compile()


def by_rival(name: str, ys: list[np.ndarray]) -> dict[str, float]:
    """Fit data sets by NumPyro and diffrax, one by one, compilation included."""
    import_jax()  # before the clock starts
    before = process_time()
    of = counted_chain if name == COUNTS else partial(compiled_chain, named(ACCURACY, name))
    of(LENGTHS[0])
    compiled = process_time()
    fits = [until_agreed(of, [y], place) for place, y in enumerate(ys)]
    return {
        "NumPyro, with compilation (CPU s)": process_time() - before,
        "after it, a set": (process_time() - compiled) / len(ys),
        "NumPyro, R-hat above 1.01": sum(fit.rhat() > 1.01 for fit in fits),
    }


def beside_fit(name: str, n: int, has_rival: bool) -> dict:
    """Fit data sets of a system together, in a process of its own, one by one, and by a rival."""
    ode, t, ys, settings = problem(name, n)
    before = process_time()
    fits = gm.fit_many(
        ode, t, ys, exact=True, draws=N_DRAWS, n_jobs=1, random_seed=1, progressbar=False,
        **settings,
    )  # fmt: skip
    together = process_time() - before
    seeds = np.random.SeedSequence(1).spawn(n)
    names, before, apart, alike = [*ode.params], process_time(), [], []
    for place, (y, seed) in enumerate(zip(ys, seeds, strict=True)):
        observed, likelihood = bind_data(settings.get("likelihood"), y)
        alone = gm.fit(
            ode, t, observed, n_draws=N_DRAWS, random_seed=np.random.default_rng(seed),
            progressbar=False, **{**settings, "likelihood": likelihood},
        )  # fmt: skip
        alike.append(bool(fits["is_exact"][place]) == alone.is_exact)
        posterior = alone.idata["posterior"].dataset[names]
        off = fits[names].isel(replicate=place).mean("draw") - posterior.mean("draw")
        apart.append(float(np.abs((off / posterior.std("draw")).to_array()).max()))
    return {
        "system": name, "data sets": n, "together (CPU s)": together,
        "one by one (CPU s)": process_time() - before,
        "passed together": int(fits["is_exact"].sum()), "verdicts alike": sum(alike),
        "means apart (sd)": max(apart), "median (sd)": float(np.median(apart)),
        **(by_rival(name, ys) if has_rival else {}),
    }  # fmt: skip


def beside(n: int, names: Sequence[str], has_rival: bool, csv: Path | None) -> pd.DataFrame:
    """Print what ``fit_many`` costs beside ``fit``, and beside NumPyro."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [*pool.map(partial(beside_fit, n=n, has_rival=has_rival), names)]
    table = pd.DataFrame(rows).set_index("system")
    if csv is not None and csv.exists():  # rows of other systems stay
        before = pd.read_csv(csv, index_col="system")
        table = pd.concat([before.drop(table.index, errors="ignore"), table])
    show(table, csv)
    return table


def by_backend(name: str, n: int) -> list[dict]:
    """Fit data sets of a system by each backend, in a process of its own."""
    ode, t, ys, settings = problem(name, n)
    rows, fits = [], {}
    for backend in ("numba", "jax"):
        wall, cpu = perf_counter(), process_time()
        one = fits[backend] = gm.fit_many(
            ode, t, ys, exact=True, draws=N_DRAWS, backend=backend, n_jobs=1, random_seed=1,
            progressbar=False, **settings,
        )  # fmt: skip
        took = perf_counter() - wall, process_time() - cpu
        theta, first = one[[*ode.params]], fits["numba"][[*ode.params]]
        off = (theta.mean("draw") - first.mean("draw")) / first.std("draw")
        rows.append(
            {
                "system": name,
                "backend": backend,
                "data sets": n,
                "wall_s": took[0],
                "cpu_s": took[1],
                "passed": int(one["is_exact"].sum()),
                "verdicts alike": int((one["is_exact"] == fits["numba"]["is_exact"]).sum()),
                "means apart (sd)": float(np.abs(off.to_array()).max()),
            }
        )
    return rows


def backends(n: int, names: Sequence[str], csv: Path | None) -> pd.DataFrame:
    """Print what the backends of ``fit_many`` cost."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [row for rows in pool.map(partial(by_backend, n=n), names) for row in rows]
    table = pd.DataFrame(rows).set_index("system")
    show(table, csv)
    return table


def main(arguments: list[str] | None = None):
    """Measure, print both tables, save them as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data-sets", type=int)
    parser.add_argument("--beside-fit", action="store_true", help="beside gm.fit, one by one")
    parser.add_argument("--backends", action="store_true", help="by machine code, and by JAX")
    parser.add_argument("--only", nargs="+", choices=BESIDE, default=BESIDE, help="some systems")
    parser.add_argument("--quick", action="store_true", help="six data sets")
    parser.add_argument("--out", type=Path, help="folder of CSV files to save")
    options = parser.parse_args(arguments)
    logging.getLogger("pymc.gradmatch").setLevel(logging.WARNING)
    n, out = 6 if options.quick else options.data_sets or 1_000, options.out
    if out:
        out.mkdir(parents=True, exist_ok=True)  # not after the work
    if options.backends:
        n = 3 if options.quick else options.data_sets or 32
        table = backends(n, options.only, out and out / "backends.csv")
        if options.quick:
            none_failed(table[table["verdicts alike"] < n])
        return
    if options.beside_fit:
        n = 3 if options.quick else options.data_sets or 100
        table = beside(n, options.only, not options.quick, out and out / "beside-fit.csv")
        if options.quick:
            none_failed(table[table["verdicts alike"] < n])
        return
    times, ys = data_sets(n)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(times[:1], ys[:1], folder, n_jobs=1)  # what is compiled once
        runs = {"1 process": run(times, ys, folder, n_jobs=1)}
        print("1 process", runs["1 process"][:2], flush=True)
        runs["2 processes"] = run(times, ys, folder, n_jobs=2)
        get_reusable_executor().shutdown()
        print("2 processes", runs["2 processes"][:2], flush=True)
        runs["Dask, 2 processes, one killed"] = on_dask(times, ys, folder)
        share = share_of_each(folder)
    alone = runs["1 process"]
    rows = [
        {
            "run": name,
            "data_sets": n,
            "wall_s": one.wall_s,
            "cpu_s_here": one.cpu_s,
            "faster": alone.wall_s / one.wall_s,
            "without_draws": int((one.fits["failure"] != "").sum()),
            "same": same(one.fits, alone.fits),
            "MB": one.bytes / 1e6,
        }
        for name, one in runs.items()
    ]
    start = start_of_a_worker()
    paper = on_paper(alone.cpu_s / n, share, start, alone.bytes / n)
    table = pd.DataFrame(rows).set_index("run")
    show(table, out and out / "many.csv")
    print(
        f"\n{ON_PAPER} data sets, on paper: {alone.cpu_s / n:.3g} CPU s a fit, {share:.3g} of the "
        f"process that hands out and writes, {start:.3g} until a worker begins"
    )
    show(paper, out and out / "on-paper.csv")
    if options.quick:
        none_failed(table[(table["without_draws"] > 0) | ~table["same"]])


if __name__ == "__main__":
    main()
