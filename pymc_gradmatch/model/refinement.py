r"""Theorem 1 without its smoothing bias: a prior mean that satisfies the ODE, and a rule.

:func:`recentre` makes the ODE's own solution the prior mean; :func:`refine` chooses all
settings of ``preset="refined"`` by one rule for all problems.  docs/accuracy.md has the
study behind it.

1. *Grid*: four steps from one observation to the next (more for short series,
   fewer for long ones).
2. *Time* is counted in observations: people observe where things change.  Where values
   are missing, each state counts its own, and time is the mean of these counts.  A long gap
   in which the solution moves on counts as many as its way there is longer than elsewhere.
3. A wide Gaussian process finds the solution: Matern52 with a lengthscale of
   four observations and an amplitude of ten standard deviations of the data,
   re-centred until theta settles.  If that one does not explain the data, others from draws
   of the prior may.
4. A narrow one describes the distance from it: ExpQuad with a lengthscale of
   two grid steps and an amplitude of 30 sigma, so that A, the tolerance that
   the Gaussian process itself has, follows the noise.  Re-centred again.
   Of a noisy state that others see by the ODE much better than its own data do
   (:func:`seen_by_all`), it is 120 of the noise with which all see it, if that is less.
   Where the likelihood is not the data's, sigma is that of a normal observation which would
   say as much; a state of which nothing is said takes the median of the others.
5. gamma is a millionth of the prior variance of the slopes.
6. Of more than 400 observations every so many-th leads to the solution, and the narrow
   process is Matern52 with a lengthscale of eighteen grid steps, which says as much of
   slopes, and is Markov: the model of all then costs in proportion to its times.

Where an input jumps, or a state by a dose, the Gaussian process is broken
(:meth:`StateGP.with_breaks`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import ceil
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable
from scipy.interpolate import PchipInterpolator
from scipy.linalg import expm

from pymc_gradmatch.arguments import in_order
from pymc_gradmatch.gp import (
    StateGP,
    StateGPs,
    as_noise,
    as_positive,
    kernels,
    unexplained,
)
from pymc_gradmatch.model.constraint import (
    check_positive,
    check_states,
    constraints,
)
from pymc_gradmatch.model.gauss_newton import (
    Matched,
    Theorem1,
    climb,
    climb_from_prior,
    climb_together,
    solutions_around,
    solutions_of_prior,
)
from pymc_gradmatch.model.likelihood import (
    Likelihood,
    LikelihoodFunction,
    Normal,
    Written,
    normal,
    of_graph,
    rehearsed,
    with_noise,
)
from pymc_gradmatch.model.priors import Parameters, parameters_of
from pymc_gradmatch.model.start import Start, known_starts, start_in
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import reporting

ROUNDS = 10
SETTLED = 0.1  # posterior standard deviations
MOST_ON_THE_WAY = 2  # climbs in a row that are cut short: where the ODE is stiff, all of them are
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
    likelihood: LikelihoodFunction | None = None,
    start: Mapping[str, Any] | Start | None = None,
    sigma: ArrayLike | None = None,
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
    tenth of its posterior standard deviation, at ten rounds, where the ODE
    cannot be integrated, or where it is so stiff that two climbs in a row end on
    their way, after a hundred steps.  A handful of solutions in all.

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
    likelihood : callable, optional
        As for :func:`~pymc_gradmatch.build_model`.
    start : mapping of str, optional
        As for :func:`~pymc_gradmatch.build_model`.
    sigma : array_like of float, optional
        Noise that is known, as for :func:`~pymc_gradmatch.build_model`; otherwise it is that
        of the residuals.
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
    gammas = as_positive(gamma, gp.states, "gamma")
    if gp.is_random:
        msg = (
            "the kernels of gp have random hyperparameters; expected numbers, as of a fit, "
            "gm.fit_gp(t, y, cov=...): re-centring evaluates its matrices."
        )
        raise ValueError(msg)
    parameters = parameters_of(priors, ode.params)
    rng = np.random.default_rng(random_seed)
    gp, noise = _with_known_noise(gp, likelihood, sigma)
    told, known = _told(likelihood, start, ode, gp, noise)
    x = known.possible(gp.posterior_mean())
    with reporting(SEARCHING, enabled=progressbar) as say:
        levels = ode.of_levels
        found = climb_from_prior(levels, gp, parameters, gammas, x, rng, told, known)
        gp, matched, moves, _ = follow(
            levels, gp, parameters, found, lambda gp, *_: (gp, gammas), told,
            known=known, say=say, rng=rng,
        )  # fmt: skip
    return Recentred(gp, parameters.by_name(matched.u), moves)


def follow(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    matched: Matched,
    settings: Callable[..., tuple[StateGP, NDArray[np.float64]]],
    likelihood: Likelihood,
    *,
    known: Start,
    say: Callable[[str], None],
    rng: np.random.Generator,
) -> tuple[StateGP, Matched, list[float], Likelihood]:
    """Re-centre until theta settles, or two climbs in a row are cut short on their way.

    ``settings``, a function of Gaussian processes around a solution, its parameters and the
    likelihood, gives each round its kernel and its gamma.  An estimate that the ODE cannot be
    integrated from, as where noise hides so small a start that it comes out below zero, gives
    way to the most probable of the draws around it that allow that.
    """
    moves: list[float] = []
    n_on_the_way = 0
    for number in range(ROUNDS):
        last = f", the last moved theta by {moves[-1]:.1g} sd" if moves else ""
        say(f"re-centring on the ODE's solution: round {number + 1}{last}")
        there = _integrated(ode, gp, parameters, matched, known)
        if there is None:
            _, gamma = settings(gp, parameters.natural(matched.u)[0], likelihood)
            nearby = solutions_around(ode, gp, parameters, gamma, matched, likelihood, known, rng)
            if not nearby:
                _warn_of_no_solution(ode, gp, parameters, matched)
                break
            there = nearby[0]
        centred, likelihood = _centred(ode, gp, parameters, there, likelihood)
        before = there.u
        gp, gamma = settings(centred, parameters.natural(before)[0], likelihood)
        matched = climb(ode, gp, parameters, gamma, (before, gp.prior_mean), likelihood, known)
        moves.append(float(np.max(np.abs(matched.u - before) / matched.sd)))
        n_on_the_way = n_on_the_way + 1 if matched.is_on_the_way else 0
        if moves[-1] < SETTLED or n_on_the_way == MOST_ON_THE_WAY:
            break
    return gp, matched, moves, likelihood


def of_model(model: pm.Model, ode: ODE, gp: StateGP) -> tuple[Written, Start]:
    """Return what a model observes, and weighs, beside its constraints, and what starts it knows.

    Parameters
    ----------
    model : pymc.Model
        Has a constraint of this ODE, the parameters of which are free variables.
    ode : ODE
        The right-hand side.
    gp : StateGP
        Gaussian processes of the constraint's data, on a grid that contains that of it.
    """
    known = constraints(model)
    fitting = [one for one in known if one.ode is ode and one.gp.data.is_same(gp.data)]
    if not fitting:
        msg = (
            f"the model has the constraints {[one.name for one in known]}; expected one of this "
            "ODE, with Gaussian processes of the same data as gp."
        )
        raise ValueError(msg)
    constraint = fitting[0]
    names = [name for name, v in model.named_vars.items() if v is constraint.x]
    if not names:
        msg = (
            f"the states of the constraint {constraint.name!r} are no variable of the model; "
            "expected a named one, of which the likelihood is written too: x = gp.prior('x'), or "
            "x = pm.Deterministic('x', ...)."
        )
        raise ValueError(msg)
    beside = [one.name for one in known] + [one.name for one in known_starts(model)]
    told = of_graph(model, names[0], ode.params, grid=constraint.gp.t, gp=gp, without=beside)
    return told, start_in(model, ode, constraint.x)


def _with_known_noise(
    gp: StateGP, likelihood, sigma: ArrayLike | None
) -> tuple[StateGP, NDArray[np.float64] | None]:
    if sigma is None:
        if isinstance(gp.sigma, TensorVariable):
            msg = (
                "sigma of gp is a random variable; expected numbers, from which re-centring "
                "starts: gp.with_sigma(0.1), or a fit, gm.fit_gp(t, y, cov=...). The prior of "
                "sigma goes into the model: build_model(sigma=pm.HalfNormal.dist(0.5))."
            )
            raise ValueError(msg)
        return gp, None
    if likelihood is not None:
        msg = "sigma is given, and so is a likelihood; expected sigma in the lines of the latter."
        raise ValueError(msg)
    noise = as_noise(sigma, gp.data)
    return with_noise(gp, noise), noise


def _told(
    given: LikelihoodFunction | pm.Model | None, start, ode: ODE, gp: StateGP, noise
) -> tuple[Likelihood, Start]:
    """Return a likelihood on the grid of gp, and what is known of x(t0)."""
    if isinstance(given, pm.Model):
        told, known = of_model(given, ode, gp)
        return told, known if start is None else Start.of(ode, start)
    known = Start.of(ode, start)
    n_known = len(known.places)
    return rehearsed(given, ode, gp) if given else normal(gp, n_known, noise), known


def _advice(ode: ODE, gp: StateGP, start: NDArray[np.float64]) -> str:
    """Say which states start below zero, where their data never are, or else where to look."""
    below = [
        f"{state!r} at {value:.3g}"
        for state, value, data, positive in zip(
            ode.states, start, gp.y.T, gp.data.positive, strict=True
        )
        if value < 0 <= np.min(data[~np.isnan(data)], initial=np.inf) and not positive
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


def seen_by_all(
    ode: ODE, gp: StateGP, theta: NDArray[np.float64], likelihood: Likelihood
) -> NDArray[np.float64]:
    r"""Return the noise with which all data see each state by the ODE, shape ``(state,)``.

    .. math::

        \sigma_k^{-2} = \frac{\sum_s \sum_i \sum_{t \ge s} \Phi_{ik}(t, s)^2 / \sigma_i^2}
                            {\sum_s \sum_{t \ge s} \Phi_{kk}(t, s)^2}

    with the flow :math:`\Phi(t, s) = \partial x(t) / \partial x(s)` along the prior mean, times
    t of observations, and any times s.  That is sigma, where one state alone sees itself.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        Around a solution.
    theta : array of float
        Its parameters.
    likelihood : Likelihood
        Its curvature counts as precision, state by state.
    """
    n_times, n_states = gp.prior_mean.shape
    _, by_state, _ = ode.linearised(gp.t, gp.prior_mean, theta)
    told = np.diagonal(likelihood.curvature(theta, gp.prior_mean))[len(theta) :]
    precision, is_seen = np.zeros((n_times, n_states)), np.zeros(n_times)
    precision[likelihood.rows] = told.reshape(n_states, -1).T
    is_seen[likelihood.rows] = 1
    # What a later time says of each state at a time, by all and by itself, backwards in time.
    places = np.arange(n_states)
    of_each = np.eye(n_states)[:, :, None] * np.eye(n_states)[:, None, :]
    by_all, by_itself = np.zeros((n_states,) * 2), np.zeros((n_states,) * 3)
    from_all, from_itself = np.zeros(n_states), np.zeros(n_states)
    with np.errstate(all="ignore"):
        flow = expm(np.diff(gp.t)[:, None, None] * np.nan_to_num(by_state[:-1]))
        for s in reversed(range(n_times)):
            if s < n_times - 1:
                by_all = flow[s].T @ by_all @ flow[s]
                by_itself = flow[s].T @ by_itself @ flow[s]
            by_all = by_all + np.diag(precision[s])
            by_itself = by_itself + is_seen[s] * of_each
            from_all += np.diagonal(by_all)
            from_itself += by_itself[places, places, places]
        return np.sqrt(from_itself / from_all)


def _solution(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, known: Start
) -> NDArray:
    theta, _ = parameters.natural(matched.u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ode.solve(gp.t, known.filled(theta, matched.x[0]), theta)


def _integrated(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, known: Start
) -> Matched | None:
    """Return an estimate with the ODE's solution from its start, if that is finite."""
    solution = _solution(ode, gp, parameters, matched, known)
    with np.errstate(over="ignore"):
        is_bounded = np.isfinite(np.square(solution)).all()
    return matched._replace(x=solution) if is_bounded else None


