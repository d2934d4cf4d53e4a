r"""Gradient matching without smoothing bias: the rule of ``preset="refined"``.

Theorem 1 holds for any prior mean m of the states:

.. math:: N(x \mid m, C)\; N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)

If m is a solution of the ODE, the Gaussian process describes the distance from that solution, and
nothing pulls the states towards a constant.  docs/history/accuracy.md has the study of the rule:

1. *Grid*: four steps from one observation to the next.
2. *Time* is counted in observations: people observe where things change.
3. A wide Matern52 process finds a solution: the ODE is integrated from the most probable
   parameters and first states, the solution becomes the prior mean, until theta settles.  If this
   solution does not explain the data, others from draws of the prior may fit better; if it moves
   far in a long gap, solutions that oscillate there more or less often.
4. A narrow ExpQuad process, with an amplitude of 30 sigma, describes the distance from the
   solution, so that A follows the noise.  It is re-centred again.  For a state that the data of
   other states determine much better than its own do, sigma is replaced by four times
   :func:`noise_of_all_data`.
5. gamma is a millionth of the prior variance of the slopes.
6. Of more than 400 observations a subset leads to the solution, and the narrow process is
   Matern52, which is Markov: the cost of the model is then linear in the number of times.

Where an input jumps, or a state by a dose, the Gaussian process is broken
(:meth:`StateGP.with_breaks`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import in_order
from pymc_gradmatch.gp import StateGP, as_noise, poorly_fitted
from pymc_gradmatch.model.constraint import check_positive, check_states
from pymc_gradmatch.model.gauss_newton import Mode, Problem, SharedParameters, optimise
from pymc_gradmatch.model.given import CheckedExperiment, Fits
from pymc_gradmatch.model.layout import (
    MAX_OBSERVATIONS,
    RELATIVE_NUGGET,
    ProcessPair,
    counts_by_path,
    gamma_of,
    narrow_process,
    process_pair,
    processes_between_gaps,
    with_amplitude,
)
from pymc_gradmatch.model.likelihood import (
    Likelihood,
    LikelihoodFunction,
    NormalLikelihood,
    graph_likelihood,
    with_noise,
)
from pymc_gradmatch.model.priors import Parameters, parameters_of
from pymc_gradmatch.model.start import Start
from pymc_gradmatch.model.starting_points import (
    optimise_from_prior,
    solutions_around,
    solutions_of_prior,
)
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import reporting

SEARCHING = "seeking the ODE's solution from draws of the prior"
MAX_ROUNDS = 10  # of re-centring
SETTLED_MOVE = 0.1  # posterior standard deviations of theta, below which re-centring ends
MAX_CUT_SHORT = 2  # optimisations in a row at their step limit: where the ODE is stiff, all are
N_OTHER_SOLUTIONS = 3  # that are tried where the first does not explain the data
MIN_GAIN = 1.0  # of the log likelihood, for another solution to replace the first
MAX_DISTANCE = 0.3  # sigma, of the states from the solution; below 0.12 in all of the study


class DoubtWarning(UserWarning):
    """A result of :func:`refine` that may be wrong: no solution, or one that does not fit.

    The verdict on draws of the exact posterior supersedes it.
    """


class Refined(NamedTuple):
    """Result of :func:`refine`; the first two go into the four lines of the model."""

    gp: StateGP
    """Grid, kernels, prior mean and sigma."""
    gamma: NDArray[np.float64]
    """One per state."""
    theta: dict[str, float]
    """The most probable parameters, a start for samplers, with other random variables of the
    likelihood."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the largest of all."""


