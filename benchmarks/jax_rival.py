"""The rival: NUTS through a numerical solver, NumPyro with diffrax.

:func:`diffrax_nuts` measures its speed with the noise known, told the true parameters;
:func:`sample` draws from the exact posterior with the noise unknown, the reference of the
accuracy study and of the breadth study.  JAX comes with the extra ``benchmarks``;
importing this module does not need it.
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from time import process_time
from typing import NamedTuple

import arviz as az
import numpy as np
import pytensor.tensor as pt

import pymc_gradmatch as gm
from benchmarks.cases import Case
from benchmarks.gradients import in_jax, microseconds
from benchmarks.paper import systems

__all__ = [
    "Fit",
    "Length",
    "Rival",
    "diffrax_nuts",
    "gradient_us",
    "import_jax",
    "nuts",
    "right_hand_side",
    "sample",
    "solved",
    "until_agreed",
]


def import_jax():
    """Import and return diffrax, jax and numpyro: float64, one thread, no accelerator."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    # A wild proposal of NUTS has no density; Equinox would end the run there.
    os.environ.setdefault("EQX_ON_ERROR", "nan")
    try:
        import diffrax
        import jax
        import numpyro
        import pymc.sampling.jax  # noqa: F401 (for right_hand_side: before any clock starts)
    except ImportError as error:
        msg = "This benchmark needs JAX, NumPyro and diffrax: pip install .[benchmarks]"
        raise ImportError(msg) from error
    jax.config.update("jax_enable_x64", True)
    return diffrax, jax, numpyro


def right_hand_side(ode: gm.ODE) -> Callable:
    """Return the right-hand side of an ODE as a function ``f(t, x, theta)`` for JAX.

    The graph that the user's function writes, translated by PyTensor.
    """
    import_jax()
    from pymc.sampling.jax import get_jaxified_graph

    t = pt.scalar("t", dtype="float64")
    x = pt.vector("x", dtype="float64", shape=(len(ode.states),))
    theta = pt.vector("theta", dtype="float64", shape=(len(ode.params),))
    f = ode(t[None], x[None], [theta[i] for i in range(len(ode.params))])[0]
    graph = get_jaxified_graph([t, x, theta], [f])
    return lambda t, x, theta: graph(t, x, theta)[0]


class Rival(NamedTuple):
    """What the rival achieved.

    Attributes
    ----------
    ess_per_cpu_second : float
        ``ess`` divided by ``cpu_seconds_sampling``.
    ess : float
        Bulk effective sample size of all chains together, the least over theta.
    cpu_seconds_sampling : float
        Warm-up and draws of all chains, compilation left out.
    cpu_seconds_compile : float
        Tracing and compiling, once for all chains.
    gradient_us : float
        CPU microseconds of one log density with gradient at the true parameters,
        inside a compiled loop.
    rhat : float
        The largest over theta.  Where it is not near 1, ``ess`` means nothing.
    divergences : int
        Divergent transitions after warm-up.
    """

    ess_per_cpu_second: float
    ess: float
    cpu_seconds_sampling: float
    cpu_seconds_compile: float
    gradient_us: float
    rhat: float
    divergences: int


def solved(f: Callable, t, x0, theta, *, solver, adjoint, rtol, atol, max_steps=4096):
    """Return the trajectory of ``f(t, x, theta)``; NaN or infinite where it has none."""
    diffrax, _, _ = import_jax()
    return diffrax.diffeqsolve(
        diffrax.ODETerm(f),
        solver,
        t0=t[0],
        t1=t[-1],
        dt0=None,
        y0=x0,
        args=theta,
        saveat=diffrax.SaveAt(ts=t),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=atol),
        adjoint=adjoint,
        max_steps=max_steps,
        throw=False,
    ).ys


def _model(case: Case, data: systems.Simulation) -> Callable[[], None]:
    """Return the NumPyro model: theta and the initial states unknown, sigma known."""
    diffrax, jax, numpyro = import_jax()
    f = right_hand_side(case.ode)
    # The fastest of those tried, see `diffrax_nuts`.
    solver, adjoint = diffrax.Tsit5(), diffrax.RecursiveCheckpointAdjoint()

    def model():
        theta = jax.numpy.stack(
            [numpyro.sample(name, prior.numpyro()) for name, prior in case.prior.items()]
        )
        near_first = numpyro.distributions.Normal(data.y[0], data.y.std(axis=0))
        x0 = numpyro.sample("x0", near_first.to_event(1))
        x = solved(f, data.t, x0, theta, solver=solver, adjoint=adjoint, rtol=1e-6, atol=1e-6)
        noise = numpyro.distributions.Normal(x, data.sigma)
        numpyro.sample("y", noise.to_event(2), obs=data.y)

    return model


