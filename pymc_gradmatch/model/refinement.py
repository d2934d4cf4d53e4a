r"""Theorem 1 without its smoothing bias: one rule for all settings of ``preset="refined"``.

docs/history/accuracy.md has the study behind it.

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
   Of a noisy state that the other states' data determine by the ODE much better than its own do
   (:func:`seen_by_all`), it is 120 of the noise of all data together, if that is less.
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
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable
from scipy.linalg import expm

from pymc_gradmatch.arguments import in_order
from pymc_gradmatch.gp import StateGP, as_noise, unexplained
from pymc_gradmatch.model.constraint import check_positive, check_states, constraints
from pymc_gradmatch.model.gauss_newton import (
    Mode,
    Problem,
    Shared,
    climb,
    climb_from_prior,
    solutions_around,
    solutions_of_prior,
)
from pymc_gradmatch.model.given import Fits, Given
from pymc_gradmatch.model.layout import (
    REFINED,
    RELATIVE_NUGGET,
    LaidOut,
    RefinedSettings,
    is_long,
    laid_out,
    separated,
    stretched,
    ways_in_long_gaps,
    with_amplitude,
)
from pymc_gradmatch.model.likelihood import (
    Likelihood,
    LikelihoodFunction,
    Normal,
    Written,
    of_graph,
    rehearsed,
    with_noise,
)
from pymc_gradmatch.model.priors import Parameters, parameters_of
from pymc_gradmatch.model.recentring import (
    Recentred,
    around_solutions,
    as_it_is,
    centre,
    integrated,
    recentre,
    solution,
)
from pymc_gradmatch.model.start import Start, known_starts, start_in
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import reporting

SEARCHING = "seeking the ODE's solution from draws of the prior"
N_OTHERS = 3  # solutions of a kind, from which one that fits better is sought
BETTER_BY = 1.0  # log likelihood, by which it does
MOST_DISTANCE = (
    0.3  # sigma, of the most probable states from the solution; below 0.12 where it was studied
)


class DoubtWarning(UserWarning):
    """What :func:`refine` doubts of what it found: its solution, or how much that explains.

    A verdict on draws of the exact posterior takes the place of these.
    """


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
    start: Mapping[str, Any] | Callable | str | Start | None = None,
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
    start : mapping of str, callable or "steady state", optional
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
    if likelihood is not None and sigma is not None:
        msg = "sigma is given, and so is a likelihood; expected sigma in the lines of the latter."
        raise ValueError(msg)
    noise = None if sigma is None else as_noise(sigma, gp.data)
    one = Given(ode, gp.data, Start.of(ode, start, gp.t[0]), likelihood, noise=noise)
    found = refine_all(
        Fits([one], gp, [priors], np.zeros(len(ode.params), dtype=bool)), grid=grid,
        settings=settings, random_seed=random_seed, progressbar=progressbar,
    )  # fmt: skip
    [problem] = found.problems
    return Refined(problem.gp, problem.gamma, found.theta, found.moves)


@dataclass(frozen=True, eq=False)
class FoundByRule(Recentred):
    """What the rule found for all experiments.

    ``theta`` are the most probable parameters, numbers or one for each experiment; of a single one
    also what else is random in its likelihood.
    """

    theta: dict[str, Any]


def refine_all(
    fits: Fits,
    *,
    grid: int | ArrayLike | None = None,
    settings: RefinedSettings = REFINED,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> FoundByRule:
    """Apply the rule of :func:`refine` to one or several experiments that share parameters.

    Solutions are first sought for each experiment by itself; then all climb together, and
    are centred on the solutions for the parameters that they share.
    """
    members = [_with_known_noise(*one) for one in zip(fits.parts, fits.gp.members, strict=True)]
    first, is_single = fits.parts[0], len(fits.parts) == 1
    if is_single and first.likelihood is None and is_long(members[0], settings):
        return _refined_by_fewer(
            fits, members[0], grid=grid, settings=settings, random_seed=random_seed,
            progressbar=progressbar,
        )  # fmt: skip
    rng, params = np.random.default_rng(random_seed), first.ode.params
    of_each = {id(priors): priors for priors in fits.priors}
    compiled = {key: parameters_of(priors, params) for key, priors in of_each.items()}
    laid = [
        laid_out(gp, one.ode, settings, gp.data.counted, grid)
        for one, gp in zip(fits.parts, members, strict=True)
    ]
    longest = max(len(one.wide.t) for one in laid)
    for number, one in enumerate(laid):
        if more := longest - len(one.wide.t):
            laid[number] = LaidOut(*(gp.with_more_times(more) for gp in one))
    problems = [
        _problem(part, one.wide, compiled[id(priors)], settings)
        for part, one, priors in zip(fits.parts, laid, fits.priors, strict=True)
    ]
    shared = None if is_single else _shared(fits)
    with reporting(SEARCHING, enabled=progressbar) as say:
        found = []
        for part, problem in zip(fits.parts, problems, strict=True):
            if part.name:
                say(f"seeking solutions of experiment {part.name!r}")
            found.append(_solution_of(problem, settings, say, rng))
        if shared is None:
            fewest, wide = 1, found[0]
            longer = _with_gaps_divided(first, members[0], wide, settings) if grid is None else None
            if longer:
                say("dividing the gaps in which the solution moves on")
                laid = [longer]
                problem = _problem(first, longer.wide, problems[0].parameters, settings)
                at = wide.modes[0]._replace(x=solution(problem, wide.modes[0]))
                again = recentre([problem], [at], [as_it_is], say=say, rng=rng)
                wide = replace(again, moves=wide.moves + again.moves)
        else:
            fewest = 2
            wide = _agreeing(problems, found, shared)
        narrow = [_Narrow(one.narrow, settings) for one in laid]
        settled = recentre(
            wide.problems, wide.modes, narrow, say=say, rng=rng, shared=shared, fewest=fewest
        )
        problems, modes = settled.problems, settled.modes
        if shared is not None and (last := around_solutions(problems, modes, narrow, rng)):
            problems, _ = last
    natural = [one.theta(at.u) for one, at in zip(problems, modes, strict=True)]
    theta: dict[str, Any] = {
        name: np.array([values[k] for values in natural]) if local else float(natural[0][k])
        for k, (name, local) in enumerate(zip(params, fits.is_local, strict=True))
    }
    for part, problem, at, values in zip(fits.parts, problems, modes, natural, strict=True):
        _warn_of_doubts(part.name, problem, at, dict(zip(params, values, strict=True)))
    if is_single:
        theta |= problems[0].likelihood.estimates()
    return FoundByRule(problems, modes, wide.moves + settled.moves, theta)


def _with_known_noise(one: Given, gp: StateGP) -> StateGP:
    gp = gp if one.noise is None else with_noise(gp, one.noise)
    if isinstance(gp.sigma, TensorVariable):
        msg = (
            "sigma of gp is a random variable; expected numbers, from which re-centring "
            "starts: gp.with_sigma(0.1), or a fit, gm.fit_gp(t, y, cov=...). The prior of "
            "sigma goes into the model: build_model(sigma=pm.HalfNormal.dist(0.5))."
        )
        raise ValueError(msg)  # noqa: TRY004  the processes are refused, not a type
    return gp


def _problem(one: Given, gp: StateGP, parameters: Parameters, settings: RefinedSettings) -> Problem:
    """Return what is sought on the grid of wide processes."""
    likelihood: Likelihood
    known = one.known
    if isinstance(one.likelihood, pm.Model):
        likelihood, of_this_model = of_model(one.likelihood, one.ode, gp)
        known = known or of_this_model
    elif one.likelihood is None:
        likelihood = Normal(gp, len(known.places), one.noise)
    else:
        likelihood = rehearsed(one.likelihood, one.ode, gp)
    gamma = settings.tolerance * gp.slope_variance()
    return Problem(one.ode.transformed, gp, parameters, gamma, likelihood, known)


def _shared(fits: Fits) -> Shared:
    """Return what experiments have in common."""
    names = [n for n, own in zip(fits.parts[0].ode.params, fits.is_local, strict=True) if not own]
    if not names:
        return Shared.nothing(len(fits.is_local))
    return Shared(~fits.is_local, parameters_of(fits.priors[0], names).log_prior)


def _agreeing(problems: Sequence[Problem], found: Sequence[Recentred], shared: Shared) -> Recentred:
    """Return the most probable states and parameters of wide processes that share parameters."""
    alone = [one.modes[0] for one in found]
    problems = [
        replace(problem, likelihood=one.problems[0].likelihood)
        for problem, one in zip(problems, found, strict=True)
    ]
    u = np.array([one.u for one in alone])
    weights = 1 / np.square(np.maximum([one.sd for one in alone], 1e-8))
    u[:, shared.among] = np.average(u, axis=0, weights=weights)[shared.among]
    starts = [one._replace(u=own) for one, own in zip(alone, u, strict=True)]
    return Recentred([*problems], climb(problems, starts, shared), [])


@dataclass(frozen=True, eq=False)
class _Narrow:
    """Gives a problem around a solution the narrow processes of the rule."""

    unit: StateGP
    settings: RefinedSettings

    def __call__(self, problem: Problem, theta: NDArray[np.float64]) -> Problem:
        gp, likelihood = problem.gp, problem.likelihood
        around = self.unit.with_sigma(likelihood.sigma).with_mean(gp.prior_mean, gp.prior_slope)
        others = self.settings.others * seen_by_all(problem.ode, gp, theta, likelihood)
        noise = np.fmin(likelihood.sigma, others)
        around = with_amplitude(around, self.settings.narrow_amplitude * noise / gp.scale)
        return replace(problem, gp=around, gamma=self.settings.tolerance * around.slope_variance())


def _solution_of(problem: Problem, settings: RefinedSettings, say, rng) -> Recentred:
    """Return the wide processes of one experiment around the solution that explains most.

    One that leaves more than noise, or moves on in long gaps, has others beside it.
    """

    def searched(found: Mode) -> tuple[Recentred, float]:
        end = recentre([problem], [found], [as_it_is], say=say, rng=rng)
        return end, problem.height(end.modes[0].u, end.problems[0].gp.prior_mean)

    def once(found: Mode) -> Mode | None:
        """Return the solution that a single climb from one leads to."""
        around = centre(problem, found)
        [end] = climb([around], [found])
        return integrated(around, end)

    smoothed = problem.known.possible(problem.gp.posterior_mean())
    found = climb_from_prior(problem, smoothed, rng)
    best, reached = searched(found)
    [around], [at] = best.problems, best.modes
    ways = ways_in_long_gaps(around.ode, around.gp, around.gp.prior_mean[0], around.theta(at.u))
    others: list[tuple[float, Mode]] = []  # with what they promise
    if not (ways <= settings.long_gap).all():
        say("seeking solutions that oscillate more often in the gaps")
        crossed = _across_gaps(problem, settings, rng.spawn(1)[0])
        others += [(np.inf, one) for one in crossed[:N_OTHERS]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of solutions that are not taken
        if _unexplained(around):
            say("seeking other solutions: this one leaves more than noise")
            for u, x in solutions_of_prior(problem, rng.spawn(1)[0])[:N_OTHERS]:
                one = once(Mode(u, x, found.sd))
                others += [] if one is None else [(problem.height(one.u, one.x), one)]
        for promised, one in sorted(others, key=itemgetter(0), reverse=True):
            if promised < reached:
                break
            end, risen = searched(one)
            if risen > reached + BETTER_BY:
                best, reached = end, risen
    return best


def _across_gaps(
    problem: Problem, settings: RefinedSettings, rng: np.random.Generator
) -> list[Mode]:
    """Return parameters with solutions of the ODE, the most probable first, for data with gaps.

    In a long gap a solution may turn round more often than smoothed data do.  So processes
    of the pieces between gaps, which say nothing of each other, match the ODE with the same
    parameters; draws from around the most probable of these are integrated across the gaps.
    """
    pieces = separated(problem.gp, settings)
    gamma = settings.tolerance * pieces.slope_variance()
    within = replace(problem, gp=pieces, gamma=gamma)
    found = climb_from_prior(within, problem.known.possible(pieces.posterior_mean()), rng)
    return solutions_around(within, found, rng)


def _with_gaps_divided(
    one: Given, gp: StateGP, found: Recentred, settings: RefinedSettings
) -> LaidOut | None:
    """Return a grid on which long gaps are divided further, if the solution moves on in them."""
    [problem], [at] = found.problems, found.modes
    counts = gp.data.counted
    longer = stretched(problem.ode, problem.gp, problem.theta(at.u), counts, settings)
    if np.array_equal(longer, counts):
        return None
    return laid_out(gp, one.ode, settings, longer, None)


def _refined_by_fewer(
    fits: Fits, gp: StateGP, *, grid, settings: RefinedSettings, **given
) -> FoundByRule:
    """Refine by fewer observations, and put all of them around the solution that these lead to."""
    [one] = fits.parts
    data = gp.data.thinned(settings.most)
    fewer = StateGP.of(data, gp.processes.with_grid(data.t), gp.sigma)
    noise = None if one.noise is None else one.noise[np.isin(gp.data.t, data.t)]
    by_fewer = replace(fits, parts=[replace(one, data=data, noise=noise)], gp=fewer)
    found = refine_all(by_fewer, settings=settings._replace(most=len(data.t)), **given)
    [before], [at] = found.problems, found.modes
    unit = laid_out(gp, one.ode, settings, gp.data.counted, grid).narrow
    problem = _problem(one, unit, before.parameters, settings)
    x = problem.ode.solve(unit.t, before.gp.prior_mean[0], before.theta(at.u))
    problem = centre(problem, at._replace(x=x))
    around = with_amplitude(problem.gp, np.sqrt(before.gp.nugget / RELATIVE_NUGGET))
    problem = replace(problem, gp=around, gamma=settings.tolerance * around.slope_variance())
    return replace(found, problems=[problem])


def of_model(model: pm.Model, ode: ODE, gp: StateGP) -> tuple[Written, Start]:
    """Return what a model observes, and weighs, beside its constraints, and what starts it knows.

    One of these is of this ODE, and its data are those of ``gp``, the grid of which contains its
    own.
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
    likelihood = of_graph(model, names[0], ode.params, grid=constraint.gp.t, gp=gp, without=beside)
    return likelihood, start_in(model, ode, constraint.x)


