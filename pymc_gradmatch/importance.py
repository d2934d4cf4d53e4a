"""Importance sampling from a Student t that moves to its target; Pareto k says whether it did."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from arviz_stats.base import array_stats
from numpy.typing import NDArray
from scipy import stats

__all__ = ["Weighted", "importance_sample", "reliable_k"]

DEGREES = 7  # tails of the proposal: heavier than most posteriors', with a finite kurtosis
MAX_ROUNDS = 40
ENOUGH = 0.25  # effective draws, as a share of all, at which a proposal is left as it is
MAX_RELIABLE = 5  # rounds with a reliable k, of which the best is taken
PER_COORDINATE = 10  # effective draws that a mean and a covariance are estimated from
FLATTEST = 1e-12  # least power of the weights; log ratios of 1e9 occur where sigma is tiny


class Weighted(NamedTuple):
    """Draws from a proposal with weights that make them draws from the target.

    Attributes
    ----------
    points : array of float
        Shape ``(draw, coordinate)``.
    weights : array of float
        Pareto-smoothed, sum one, shape ``(draw,)``.
    pareto_k, n_effective : float
        The tail of the weights; one over the sum of their squares.
    n_rounds : int
        Proposals that were tried.
    covariance : array of float
        Of the coordinates; weights are flattened if too few of them dominate.
    evaluated : object
        What the target returned at these points.
    """

    points: NDArray[np.float64]
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    n_rounds: int
    covariance: NDArray[np.float64]
    evaluated: Any

    @property
    def is_reliable(self) -> bool:
        """Tell whether Pareto k is below :func:`reliable_k`."""
        return bool(self.pareto_k < reliable_k(len(self.weights)))


def reliable_k(n_draws: int) -> float:
    """Return the k below which estimates from n draws are reliable (Vehtari et al. 2024)."""
    return min(1 - 1 / np.log10(n_draws), 0.7)


def importance_sample(
    target: Callable[[NDArray[np.float64]], Any],
    draws: NDArray[np.float64],
    n_draws: int,
    rng: np.random.Generator,
) -> Weighted:
    r"""Draw from a Student t near some draws, weight by the target, move the t, repeat.

    .. math:: w_i \propto p(\phi_i) / t_7(\phi_i \mid m, S), \qquad \phi_i \sim t_7(m, S)

    m and S match mean and covariance of ``draws`` at first, then those of the
    weighted draws of the round before, with :math:`w^\beta` in place of w where
    too few weights dominate.  Each round is valid by itself: its draws come from
    one known density.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to an object whose ``log_density`` has
        shape ``(draw,)`` and is -inf for weight zero.
    draws : array of float
        Draws of a density like the target, shape ``(draw, coordinate)``.
    n_draws : int
        Draws of each round.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    Weighted
        The first round with a reliable k and enough effective draws; if none
        is found soon, the reliable one with most effective draws, else that of least k.

    Raises
    ------
    ValueError
        If the target is zero at all draws of a round.

    References
    ----------
    .. [1] Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto
       smoothed importance sampling. *Journal of Machine Learning Research* 25.
    """
    mean, covariance = draws.mean(axis=0), np.atleast_2d(np.cov(draws.T))
    rounds: list[Weighted] = []
    while len(rounds) < MAX_ROUNDS and sum(r.is_reliable for r in rounds) < MAX_RELIABLE:
        shape = covariance * (DEGREES - 2) / DEGREES
        proposal = stats.multivariate_t(mean, shape, df=DEGREES)
        points = proposal.rvs(n_draws, random_state=rng).reshape(n_draws, -1)
        evaluated = target(points)
        log_ratio = evaluated.log_density - proposal.logpdf(points)
        if not np.isfinite(log_ratio).any():
            msg = (
                f"the exact density is zero at all {n_draws} draws near the given ones; expected "
                "some that the ODE can be integrated from. Check priors and the draws, "
                "and that data and ODE are the model's."
            )
            raise ValueError(msg)
        weights, pareto_k = _smoothed(log_ratio)
        mean, covariance = _moved(points, log_ratio, covariance)
        latest = Weighted(
            points=points,
            weights=weights,
            pareto_k=pareto_k,
            n_effective=1 / (weights**2).sum(),
            n_rounds=len(rounds) + 1,
            covariance=covariance,
            evaluated=evaluated,
        )
        if latest.is_reliable and latest.n_effective > ENOUGH * n_draws:
            return latest
        rounds.append(latest)
    best = max(
        rounds, key=lambda r: (r.is_reliable, r.n_effective if r.is_reliable else -r.pareto_k)
    )
    return best._replace(n_rounds=len(rounds))


def _smoothed(log_ratio) -> tuple[NDArray[np.float64], float]:
    possible = np.isfinite(log_ratio)
    highest = log_ratio[possible].max()
    log_ratio = np.where(possible, log_ratio - highest, -1e3)
    with np.errstate(all="ignore"):  # a proposal without hope has a tail beyond floats, and a k
        smoothed, pareto_k = array_stats.psislw(-log_ratio)
        weights = np.where(possible, np.exp(smoothed), 0.0)
    # No tail can be fitted where all but a few weights vanish.
    return weights / weights.sum(), float(np.nan_to_num(pareto_k, nan=np.inf))


def _moved(points, log_ratio, covariance):
    """Return the weighted mean and covariance, weights flattened until enough of them count."""
    enough = PER_COORDINATE * points.shape[1]
    power = 1.0
    weights, n_effective = _flattened(log_ratio, power)
    while n_effective < enough and power > FLATTEST:
        power *= 0.8
        weights, n_effective = _flattened(log_ratio, power)
    new = np.atleast_2d(np.cov(points.T, aweights=weights, ddof=0))
    share = min(n_effective / enough, 1.0)
    return weights @ points, share * new + (1 - share) * covariance


def _flattened(log_ratio, power: float) -> tuple[NDArray[np.float64], float]:
    weights = np.exp(power * (log_ratio - log_ratio.max()))
    weights /= weights.sum()
    return weights, 1 / (weights**2).sum()
