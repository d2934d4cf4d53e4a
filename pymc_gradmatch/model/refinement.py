r"""Theorem 1 without its smoothing bias: a prior mean that satisfies the ODE, and a rule.

:func:`recentre` makes the ODE's own solution the prior mean; :func:`refine` chooses all
settings of ``preset="refined"`` by one rule for all problems.  docs/accuracy.md has the
study behind it.

1. *Grid*: four steps from one observation to the next (more for short series,
   fewer for long ones).
2. *Time* is counted in observations: people observe where things change.
3. A wide Gaussian process finds the solution: Matern52 with a lengthscale of
   four observations and an amplitude of ten standard deviations of the data,
   re-centred until theta settles.
4. A narrow one describes the distance from it: ExpQuad with a lengthscale of
   two grid steps and an amplitude of 30 sigma, so that A, the tolerance that
   the Gaussian process itself has, follows the noise.  Re-centred again.
5. gamma is a millionth of the prior variance of the slopes.

Where an input jumps the Gaussian process is broken (:meth:`StateGP.with_breaks`).
"""

import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable
from scipy.interpolate import PchipInterpolator

from pymc_gradmatch.arguments import in_order
from pymc_gradmatch.gp import StateGP, as_positive
from pymc_gradmatch.model.constraint import check_positive, check_states
from pymc_gradmatch.model.gauss_newton import Matched, climb, climb_from_prior
from pymc_gradmatch.model.priors import Parameters, parameters_of
from pymc_gradmatch.model.start import Start
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import reporting

ROUNDS = 10
SETTLED = 0.1  # posterior standard deviations
SEARCHING = "seeking the ODE's solution from draws of the prior"


class Recentred(NamedTuple):
    """What :func:`recentre` found."""

    gp: StateGP
    """With the ODE's solution as prior mean, and sigma from the residuals around it."""
    theta: dict[str, float]
    """The parameters of that solution."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the most of all."""