def _centred(
    ode: ODE, gp: StateGP, parameters: Parameters, integrated: Matched, likelihood: Likelihood
) -> tuple[StateGP, Likelihood]:
    theta, _ = parameters.natural(integrated.u)
    likelihood = likelihood.around(theta, integrated.x)
    slope, *_ = ode.linearised(gp.t, integrated.x, theta)
    return gp.with_mean(integrated.x, slope).with_sigma(likelihood.sigma), likelihood


def _warn_of_no_solution(ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched):
    theta, _ = parameters.natural(matched.u)
    warnings.warn(
        f"the ODE could not be integrated at the estimate "
        f"{dict(zip(ode.params, theta.round(4).tolist(), strict=True))}: the prior mean stays "
        f"as it is, and so does the smoothing bias. {_advice(ode, gp, matched.x[0])}",
        UserWarning,
        stacklevel=4,
    )


class DoubtWarning(UserWarning):
    """What :func:`refine` doubts of the matched posterior: its solution, or how much it explains.

    A verdict on draws of the exact posterior says what it has to say of these in its place.
    """


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
    long_gap: float = 3.0
    """Mean ways of the solution in other gaps, from which on much happens in a long one."""
    most: int = 400
    """Observations, beyond which a solution is sought by fewer of them."""
    markov_lengthscale: float = 18.0
    """In grid steps, of the narrow Matern52 process of so many."""
    narrow_amplitude: float = 30.0
    """In sigma."""
    others: float = 4.0
    """How many times less than sigma the noise is with which all states see one, before that
    counts in place of sigma."""
    tolerance: float = 1e-6
    """gamma, relative to the prior variance of the slopes."""


