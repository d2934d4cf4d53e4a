"""Ways of inference, one function each, in one registry.

To add a method, write a function of (case, data, seed, effort) that returns
:class:`Draws`, and enter it in ``METHODS``; the study does the rest.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import xarray as xr

import pymc_gradmatch as gm
from benchmarks.cases import Case
from benchmarks.paper import systems
from benchmarks.paper.adaptive import adaptive_model, with_roles
from benchmarks.paper.likelihood import maximum_likelihood
from benchmarks.paper.meanfield import fit_mean_field
from pymc_gradmatch.sampling.coordinates import straight_coordinates
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compiled_for

__all__ = ["FULL", "METHODS", "QUICK", "Draws", "Effort", "Method"]


class Effort(NamedTuple):
    """Lengths of chains and of optimisations."""

    draws: int
    """Draws of each NUTS chain."""
    chains: int
    """NUTS chains."""
    sweeps: float
    """Metropolis sweeps, as a fraction of the paper's."""
    steps: int
    """Steps of variational inference."""


FULL = Effort(draws=1_000, chains=4, sweeps=1.0, steps=30_000)
ALONE: dict[str, Any] = {"tune": None, "cores": 1}  # on one core, as long as nutpie would
QUICK = Effort(draws=200, chains=2, sweeps=0.01, steps=500)


class Draws(NamedTuple):
    """What a method returns.

    Attributes
    ----------
    theta : array of float
        Draws of the parameters, shape ``(chain, draw, param)``.
    x : array of float
        Draws of the states at the times of the observations, shape
        ``(chain, draw, time, state)``.
    is_chain : bool
        Whether draws depend on one another, so that their effective number and
        R-hat mean something.
    note : str
        What the reader of the result should know.
    """

    theta: np.ndarray
    x: np.ndarray
    is_chain: bool = True
    note: str = ""


Method = Callable[[Case, systems.Simulation, int, Effort], Draws]

# One list per case and method in every process: the first data set compiles.
_compiled: dict[tuple[str, str], list[CompiledPosterior]] = defaultdict(list)


def paper_model(case: Case, data: systems.Simulation, **settings) -> pm.Model:
    """Build the paper's density, with its box of the states; the same fit for every method."""
    model = case.paper_model(data, random_seed=0, **settings)
    return systems.keep_within(model, case.paper.state_box)


def sweeps_of(case: Case) -> int:
    """Return the length of the Metropolis chain, the paper's.

    It states none for FitzHugh-Nagumo.  The reference code's 300 000 sweeps take a
    quarter of an hour at 100 times, which get as many as Lotka-Volterra.
    """
    return case.paper.draws if len(case.t) < 100 else 100_000


def fgpgm(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Run the paper's single Metropolis chain."""
    settings = case.paper
    idata = gm.sample_fgpgm(
        paper_model(case, data),
        draws=max(500, int(effort.sweeps * sweeps_of(case))),
        state_step=settings.state_step,
        param_step=settings.param_step,
        random_seed=seed,
        progressbar=False,
    )
    return _draws(case, idata["posterior"].dataset)


def nuts(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Run NUTS on the density of :func:`fgpgm`, as :func:`pymc_gradmatch.sample` does."""
    return _nuts(case, paper_model(case, data), "nuts", seed, effort)


def agm(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Run NUTS on adaptive gradient matching: hyperparameters and gamma are random too.

    In straight coordinates: hyperparameters change the ridge from draw to draw.
    Every density costs factorisations, ten times the others' time, so that there
    are a quarter of the draws.
    """
    model = adaptive_model(case, data, case.paper_gp(data, random_seed=0))
    posterior = with_roles(compiled_for(model, _compiled[case.name, "agm"]), case.ode.params)
    rng = np.random.default_rng(seed)
    around = straight_coordinates(posterior.find_mode(rng), posterior.roles)
    idata = posterior.sample_around(around, rng, draws=effort.draws // 2, chains=2, **ALONE)
    return _nuts_draws(case, idata)


def refined(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Run NUTS on ``preset="refined"``, in the boxes of the paper."""
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=seed)
    model = case.model(data, preset="refined", gp=gp, random_seed=seed)
    return _nuts(case, model, "refined", seed, effort)


def _nuts(case: Case, model: pm.Model, method: str, seed: int, effort: Effort) -> Draws:
    posterior = compiled_for(model, _compiled[case.name, method])
    rng = np.random.default_rng(seed)
    mode = posterior.find_mode(rng)
    return _nuts_draws(
        case, posterior.sample(mode, rng, draws=effort.draws, chains=effort.chains, **ALONE)
    )


def _nuts_draws(case: Case, idata: xr.DataTree) -> Draws:
    diverging = int(idata["sample_stats"]["diverging"].sum())
    note = f"{diverging} divergences" if diverging else ""
    return _draws(case, idata["posterior"].dataset, note)


def _draws(case: Case, posterior, note: str = "") -> Draws:
    theta = np.stack([posterior[name].to_numpy() for name in case.theta], axis=-1)
    # The refined preset has a finer grid than the observations.
    x = posterior["x"].sel(time=case.t, method="nearest").to_numpy()
    return Draws(theta, x, note=note)


def mvgm(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Fit a mean-field Gaussian to the density of :func:`fgpgm`, by ``pm.fit``.

    Gorbach et al. (2017) have a full Gaussian per state over time, and factorise
    over states and parameters.  PyMC's mean field in whitened coordinates is our
    reading of it: in the eigenbasis of C the Gaussian process' own posterior is
    diagonal, so that each state's factor is a full Gaussian over time.
    """
    model = paper_model(case, data, parameterization="whitened")
    posterior = compiled_for(model, _compiled[case.name, "mvgm"])
    fitted, note = fit_mean_field(model, posterior, seed, effort.steps)
    return _draws(case, fitted, note)._replace(is_chain=False)


def exact(case: Case, data: systems.Simulation, seed: int, effort: Effort) -> Draws:
    """Maximise the likelihood by numerical integration; draws are the normal approximation.

    No posterior: the maximum over (theta, x0) in the paper's box, and normal
    draws around it, clipped to the box.
    """
    fit = maximum_likelihood(case, data, case.paper_gp(data, random_seed=0), seed)
    theta, x = fit.draws(1_000, np.random.default_rng(seed))
    return Draws(theta[None], x[None], is_chain=False, note=fit.note)


METHODS: dict[str, Method] = {
    "fgpgm": fgpgm,
    "agm": agm,
    "nuts": nuts,
    "refined": refined,
    "mvgm": mvgm,
    "exact": exact,
}
