"""The exact posterior of a data set of the messy study, by NumPyro and diffrax.

The likelihood is the instrument's, in NumPyro's words, and so are the priors: nothing here
knows of the model that ``gm.fit`` builds.
"""

from collections.abc import Callable, Sequence
from functools import cache
from time import process_time
from types import SimpleNamespace
from typing import NamedTuple

import arviz as az
import numpy as np
from scipy.optimize import minimize

from benchmarks.cases import MESSY, Messy, Prior, named
from benchmarks.jax_rival import (
    LENGTHS,
    Fit,
    Length,
    import_jax,
    nuts,
    right_hand_side,
    solved,
    until_agreed,
)
from benchmarks.messy.rows import Row, free_starts, moments, rmse_of

__all__ = ["Target", "exact", "target_of"]

STEP = 1e-4  # of the differences of gradients, in log units or noise
SOFTEST = 0.05  # the least curvature of the coordinates: no direction is wider than 4.5
N_TRAJECTORIES = 1_000
LONGER = (*LENGTHS, Length(2_000, 16_000))


class Target(NamedTuple):
    """An exact posterior for all data sets of a case.

    Attributes
    ----------
    log_density : callable
        ``log_density(u, (y, spread))`` of an unconstrained point: log theta, what is free of
        x(t0), its logarithm where the state is positive or has a prior, and log sigma; spread is
        what the instrument says of y.
    natural : callable
        Maps u to log theta, x(t0) of all states and log sigma.
    trajectory : callable
        Maps u to the states at the times, shape ``(time, state)``.
    at : callable
        Maps theta, the x(t0) of all states and sigma to u.
    """

    log_density: Callable
    natural: Callable
    trajectory: Callable
    at: Callable


@cache
def target_of(case: Messy) -> Target:
    """Write the exact posterior of a case."""
    diffrax, jax, _ = import_jax()
    jnp = jax.numpy
    f, states = right_hand_side(case.ode), case.ode.states
    priors = [prior.numpyro() for prior in case.prior.values()]
    unit = case.x.std(axis=0)
    free = [name[3:-1] for name in free_starts(case)]
    of_start = {s: p.numpyro() for s, p in case.start.items() if isinstance(p, Prior)}
    is_log = np.array([s in case.ode.positive or s in of_start for s in free], dtype=bool)
    n_theta = len(case.theta)
    n_start = n_theta + len(free)

    def natural(u):
        log_theta, start, log_sigma = u[:n_theta], u[n_theta:n_start], u[n_start:]
        start = jnp.where(is_log, jnp.exp(jnp.where(is_log, start, 0.0)), start)
        known = dict(zip(free, start, strict=True))
        theta = SimpleNamespace(**dict(zip(case.theta, jnp.exp(log_theta), strict=True)))
        for state in states:
            if state not in known:
                value = case.start[state]
                known[state] = value(theta, SimpleNamespace(**known)) if callable(value) else value
        return log_theta, jnp.array([known[s] for s in states], dtype=float), log_sigma

    def trajectory(u):
        log_theta, x0, _ = natural(u)
        return unit * solved(
            lambda t, z, theta: f(t, unit * z, theta) / unit,
            case.t,
            x0 / unit,
            jnp.exp(log_theta),
            solver=diffrax.Tsit5(),
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            rtol=1e-6,
            atol=1e-7,
            max_steps=1_000,
        )

    def log_density(u, data):
        y, spread = data
        log_theta, x0, log_sigma = natural(u)
        theta, sigma = jnp.exp(log_theta), jnp.exp(log_sigma)
        total = log_theta.sum() + log_sigma.sum()
        total += sum(prior.log_prob(value) for prior, value in zip(priors, theta, strict=True))
        for state, prior in of_start.items():
            start = x0[states.index(state)]
            total += prior.log_prob(start) + jnp.log(start)
        noise = case.instrument.noise(spread)
        if noise is not None:
            total += noise.prior.numpyro().log_prob(sigma).sum()
        return total + case.instrument.log_density(trajectory(u), sigma, y)

    def at(theta, x0, sigma):
        start = np.array([x0[states.index(s)] for s in free], dtype=float)
        start[is_log] = np.log(start[is_log])
        return np.concatenate([np.log(theta), start, np.log(sigma)])

    return Target(log_density, natural, trajectory, at)


class Compiled(NamedTuple):
    """A function and the CPU seconds that its compilation took."""

    function: Callable
    cpu_seconds: float


def _compiled(function: Callable, *example) -> Compiled:
    _, jax, _ = import_jax()
    start = process_time()
    function = jax.jit(function).lower(*example).compile()
    return Compiled(function, process_time() - start)