REFINED = RefinedSettings()
NUGGET = 1e-9  # of the kernel's variance
N_OTHERS = 3  # solutions of a kind, from which one that fits better is sought
HIGHER = 1.0  # log likelihood, by which it does
STILL = 0.1  # of its slope in the outermost gap, below which a clock stops at the end
MOST_IN_GAP = 16.0  # median gaps that a longer one counts as, for a solution to be drawn by
MOST_KNOTS = 400  # of a clock
FINELY = 32  # points in a gap, to measure a solution's way
FAR = 0.3  # sigma, between matched states and solution; docs/accuracy.md's cases stay below 0.12


class Refined(NamedTuple):
    """What :func:`refine` found; the first two go into the four lines of the model."""

    gp: StateGP
    """Grid, kernels, prior mean and sigma."""
    gamma: NDArray[np.float64]
    """One per state."""
    theta: dict[str, float]
    """The most probable parameters, a start for samplers; with what else is random in the
    likelihood."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the most of all."""


def refine(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    likelihood: LikelihoodFunction | pm.Model | None = None,
    start: Mapping[str, Any] | Start | None = None,
    sigma: ArrayLike | None = None,
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
    likelihood : callable or pymc.Model, optional
        As for :func:`~pymc_gradmatch.build_model`, in place of the normal likelihood of
        the data; or a model that has been written already, with all that it observes and
        the starts that it knows.
    start : mapping of str, optional
        As for :func:`~pymc_gradmatch.build_model`.
    sigma : array_like of float, optional
        Noise that is known, as for :func:`~pymc_gradmatch.build_model`; otherwise it is that
        of the residuals.
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
        If the ODE cannot be integrated at an estimate; if the most probable states are not
        its solution, where it is faster than the grid; or if the solution leaves much of the
        data unexplained that is no mere noise.

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
    if likelihood is None and _is_long(gp, settings):
        return _refined_by_fewer(
            ode, gp, priors=priors, start=start, sigma=sigma, grid=grid, settings=settings,
            random_seed=random_seed, progressbar=progressbar,
        )  # fmt: skip
    parameters = parameters_of(priors, ode.params)
    gp, noise = _with_known_noise(gp, likelihood, sigma)
    counts = gp.data.counted
    searching, unit = _laid_out(gp, ode, settings, counts, grid)

    def gamma_of(gp: StateGP) -> NDArray[np.float64]:
        return settings.tolerance * gp.slope_variance()

    def narrowed(
        gp: StateGP, theta: NDArray[np.float64], told: Likelihood
    ) -> tuple[StateGP, NDArray[np.float64]]:
        around = unit.with_sigma(gp.sigma).with_mean(gp.prior_mean, gp.prior_slope)
        noise = np.fmin(gp.sigma, settings.others * seen_by_all(ode.of_levels, gp, theta, told))
        around = _scaled(around, settings.narrow_amplitude * noise / gp.scale)
        return around, gamma_of(around)

    def searched(searching: StateGP, found: Matched, told: Likelihood):
        return follow(
            levels, searching, parameters, found, lambda gp, *_: (gp, gamma_of(searching)), told,
            known=known, say=say, rng=rng,
        )  # fmt: skip

    told, known = _told(likelihood, start, ode, searching, noise)
    smoothed = known.possible(searching.posterior_mean())
    rng = np.random.default_rng(random_seed)
    with reporting(SEARCHING, enabled=progressbar) as say:
        levels = ode.of_levels
        found = climb_from_prior(
            levels, searching, parameters, gamma_of(searching), smoothed, rng, told, known
        )
        first = told

        def height(found: Matched, solution: NDArray[np.float64]) -> float:
            value = first(parameters.natural(found.u)[0], solution).log_density
            return -np.inf if np.isnan(value) else value

        def once(found: Matched) -> Matched | None:
            """Return the solution that a single climb from one leads to."""
            gp, told = _centred(levels, searching, parameters, found, first)
            start = found.u, gp.prior_mean
            found = climb(levels, gp, parameters, gamma_of(searching), start, told, known)
            return _integrated(levels, gp, parameters, found, known)

        best = searched(searching, found, first)
        reached = height(best[1], best[0].prior_mean)
        others: list[tuple[float, Matched]] = []  # with what they promise
        at = best[0].prior_mean[0], parameters.natural(best[1].u)[0]
        if _moves_on_in_gaps(levels, best[0], *at, settings):
            say("crossing the gaps, in which solutions may turn round more often")
            crossed = across_gaps(
                levels, searching, parameters, first, known, rng.spawn(1)[0], settings
            )
            others += [(np.inf, one) for one in crossed[:N_OTHERS]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of solutions that are not taken
            if _unexplained(best[0], ode):
                say("seeking other solutions: this one leaves more than noise")
                drawn = solutions_of_prior(
                    levels, searching, parameters, first, known, rng.spawn(1)[0]
                )
                for u, x in drawn[:N_OTHERS]:
                    one = once(Matched(u, x, found.sd))
                    others += [] if one is None else [(height(one, one.x), one)]
            for promised, one in sorted(others, key=itemgetter(0), reverse=True):
                if promised < reached:
                    break
                end = searched(searching, one, first)
                if (risen := height(end[1], end[0].prior_mean)) > reached + HIGHER:
                    best, reached = end, risen
        centred, found, moves, told = best
        stretched = _stretched(levels, centred, parameters, found, counts, settings.long_gap)
        if grid is None and not np.array_equal(stretched, counts):
            say("dividing the gaps in which the solution moves on")
            searching, unit = _laid_out(gp, ode, settings, stretched, None)
            told, known = _told(likelihood, start, ode, searching, noise)
            there = _solution(levels, searching, parameters, found, known)
            centred, found, more, told = searched(searching, found._replace(x=there), told)
            moves += more
        centred, found, more, told = follow(
            levels, centred, parameters, found, narrowed, told, known=known, say=say, rng=rng
        )
    theta = parameters.by_name(found.u)
    _warn_if_apart(distance_from_solution(levels, centred, parameters, found, known), ode, theta)
    _warn_if_unexplained(centred, ode, theta)
    return Refined(centred, gamma_of(centred), theta | told.estimates(), moves + more)


def _is_long(gp: StateGP, settings: RefinedSettings) -> bool:
    return len(gp.t_observed) > settings.most


def _refined_by_fewer(
    ode: ODE, gp: StateGP, *, start, sigma, grid, settings: RefinedSettings, **given
) -> Refined:
    """Refine by fewer observations, and put all of them around the solution that these lead to."""
    gp, noise = _with_known_noise(gp, None, sigma)
    data = gp.data.thinned(settings.most)
    fewer = StateGP.of(data, gp.processes.with_grid(data.t), gp.sigma)
    of_fewer = None if noise is None else noise[np.isin(gp.data.t, data.t)]
    settings = settings._replace(most=len(data.t))
    found = refine(ode, fewer, start=start, sigma=of_fewer, settings=settings, **given)
    _, unit = _laid_out(gp, ode, settings, gp.data.counted, grid)
    told, _ = _told(None, start, ode, unit, noise)
    theta, levels = np.array([found.theta[name] for name in ode.params]), ode.of_levels
    solution = levels.solve(unit.t, found.gp.prior_mean[0], theta)
    slope, *_ = levels.linearised(unit.t, solution, theta)
    around = unit.with_mean(solution, slope).with_sigma(told.around(theta, solution).sigma)
    around = _scaled(around, np.sqrt(found.gp.nugget / NUGGET))
    gamma = settings.tolerance * around.slope_variance()
    return found._replace(gp=around, gamma=gamma)


class RefinedTogether(NamedTuple):
    """What :func:`refine_together` found."""

    gps: StateGPs
    gamma: NDArray[np.float64]
    """Shape ``(experiment, state)``."""
    theta: dict[str, Any]
    """The most probable parameters, numbers or one for each experiment."""


def refine_together(
    odes: Sequence[ODE],
    gps: StateGPs,
    *,
    priors: Sequence[Mapping[str, TensorVariable]],
    is_local: Sequence[bool],
    likelihoods: Sequence[LikelihoodFunction | None],
    starts: Sequence[Start],
    grid: int | None = None,
    settings: RefinedSettings = REFINED,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> RefinedTogether:
    """Apply the rule of :func:`refine` to several experiments that share parameters.

    Solutions are first sought for each experiment by itself; then all climb together, and
    are centred on the solutions for the parameters that they share.

    Parameters
    ----------
    odes, priors, likelihoods, starts : sequence
        Of each experiment, as for :func:`refine`; scalar priors.
    gps : StateGPs
        Fits to the data, of which sigma counts.
    is_local : sequence of bool
        Which parameters each experiment has for itself.
    grid : int, optional
        Steps between observations; the rule's if not given.
    settings : RefinedSettings
        The rule.
    random_seed, progressbar
        As for :func:`refine`.
    """
    rng, params = np.random.default_rng(random_seed), odes[0].params
    written = {id(prior): prior for prior in priors}
    compiled = {key: parameters_of(prior, params) for key, prior in written.items()}
    parameters = [compiled[id(prior)] for prior in priors]
    shared = ~np.array(is_local)
    names = [name for name, is_shared in zip(params, shared, strict=True) if is_shared]
    of_shared = parameters_of(priors[0], names).log_prior if names else _nothing
    levels = [ode.of_levels for ode in odes]
    counts = [gp.data.counted for gp in gps.members]
    laid_out = [
        _laid_out(gp, ode, settings, count, grid)
        for gp, ode, count in zip(gps.members, odes, counts, strict=True)
    ]
    longest = max(len(searching.t) for searching, _ in laid_out)
    searching, units = zip(*(_finer(pair, longest) for pair in laid_out), strict=True)

    def wide(gp: StateGP) -> NDArray[np.float64]:
        return settings.tolerance * gp.slope_variance()

    told = []
    found: list[Matched] = []
    with reporting(SEARCHING, enabled=progressbar) as say:
        for number, gp in enumerate(searching):
            say(f"seeking solutions of experiment {gps.names[number]!r}")
            one, _ = _told(likelihoods[number], starts[number], odes[number], gp, None)
            own = levels[number], gp, parameters[number]
            smoothed = starts[number].possible(gp.posterior_mean())
            at = climb_from_prior(*own, wide(gp), smoothed, rng, one, starts[number])
            gamma = wide(gp)
            *_, at, _, one = follow(
                *own, at, lambda gp, *_, gamma=gamma: (gp, gamma), one,
                known=starts[number], say=say, rng=rng,
            )  # fmt: skip
            found.append(at)
            told.append(one)
        u = np.array([one.u for one in found])
        weights = 1 / np.square(np.maximum([one.sd for one in found], 1e-8))
        u[:, shared] = np.average(u, axis=0, weights=weights)[shared]
        x, centred, gammas = [one.x for one in found], list(searching), [wide(g) for g in searching]
        for number in range(ROUNDS):
            say(f"climbing together: round {number + 1}")
            problems = [
                Theorem1(*each)
                for each in zip(levels, centred, parameters, gammas, told, starts, strict=True)
            ]
            matched = climb_together(problems, shared, of_shared, u, x)
            moved = np.max(np.abs(matched.u - u) / np.maximum(matched.sd, 1e-12))
            u, is_last = matched.u, number > 1 and moved < SETTLED
            solved, around = [], []
            for ode, gp, own, ui, xi, si, one, start in zip(
                levels, centred, parameters, u, matched.x, matched.sd, told, starts, strict=True
            ):
                at = Matched(ui, xi, si)
                if (there := _integrated(ode, gp, own, at, start)) is None:
                    _warn_of_no_solution(ode, gp, own, at)
                    break
                recentred, of_it = _centred(ode, gp, own, there, one)
                solved.append(recentred)
                around.append(of_it)
            if len(solved) < len(centred):
                break
            told = _with_noise_of_all(around)
            for k, (gp, unit) in enumerate(zip(solved, units, strict=True)):
                theta, _ = parameters[k].natural(u[k])
                noise = np.fmin(
                    told[k].sigma, settings.others * seen_by_all(levels[k], gp, theta, told[k])
                )
                narrow = unit.with_sigma(told[k].sigma).with_mean(gp.prior_mean, gp.prior_slope)
                centred[k] = _scaled(narrow, settings.narrow_amplitude * noise / gp.scale)
            gammas, x = [wide(gp) for gp in centred], [gp.prior_mean for gp in centred]
            if is_last:
                break
    natural = np.array([own.natural(ui)[0] for own, ui in zip(parameters, u, strict=True)])
    by_name: dict[str, Any] = {
        name: natural[:, k] if is_local[k] else float(natural[0, k])
        for k, name in enumerate(params)
    }
    return RefinedTogether(gps.of_members(centred), np.array(gammas), by_name)


def _nothing(u) -> tuple[NDArray, NDArray, NDArray]:
    return np.array(0.0), np.zeros(0), np.zeros(0)


def _finer(laid_out: tuple[StateGP, StateGP], n_times: int) -> tuple[StateGP, StateGP]:
    """Return wide and narrow processes on a grid of so many times."""
    searching, unit = laid_out
    more = n_times - len(searching.t)
    return (searching.with_more_times(more), unit.with_more_times(more)) if more else laid_out


def _with_noise_of_all(told: Sequence[Likelihood]) -> list[Likelihood]:
    """Return normal likelihoods with the same sigma in all experiments."""
    normals = [one for one in told if isinstance(one, Normal)]
    if len(normals) < len(told):
        return list(told)
    n_observed = np.array([one.gp.data.is_observed.sum(axis=0) for one in normals])
    squares = np.square([one.sigma for one in normals])
    sigma = np.sqrt(np.average(squares, axis=0, weights=np.maximum(n_observed, 1e-3)))
    return [Normal(one.gp.with_sigma(sigma), one.n_known) for one in normals]


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
            DoubtWarning,
            stacklevel=3,
        )


def _unexplained(centred: StateGP, ode: ODE) -> list[str]:
    """Return the states whose data the solution that processes are centred on does not explain."""
    solution = centred.states_of(centred.prior_mean)
    return unexplained(centred.residuals(solution, ode.states))


def _warn_if_unexplained(centred: StateGP, ode: ODE, theta: Mapping[str, float]):
    """Warn where the solution leaves much of the data, and this is no mere noise."""
    if strange := _unexplained(centred, ode):
        values = {name: float(f"{theta[name]:.4g}") for name in ode.params}
        warnings.warn(
            f"the ODE's solution with {values} leaves much of {', '.join(map(repr, strange))} "
            "unexplained, and what it leaves is no mere noise: another solution may fit better, or "
            "the data follow other equations. Do not trust this fit by itself: narrower priors or "
            "another random_seed may lead elsewhere, and gm.fit looks for other modes.",
            DoubtWarning,
            stacklevel=3,
        )


def _laid_out(
    gp: StateGP, ode: ODE, settings: RefinedSettings, counts: NDArray, grid: int | ArrayLike | None
) -> tuple[StateGP, StateGP]:
    """Return the wide processes on the rule's grid, and narrow ones of unit amplitude."""
    times, states = gp.t_observed, range(len(gp.states))
    n_gaps = counts[-1] - counts[0]
    steps = _steps_per_gap(settings, n_gaps)
    clock = _clock(times, counts)
    wide = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, *clock)
    divided = _divided(times, counts, steps) if grid is None else grid
    smooth = gp.with_covs([wide for _ in states]).with_grid(divided)
    on_grid = smooth.with_breaks(ode.jumps, *ode.steps)
    step = 1 / steps if grid is None else n_gaps / (len(smooth.t) - 1)
    family, lengthscale = (
        (pm.gp.cov.Matern52, settings.markov_lengthscale)
        if _is_long(gp, settings)
        else (pm.gp.cov.ExpQuad, settings.narrow_lengthscale)
    )
    narrow = _counted(family, lengthscale * step, *clock)
    searching = _scaled(on_grid, settings.wide_amplitude)
    return searching, on_grid.with_covs([narrow for _ in states])


def _stretched(
    ode: ODE, gp: StateGP, parameters: Parameters, matched: Matched, counts: NDArray, long: float
) -> NDArray:
    """Return the counts of the observations' times, more for long gaps with much in them.

    Parameters
    ----------
    ode, gp, parameters, matched
        Where a solution was found: the prior mean of gp, with these parameters.
    counts : array of float
        Of each time of the observations.
    long : float
        Mean ways of the solution in the others, from which on much happens in a long gap.
    """
    theta, _ = parameters.natural(matched.u)
    times_longer = _ways_in_long_gaps(ode, gp, gp.prior_mean[0], theta)
    counted = np.diff(counts)
    stretched = np.where(times_longer > long, counted * times_longer, counted)
    return np.append(counts[0], counts[0] + np.cumsum(stretched))


def _moves_on_in_gaps(
    ode: ODE, gp: StateGP, start: NDArray, theta: NDArray, settings: RefinedSettings = REFINED
) -> bool:
    """Tell whether a solution moves on where data are missing for long."""
    return not (_ways_in_long_gaps(ode, gp, start, theta) <= settings.long_gap).all()


def _ways_in_long_gaps(ode: ODE, gp: StateGP, start: NDArray, theta: NDArray) -> NDArray:
    """Return a solution's ways in long gaps, in mean ways of the others; zero for the others.

    NaN where it cannot be integrated.
    """
    times, is_long = gp.t_observed, gp.data.is_long_gap
    if not is_long.any():
        return np.zeros(len(is_long))
    fine = np.linspace(times[:-1], times[1:], FINELY, endpoint=False, axis=1).ravel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        solution = ode.solve(np.append(fine, times[-1]), start, theta) / gp.scale
    if not np.isfinite(solution).all():
        return np.where(is_long, np.nan, 0)
    way = np.linalg.norm(np.diff(solution, axis=0), axis=1).reshape(-1, FINELY).sum(axis=1)
    return np.where(is_long, way / way[~is_long].mean(), 0)


def across_gaps(
    ode: ODE,
    gp: StateGP,
    parameters: Parameters,
    likelihood: Likelihood,
    known: Start,
    rng: np.random.Generator,
    settings: RefinedSettings = REFINED,
) -> list[Matched]:
    """Return parameters with solutions of the ODE, the most probable first, for data with gaps.

    In a long gap a solution may turn round more often than smoothed data do.  So processes
    of the pieces between gaps, which say nothing of each other, match the ODE with the same
    parameters; draws from around the most probable of these are integrated across the gaps.

    Parameters
    ----------
    ode : ODE
        Of the levels of states.
    gp : StateGP
        The data on a grid.
    parameters, likelihood, known
        As for :func:`climb_from_prior`; the likelihood is on this grid.
    rng : numpy.random.Generator
        Source of the draws.
    """
    times, counts, is_long = gp.t_observed, gp.data.counted, gp.data.is_long_gap
    # The clock of a piece goes on in the gap: nothing is smoother at its edges than inside.
    rates = np.diff(counts) / np.diff(times)
    going = np.where(is_long, np.median(rates[~is_long]), rates) * np.diff(times)
    clock = _clock(times, np.append(counts[0], counts[0] + np.cumsum(going)))
    within = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, *clock)
    in_gap = (gp.t[:, None] > times[:-1][is_long]) & (gp.t[:, None] <= times[1:][is_long])
    separate = kernels.Separate(within, gp.t[in_gap.any(axis=1)])
    pieces = _scaled(gp.with_covs([separate] * len(gp.states)), settings.wide_amplitude)
    gamma = settings.tolerance * pieces.slope_variance()
    smoothed = known.possible(pieces.posterior_mean())
    found = climb_from_prior(ode, pieces, parameters, gamma, smoothed, rng, likelihood, known)
    return solutions_around(ode, pieces, parameters, gamma, found, likelihood, known, rng)