def gradient_us(model: Callable[[], None], init_strategy: Callable) -> float:
    """Return CPU microseconds of a model's log density with gradient, in a compiled loop."""
    _, jax, numpyro = import_jax()
    information = numpyro.infer.util.initialize_model(
        jax.random.key(0), model, init_strategy=init_strategy
    )
    density = jax.value_and_grad(information.potential_fn)
    return microseconds(in_jax(density, information.param_info.z))


def diffrax_nuts(
    case: Case,
    data: systems.Simulation,
    *,
    dense_mass: bool,
    warmup: int = 1_000,
    draws: int = 1_000,
    chains: int = 4,
    random_seed: int = 0,
) -> Rival:
    """Sample the exact posterior, solving the ODE at every step of NUTS.

    Theta has the case's priors, the initial states a normal one around the first
    observation, as wide as each state varies over time; sigma is fixed at its
    true value.  The rival gets its best: chains start at the true parameters;
    ``Tsit5`` with ``RecursiveCheckpointAdjoint`` was the fastest or within 15 %
    of it on every system, against ``Dopri8``, ``Kvaerno5`` (protein transduction
    at these parameters is not stiff), ``DirectAdjoint`` and ``ForwardMode``; and
    every chain is one compiled program.

    Parameters
    ----------
    case : Case
        The problem.
    data : Simulation
        One of its data sets.
    dense_mass : bool
        Whether warm-up adapts a whole mass matrix, or its diagonal only.
    warmup, draws, chains : int
        Length of warm-up, draws after it, and chains, which run in sequence.
    random_seed : int
        Seed of all chains.

    Returns
    -------
    Rival

    Raises
    ------
    ImportError
        If JAX, NumPyro or diffrax is missing.

    Notes
    -----
    JAX is switched to float64 for the whole process, and to one thread if it
    has not run yet.
    """
    _, jax, numpyro = import_jax()
    model = _model(case, data)
    start_at_truth = numpyro.infer.init_to_value(
        values={**case.theta, "x0": np.array(list(case.x0.values()))}
    )

    def chain(key):
        kernel = numpyro.infer.NUTS(model, dense_mass=dense_mass, init_strategy=start_at_truth)
        mcmc = numpyro.infer.MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key, extra_fields=("diverging",))
        return mcmc.get_samples(), mcmc.get_extra_fields()["diverging"]

    keys = jax.random.split(jax.random.key(random_seed), chains)
    start = process_time()
    compiled = jax.jit(chain).lower(keys[0]).compile()
    cpu_seconds_compile = process_time() - start

    start = process_time()
    runs = [jax.block_until_ready(compiled(key)) for key in keys]
    cpu_seconds_sampling = process_time() - start

    theta = az.from_dict(
        {"posterior": {name: np.stack([run[0][name] for run in runs]) for name in case.theta}}
    )
    ess = float(az.ess(theta, method="bulk").dataset.to_array().min())
    return Rival(
        ess_per_cpu_second=ess / cpu_seconds_sampling,
        ess=ess,
        cpu_seconds_sampling=cpu_seconds_sampling,
        cpu_seconds_compile=cpu_seconds_compile,
        gradient_us=gradient_us(model, start_at_truth),
        rhat=float(az.rhat(theta).dataset.to_array().max()),
        divergences=sum(int(run[1].sum()) for run in runs),
    )


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
    priors = [prior.numpyro() for prior in case.prior.values()]
    f = right_hand_side(case.ode)
    straight = _straight(case)
    unit = case.simulate(0).sigma
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
        # States in units of their noise: errors are a hundred thousandth of it.
        z = solved(
            lambda t, z, theta: f(t, unit * z, theta) / unit,
            case.t,
            x0 / unit,
            theta,
            solver=solver,
            adjoint=adjoint,
            rtol=tolerance,
            atol=10 * tolerance,
            max_steps=1_000,
        )
        log_prior = sum(prior.log_prob(value) for prior, value in zip(priors, theta, strict=True))
        return (
            (log_prior + log_theta.sum() + log_volume)
            + distributions.Normal(y.mean(axis=0), 10 * spread).log_prob(x0).sum()
            + (distributions.HalfNormal(spread).log_prob(sigma) + log_sigma).sum()
            + distributions.Normal(unit * z, sigma).log_prob(y).sum()
        )

    return log_p


