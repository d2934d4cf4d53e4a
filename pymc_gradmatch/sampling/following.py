"""Draws that follow the ODE, for posteriors in which NUTS gets stuck.

What the ODE is solved from, parameters and x(t0), and what the likelihood needs beside are
few; given them the states are drawn around the solution (``model.randomised``).  So a mixture
of t distributions in the few is a proposal for all, and importance sampling moves it to the
matched posterior, however bent that is.
"""

from typing import NamedTuple

import numpy as np
import pymc as pm
import xarray as xr
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors

from pymc_gradmatch.exact import ExactPosterior, Mixture, fit_mixture, gather
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import (
    Observed,
    RandomisedStates,
    constraints,
    known_starts,
    observed,
    of_model,
)
from pymc_gradmatch.numerics import Density

MOST_COORDINATES = 600  # of states: draws cost their number to the power of three
ENOUGH = 1_500  # effective draws of all rounds
MOST_PILOTS, WIDER = 3_000, 2.0  # draws that the first proposal is fitted to, and one around it


class Chains(NamedTuple):
    """Draws of value variables, and whether their weights are reliable."""

    u: NDArray[np.float64]
    """Shape ``(chain, draw, n)``."""
    pareto_k: float
    is_reliable: bool


class Followed:
    """A posterior as a function of what the ODE needs: its states are drawn given that.

    Parameters
    ----------
    model : pymc.Model
        With one constraint.
    density : callable
        Its log density at value variables, shape ``(point, n)``, in the order of the model.
    """

    def __init__(self, model: pm.Model, density: Density):
        self.target = ExactPosterior(model)
        self._density = density
        [constraint] = constraints(model)
        self._gp = constraint.gp
        self._told, _ = of_model(model, constraint.ode, constraint.gp)
        self._states = RandomisedStates(constraint)
        self._names = [model.rvs_to_values[rv].name for rv in model.free_RVs]

    @property
    def size(self) -> int:
        """How many standard normal numbers z the states are made of."""
        return self._states.size

    def __call__(
        self, phi: NDArray[np.float64], z: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return log densities of points, estimated without bias, and value variables."""
        at = self.target.integrated(phi)
        [theta], [trajectories] = at.theta, at.trajectories
        solved = np.flatnonzero(np.isfinite(trajectories).all(axis=(1, 2)))
        log_density = np.full(len(phi), -np.inf)
        n_others = sum(values[0].size for values in at.values.values())
        u = np.zeros((len(phi), n_others + trajectories[0].size))
        if not len(solved):
            return log_density, u
        theta = theta.reshape(len(phi), -1)[solved]
        levels = self._gp.levels_of(trajectories[solved])
        each = [
            observed(self._told.given({name: part[i] for name, part in at.values.items()}), *one)
            for i, *one in zip(solved, theta, levels, strict=True)
        ]
        by_states, curvature = map(np.array, zip(*each, strict=True))
        around = Observed(by_states, curvature, self._told.rows)
        drawn = self._states.draw(theta, levels, around, z[solved])
        deviation = (drawn.levels - self._gp.prior_mean) / self._gp.scale
        parts = [
            (at.values[name][solved] if name in at.values else deviation).reshape(len(solved), -1)
            for name in self._names
        ]
        u[solved] = np.concatenate(parts, axis=1)
        found = np.isfinite(drawn.log_density)
        ended = solved[found]
        height, _ = self._density(u[ended])
        log_density[ended] = height - drawn.log_density[found] + at.log_volume[ended]
        return np.where(np.isfinite(log_density), log_density, -np.inf), u


def followed(model: pm.Model, density: Density) -> Followed | None:
    """Return the posterior of one ODE, of known gamma and starts from anywhere; else none."""
    found = constraints(model)
    if len(found) != 1:
        return None
    [constraint] = found
    gp = constraint.gp
    fits = (
        gp.prior_mean.ndim == 2
        and gp.prior_mean.size <= MOST_COORDINATES
        and not gp.is_random
        and not known_starts(model)
        and sum(map(is_states, model.free_RVs)) == 1
        and not set(ancestors(list(constraint.basis))) & set(model.basic_RVs)
        and all(model.named_vars.get(name) in model.free_RVs for name in constraint.ode.params)
    )
    if not fits:
        return None
    try:
        return Followed(model, density)
    except ValueError:  # the exact posterior cannot be written
        return None


def follow(
    matched: Followed, posterior: xr.Dataset, *, draws: int, chains: int, rng: np.random.Generator
) -> Chains:
    """Draw from a posterior by importance sampling, from draws that lie about where it is.

    Each chain is a share of the draws of all rounds, repeated as often as their weights say: of
    what is repeated R-hat and effective sample sizes take account.
    """
    phi = rng.permutation(matched.target.coordinates(posterior))
    around = Mixture.around(phi.mean(axis=0), WIDER**2 * np.atleast_2d(np.cov(phi.T)))
    start = fit_mixture(phi[:MOST_PILOTS], rng).stretched().defended(around)
    rounds = []

    def target(phi):
        height, u = matched(phi, rng.normal(size=(len(phi), matched.size)))
        rounds.append(u)
        return height

    weighted = gather(target, start, ENOUGH, rng)
    u = np.concatenate(rounds)
    mixed = rng.permutation(len(u))
    shares = [mixed[chain::chains] for chain in range(chains)]
    chosen = np.stack([share[_repeated(weighted.weights[share], draws, rng)] for share in shares])
    return Chains(u[chosen], weighted.pareto_k, weighted.is_reliable)


def _repeated(weights, n: int, rng) -> NDArray[np.int64]:
    """Return the places of n draws, each as often as its weight says, or once more."""
    ends = np.cumsum(weights)
    return np.searchsorted(ends / ends[-1], (np.arange(n) + rng.random()) / n)
