"""One data set of the accuracy study: the fits, and what is kept of them."""

from collections.abc import Callable
from time import process_time
from typing import NamedTuple

import arviz as az
import numpy as np
import pymc as pm

import pymc_gradmatch as gm
from benchmarks.cases import AccuracyCase
from pymc_gradmatch.sampling.many import compiled_for
from pymc_gradmatch.sampling.posterior import CompiledPosterior

DRAWS, CHAINS = 1_000, 2


class Model(NamedTuple):
    """A model, and the Gaussian processes fitted to its data."""

    model: pm.Model
    gp: gm.StateGP


def refined(case: AccuracyCase, data) -> Model:
    """Build ``preset="refined"``."""
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    model = gm.build_model(
        case.system.ode,
        data.t,
        data.y,
        priors=case.priors(),
        preset="refined",
        gp=gp,
        random_seed=1,
    )
    return Model(model, gp)


def paper(case: AccuracyCase, data) -> Model:
    """Build the paper's model: its kernel and gamma, sigma at its estimate."""
    ode, settings = case.system.ode, case.system.paper
    gp = gm.fit_gp(data.t, data.y, cov=settings.cov, shared=settings.shared, random_seed=1)
    model = gm.build_model(ode, data.t, data.y, priors=case.priors(), gp=gp, gamma=settings.gamma)
    return Model(model, gp)


METHODS: dict[str, Callable[[AccuracyCase, gm.systems.Simulation], Model]] = {
    "refined": refined,
    "paper": paper,
}


class Study:
    """Fits of one case and method, compiled once."""

    def __init__(self, case: AccuracyCase, method: str):
        self.case, self.method = case, method
        self.compiled: list[CompiledPosterior] = []

    def fit(self, replicate: int) -> dict[str, float]:
        """Fit one data set; returns a row of the table."""
        data = self.case.simulate(replicate)
        start = process_time()
        built = METHODS[self.method](self.case, data)
        posterior = compiled_for(built.model, self.compiled)
        started_sampling = process_time()
        rng = np.random.default_rng(replicate)
        idata = posterior.sample(
            posterior.find_mode(rng),
            rng,
            draws=DRAWS,
            tune=None,
            chains=CHAINS,
            cores=1,
        )
        sampled = process_time()
        row = self._accuracy(idata["posterior"].dataset, data, "")
        theta = idata["posterior"].dataset[list(self.case.system.ode.params)]
        row |= {
            "rhat": float(az.rhat(theta).to_array().max()),
            "ess": float(az.ess(theta).to_array().min()),
            "divergences": int(idata["sample_stats"]["diverging"].sum()),
            "build_seconds": started_sampling - start,
            "sample_seconds": sampled - started_sampling,
        }
        if self.method != "refined":
            return row
        check = gm.integrate_check(idata, model=built.model, random_seed=replicate)
        return row | {
            "k": check.pareto_k,
            "n_effective": check.n_effective,
            "is_exact": float(check.is_exact),
            "check_seconds": process_time() - sampled,
            **self._accuracy(check.idata["posterior"].dataset, data, "checked "),
        }

    def _accuracy(self, draws, data, prefix: str) -> dict[str, float]:
        """Return errors of the trajectory, coverage, and moments of theta."""
        ode, truth = self.case.system.ode, self.case.system.theta
        theta = draws[list(ode.params)].to_array().to_numpy().reshape(len(ode.params), -1)
        first = draws["x0"] if "x0" in draws else draws["x"].isel(time=0)
        x0 = first.mean(["chain", "draw"]).to_numpy()
        error = ode.solve(data.t, x0, theta.mean(axis=1)) - data.x
        low, high = np.quantile(theta, [0.025, 0.975], axis=1)
        true = np.array(list(truth.values()))
        row = {
            "rmse": float(np.sqrt((error**2).mean())),
            "covered": float(((low <= true) & (true <= high)).mean()),
        }
        row |= {
            f"rmse {state}": float(value)
            for state, value in zip(ode.states, np.sqrt((error**2).mean(axis=0)), strict=True)
        }
        for name, values in zip(ode.params, theta, strict=True):
            row |= {
                f"mean {name}": float(values.mean()),
                f"sd {name}": float(values.std()),
                f"log mean {name}": float(np.log(values).mean()),
                f"log sd {name}": float(np.log(values).std()),
            }
        return {f"{prefix}{name}": value for name, value in row.items()}