def refine(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    likelihood: LikelihoodFunction | None = None,
    start: Mapping[str, Any] | Callable | str | None = None,
    sigma: ArrayLike | None = None,
    grid: int | ArrayLike | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> Refined:
    """Choose grid, kernels, prior mean and gamma so that there is no smoothing bias.

    ``build_model(preset="refined")`` calls it before it writes the model.  Call it yourself to
    write the four lines.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        A fit to the data, of which only sigma is used.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    likelihood : callable, optional
        As for :func:`~pymc_gradmatch.build_model`, in place of the normal likelihood of
        the data.
    start : mapping of str, callable or "steady state", optional
        As for :func:`~pymc_gradmatch.build_model`.
    sigma : array_like of float, optional
        Known noise, as for :func:`~pymc_gradmatch.build_model`; if not given, that of the
        residuals.
    grid : int or array_like of float, optional
        Steps between observations or sorted times, see
        :meth:`StateGP.with_grid`; the rule's if not given.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starting points.
    progressbar : bool, default True
        Show progress, from the first second on.

    Returns
    -------
    Refined
        Named tuple ``(gp, gamma, theta, moves)``.

    Raises
    ------
    ValueError
        If names do not fit, or the right-hand side is finite at no starting point.

    Warns
    -----
    UserWarning
        If the ODE cannot be integrated at an estimate; if the most probable states are not
        its solution, where it is faster than the grid; or if the solution leaves much of the
        data unexplained.

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
    one = CheckedExperiment(
        ode, gp.data, Start.of(ode, start, gp.t[0]), likelihood=likelihood, noise=noise
    )
    found = refine_experiments(
        Fits([one], gp, [priors], np.zeros(len(ode.params), dtype=bool)), grid=grid,
        random_seed=random_seed, progressbar=progressbar,
    )  # fmt: skip
    [problem] = found.problems
    return Refined(problem.gp, problem.gamma, found.theta, found.moves)


@dataclass(frozen=True, eq=False)
class Recentred:
    """Each experiment's problem, with a solution as its prior mean, and its mode.

    ``moves`` are how far each round moved theta, in posterior standard deviations.
    """

    problems: list[Problem]
    modes: list[Mode]
    moves: list[float]


@dataclass(frozen=True, eq=False)
class RefinedExperiments(Recentred):
    """Result of the rule for all experiments.

    ``theta`` are the most probable parameters, numbers or one for each experiment; for a single
    experiment also other random variables of its likelihood.
    """

    theta: dict[str, Any]


def refine_experiments(
    fits: Fits,
    *,
    grid: int | ArrayLike | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    by_subset: bool = True,
) -> RefinedExperiments:
    """Apply the rule of :func:`refine` to one or several experiments that share parameters.

    A solution is first sought for each experiment separately; then all are optimised jointly, and
    re-centred on the solutions for their shared parameters.  ``by_subset`` is whether a subset of
    many observations leads to the solution.
    """
    members = [_with_known_noise(*one) for one in zip(fits.parts, fits.gp.members, strict=True)]
    first, is_single = fits.parts[0], len(fits.parts) == 1
    is_long = [by_subset and len(gp.t_observed) > MAX_OBSERVATIONS for gp in members]
    if is_single and is_long[0] and first.likelihood is None:
        return _refined_by_subset(
            fits, members[0], grid, random_seed=random_seed, progressbar=progressbar
        )
    rng, params = np.random.default_rng(random_seed), first.ode.params
    of_each = {id(priors): priors for priors in fits.priors}
    compiled = {key: parameters_of(priors, params) for key, priors in of_each.items()}
    pairs = [
        process_pair(gp, one.ode, grid, is_markov)
        for one, gp, is_markov in zip(fits.parts, members, is_long, strict=True)
    ]
    longest = max(len(one.wide.t) for one in pairs)
    for number, one in enumerate(pairs):
        if more := longest - len(one.wide.t):
            pairs[number] = ProcessPair(*(gp.with_more_times(more) for gp in one))
    problems = [
        _problem(part, one.wide, compiled[id(priors)])
        for part, one, priors in zip(fits.parts, pairs, fits.priors, strict=True)
    ]
    with reporting(SEARCHING, enabled=progressbar) as report:
        found = []
        for part, problem in zip(fits.parts, problems, strict=True):
            if part.name:
                report(f"seeking solutions of experiment {part.name!r}")
            found.append(_find_solution(problem, report, rng))
        shared = None if is_single else _shared_parameters(fits)
        if shared is None:
            wide = found[0]
            if grid is None and _moves_in_long_gap(wide):
                report("refining the grid in long gaps in which the solution moves far")
                pairs, wide = _with_finer_gaps(first, members[0], wide, is_long[0], report, rng)
        else:
            wide = _optimised_jointly(problems, found, shared)
        narrow = [partial(_with_narrow_process, one.narrow) for one in pairs]
        settled = recentre(
            wide.problems, wide.modes, narrow, report=report, rng=rng, shared=shared,
            min_rounds=1 if is_single else 2,
        )  # fmt: skip
        problems, modes = settled.problems, settled.modes
        if not is_single and (last := _centred_on_solutions(problems, modes, narrow, rng)):
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
    return RefinedExperiments(problems, modes, wide.moves + settled.moves, theta)


def _with_known_noise(one: CheckedExperiment, gp: StateGP) -> StateGP:
    return gp if one.noise is None else with_noise(gp, one.noise)


def _problem(one: CheckedExperiment, gp: StateGP, parameters: Parameters) -> Problem:
    """Return the problem of one experiment with wide processes."""
    likelihood: Likelihood
    if one.likelihood is None:
        likelihood = NormalLikelihood(gp, len(one.start.places), one.noise)
    else:
        likelihood = graph_likelihood(one.likelihood, one.ode, gp)
    return Problem(one.ode.transformed, gp, parameters, gamma_of(gp), likelihood, one.start)


def _shared_parameters(fits: Fits) -> SharedParameters:
    names = [n for n, own in zip(fits.parts[0].ode.params, fits.is_local, strict=True) if not own]
    if not names:
        return SharedParameters.none(len(fits.is_local))
    return SharedParameters(~fits.is_local, parameters_of(fits.priors[0], names).log_prior)


def _optimised_jointly(
    problems: Sequence[Problem], found: Sequence[Recentred], shared: SharedParameters
) -> Recentred:
    """Return the joint mode of wide processes, from the modes of the separate experiments."""
    separate = [one.modes[0] for one in found]
    problems = [
        replace(problem, likelihood=one.problems[0].likelihood)
        for problem, one in zip(problems, found, strict=True)
    ]
    u = np.array([one.u for one in separate])
    weights = 1 / np.square(np.maximum([one.sd for one in separate], 1e-8))
    u[:, shared.is_shared] = np.average(u, axis=0, weights=weights)[shared.is_shared]
    starts = [one._replace(u=own) for one, own in zip(separate, u, strict=True)]
    return Recentred([*problems], optimise(problems, starts, shared), [])


def _find_solution(
    problem: Problem, report: Callable[[str], None], rng: np.random.Generator
) -> Recentred:
    """Return the wide processes of one experiment around the solution that fits its data best."""

    def recentred(mode: Mode) -> tuple[Recentred, float]:
        end = recentre([problem], [mode], report=report, rng=rng)
        return end, problem.log_likelihood(end.modes[0].u, end.problems[0].gp.prior_mean)

    smoothed = problem.start.within_support(problem.gp.posterior_mean())
    mode = optimise_from_prior(problem, smoothed, rng)
    best, reached = recentred(mode)
    others: list[tuple[float, Mode]] = []  # with their log likelihoods, if known
    if _moves_in_long_gap(best):
        report("seeking solutions that oscillate more or less often in long gaps")
        others += [(np.inf, one) for one in _solutions_across_gaps(problem, rng.spawn(1)[0])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about solutions that are not taken
        if _unexplained(best.problems[0]):
            report("seeking other solutions: this one leaves more than noise")
            for u, x in solutions_of_prior(problem, rng.spawn(1)[0])[:N_OTHER_SOLUTIONS]:
                start = Mode(u, x, mode.sd)
                centred = _centred(problem, start)
                [end] = optimise([centred], [start])
                if one := with_solution(centred, end):
                    others.append((problem.log_likelihood(one.u, one.x), one))
        for value, other in sorted(others, key=itemgetter(0), reverse=True):
            if value < reached:
                break
            there, value_at_end = recentred(other)
            if value_at_end > reached + MIN_GAIN:
                best, reached = there, value_at_end
    return best


def _solutions_across_gaps(problem: Problem, rng: np.random.Generator) -> list[Mode]:
    """Return solutions of the ODE, the most probable first, for data with long gaps.

    Smoothed data hardly oscillate in a long gap, but a solution may.  So processes that are
    independent on the two sides of each gap are matched with the same parameters, and the ODE is
    integrated across the gaps for draws around the mode.
    """
    gp = processes_between_gaps(problem.gp)
    separate = replace(problem, gp=gp, gamma=gamma_of(gp))
    start = separate.start.within_support(gp.posterior_mean())
    found = optimise_from_prior(separate, start, rng)
    return solutions_around(separate, found, rng)[:N_OTHER_SOLUTIONS]


def _counts_by_path(found: Recentred) -> NDArray[np.float64]:
    """Return the counts of the observed times along the solution that was found."""
    [problem], [at] = found.problems, found.modes
    return counts_by_path(problem.ode, problem.gp, problem.theta(at.u))


def _moves_in_long_gap(found: Recentred) -> bool:
    return not np.array_equal(_counts_by_path(found), found.problems[0].gp.data.counted)


def _with_finer_gaps(
    one: CheckedExperiment,
    gp: StateGP,
    found: Recentred,
    is_markov: bool,
    report: Callable[[str], None],
    rng: np.random.Generator,
) -> tuple[list[ProcessPair], Recentred]:
    """Return processes with a finer grid in long gaps, and the wide ones around the solution."""
    pair = process_pair(gp, one.ode, None, is_markov, _counts_by_path(found))
    [before], [mode] = found.problems, found.modes
    problem = _problem(one, pair.wide, before.parameters)
    at = mode._replace(x=_solution(problem, mode))
    again = recentre([problem], [at], report=report, rng=rng)
    return [pair], replace(again, moves=found.moves + again.moves)


def recentre(
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    narrow: Sequence[Callable[[Problem, NDArray], Problem]] | None = None,
    *,
    report: Callable[[str], None],
    rng: np.random.Generator,
    shared: SharedParameters | None = None,
    min_rounds: int = 1,
) -> Recentred:
    """Make the ODE's solution from the mode the prior mean, and repeat until theta settles.

    ``narrow`` gives a problem around a solution, with theta, its kernel and gamma; by default
    these stay.  Where the ODE cannot be integrated from an estimate of a single experiment, such
    as a start below zero, the most probable solution of draws around the estimate is taken.
    """
    problems, modes = [*problems], [*modes]
    narrow = [lambda problem, _: problem] * len(problems) if narrow is None else narrow
    moves: list[float] = []
    n_cut_short = 0
    for number in range(MAX_ROUNDS):
        last = f", the last moved theta by {moves[-1]:.1g} sd" if moves else ""
        report(f"re-centring on the ODE's solution: round {number + 1}{last}")
        centred = _centred_on_solutions(problems, modes, narrow, rng)
        if centred is None:
            break
        problems, starts = centred
        modes = optimise(problems, starts, shared)
        moves.append(
            max(
                float(np.max(np.abs(start.u - mode.u) / np.maximum(mode.sd, 1e-12)))
                for start, mode in zip(starts, modes, strict=True)
            )
        )
        n_cut_short = n_cut_short + 1 if modes[0].reached_limit else 0
        is_settled = moves[-1] < SETTLED_MOVE and number + 1 >= min_rounds
        if is_settled or n_cut_short == MAX_CUT_SHORT:
            break
    return Recentred(problems, modes, moves)


def _centred_on_solutions(
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    narrow: Sequence[Callable[[Problem, NDArray], Problem]],
    rng: np.random.Generator,
) -> tuple[list[Problem], list[Mode]] | None:
    """Return problems with solutions as prior means, and starting points there; None if none."""
    solved = [with_solution(*one) for one in zip(problems, modes, strict=True)]
    if solved == [None]:
        [problem], [mode], [narrowed] = problems, modes, narrow
        gamma = narrowed(problem, problem.theta(mode.u)).gamma
        solved = [*solutions_around(replace(problem, gamma=gamma), mode, rng)[:1]] or [None]
    there = []
    for problem, mode, one in zip(problems, modes, solved, strict=True):
        if one is None:
            _warn_of_no_solution(problem, mode)
            return None
        there.append(one)
    centred = _with_common_noise([_centred(*one) for one in zip(problems, there, strict=True)])
    narrowed_ones = [
        narrowed(problem, problem.theta(one.u))
        for problem, one, narrowed in zip(centred, there, narrow, strict=True)
    ]
    starts = [
        one._replace(x=problem.gp.prior_mean)
        for one, problem in zip(there, narrowed_ones, strict=True)
    ]
    return narrowed_ones, starts


def _solution(problem: Problem, mode: Mode) -> NDArray[np.float64]:
    """Return the solution from an estimate, NaN where it cannot be integrated."""
    theta = problem.theta(mode.u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        start = problem.start.with_known(theta, mode.x[0])
        return problem.ode.solve(problem.gp.t, start, theta)


def with_solution(problem: Problem, mode: Mode) -> Mode | None:
    """Return an estimate with the ODE's solution from its start, if that is finite."""
    x = _solution(problem, mode)
    with np.errstate(over="ignore"):
        is_bounded = np.isfinite(np.square(x)).all()
    return mode._replace(x=x) if is_bounded else None


def _centred(problem: Problem, there: Mode) -> Problem:
    """Return a problem with a solution as prior mean, and sigma from its residuals."""
    theta = problem.theta(there.u)
    likelihood = problem.likelihood.around(theta, there.x)
    slope, *_ = problem.ode.linearised(problem.gp.t, there.x, theta)
    gp = problem.gp.with_mean(there.x, slope).with_sigma(likelihood.sigma)
    return replace(problem, gp=gp, likelihood=likelihood)


def _with_common_noise(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with the same sigma in all experiments, where it is estimated in all."""
    normals = [o.likelihood for o in problems if isinstance(o.likelihood, NormalLikelihood)]
    is_known = any(one.noise is not None for one in normals)
    if len(problems) == 1 or len(normals) < len(problems) or is_known:
        return [*problems]
    n_observed = np.array([one.gp.data.is_observed.sum(axis=0) for one in normals])
    squares = np.square([one.sigma for one in normals])
    sigma = np.sqrt(np.average(squares, axis=0, weights=np.maximum(n_observed, 1e-3)))
    return [
        replace(one, likelihood=NormalLikelihood(normal.gp.with_sigma(sigma), normal.n_known))
        for one, normal in zip(problems, normals, strict=True)
    ]


def _with_narrow_process(unit: StateGP, problem: Problem, theta: NDArray[np.float64]) -> Problem:
    """Return a problem around a solution with the rule's narrow processes, and their gamma."""
    around = narrow_process(unit, problem.ode, problem.gp, theta, problem.likelihood)
    return replace(problem, gp=around, gamma=gamma_of(around))


def _refined_by_subset(
    fits: Fits, gp: StateGP, grid: int | ArrayLike | None, **given: Any
) -> RefinedExperiments:
    """Refine by a subset of the observations, and centre the whole series on the solution."""
    [one] = fits.parts
    data = gp.data.thinned(MAX_OBSERVATIONS)
    subset = StateGP.of(data, gp.processes.changed(t=data.t), gp.sigma)
    noise = None if one.noise is None else one.noise[np.isin(gp.data.t, data.t)]
    fewer = replace(fits, parts=[replace(one, data=data, noise=noise)], gp=subset)
    found = refine_experiments(fewer, by_subset=False, **given)
    [before], [at] = found.problems, found.modes
    unit = process_pair(gp, one.ode, grid, is_markov=True).narrow
    problem = _problem(one, unit, before.parameters)
    x = problem.ode.solve(unit.t, before.gp.prior_mean[0], before.theta(at.u))
    problem = _centred(problem, at._replace(x=x))
    around = with_amplitude(problem.gp, np.sqrt(before.gp.nugget / RELATIVE_NUGGET))
    return replace(found, problems=[replace(problem, gp=around, gamma=gamma_of(around))])


def _unexplained(problem: Problem) -> list[str]:
    """Return the states whose data the prior mean, a solution, does not explain."""
    gp = problem.gp
    return poorly_fitted(gp.residuals(gp.back_transform(gp.prior_mean), problem.ode.states))


def _warn_of_doubts(name: str, problem: Problem, mode: Mode, theta: Mapping[str, float]):
    """Warn where states are not the ODE's solution, or where it leaves more than noise."""
    rounded = {name: float(f"{value:.4g}") for name, value in theta.items()}
    where = f"experiment {name!r}: " if name else ""
    with np.errstate(over="ignore"):
        distances = (mode.x - _solution(problem, mode)) / problem.gp.sigma
        rms = np.sqrt(np.square(distances).mean(axis=0))
    distant = [
        f"{state!r} by {by:.2g}"
        for state, by in zip(problem.ode.states, rms, strict=True)
        if not by <= MAX_DISTANCE
    ]
    if distant:
        warnings.warn(
            f"{where}the most probable states and the ODE's solution from the same start, with "
            f"{rounded}, differ in state {', '.join(distant)} (sigma, root mean square; at most "
            f"{MAX_DISTANCE} is expected): between the times of the grid the system is faster "
            "than the grid, or than the data resolve. Do not trust this fit without a check: take "
            "a finer grid, give fast parameters narrow priors or eliminate them (quasi-steady "
            "state), and follow it with gm.integrate_check.",
            DoubtWarning,
            stacklevel=4,
        )
    if poor := _unexplained(problem):
        warnings.warn(
            f"{where}the ODE's solution with {rounded} leaves much of "
            f"{', '.join(map(repr, poor))} unexplained, and the residuals are not noise: "
            "another solution may fit better, or the data follow other equations. Do not trust "
            "this fit without a check: narrower priors or another random_seed may lead elsewhere, "
            "and gm.fit looks for other modes.",
            DoubtWarning,
            stacklevel=4,
        )


def _warn_of_no_solution(problem: Problem, mode: Mode):
    ode = problem.ode
    theta = dict(zip(ode.params, problem.theta(mode.u).round(4).tolist(), strict=True))
    start = ", ".join(
        f"{name} = {value:.3g}"
        for name, value in zip(ode.states, problem.gp.back_transform(mode.x)[0], strict=True)
    )
    warnings.warn(
        f"the ODE could not be integrated at the estimate {theta} from {start}: the prior mean "
        "stays as it is, and so does the smoothing bias. Where a state starts below zero although "
        "its data never are, noise hides a small start: give what is known of it (start=), or "
        "write the ODE for its logarithm. Otherwise check the priors, and start elsewhere with "
        "another random_seed.",
        UserWarning,
        stacklevel=5,
    )