def recentre(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    gamma: ArrayLike,
    start: Mapping[str, Any] | Start | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> Recentred:
    r"""Make the ODE's own solution the prior mean of the states, in rounds.

    Each round finds the most probable states and parameters, integrates the
    ODE numerically from there, and takes the solution m as the prior mean:

    .. math:: N(x \mid m, C)\; N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)

    Theorem 1 holds for any mean.  The Gaussian process then describes what is
    left, the distance from one solution of the ODE, and pulls towards no
    constant: the smoothing bias goes.  It ends when theta moves by less than a
    tenth of its posterior standard deviation, at ten rounds, or where the ODE
    cannot be integrated.  A handful of solutions in all.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        Gaussian processes with their data.  Re-centring serves best with an
        inflated amplitude on a fine grid:
        ``gp.with_grid(4).with_amplitude(100)``.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    gamma : array_like of float
        Variance of the mismatch, one number or one per state.
    start : mapping of str, optional
        As for :func:`~pymc_gradmatch.build_model`.
    random_seed : int or numpy.random.Generator, optional
        Seed of the eight prior draws among which the first estimate is sought.
    progressbar : bool, default True
        Show what is being done, from the first second on.

    Returns
    -------
    Recentred
        Named tuple ``(gp, theta, moves)``.

    Raises
    ------
    ValueError
        If names do not fit, or the right-hand side is finite at no start.

    Warns
    -----
    UserWarning
        If the ODE cannot be integrated at an estimate; the rounds before stand.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1).with_grid(4).with_amplitude(100)
    >>> priors = {"rate": pm.HalfNormal.dist(5)}
    >>> fit = gm.recentre(decay, gp, priors=priors, gamma=1e-4, random_seed=1)
    >>> bool(fit.moves[-1] < 0.1)
    True
    """
    check_states(ode, gp.states)
    check_positive(ode, gp)
    in_order(priors, ode.params, "priors are")
    gammas = as_positive(gamma, len(gp.states), "gamma")
    parameters = parameters_of(priors, ode.params)
    rng = np.random.default_rng(random_seed)
    known = Start.of(ode, start)
    x = known.possible(gp.posterior_mean())
    ode = ode.of_levels
    with reporting(SEARCHING, enabled=progressbar) as say:
        found = climb_from_prior(ode, gp, parameters, gammas, x, rng, known=known)
        gp, matched, moves = follow(
            ode, gp, parameters, found, lambda gp: (gp, gammas), known=known, say=say
        )
    return Recentred(gp, parameters.by_name(matched.u), moves)


def follow(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    matched: Matched,
    settings: Callable[[StateGP], tuple[StateGP, NDArray[np.float64]]],
    *,
    known: Start,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
) -> tuple[StateGP, Matched, list[float]]:
    """Re-centre until theta settles; ``settings`` gives each round its kernel and its gamma."""
    moves: list[float] = []
    for number in range(rounds):
        last = f", the last moved theta by {moves[-1]:.1g} sd" if moves else ""
        say(f"re-centring on the ODE's solution: round {number + 1}{last}")
        centred = _centred(ode, gp, parameters, matched, known)
        if centred is None:
            break
        gp, gamma = settings(centred)
        before = matched.u
        matched = climb(ode, gp, parameters, gamma, (before, gp.prior_mean), known=known)
        moves.append(float(np.max(np.abs(matched.u - before) / matched.sd)))
        if moves[-1] < SETTLED:
            break
    return gp, matched, moves


def _advice(ode: ODE, gp: StateGP, start: NDArray[np.float64]) -> str:
    """Say which states start below zero, where their data never are, or else where to look."""
    below = [
        f"{state!r} at {value:.3g}"
        for state, value, data, positive in zip(
            ode.states, start, gp.y.T, gp.data.positive, strict=True
        )
        if value < 0 <= data.min() and not positive
    ]
    look = "Check the priors, and start elsewhere with another random_seed."
    if not below:
        return look
    return (
        f"The state {', '.join(below)} starts below zero, where its data never are: if noise hides "
        "so small a start, say what is known of it (start=), or write the ODE for its logarithm. "
        f"{look}"
    )


def distance_from_solution(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, known: Start
) -> NDArray[np.float64]:
    """Return how far the most probable states are from the solution with the same start.

    In sigma, root mean square over time, shape ``(state,)``; NaN if it cannot be integrated.
    """
    solution = _solution(ode, gp, parameters, matched, known)
    with np.errstate(over="ignore"):
        return np.sqrt(np.square((matched.x - solution) / gp.sigma).mean(axis=0))


def _solution(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, known: Start
) -> NDArray:
    theta, _ = parameters.natural(matched.u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ode.solve(gp.t, known.filled(theta, matched.x[0]), theta)


def _centred(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, known: Start
) -> StateGP | None:
    solution = _solution(ode, gp, parameters, matched, known)
    theta, _ = parameters.natural(matched.u)
    residual = gp.data.levels - solution[gp.observed]
    spent = (len(theta) + solution.shape[1] - len(known.places)) / solution.shape[1]
    with np.errstate(over="ignore"):
        variance = np.square(residual).sum(axis=0) / max(len(residual) - spent, 1)
    if not (np.isfinite(solution).all() and np.isfinite(variance).all()):
        warnings.warn(
            f"the ODE could not be integrated at the estimate "
            f"{dict(zip(ode.params, theta.round(4).tolist(), strict=True))}: the prior mean stays "
            f"as it is, and so does the smoothing bias. {_advice(ode, gp, matched.x[0])}",
            UserWarning,
            stacklevel=4,
        )
        return None
    slope, *_ = ode.linearised(gp.t, solution, theta)
    return gp.with_mean(solution, slope).with_sigma(np.sqrt(variance))


class RefinedSettings(NamedTuple):
    """What the rule fixes; lengths are in observations or in grid steps."""

    steps: int = 4
    """Grid steps from one observation to the next."""
    shortest: int = 56
    """Grid steps in all below which gaps are divided further."""
    longest: int = 160
    """Grid steps in all beyond which gaps are divided no further."""
    wide_lengthscale: float = 4.0
    """In observations."""
    wide_amplitude: float = 10.0
    """In standard deviations of the data."""
    narrow_lengthscale: float = 2.0
    """In grid steps."""
    narrow_amplitude: float = 30.0
    """In sigma."""
    tolerance: float = 1e-6
    """gamma, relative to the prior variance of the slopes."""


REFINED = RefinedSettings()
NUGGET = 1e-9  # of the kernel's variance
FAR = 0.3  # sigma, between matched states and solution; docs/accuracy.md's cases stay below 0.12


class Refined(NamedTuple):
    """What :func:`refine` found; the first two go into the four lines of the model."""

    gp: StateGP
    """Grid, kernels, prior mean and sigma."""
    gamma: NDArray[np.float64]
    """One per state."""
    theta: dict[str, float]
    """The most probable parameters: a start for samplers."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the most of all."""


def refine(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    start: Mapping[str, Any] | Start | None = None,
    grid: int | ArrayLike | None = None,
    settings: RefinedSettings = REFINED,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> Refined:
    """Choose grid, kernels, prior mean and gamma so that the smoothing bias goes.

    What ``build_model(preset="refined")`` does before it writes the model; call
    it to write the four lines yourself, with another likelihood for example.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        A fit to the data, of which sigma counts.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    start : mapping of str, optional
        As for :func:`~pymc_gradmatch.build_model`.
    grid : int or array_like of float, optional
        Steps between observations or sorted times, see
        :meth:`StateGP.with_grid`; the rule's if not given.
    settings : RefinedSettings
        The rule.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starts.
    progressbar : bool, default True
        Show what is being done, from the first second on.

    Returns
    -------
    Refined
        Named tuple ``(gp, gamma, theta, moves)``.

    Raises
    ------
    ValueError
        If names do not fit, or the right-hand side is finite at no start.

    Warns
    -----
    UserWarning
        If the ODE cannot be integrated at an estimate, or if the most probable states
        are not its solution: where it is faster than the grid.

    Examples
    --------
    .. code-block:: python

        gp, gamma, start, _ = gm.refine(ode, gm.fit_gp(t, y, cov="Matern52"), priors=priors)
        with pm.Model(coords={"time_observed": t}):
            theta = {name: pm.HalfNormal(name, 5, initval=start[name]) for name in ode.params}
            x = gp.prior("x")
            sigma = pm.HalfNormal("sigma", gp.scale, initval=gp.sigma, dims="state")
            dims = ("time_observed", "state")
            pm.Normal("y", gp.at_observations(x), sigma, observed=y, dims=dims)
            gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
            idata = gm.sample()
    """
    check_states(ode, gp.states)
    check_positive(ode, gp)
    in_order(priors, ode.params, "priors are")
    parameters = parameters_of(priors, ode.params)
    times, states = gp.t_observed, range(len(gp.states))
    if grid is None:
        grid = _steps_per_gap(settings, len(times) - 1)
    wide = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, times)
    smooth = gp.with_covs([wide for _ in states]).with_grid(grid)
    on_grid = smooth.with_breaks(ode.jumps)
    step = (len(times) - 1) / (len(smooth.t) - 1)
    narrow = _counted(pm.gp.cov.ExpQuad, settings.narrow_lengthscale * step, times)
    unit = on_grid.with_covs([narrow for _ in states])

    def gamma_of(gp: StateGP) -> NDArray[np.float64]:
        return settings.tolerance * gp.slope_variance()

    def narrowed(gp: StateGP) -> tuple[StateGP, NDArray[np.float64]]:
        around = unit.with_sigma(gp.sigma).with_mean(gp.prior_mean, gp.prior_slope)
        around = _scaled(around, settings.narrow_amplitude * gp.sigma / gp.scale)
        return around, gamma_of(around)

    searching = _scaled(on_grid, settings.wide_amplitude)
    gamma = gamma_of(searching)
    known = Start.of(ode, start)
    smoothed = known.possible(searching.posterior_mean())
    ode = ode.of_levels
    rng = np.random.default_rng(random_seed)
    with reporting(SEARCHING, enabled=progressbar) as say:
        found = climb_from_prior(ode, searching, parameters, gamma, smoothed, rng, known=known)
        centred, found, moves = follow(
            ode, searching, parameters, found, lambda gp: (gp, gamma), known=known, say=say
        )
        centred, found, more = follow(
            ode, centred, parameters, found, narrowed, known=known, say=say
        )
    theta = parameters.by_name(found.u)
    _warn_if_apart(distance_from_solution(ode, centred, parameters, found, known), ode, theta)
    return Refined(centred, gamma_of(centred), theta, moves + more)


def _warn_if_apart(distance: NDArray[np.float64], ode: ODE, theta: Mapping[str, float]):
    """Warn where states that match the ODE on the grid are not its solution."""
    apart = [
        f"{state!r} by {far:.2g}"
        for state, far in zip(ode.states, distance, strict=True)
        if not far <= FAR
    ]
    if apart:
        warnings.warn(
            f"the most probable states and the ODE's solution from the same start, with "
            f"{ {name: float(f'{value:.4g}') for name, value in theta.items()} }, differ in state "
            f"{', '.join(apart)} (sigma, root mean square; at most {FAR} is expected): between the "
            "times of the grid the system is faster than the grid, or than the data tell. Do not "
            "trust this fit by itself: take a finer grid, give fast parameters narrow priors or "
            "eliminate them (quasi-steady state), and follow it with gm.integrate_check.",
            UserWarning,
            stacklevel=3,
        )


def _steps_per_gap(settings: RefinedSettings, n_gaps: int) -> int:
    fewest, most = ceil(settings.shortest / n_gaps), round(settings.longest / n_gaps)
    return max(fewest, min(settings.steps, most))


def _scaled(gp: StateGP, amplitude) -> StateGP:
    variance = np.square(amplitude)
    return gp.with_amplitude(variance).with_nugget(NUGGET * variance)


def _counted(family, lengthscale: float, times: NDArray) -> pm.gp.cov.BaseCovariance:
    """Return a kernel of unit variance whose lengthscale is counted in observations."""
    gaps = np.diff(times)
    if np.allclose(gaps, gaps[0]):
        return family(1, ls=np.float64(lengthscale * gaps[0]))
    counted = PchipInterpolator(times, np.arange(len(times)))
    return pm.gp.cov.WarpedInput(
        1, family(1, ls=np.float64(lengthscale)), lambda t: _piecewise(counted, t)
    )


def _piecewise(polynomial: PchipInterpolator, t):
    """Write a piecewise polynomial of a column t; the outer pieces go on beyond their ends."""
    inner = polynomial.x[1:-1]
    inside = (t >= np.append(-np.inf, inner)) & (t < np.append(inner, np.inf))
    from_start = t - polynomial.x[:-1]
    values = reduce(lambda total, c: total * from_start + c, polynomial.c)
    return pt.switch(inside, values, 0).sum(axis=1, keepdims=True)