def seen_by_all(
    ode: ODE, gp: StateGP, theta: NDArray[np.float64], likelihood: Likelihood
) -> NDArray[np.float64]:
    r"""Return the noise with which all data see each state by the ODE, shape ``(state,)``.

    .. math::

        \sigma_k^{-2} = \frac{\sum_s \sum_i \sum_{t \ge s} \Phi_{ik}(t, s)^2 / \sigma_i^2}
                            {\sum_s \sum_{t \ge s} \Phi_{kk}(t, s)^2}

    with the flow :math:`\Phi(t, s) = \partial x(t) / \partial x(s)` along the prior mean, a
    solution, times t of observations, and any times s.  That is sigma, where one state alone sees
    itself.  The curvature of the likelihood counts as precision, state by state.
    """
    n_times, n_states = gp.prior_mean.shape
    _, by_state, _ = ode.linearised(gp.t, gp.prior_mean, theta)
    curvature = np.diagonal(likelihood.curvature(theta, gp.prior_mean))[len(theta) :]
    precision, is_seen = np.zeros((n_times, n_states)), np.zeros(n_times)
    precision[likelihood.rows] = curvature.reshape(n_states, -1).T
    is_seen[likelihood.rows] = 1
    # Precision that later times give each state at a time, by all and by itself, backwards.
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


