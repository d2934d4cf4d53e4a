"""NUTS on the exact posterior of a data set: NumPyro, with diffrax inside.

JAX comes with the extra ``benchmarks``; importing this module does not need it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from time import process_time
from typing import NamedTuple

import arviz as az
import numpy as np

from benchmarks.breadth_cases import PROBLEMS, Problem
from benchmarks.cases import ACCURACY_CASES, AccuracyCase
from benchmarks.rivals import import_jax, jax_right_hand_side

type Case = AccuracyCase | Problem


class Length(NamedTuple):
    """Length of every chain: warm-up, and draws after it."""

    warmup: int
    draws: int


LENGTHS = (Length(300, 700), Length(600, 1_400), Length(1_000, 4_000))
CHAINS = 4
RHAT_REACHED = 1.01


class Fit(NamedTuple):
    """Draws of the exact posterior of one data set.

    Attributes
    ----------
    theta, x0, sigma : array
        Parameters, states at the first time and noise of every state, each of
        shape ``(chain, draw, ...)``.
    divergences : int
        Divergent transitions after warm-up.
    attempts : int
        How many lengths of chains were tried; the last is kept.
    cpu_seconds : float
        Warm-up and draws of all chains of the last attempt, compilation left out.
    """

    theta: np.ndarray
    x0: np.ndarray
    sigma: np.ndarray
    divergences: int
    attempts: int
    cpu_seconds: float

    def rhat(self) -> float:
        """Return the largest R-hat of theta."""
        return float(az.rhat(self._theta_by_name()).dataset["theta"].max())

    def ess(self) -> float:
        """Return the least bulk effective sample size of theta."""
        return float(az.ess(self._theta_by_name(), method="bulk").dataset["theta"].min())

    def _theta_by_name(self):
        return az.from_dict({"posterior": {"theta": self.theta}})


class Straight(NamedTuple):
    """Coordinates of log theta in which a long bent ridge is straight, and back."""

    to: Callable
    back: Callable


def _tumour_to(log_theta):
    # Data tell the growth r u / (g + u) - d of effector cells at u = 40, and its slope there.
    _, jax, _ = import_jax()
    s, r, g, d, al = jax.numpy.exp(log_theta)
    growth, slope = r * 40 / (g + 40) - d, r * g / (g + 40) ** 2
    return jax.numpy.log(jax.numpy.array([s, growth, slope, d, al]))


def _tumour_back(v):
    _, jax, _ = import_jax()
    s, growth, slope, d, al = jax.numpy.exp(v)
    g = 40 / ((growth + d) / (40 * slope) - 1)
    return jax.numpy.log(jax.numpy.array([s, (growth + d) * (g + 40) / 40, g, d, al]))


STRAIGHT = {"tumour": Straight(_tumour_to, _tumour_back)}


def split(case: Case, u) -> tuple:
    """Split unconstrained points into theta's coordinates, the first states and log sigma."""
    n_params, n_states = len(case.theta), len(case.x0)
    return u[..., :n_params], u[..., n_params : n_params + n_states], u[..., -n_states:]


def _straight(case: Case) -> Straight:
    return STRAIGHT.get(case.name, Straight(lambda log_theta: log_theta, lambda v: v))


def log_density(case: Case) -> Callable:
    """Return the exact log density of an unconstrained point, given the observations.

    Theta has the prior of the case; the first states have normal priors as wide as
    ten standard deviations of the observations, which is practically flat; and the
    noise of each state is half-normal, as wide as its observations vary.
    """
    diffrax, jax, numpyro = import_jax()
    distributions = numpyro.distributions
    priors = [case.prior_of(name).numpyro() for name in case.theta]
    right_hand_side = jax_right_hand_side(case.ode)
    straight = _straight(case)
    unit = case.simulate(0).sigma
    # States in units of their noise: errors are a hundred thousandth of it.
    term = diffrax.ODETerm(lambda t, z, theta: right_hand_side(t, unit * z, theta) / unit)
    solver, adjoint, tolerance = diffrax.Tsit5(), diffrax.RecursiveCheckpointAdjoint(), 1e-6
    if case.stiff:
        # The fastest of those tried, by a factor of thirty; errors are two thousandths.
        solver, adjoint, tolerance = diffrax.Kvaerno3(), diffrax.ForwardMode(), 1e-4

    def log_p(u, y):
        v, x0, log_sigma = split(case, u)
        log_theta = straight.back(v)
        _, log_volume = jax.numpy.linalg.slogdet(jax.jacfwd(straight.back)(v))
        theta, sigma = jax.numpy.exp(log_theta), jax.numpy.exp(log_sigma)
        spread = y.std(axis=0)
        solution = diffrax.diffeqsolve(
            term,
            solver,
            t0=case.t[0],
            t1=case.t[-1],
            dt0=None,
            y0=x0 / unit,
            args=theta,
            saveat=diffrax.SaveAt(ts=case.t),
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=10 * tolerance),
            adjoint=adjoint,
            max_steps=1_000,
            throw=False,
        )
        log_prior = sum(prior.log_prob(value) for prior, value in zip(priors, theta, strict=True))
        return (
            (log_prior + log_theta.sum() + log_volume)
            + distributions.Normal(y.mean(axis=0), 10 * spread).log_prob(x0).sum()
            + (distributions.HalfNormal(spread).log_prob(sigma) + log_sigma).sum()
            + distributions.Normal(unit * solution.ys, sigma).log_prob(y).sum()
        )

    return log_p


