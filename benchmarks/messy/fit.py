"""One data set of the messy study by ``gm.fit``, and what is kept of it."""

import warnings
from collections.abc import Callable
from time import process_time

import xarray as xr

from benchmarks.cases import MESSY, Messy, named
from benchmarks.messy.rows import Row, free_starts, moments, rmse_of

__all__ = ["fit", "given_up"]


def fit(key: tuple[str, int, int], keep: Callable[[Row], None]) -> Row:
    """Fit a data set.

    Parameters
    ----------
    key : tuple of str, int and int
        Name of the case, number of the data set, seed of the fit.
    keep : callable
        Called with an empty row before the work begins.

    Returns
    -------
    dict
        Moments of what is unknown, errors of the mean trajectory, the verdict and CPU
        seconds; an error in words.
    """
    name, replicate, seed = key
    case = named(MESSY, name)
    y = case.simulate(replicate)
    keep({})
    start = process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = case.fit(y, random_seed=seed, progressbar=False)
        seconds = process_time() - start
        return summary(case, found.idata["posterior"].dataset) | {
            "k": float(found.pareto_k),
            "n_effective": float(found.n_effective),
            "is_exact": float(found.is_exact),
            "cpu_seconds": seconds,
            "verdict": found.verdict,
        }
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"[:300]
        return {"failure": failure, "cpu_seconds": process_time() - start}


def summary(case: Messy, posterior: xr.Dataset) -> Row:
    """Return moments of theta and of the unknown x(t0), and errors of the mean trajectory."""
    draws = {name: posterior[name].to_numpy() for name in case.theta}
    for name in free_starts(case):
        draws[name] = posterior["x0"].sel(state=name[3:-1]).to_numpy()
    x = posterior["x"].sel(time=case.t, method="nearest").mean(["chain", "draw"])
    return {
        "variables": {name: moments(values) for name, values in draws.items()},
        "rmse": rmse_of(case, x.to_numpy()),
    }


def given_up(row: Row, limit: int, exitcode: int | None) -> Row:
    """Return the row of a fit whose process ended without an answer."""
    failure = f"no answer within {limit} CPU s (exit code {exitcode})"
    return {"failure": failure, "cpu_seconds": float(limit)}
