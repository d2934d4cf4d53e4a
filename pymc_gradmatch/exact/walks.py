"""Hamiltonian walks from weighted draws: whether they leave what proposals cover.

Weights are blind where no draw is.  A ridge that bends away from every proposal goes on unseen,
with a short tail of weights; a walk that follows the gradient goes along it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.exact.importance import LogDensity, Weighted

WALKERS = 48
TIME = 6.0  # of a walk: what takes a standard deviation of the draws to be passed is one
MOST_STEPS = 200
FIRST_STEP, SHORTEST_STEP = 0.5, 0.01
KEPT = 0.8  # mean acceptance after two steps
DIFFERENCE = 0.02  # for gradients, in standard deviations
ENERGY = 3.0  # that a walk may lose by its steps
CHANCE = 1e-3  # that walks within the target are taken for ones that leave
LIGHTEST = 0.1  # tail that weights are taken to have at least
NEAREST = 1.0  # log of a ratio above the largest, at least


class Walks(NamedTuple):
    """Where walks went.

    Attributes
    ----------
    points : array of float
        All points passed, shape ``(point, n)``.
    n_leaving : int
        How many of the walks left what the proposal covers.
    """

    points: NDArray[np.float64]
    n_leaving: int


def walk(
    target: LogDensity,
    weighted: Weighted,
    log_ratio: NDArray[np.float64],
    proposal: LogDensity,
    rng: np.random.Generator,
) -> Walks:
    r"""Walk from some draws by Hamiltonian dynamics, and tell how many walks leave the proposal.

    Walks from draws of the target stay draws of it [1]_.  With a tail index k of the
    weights :math:`r = p / q`, the part of the target where r is :math:`e^m` times the
    largest of all draws, which has weight w itself, is about

    .. math:: w\, e^{-m (1 / k - 1)},

    so that a margin m follows from the chance that one of the walks comes there.

    Parameters
    ----------
    target, proposal : callable
        Map points ``(draw, coordinate)`` to log densities.
    weighted : Weighted
        Draws of the proposal with weights.
    log_ratio : array of float
        Log of r at these draws.
    rng : numpy.random.Generator
        Source of momenta, and of the choice of draws.

    References
    ----------
    .. [1] Neal, R. M. (2011). MCMC using Hamiltonian dynamics. In *Handbook of Markov Chain
       Monte Carlo*, chapter 5.
    """
    weights = weighted.weights
    start = weighted.points[rng.choice(len(weights), WALKERS, p=weights)]
    factor = np.linalg.cholesky(np.atleast_2d(np.cov(weighted.points.T, aweights=weights)))
    hamiltonian = _Hamiltonian(target, factor)
    momentum = rng.normal(size=start.shape)
    step = FIRST_STEP
    while step > SHORTEST_STEP and hamiltonian.acceptance(start, momentum, step) < KEPT:
        step /= 2
    n_steps = min(MOST_STEPS, int(np.ceil(TIME / step)))
    points, energy = hamiltonian.trajectory(start, momentum, step, n_steps)
    tail = np.clip(weighted.pareto_k, LIGHTEST, 1 - LIGHTEST)
    margin = np.log(weights.max() * WALKERS / CHANCE) / (1 / tail - 1)
    passed = points[1:].reshape(-1, start.shape[1])
    ratio = (target(passed) - proposal(passed)).reshape(n_steps, -1)
    kept = energy[1:] - energy[0] < ENERGY
    leaves = kept & (ratio > np.max(log_ratio) + max(margin, NEAREST))
    return Walks(passed[kept.ravel()], int(leaves.any(axis=0).sum()))


class _Hamiltonian:
    """Dynamics of many walkers at once, in coordinates of unit width."""

    def __init__(self, target: LogDensity, factor: NDArray[np.float64]):
        self.target, self.factor = target, factor
        n = len(factor)
        self.moves = DIFFERENCE * np.concatenate([factor.T, -factor.T]).reshape(2, n, n)

    def gradient(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return central differences; nothing where the density is zero beside a point."""
        n_walkers, n = points.shape
        beside = (points[:, None, None] + self.moves).reshape(-1, n)
        ahead, behind = self.target(beside).reshape(n_walkers, 2, n).swapaxes(0, 1)
        with np.errstate(invalid="ignore"):
            slopes = (ahead - behind) / (2 * DIFFERENCE)
        return np.where(np.isfinite(slopes).all(axis=1, keepdims=True), slopes, 0.0)

    def trajectory(
        self, points: NDArray[np.float64], momentum: NDArray[np.float64], step: float, n_steps: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the points of leapfrog steps, and the energy at each."""
        passed, momenta = [points], [momentum]
        slopes = self.gradient(points)
        for _ in range(n_steps):
            half = momentum + step / 2 * slopes
            points = points + step * half @ self.factor.T
            slopes = self.gradient(points)
            momentum = half + step / 2 * slopes
            passed.append(points)
            momenta.append(momentum)
        path = np.stack(passed)
        height = self.target(path.reshape(-1, path.shape[-1])).reshape(path.shape[:-1])
        return path, 0.5 * np.square(momenta).sum(axis=-1) - height

    def acceptance(self, points, momentum, step: float) -> float:
        """Return the mean probability that Metropolis' rule accepts two steps."""
        _, energy = self.trajectory(points, momentum, step, 2)
        with np.errstate(invalid="ignore"):
            change = np.nan_to_num(energy[-1] - energy[0], nan=np.inf)
        return float(np.exp(-np.maximum(change, 0)).mean())
