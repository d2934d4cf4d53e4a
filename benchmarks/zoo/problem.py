"""A problem of the zoo: written for ``gm.fit``, and once more in numpy.

The second way shares the ODE's solver with the first and nothing else: it draws the data, and
its log density is what references sample.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import NDArray
from scipy import stats
from scipy.special import gammaln

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.zoo.priors import from_scores

__all__ = ["LAWS", "Channel", "Part", "Problem", "Unknown", "draws_of"]

type Array = NDArray[np.float64]

DEGREES = 4.0  # of freedom, of Student's t
CHUNK = 4_000_000  # numbers of trajectories held at once


class Law(NamedTuple):
    """A distribution of data around an expected value, with at most one number of its own.

    Each function takes what is expected, that number, and the limit of detection, if any.
    """

    draw: Callable[..., Array]
    """``draw(rng, expected, noise, limit)``."""
    log_density: Callable[..., Array]
    """``log_density(y, expected, noise, limit)``."""
    write: Callable[..., Any]
    """``write(name, expected, noise, limit, y)``, in a PyMC model."""


def _censored(y, expected, noise, limit):
    return np.where(
        y > limit,
        stats.norm.logpdf(y, expected, noise),
        stats.norm.logcdf(limit, expected, noise),
    )


def _write_censored(name, expected, noise, limit, y):
    noisy = pm.Normal.dist(expected, noise)
    return pm.Censored(name, noisy, lower=limit, upper=None, observed=y)


def _poisson(y, expected, noise, limit):
    return y * np.log(expected) - expected - gammaln(y + 1)


def _negative_binomial(y, expected, alpha, limit):
    return (
        gammaln(y + alpha) - gammaln(alpha) - gammaln(y + 1)
        + alpha * np.log(alpha / (alpha + expected))
        + y * np.log(expected / (alpha + expected))
    )  # fmt: skip


LAWS = {
    "normal": Law(
        lambda rng, mu, s, limit: rng.normal(mu, s),
        lambda y, mu, s, limit: stats.norm.logpdf(y, mu, s),
        lambda name, mu, s, limit, y: pm.Normal(name, mu, s, observed=y),
    ),
    "Student-t": Law(
        lambda rng, mu, s, limit: mu + s * rng.standard_t(DEGREES, np.shape(mu)),
        lambda y, mu, s, limit: stats.t.logpdf(y, DEGREES, mu, s),
        lambda name, mu, s, limit, y: pm.StudentT(name, DEGREES, mu=mu, sigma=s, observed=y),
    ),
    "log-normal": Law(
        lambda rng, mu, s, limit: mu * np.exp(rng.normal(0, s, np.shape(mu))),
        lambda y, mu, s, limit: stats.norm.logpdf(np.log(y), np.log(mu), s) - np.log(y),
        lambda name, mu, s, limit, y: pm.LogNormal(name, pm.math.log(mu), s, observed=y),
    ),
    "Poisson": Law(
        lambda rng, mu, s, limit: rng.poisson(mu).astype(float),
        _poisson,
        lambda name, mu, s, limit, y: pm.Poisson(name, mu, observed=y.astype(int)),
    ),
    "negative binomial": Law(
        lambda rng, mu, a, limit: rng.negative_binomial(a, a / (a + mu)).astype(float),
        _negative_binomial,
        lambda name, mu, a, limit, y: pm.NegativeBinomial(
            name, mu=mu, alpha=a, observed=y.astype(int)
        ),
    ),
    "censored": Law(
        lambda rng, mu, s, limit: np.maximum(rng.normal(mu, s), limit),
        _censored,
        _write_censored,
    ),
}


@dataclass(frozen=True, eq=False)
class Channel:
    """What is seen of the states of one experiment.

    Attributes
    ----------
    name : str
        Of the observed variable.
    states : tuple of str
        Whose sum is seen.
    seen : array of int
        Places of the times at which it is.
    law : str
        One of ``LAWS``.
    noise : float or Prior, optional
        The law's own number, known or unknown; nothing for Poisson counts.
    gain, background : float
        Data are expected around ``background + gain * sum``.
    limit : float
        Of detection.
    """

    name: str
    states: tuple[str, ...]
    seen: NDArray[np.int64]
    law: str
    noise: float | Prior | None = None
    gain: float = 1.0
    background: float = 0.0
    limit: float = -np.inf


@dataclass(frozen=True, eq=False)
class Part:
    """One experiment; of several, with a name.

    Attributes
    ----------
    name : str
        Empty where it is the only one.
    t : array of float
        Times, at the first of which starts hold.
    channels : sequence of Channel
        What is seen.
    start : mapping of str to float or Prior
        What is known of each state at the first time.
    inputs : mapping of str to Input
        Inputs and doses.
    """

    name: str
    t: Array
    channels: Sequence[Channel]
    start: Mapping[str, float | Prior]
    inputs: Mapping[str, gm.Input] = field(default_factory=dict)


class Unknown(NamedTuple):
    """A scalar that is inferred: its name in ``fit.table``, its prior, and what it is."""

    label: str
    prior: Prior
    kind: str


@dataclass(frozen=True, eq=False)
class Problem:
    """An ODE, priors of all that is unknown, and what is measured.

    Attributes
    ----------
    family : str
        What kind of system it is.
    ode : ODE
        The right-hand side.
    theta : mapping of str to Prior
        Of each parameter.
    parts : sequence of Part
        Experiments.
    truth : array of float
        True values of the unknowns, in their order.
    data : sequence of sequence of array
        Of each part and channel, at the times seen.
    by_table : bool
        Whether ``gm.fit`` is given a table and ``sigma=``, not a likelihood.
    described : mapping of str
        What a table says of it.
    """

    family: str
    ode: gm.ODE
    theta: Mapping[str, Prior]
    parts: Sequence[Part]
    truth: Array = field(default_factory=lambda: np.empty(0))
    data: Sequence[Sequence[Array]] = ()
    by_table: bool = False
    described: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def unknowns(self) -> list[Unknown]:
        """All scalars that are inferred: parameters, starts, noise."""
        starts, noises = [], []
        for part in self.parts:
            where, prefix = (f"{part.name}, ", f"{part.name}::") if part.name else ("", "")
            starts += [
                Unknown(f"x0[{where}{state}]", prior, "start")
                for state, prior in part.start.items()
                if isinstance(prior, Prior)
            ]
            noises += [
                Unknown(
                    f"sigma[{k}]" if self.by_table else f"{prefix}noise_{channel.name}",
                    channel.noise,
                    "noise",
                )
                for k, channel in enumerate(part.channels)
                if isinstance(channel.noise, Prior)
            ]
        of_theta = [Unknown(name, prior, "parameter") for name, prior in self.theta.items()]
        return [*of_theta, *starts, *noises]

    @cached_property
    def _solvers(self) -> list[gm.ODE]:
        return [self.ode.with_inputs(p.inputs) if p.inputs else self.ode for p in self.parts]

    def natural(self, scores: Array) -> Array:
        """Return the values of the unknowns of normal scores, shape ``(point, unknown)``."""
        columns = zip(self.unknowns, scores.T, strict=True)
        return np.stack([from_scores(unknown.prior, column) for unknown, column in columns], axis=1)

    def expected(self, points: Array) -> list[list[tuple[Channel, Array, Any]]]:
        """Return every channel with what it is expected to show and its noise, at points.

        Of each part.  Points have shape ``(point, unknown)``, expectations ``(point, time)``.
        """
        columns: Iterator[Array] = iter(points.T)
        theta = np.stack([next(columns) for _ in self.theta], axis=1)
        starts = [
            np.stack(
                [
                    next(columns) if isinstance(given, Prior) else np.full(len(points), given)
                    for given in (part.start[state] for state in self.ode.states)
                ],
                axis=1,
            )
            for part in self.parts
        ]
        places = {state: k for k, state in enumerate(self.ode.states)}
        if self.ode.positive:  # a score far below any draw's may be a start of zero
            starts = [np.maximum(x0, np.finfo(float).tiny) for x0 in starts]
        of_parts = []
        for part, ode, x0 in zip(self.parts, self._solvers, starts, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of solutions that fail, which are NaN
                x = ode.solve(part.t, x0, theta)
            shown = []
            for channel in part.channels:
                level = sum(x[:, channel.seen, places[state]] for state in channel.states)
                noise = channel.noise
                if isinstance(noise, Prior):
                    noise = next(columns)[:, None]
                shown.append((channel, channel.background + channel.gain * level, noise))
            of_parts.append(shown)
        return of_parts

    def log_likelihood(self, points: Array) -> Array:
        """Return the log density of the data at points; minus infinity without a solution."""
        size = max(len(part.t) for part in self.parts) * len(self.ode.states)
        chunks = np.array_split(points, max(1, -(-len(points) * size // CHUNK)))
        return np.concatenate([self._log_likelihood(chunk) for chunk in chunks])

    def _log_likelihood(self, points: Array) -> Array:
        total = np.zeros(len(points))
        with np.errstate(all="ignore"):
            for shown, measured in zip(self.expected(points), self.data, strict=True):
                for (channel, expected, noise), y in zip(shown, measured, strict=True):
                    law = LAWS[channel.law]
                    total += law.log_density(y, expected, noise, channel.limit).sum(axis=1)
        return np.where(np.isfinite(total), total, -np.inf)

    def simulated(self, truth: Array, rng: np.random.Generator) -> list[list[Array]] | None:
        """Return data that the laws draw, or nothing where there is no solution."""
        data = []
        for shown in self.expected(truth[None]):
            measured = []
            for channel, expected, noise in shown:
                if not np.isfinite(expected).all():
                    return None
                if channel.law in {"log-normal", "Poisson", "negative binomial"} and (
                    expected.min() <= 0
                ):
                    return None
                noise = noise[0, 0] if isinstance(noise, np.ndarray) else noise
                draw = LAWS[channel.law].draw
                measured.append(draw(rng, expected[0], noise, channel.limit))
            data.append(measured)
        return data

    def arguments(self) -> dict[str, Any]:
        """Return what ``gm.fit`` is given beside the ODE, times and observations."""
        priors = {name: prior.pymc() for name, prior in self.theta.items()}
        if len(self.parts) == 1:
            return {"priors": priors, **self._of_part(0)}
        experiments = {
            part.name: gm.Experiment(part.t, **self._of_part(number))
            for number, part in enumerate(self.parts)
        }
        return {"priors": priors, "experiments": experiments}

    def fit(self, random_seed: int, fitted: Callable) -> Any:
        """Call ``gm.fit``, or what takes its arguments."""
        given = self.arguments() | {"random_seed": random_seed}
        alone = len(self.parts) == 1
        return fitted(self.ode, self.parts[0].t if alone else None, given.pop("y", None), **given)

    def _of_part(self, number: int) -> dict[str, Any]:
        part, data = self.parts[number], self.data[number]
        start = {
            state: known.pymc() if isinstance(known, Prior) else known
            for state, known in part.start.items()
        }
        given: dict[str, Any] = {"start": start}
        if part.inputs:
            given["inputs"] = dict(part.inputs)
        return given | (self._table(part, data) if self.by_table else _lines(part, data))

    @staticmethod
    def _table(part: Part, data: Sequence[Array]) -> dict[str, Any]:
        table = pd.DataFrame({c.name: np.full(len(part.t), np.nan) for c in part.channels})
        for channel, y in zip(part.channels, data, strict=True):
            table.loc[channel.seen, channel.name] = y
        noises = [channel.noise for channel in part.channels]
        known = [noise for noise in noises if isinstance(noise, float)]
        if known:
            sigma: Any = table * 0 + known
        else:
            arguments = zip(*(prior.arguments for prior in noises), strict=True)
            sigma = getattr(pm, noises[0].family).dist(*map(np.array, arguments))
        return {"y": table, "sigma": sigma}


def _lines(part: Part, data: Sequence[Array]) -> dict[str, Any]:
    """Return the likelihood as lines of PyMC."""

    def likelihood(x, theta):
        for channel, y in zip(part.channels, data, strict=True):
            level = sum(getattr(x, state)[channel.seen] for state in channel.states)
            noise = channel.noise
            if isinstance(noise, Prior):
                family = getattr(pm, noise.family)
                noise = family(f"noise_{channel.name}", *noise.arguments)
            expected = channel.background + channel.gain * level
            LAWS[channel.law].write(channel.name, expected, noise, channel.limit, y)

    return {"likelihood": likelihood}


def draws_of(posterior: xr.Dataset, label: str) -> Array:
    """Return the draws of a scalar by its label, such as ``x0[first, prey]``."""
    name, _, entry = label.rstrip("]").partition("[")
    draws = posterior[name]
    places = [int(one) if one.isdigit() else one for one in entry.split(", ")] if entry else []
    return draws.sel(dict(zip(draws.dims[2:], places, strict=True))).to_numpy().ravel()