def _unexplained(problem: Problem) -> list[str]:
    """Return the states whose data the solution that processes are centred on does not explain."""
    gp = problem.gp
    return unexplained(gp.residuals(gp.states_of(gp.prior_mean), problem.ode.states))


def _warn_of_doubts(name: str, problem: Problem, mode: Mode, theta: Mapping[str, float]):
    """Warn where states are not the ODE's solution, or where it leaves more than noise."""
    rounded = {name: float(f"{value:.4g}") for name, value in theta.items()}
    where = f"experiment {name!r}: " if name else ""
    with np.errstate(over="ignore"):
        apart = (mode.x - solution(problem, mode)) / problem.gp.sigma
        distance = np.sqrt(np.square(apart).mean(axis=0))
    far = [
        f"{state!r} by {by:.2g}"
        for state, by in zip(problem.ode.states, distance, strict=True)
        if not by <= MOST_DISTANCE
    ]
    if far:
        warnings.warn(
            f"{where}the most probable states and the ODE's solution from the same start, with "
            f"{rounded}, differ in state {', '.join(far)} (sigma, root mean square; at most "
            f"{MOST_DISTANCE} is expected): between the times of the grid the system is faster "
            "than the grid, or than the data resolve. Do not trust this fit by itself: take a "
            "finer grid, give fast parameters narrow priors or eliminate them (quasi-steady "
            "state), and follow it with gm.integrate_check.",
            DoubtWarning,
            stacklevel=4,
        )
    if strange := _unexplained(problem):
        warnings.warn(
            f"{where}the ODE's solution with {rounded} leaves much of "
            f"{', '.join(map(repr, strange))} unexplained, and what it leaves is no mere noise: "
            "another solution may fit better, or the data follow other equations. Do not trust "
            "this fit by itself: narrower priors or another random_seed may lead elsewhere, and "
            "gm.fit looks for other modes.",
            DoubtWarning,
            stacklevel=4,
        )
