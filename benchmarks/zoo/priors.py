"""Priors as the zoo needs them: drawn from, and as normal scores, in which all are N(0, 1)."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.cases.case import Prior

__all__ = ["drawn", "from_scores", "to_scores"]

FAMILIES = {
    "Normal": lambda mean, sd: stats.norm(mean, sd),
    "LogNormal": lambda mean, sd: stats.lognorm(sd, scale=np.exp(mean)),
    "HalfNormal": lambda sd: stats.halfnorm(scale=sd),
    "HalfCauchy": lambda scale: stats.halfcauchy(scale=scale),
    "Uniform": lambda lower, upper: stats.uniform(lower, upper - lower),
    "Gamma": lambda shape, rate: stats.gamma(shape, scale=1 / rate),
    "Exponential": lambda rate: stats.expon(scale=1 / rate),
    "Beta": lambda a, b: stats.beta(a, b),
    "TruncatedNormal": lambda mean, sd: stats.truncnorm(-mean / sd, np.inf, mean, sd),
}


@cache
def _frozen(prior: Prior) -> Any:
    return FAMILIES[prior.family](*prior.arguments)


def drawn(prior: Prior, rng: np.random.Generator) -> float:
    """Return a draw of a prior."""
    return float(from_scores(prior, rng.normal(size=1))[0])


def from_scores(prior: Prior, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of which the normal scores under a prior are these."""
    if prior.family in {"Normal", "LogNormal"}:
        mean, sd = prior.arguments
        values = mean + sd * scores
        return np.exp(values) if prior.family == "LogNormal" else values
    frozen = _frozen(prior)
    upper = scores > 0  # each side from its own tail, that neither is rounded to one
    below, above = stats.norm.cdf(np.minimum(scores, 0)), stats.norm.sf(np.maximum(scores, 0))
    return np.where(upper, frozen.isf(above), frozen.ppf(below))


def to_scores(prior: Prior, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the normal scores of values under a prior."""
    if prior.family in {"Normal", "LogNormal"}:
        mean, sd = prior.arguments
        return ((np.log(values) if prior.family == "LogNormal" else values) - mean) / sd
    frozen = _frozen(prior)
    upper = values > frozen.median()
    return np.where(upper, stats.norm.isf(frozen.sf(values)), stats.norm.ppf(frozen.cdf(values)))
