"""One data set of the accuracy study: the fits, and what is kept of them."""

import warnings
from collections.abc import Callable
from functools import cache
from time import process_time

import arviz as az
import numpy as np
import pymc as pm

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, Case, named
from benchmarks.paper import systems
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compiled_for

__all__ = ["METHODS", "accuracy_of", "fit"]

DRAWS, CHAINS = 1_000, 2


def refined(case: Case, data: systems.Simulation) -> pm.Model:
    """Build ``preset="refined"``."""
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    return case.model(data, preset="refined", gp=gp, random_seed=1)


def paper(case: Case, data: systems.Simulation) -> pm.Model:
    """Build the paper's model."""
    return case.paper_model(data, random_seed=1)


MODELS: dict[str, Callable[[Case, systems.Simulation], pm.Model]] = {
    "refined": refined,
    "paper": paper,
}
ONE_CALL = "gm.fit"
METHODS = [*MODELS, ONE_CALL]


@cache
def _compiled(name: str, method: str) -> list[CompiledPosterior]:
    """Return the list that the first data set of a case and method fills for all others."""
    return []


def fit(key: tuple[str, str, int]) -> dict[str, float | str]:
    """Fit a data set by a method; returns a row of the table, a failure with its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _fitted(*key)
        except Exception as error:
            return {"failure": f"{type(error).__name__}: {error}"[:200]}


def _fitted(name: str, method: str, replicate: int) -> dict[str, float]:
    case = named(ACCURACY, name)
    data = case.simulate(replicate)
    if method == ONE_CALL:
        return _in_one_call(case, data, replicate)
    start = process_time()
    model = MODELS[method](case, data)
    posterior = compiled_for(model, _compiled(name, method))
    started_sampling = process_time()
    rng = np.random.default_rng(replicate)
    idata = posterior.sample(
        posterior.find_mode(rng), rng, draws=DRAWS, tune=None, chains=CHAINS, cores=1
    )
    sampled = process_time()
    row = _accuracy(case, data, idata["posterior"].dataset)
    theta = idata["posterior"].dataset[list(case.theta)]
    row |= {
        "rhat": float(az.rhat(theta).to_array().max()),
        "ess": float(az.ess(theta).to_array().min()),
        "divergences": int(idata["sample_stats"]["diverging"].sum()),
        "build_seconds": started_sampling - start,
        "sample_seconds": sampled - started_sampling,
    }
    if method != "refined":
        return row
    check = gm.integrate_check(idata, model=model, random_seed=replicate)
    checked = _accuracy(case, data, check.idata["posterior"].dataset)
    return row | {
        "k": check.pareto_k,
        "n_effective": check.n_effective,
        "is_exact": float(check.is_exact),
        "check_seconds": process_time() - sampled,
        **{f"checked {name}": value for name, value in checked.items()},
    }


def _in_one_call(case: Case, data: systems.Simulation, replicate: int) -> dict[str, float]:
    """Fit by ``gm.fit``, whose draws are checked as they come."""
    start = process_time()
    found = gm.fit(
        case.ode, data.t, data.y, priors=case.priors(), random_seed=replicate, progressbar=False
    )
    seconds = process_time() - start
    row = _accuracy(case, data, found.idata["posterior"].dataset)
    return row | {
        "rhat": np.nan,
        "ess": np.nan,  # no chain was run
        "build_seconds": seconds,
        "sample_seconds": 0.0,
        "k": found.pareto_k,
        "n_effective": found.n_effective,
        "is_exact": float(found.is_exact),
        **{f"checked {name}": value for name, value in row.items()},
    }


def _accuracy(case: Case, data: systems.Simulation, draws) -> dict[str, float]:
    """Return errors of the trajectory, coverage, and moments of theta."""
    theta = draws[list(case.theta)].to_array().to_numpy().reshape(len(case.theta), -1)
    first = draws["x0"] if "x0" in draws else draws["x"].isel(time=0)
    low, high = np.quantile(theta, [0.025, 0.975], axis=1)
    covered = float(((low <= case.truth) & (case.truth <= high)).mean())
    x0 = first.mean(["chain", "draw"]).to_numpy()
    return {"covered": covered} | accuracy_of(case, data, theta, x0)


def accuracy_of(case: Case, data: systems.Simulation, theta, x0) -> dict[str, float]:
    """Return errors of the trajectory from the means, and moments of theta's draws by parameter."""
    error = case.ode.solve(data.t, x0, theta.mean(axis=1)) - data.x
    row = {"rmse": float(np.sqrt((error**2).mean()))}
    for state, values in zip(case.x0, error.T, strict=True):
        row[f"rmse {state}"] = float(np.sqrt((values**2).mean()))
    for name, values in zip(case.theta, theta, strict=True):
        row |= {
            f"mean {name}": float(values.mean()),
            f"sd {name}": float(values.std()),
            f"log mean {name}": float(np.log(values).mean()),
            f"log sd {name}": float(np.log(values).std()),
        }
    return row
