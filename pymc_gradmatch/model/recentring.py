r"""The ODE's own solution as the prior mean of the states, in rounds.

Each round finds the most probable states and parameters, integrates the ODE numerically from
there, and takes the solution m as the prior mean:

.. math:: N(x \mid m, C)\; N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)

Theorem 1 holds for any mean.  The Gaussian process then describes what is left, the distance
from one solution of the ODE, and has no constant mean: the smoothing bias goes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.model.gauss_newton import (
    Mode,
    Problem,
    Shared,
    climb,
    solutions_around,
)
from pymc_gradmatch.model.likelihood import (
    Normal,
)
from pymc_gradmatch.ode import ODE

MOST_ROUNDS = 10
SETTLED_MOVE = 0.1  # posterior standard deviations
MOST_CUT_SHORT = 2  # climbs in a row that are cut short: where the ODE is stiff, all of them are


type Narrowing = Callable[[Problem, NDArray[np.float64]], Problem]
"""Gives a problem around a solution, with its parameters, kernel and gamma for the next climb."""


def as_it_is(problem: Problem, theta: NDArray[np.float64]) -> Problem:
    """Leave kernel and gamma as they are."""
    return problem


@dataclass(frozen=True, eq=False)
class Recentred:
    """Where rounds of re-centring ended: each experiment's problem, around a solution, and mode.

    ``moves`` says how far each round moved theta, in posterior standard deviations, the most of
    all.
    """

    problems: list[Problem]
    modes: list[Mode]
    moves: list[float]


def recentre(
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    narrow: Sequence[Narrowing],
    *,
    say: Callable[[str], None],
    rng: np.random.Generator,
    shared: Shared | None = None,
    fewest: int = 1,
) -> Recentred:
    """Re-centre until theta settles, or two climbs in a row are cut short on their way.

    ``narrow`` gives each round its kernel and its gamma; there are ``fewest`` rounds at least. An
    estimate that the ODE cannot be integrated from, as where noise hides so small a start that it
    comes out below zero, gives way to the most probable of the draws around it that allow that;
    estimates of several experiments, which share parameters, do not.
    """
    problems, modes = [*problems], [*modes]
    moves: list[float] = []
    n_cut_short = 0
    for number in range(MOST_ROUNDS):
        last = f", the last moved theta by {moves[-1]:.1g} sd" if moves else ""
        say(f"re-centring on the ODE's solution: round {number + 1}{last}")
        around = around_solutions(problems, modes, narrow, rng)
        if around is None:
            break
        problems, starts = around
        modes = climb(problems, starts, shared)
        moves.append(moved(starts, modes))
        n_cut_short = n_cut_short + 1 if modes[0].reached_limit else 0
        is_settled = moves[-1] < SETTLED_MOVE and number + 1 >= fewest
        if is_settled or n_cut_short == MOST_CUT_SHORT:
            break
    return Recentred(problems, modes, moves)


def moved(before: Sequence[Mode], after: Sequence[Mode]) -> float:
    """Return how far theta moved, in posterior standard deviations, the most of all."""
    each = zip(before, after, strict=True)
    return max(float(np.max(np.abs(b.u - a.u) / np.maximum(a.sd, 1e-12))) for b, a in each)


def around_solutions(
    problems: Sequence[Problem],
    modes: Sequence[Mode],
    narrow: Sequence[Narrowing],
    rng: np.random.Generator,
) -> tuple[list[Problem], list[Mode]] | None:
    """Return problems around solutions of the ODE, and these; nothing where there are none."""
    solutions = [integrated(*one) for one in zip(problems, modes, strict=True)]
    if solutions == [None]:
        [problem], [found], [narrowed] = problems, modes, narrow
        gamma = narrowed(problem, problem.theta(found.u)).gamma
        solutions = [*solutions_around(replace(problem, gamma=gamma), found, rng)[:1]] or [None]
    there = []
    for problem, found, solution in zip(problems, modes, solutions, strict=True):
        if solution is None:
            _warn_of_no_solution(problem, found)
            return None
        there.append(solution)
    centred = [centre(*one) for one in zip(problems, there, strict=True)]
    settled = [
        narrowed(problem, problem.theta(one.u))
        for problem, one, narrowed in zip(with_noise_of_all(centred), there, narrow, strict=True)
    ]
    starts = [
        one._replace(x=problem.gp.prior_mean) for one, problem in zip(there, settled, strict=True)
    ]
    return settled, starts


def solution(problem: Problem, mode: Mode) -> NDArray[np.float64]:
    """Return the solution from an estimate, NaN where it cannot be integrated."""
    theta = problem.theta(mode.u)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        start = problem.known.filled(theta, mode.x[0])
        return problem.ode.solve(problem.gp.t, start, theta)


def integrated(problem: Problem, mode: Mode) -> Mode | None:
    """Return an estimate with the ODE's solution from its start, if that is finite."""
    x = solution(problem, mode)
    with np.errstate(over="ignore"):
        is_bounded = np.isfinite(np.square(x)).all()
    return mode._replace(x=x) if is_bounded else None


def centre(problem: Problem, there: Mode) -> Problem:
    """Return a problem around a solution, with the noise that this leaves."""
    theta = problem.theta(there.u)
    likelihood = problem.likelihood.around(theta, there.x)
    slope, *_ = problem.ode.linearised(problem.gp.t, there.x, theta)
    gp = problem.gp.with_mean(there.x, slope).with_sigma(likelihood.sigma)
    return replace(problem, gp=gp, likelihood=likelihood)


def with_noise_of_all(problems: Sequence[Problem]) -> list[Problem]:
    """Return problems with the same sigma in all experiments, where it is sought in all."""
    normals = [one.likelihood for one in problems if isinstance(one.likelihood, Normal)]
    is_known = any(one.noise is not None for one in normals)
    if len(problems) == 1 or len(normals) < len(problems) or is_known:
        return [*problems]
    n_observed = np.array([one.gp.data.is_observed.sum(axis=0) for one in normals])
    squares = np.square([one.sigma for one in normals])
    sigma = np.sqrt(np.average(squares, axis=0, weights=np.maximum(n_observed, 1e-3)))
    return [
        replace(one, likelihood=Normal(likelihood.gp.with_sigma(sigma), likelihood.n_known))
        for one, likelihood in zip(problems, normals, strict=True)
    ]


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


def _warn_of_no_solution(problem: Problem, mode: Mode):
    theta = dict(zip(problem.ode.params, problem.theta(mode.u).round(4).tolist(), strict=True))
    warnings.warn(
        f"the ODE could not be integrated at the estimate {theta}: the prior mean stays "
        "as it is, and so does the smoothing bias. "
        f"{_advice(problem.ode, problem.gp, mode.x[0])}",
        UserWarning,
        stacklevel=5,
    )