def round_coordinates(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the truth, unconstrained, and a factor of its Gauss-Newton covariance.

    In these coordinates the posterior of every data set of the case is nearly
    round, so that warm-up starts with short trajectories.
    """
    sigma = case.simulate(0).sigma
    theta, x0 = case.truth, np.array(list(case.x0.values()))
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


def nuts(log_p: Callable, length: Length, *, stiff: bool = False) -> Callable:
    """Return ``chain(key, center, factor, y)``: draws, and how many diverged.

    Parameters
    ----------
    log_p : callable
        The log density ``log_p(u, y)`` of unconstrained points given the observations.
    length : Length
        Of the chain.
    stiff : bool, default False
        Whether derivatives are to be taken forwards.

    Returns
    -------
    callable
        Its draws have shape ``(draw, coordinate)``.

    Notes
    -----
    The chain moves in (u - center) / factor, in which the posterior should be nearly round, and
    starts a standard normal away from the center: a reference may know its mode.
    """
    _, jax, numpyro = import_jax()

    def chain(key, center, factor, y):
        of_start, of_chain = jax.random.split(key)
        kernel = numpyro.infer.NUTS(
            potential_fn=lambda z: -log_p(center + factor @ z, y),
            dense_mass=True,
            forward_mode_differentiation=stiff,
            # With NumPyro's 0.8 a few draws in a thousand diverge on FitzHugh-Nagumo.
            target_accept_prob=0.9,
        )
        mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=length.warmup, num_samples=length.draws, progress_bar=False
        )
        start = jax.random.normal(of_start, center.shape)
        mcmc.run(of_chain, init_params=start, extra_fields=("diverging",))
        draws = center + mcmc.get_samples() @ factor.T
        return draws, mcmc.get_extra_fields()["diverging"].sum()

    return chain


@cache
def compiled_chain(case: Case, length: Length) -> Callable:
    """Return ``chain(key, y)``, compiled once for all data sets of a case."""
    _, jax, _ = import_jax()
    center, factor = round_coordinates(case)
    steps = nuts(log_density(case), length, stiff=case.stiff)

    def chain(key, y):
        draws, divergences = steps(key, center, factor, y)
        v, x0, log_sigma = split(case, draws)
        log_theta = jax.vmap(_straight(case).back)(v)
        return (log_theta, x0, log_sigma), divergences

    example = jax.random.key(0), case.simulate(0).y
    return jax.jit(chain).lower(*example).compile()


def until_agreed(
    chain_of: Callable[[Length], Callable],
    arguments: Sequence,
    random_seed: int,
    lengths: Sequence[Length] = LENGTHS,
) -> Fit:
    """Run chains, longer ones until the largest R-hat of theta is at most 1.01.

    Parameters
    ----------
    chain_of : callable
        Maps a length to ``chain(key, *arguments)``, which returns draws of log theta, of x(t0)
        and of log sigma as a tuple, and how many diverged.
    arguments : sequence
        Of the chain, beside its key.
    random_seed : int
        Seed of all chains.
    lengths : sequence of Length
        What to try in turn.

    Returns
    -------
    Fit
        The last attempt.
    """
    _, jax, _ = import_jax()
    for attempt, length in enumerate(lengths):
        chain = chain_of(length)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(random_seed), attempt), CHAINS)
        start = process_time()
        runs = [jax.block_until_ready(chain(key, *arguments)) for key in keys]
        cpu_seconds = process_time() - start
        log_theta, x0, log_sigma = (
            np.stack(arrays) for arrays in zip(*(draws for draws, _ in runs), strict=True)
        )
        divergences = sum(int(count) for _, count in runs)
        fit = Fit(np.exp(log_theta), x0, np.exp(log_sigma), divergences, attempt + 1, cpu_seconds)
        if fit.rhat() <= RHAT_REACHED:
            break
    return fit


def sample(case: Case, replicate: int, lengths: Sequence[Length] = LENGTHS) -> Fit:
    """Sample the exact posterior of a data set, with longer chains until they agree.

    Parameters
    ----------
    case : Case
        The problem.
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
    y = case.simulate(replicate).y
    return until_agreed(lambda length: compiled_chain(case, length), [y], replicate, lengths)