def data_of(case: Messy, replicate: int) -> tuple:
    """Return the data of a set, as log densities take them."""
    y = case.simulate(replicate)
    return y, case.instrument.spread(y)


def truth(case: Messy, data: tuple):
    """Return the true point, with the noise where its prior has its middle."""
    noise = case.instrument.noise(data[1])
    sigma = np.zeros(0)
    if noise is not None:
        sigma = np.broadcast_to(noise.prior.numpyro().icdf(0.5), noise.size)
    return target_of(case).at(case.truth, list(case.x0.values()), sigma)


def _example(case: Messy) -> tuple:
    data = data_of(case, 0)
    return truth(case, data), data


@cache
def _gradient(case: Messy) -> Compiled:
    _, jax, _ = import_jax()
    return _compiled(jax.value_and_grad(target_of(case).log_density), *_example(case))


@cache
def _chain(case: Messy, length: Length) -> Compiled:
    _, jax, _ = import_jax()
    target = target_of(case)
    steps = nuts(target.log_density, length)

    def chain(key, center, factor, data):
        draws, divergences = steps(key, center, factor, data)
        return jax.vmap(target.natural)(draws), divergences

    u, data = _example(case)
    return _compiled(chain, jax.random.key(0), u, np.eye(len(u)), data)


@cache
def _mean_trajectory(case: Messy) -> Callable:
    _, jax, _ = import_jax()
    trajectory = target_of(case).trajectory
    return jax.jit(lambda draws: jax.lax.map(trajectory, draws).mean(axis=0))


def rounded(case: Messy, data: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Return the mode that is reached from the truth, and a factor of the covariance there."""
    evaluate = _gradient(case).function

    def height(u):
        value, gradient = evaluate(u, data)
        value = float(value)
        return (-value if np.isfinite(value) else np.inf), -np.nan_to_num(np.asarray(gradient))

    def curvature(u):
        slopes = [height(u + step)[1] - height(u - step)[1] for step in STEP * np.eye(len(u))]
        return (slopes + np.transpose(slopes)) / (4 * STEP)

    with np.errstate(all="ignore"):
        found = minimize(height, truth(case, data), jac=True, hess=curvature, method="trust-exact")
    values, vectors = np.linalg.eigh(curvature(found.x))
    return found.x, vectors / np.sqrt(np.maximum(values, SOFTEST))


def exact(key: tuple[str, int], lengths: Sequence[Length] = LONGER) -> Row:
    """Sample the exact posterior of a data set; returns a row like that of our fit."""
    case = named(MESSY, key[0])
    data = data_of(case, key[1])
    compiling = _gradient(case).cpu_seconds
    start = process_time()
    round_there = rounded(case, data)
    climbing = process_time() - start
    fit = until_agreed(
        lambda length: _chain(case, length).function, [*round_there, data], key[1], lengths
    )
    compiling += _chain(case, lengths[fit.attempts - 1]).cpu_seconds
    draws = {
        **dict(zip(case.theta, np.moveaxis(fit.theta, -1, 0), strict=True)),
        **dict(zip(free_starts(case), _free_of(case, fit.x0), strict=True)),
        **{f"sigma[{k}]": sigma for k, sigma in enumerate(np.moveaxis(fit.sigma, -1, 0))},
    }
    by_chain = az.from_dict({"posterior": draws})["posterior"].dataset
    return {
        "variables": {name: moments(values) for name, values in draws.items()},
        "rmse": rmse_of(case, _mean(case, fit)),
        "rhat": fit.rhat(),
        "worst rhat": float(az.rhat(by_chain).to_array().max()),
        "n_effective": fit.ess(),
        "divergences": fit.divergences,
        "attempts": fit.attempts,
        "compile_seconds": compiling,
        "cpu_seconds": climbing + fit.cpu_seconds,
    }


def _free_of(case: Messy, x0) -> np.ndarray:
    places = [case.ode.states.index(name[3:-1]) for name in free_starts(case)]
    return np.moveaxis(x0[..., places], -1, 0)


def _mean(case: Messy, fit: Fit) -> np.ndarray:
    """Return the mean trajectory of some of the draws."""
    at = target_of(case).at
    every = [np.concatenate(values) for values in (fit.theta, fit.x0, fit.sigma)]
    some = np.linspace(0, len(every[0]) - 1, N_TRAJECTORIES).astype(int)
    points = np.array([at(*point) for point in zip(*(v[some] for v in every), strict=True)])
    return np.asarray(_mean_trajectory(case)(points))