def round_coordinates(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the truth, unconstrained, and a factor of its Gauss-Newton covariance.

    In these coordinates the posterior of every data set of the case is nearly
    round, so that warm-up starts with short trajectories.
    """
    sigma = case.simulate(0).sigma
    theta, x0 = (np.array(list(values.values())) for values in (case.theta, case.x0))
    straight = _straight(case)
    center = np.concatenate([straight.to(np.log(theta)), x0, np.log(sigma)])
    width = np.concatenate([np.full(len(theta), 1e-3), 1e-2 * sigma])
    steps = np.eye(len(width), len(center)) * width[:, None]
    up, down = (
        case.ode.solve(case.t, x0, np.exp([straight.back(row) for row in v]))
        for v, x0, _ in (split(case, center + step) for step in (steps, -steps))
    )
    slopes = (up - down).reshape(len(width), -1) / np.tile(sigma, len(case.t)) / 2 / width[:, None]
    # About the prior's share, one for every log theta, and Fisher's, 2 T for every log sigma.
    counts = len(theta), len(x0), len(x0)
    precision = np.diag(np.repeat([1.0, 0.0, 2.0 * len(case.t)], counts))
    precision[: len(width), : len(width)] += slopes @ slopes.T
    return center, np.linalg.inv(np.linalg.cholesky(precision)).T


@cache
def compiled_chain(name: str, length: Length) -> Callable:
    """Return ``chain(key, y)``, compiled once for all data sets of a case."""
    _, jax, numpyro = import_jax()
    case = next(case for case in (*ACCURACY_CASES, *PROBLEMS) if case.name == name)
    log_p = log_density(case)
    center, factor = round_coordinates(case)

    def chain(key, y):
        of_start, of_chain = jax.random.split(key)
        kernel = numpyro.infer.NUTS(
            potential_fn=lambda z: -log_p(center + factor @ z, y),
            dense_mass=True,
            forward_mode_differentiation=case.stiff,
            # With NumPyro's 0.8 a few draws in a thousand diverge on FitzHugh-Nagumo.
            target_accept_prob=0.9,
        )
        mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=length.warmup, num_samples=length.draws, progress_bar=False
        )
        # As far from the truth as the posterior is wide: a reference may know its mode.
        start = jax.random.normal(of_start, center.shape)
        mcmc.run(of_chain, init_params=start, extra_fields=("diverging",))
        v, x0, log_sigma = split(case, center + mcmc.get_samples() @ factor.T)
        log_theta = jax.vmap(_straight(case).back)(v)
        return (log_theta, x0, log_sigma), mcmc.get_extra_fields()["diverging"].sum()

    example = jax.random.key(0), case.simulate(0).y
    return jax.jit(chain).lower(*example).compile()


def sample(case: Case, replicate: int, lengths: Sequence[Length] = LENGTHS) -> Fit:
    """Sample the exact posterior of a data set, with longer chains until they agree.

    Parameters
    ----------
    case : AccuracyCase or Problem
        One of the cases of the accuracy study or of the breadth study.
    replicate : int
        Number of the data set, also the seed of the chains.
    lengths : sequence of Length
        What to try in turn while the largest R-hat is above 1.01.

    Returns
    -------
    Fit
        The last attempt.

    Raises
    ------
    ImportError
        If JAX, NumPyro or diffrax is missing.
    """
    _, jax, _ = import_jax()
    y = case.simulate(replicate).y
    for attempt, length in enumerate(lengths):
        chain = compiled_chain(case.name, length)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(replicate), attempt), CHAINS)
        start = process_time()
        runs = [jax.block_until_ready(chain(key, y)) for key in keys]
        cpu_seconds = process_time() - start
        log_theta, x0, log_sigma = (
            np.stack(arrays) for arrays in zip(*(draws for draws, _ in runs), strict=True)
        )
        divergences = sum(int(count) for _, count in runs)
        fit = Fit(np.exp(log_theta), x0, np.exp(log_sigma), divergences, attempt + 1, cpu_seconds)
        if fit.rhat() <= RHAT_REACHED:
            break
    return fit
