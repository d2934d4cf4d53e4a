"""One data set of the breadth study, by the road of the README, and what is kept of it."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import arviz as az
import numpy as np
import xarray as xr

import pymc_gradmatch as gm
from benchmarks import is_ours
from benchmarks.cases import BREADTH, Case, named
from benchmarks.paper import systems

__all__ = ["Row", "fit", "fit_in_one_call", "given_up", "moments", "trajectory_rmse"]

type Row = dict[str, Any]


def fit(key: tuple[str, int], keep: Callable[[Row], None], *, seed: int = 0) -> Row:
    """Fit a data set: build, sample, check.

    Parameters
    ----------
    key : tuple of str and int
        Name of the case, and number of the data set.
    keep : callable
        Called with the row as far as it is known, before each stage.
    seed : int, default 0
        With the number of the data set, the seed of the fit.

    Returns
    -------
    dict
        What each stage gave and said, and its CPU seconds; an error in words.
    """
    name, replicate = key
    case = named(BREADTH, name)
    data = case.simulate(replicate)
    row: Row = {"said": {}, "cpu_seconds": {}}
    try:
        with _stage("build", row, keep):
            model = case.model(data, preset="refined", random_seed=seed + replicate)
        with _stage("sample", row, keep):
            idata = gm.sample(model=model, random_seed=seed + replicate, progressbar=False)
        row |= _sampling(case, idata)
        row["matched"] = _accuracy(case, data, idata["posterior"].dataset)
        with _stage("check", row, keep):
            check = gm.integrate_check(idata, model=model, random_seed=seed + replicate)
        row |= {"is_exact": bool(check.is_exact), "verdict": check.verdict}
        row["checked"] = _accuracy(case, data, check.idata["posterior"].dataset)
    except Exception as error:
        row |= _failure(error)
    return row


def fit_in_one_call(key: tuple[str, int], keep: Callable[[Row], None], *, seed: int = 0) -> Row:
    """Fit a data set by ``gm.fit``; a row like that of :func:`fit`."""
    name, replicate = key
    case = named(BREADTH, name)
    data = case.simulate(replicate)
    row: Row = {"said": {}, "cpu_seconds": {}}
    try:
        with _stage("fit", row, keep):
            found = gm.fit(
                case.ode, data.t, data.y, priors=case.priors(),
                random_seed=seed + replicate, progressbar=False,
            )  # fmt: skip
        row |= {"is_exact": bool(found.is_exact), "verdict": found.verdict}
        row["n_effective"] = float(found.n_effective)
        row["checked"] = _accuracy(case, data, found.idata["posterior"].dataset)
    except Exception as error:
        row |= _failure(error)
    return row


def _failure(error: Exception) -> Row:
    return {"failure": f"{type(error).__name__}: {error}", "in_words": is_ours(error)}


def given_up(row: Row, limit: int, exitcode: int | None) -> Row:
    """Return the row of a fit whose process ended without an answer, from what was kept."""
    row["failure"] = f"no answer within {limit} CPU s (exit code {exitcode})"
    row["cpu_seconds"][row["stage"]] = float(limit)
    return row


@contextmanager
def _stage(name: str, row: Row, keep: Callable[[Row], None]) -> Iterator[None]:
    """Collect what is said in a block, each line once, and its CPU seconds."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    row["stage"] = name
    keep(row)
    start = process_time()
    listener = Listener(logging.INFO)
    logging.getLogger().addHandler(listener)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logging.getLogger().removeHandler(listener)
        said += [str(warning.message) for warning in caught]
        row["said"][name] = list(dict.fromkeys(said))
        row["cpu_seconds"][name] = process_time() - start


def _sampling(case: Case, idata: xr.DataTree) -> Row:
    theta = idata["posterior"].dataset[list(case.theta)]
    return {
        "rhat": float(az.rhat(theta).to_array().max()),
        "ess": float(az.ess(theta).to_array().min()),
        "divergences": int(idata["sample_stats"]["diverging"].sum()),
    }


def _accuracy(case: Case, data: systems.Simulation, draws: xr.Dataset) -> Row:
    """Return the moments of theta, and the error of the trajectory from its mean."""
    theta = {name: draws[name].to_numpy() for name in case.theta}
    first = draws["x0"] if "x0" in draws else draws["x"].isel(time=0)
    x0 = first.mean(["chain", "draw"]).to_numpy()
    return {
        "rmse": trajectory_rmse(case, data, x0, [values.mean() for values in theta.values()]),
        "theta": {name: moments(values) for name, values in theta.items()},
    }


def trajectory_rmse(case: Case, data: systems.Simulation, x0, theta) -> float:
    """Return the error of an integrated trajectory, each state in units of its noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        x = case.ode.solve(data.t, x0, np.asarray(theta))
    return float(np.sqrt((((x - data.x) / data.sigma) ** 2).mean()))


def moments(values: np.ndarray) -> Row:
    """Return mean, standard deviation and central 95 % interval of draws."""
    low, high = np.quantile(values, [0.025, 0.975])
    return {
        "mean": float(values.mean()),
        "sd": float(values.std()),
        "2.5 %": float(low),
        "97.5 %": float(high),
    }