def grid_of(gp: StateGP) -> int | NDArray[np.float64]:
    """Return the rule's grid for the times of the data, long gaps divided by their length."""
    times, counts = gp.t_observed, gp.data.counted
    steps = _steps_per_gap(REFINED, counts[-1] - counts[0])
    gaps = np.diff(times)
    longer = np.minimum(gaps / np.median(gaps), MOST_IN_GAP)
    counted = np.where(
        longer > REFINED.long_gap, np.maximum(longer, np.diff(counts)), np.diff(counts)
    )
    return _divided(times, np.append(0.0, np.cumsum(counted)), steps)


def _steps_per_gap(settings: RefinedSettings, n_gaps: float) -> int:
    fewest, most = ceil(settings.shortest / n_gaps), round(settings.longest / n_gaps)
    return max(fewest, min(settings.steps, most))


def _divided(times: NDArray, counts: NDArray, steps: int) -> int | NDArray:
    """Return the grid: so many steps per observation, the same in every gap where they are even."""
    inside = np.maximum(np.ceil(steps * np.diff(counts) - 1e-9).astype(int), 1)
    if (inside == inside[0]).all():
        return int(inside[0])
    gaps = zip(times[:-1], times[1:], inside.tolist(), strict=True)
    fine = [np.linspace(start, end, n, endpoint=False) for start, end, n in gaps]
    return np.append(np.concatenate(fine), times[-1])


def _scaled(gp: StateGP, amplitude) -> StateGP:
    variance = np.square(amplitude)
    return gp.with_amplitude(variance).with_nugget(NUGGET * variance)


def _clock(times: NDArray, counts: NDArray) -> tuple[NDArray, NDArray]:
    """Return times that are one observation apart, and their counts: smoother than every time's."""
    n_gaps = min(max(round(counts[-1] - counts[0]), 2), MOST_KNOTS)
    even = np.linspace(counts[0], counts[-1], n_gaps + 1)
    return np.interp(even, counts, times), even


def _counted(
    family, lengthscale: float, times: NDArray, counts: NDArray
) -> pm.gp.cov.BaseCovariance:
    """Return a kernel of unit variance whose lengthscale is counted in observations."""
    gaps = np.diff(times) / np.diff(counts)
    if np.allclose(gaps, gaps[0], atol=0):
        return family(1, ls=np.float64(lengthscale * gaps[0]))
    counted = _never_still(times, counts)
    return pm.gp.cov.WarpedInput(
        1, family(1, ls=np.float64(lengthscale)), lambda t: _piecewise(counted, t)
    )


def _never_still(times: NDArray, counts: NDArray) -> PchipInterpolator:
    """Interpolate the counts; where they would stop at an end, go on as in the outermost gap."""
    slopes = np.diff(counts) / np.diff(times)
    at_ends = PchipInterpolator(times, counts).derivative()(times[[0, -1]])
    stops = at_ends < STILL * slopes[[0, -1]]
    for at, sign in ((0, -1), (-1, 1)):
        if stops[at]:
            gap = np.diff(times)[at]
            edge = 0 if at == 0 else len(times)
            counts = np.insert(counts, edge, counts[at] + sign * gap * slopes[at])
            times = np.insert(times, edge, times[at] + sign * gap)
    return PchipInterpolator(times, counts)


def _piecewise(polynomial: PchipInterpolator, t):
    """Write a piecewise polynomial of a column t; the outer pieces go on beyond their ends."""
    inner = polynomial.x[1:-1]
    inside = (t >= np.append(-np.inf, inner)) & (t < np.append(inner, np.inf))
    from_start = t - polynomial.x[:-1]
    values = reduce(lambda total, c: total * from_start + c, polynomial.c)
    return pt.switch(inside, values, 0).sum(axis=1, keepdims=True)
