"""Starting points of optimisations: prior draws and solutions of the ODE from them."""

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.gp import Data
from pymc_gradmatch.model.gauss_newton import Mode, Problem, Theorem1, local_optimum
from pymc_gradmatch.numerics import N_STARTS, on_one_thread, search_mode
from pymc_gradmatch.ode import Solver, explain_failure, explain_nonfinite

N_PRIOR_DRAWS = 500  # that are solved: a tenth or less of them resembles the data
MIN_CURVATURE = 1e-10  # of the largest, for draws around a point; rounding makes others negative


@on_one_thread
def optimise_from_prior(problem: Problem, x: NDArray[np.float64], rng: np.random.Generator) -> Mode:
    """Return the best local optimum from prior draws, of the parameters given x, then of all.

    Where states are hidden, or the density is zero at x, optimisation starts from solutions of
    the ODE (:func:`solutions_of_prior`), and hidden states are free in both steps.
    """
    theorem = Theorem1(problem)
    draws = [problem.parameters.draw(seed) for seed in rng.integers(2**31, size=N_STARTS)]
    starts = [(u, x) for u in draws]
    hidden = problem.gp.data.is_sparse

    def is_possible(start) -> bool:
        return bool(np.isfinite(theorem.value(theorem.flat(*start))[0]))

    if hidden.any() or not any(map(is_possible, starts)):
        found = solutions_of_prior(problem, rng)[:N_STARTS]
        starts = [(u, np.where(hidden, solution, x)) for u, solution in found]
        if not any(map(is_possible, starts)):
            starts = found
    free = np.append(np.full(theorem.n_params, True), np.repeat(hidden, len(problem.gp.t)))
    best = search_mode(
        [theorem.flat(*start) for start in starts],
        lambda point: -theorem.value(point)[0],
        parameters=lambda point: local_optimum(theorem, point, free),
        jointly=lambda point: local_optimum(theorem, point),
    )
    if best is None:
        theta = problem.theta(draws[0])
        zero = problem.likelihood.impossible(theta, x)
        msg = (
            f"the right-hand side is finite for none of {N_STARTS} draws of the parameters from "
            "their prior, at the states' posterior mean; check the priors and the ODE. "
            f"{_why_not_finite(problem, x, x[0], theta)}"
        )
        if zero:
            msg = (
                f"the likelihood is zero at {zero}, at the states' posterior mean as at all of "
                f"{N_PRIOR_DRAWS} solutions from draws of the prior; check priors and likelihood."
            )
        raise ValueError(msg)
    return theorem.mode(best)


def solutions_around(problem: Problem, mode: Mode, rng: np.random.Generator) -> list[Mode]:
    """Return parameters with solutions of the ODE, the most probable first.

    Draws of parameters and x(t0) from the normal approximation of Theorem 1 around a point.
    """
    theorem, gp = Theorem1(problem), problem.gp
    point = theorem.flat(mode.u, mode.x)
    variances, axes = np.linalg.eigh(theorem.hessian(point))
    n_params, n_times = theorem.n_params, len(gp.t)
    needed = np.append(np.arange(n_params), np.arange(n_params, len(point), n_times))
    factor = axes[needed] / np.sqrt(np.maximum(variances, variances.max() * MIN_CURVATURE))
    drawn = point[needed] + rng.normal(size=(N_PRIOR_DRAWS, len(point))) @ factor.T
    draws, deviation = drawn[:, :n_params], drawn[:, n_params:]
    starts = gp.prior_mean[0] + gp.scale * deviation
    return [Mode(u, solution, mode.sd) for u, solution in _solved(problem, draws, starts)]


def solutions_of_prior(problem: Problem, rng: np.random.Generator) -> list[tuple[NDArray, NDArray]]:
    """Return prior draws of the parameters with solutions of the ODE, the most probable first.

    A solution starts where the smoothed data do.  A hidden state starts at random, within two
    powers of ten of its scale, unless its start is known or has a prior, which is drawn from.
    """
    gp, known = problem.gp, problem.start
    seeds = rng.integers(2**31, size=N_PRIOR_DRAWS)
    draws = np.array([problem.parameters.draw(seed) for seed in seeds])
    shape = (N_PRIOR_DRAWS, len(gp.states))
    size = gp.scale * 10 ** rng.uniform(-1.5, 1, size=shape) * rng.choice([1, 1, 1, -1], size=shape)
    hidden = gp.data.is_sparse
    smoothed = known.within_support(gp.posterior_mean())
    starts = known.with_prior_draws(np.where(hidden, gp.mean + size, smoothed[0]), hidden, rng)
    return _solved(problem, draws, starts)


def _solved(problem: Problem, draws, starts) -> list[tuple[NDArray, NDArray]]:
    known, theta = problem.start, np.array([problem.theta(u) for u in draws])
    starts = np.array([known.with_known(*pair) for pair in zip(theta, starts, strict=True)])
    solutions = Solver(problem.ode.equations(), problem.gp.t)(starts, theta).x
    finite = np.flatnonzero(np.isfinite(solutions).all(axis=(1, 2)))
    values = np.array([problem.likelihood.log_density(theta[i], solutions[i]) for i in finite])
    if known.priors:
        values += [known.evaluated(theta[i], starts[i]).log_prior for i in finite]
    best = [finite[i] for i in np.argsort(-values) if np.isfinite(values[i])]
    return [(draws[i], solutions[i]) for i in best]


def scaled_by_solutions(problem: Problem, data: Data, rng: np.random.Generator) -> Data:
    """Return data in which states without a scale have one, and a mean, from probable solutions.

    A state that was never observed takes its mean from these also where its scale is given.  A
    state that is zero in all of them still has no scale.  The problem has the same data in
    Gaussian processes that are not fitted.
    """
    found = solutions_of_prior(problem, rng)[:N_STARTS]
    if not found:
        known, likelihood, gp = problem.start, problem.likelihood, problem.gp
        theta = problem.theta(problem.parameters.draw(int(rng.integers(2**31))))
        smoothed = known.within_support(gp.posterior_mean())
        why = _why_not_finite(problem, None, smoothed[0], theta)
        start = known.with_known(theta, smoothed[0])
        if not why and (zero := likelihood.impossible(theta, np.tile(start, (len(gp.t), 1)))):
            why = (
                f"For one, the likelihood is zero at {zero} where the solution starts. Where a "
                "count or a positive number has a state that starts at zero as its mean, give the "
                "start a prior, or write pm.math.maximum(x.state, 1e-9)."
            )
        msg = (
            f"none of {N_PRIOR_DRAWS} solutions from draws of the prior is finite where the data "
            f"are; check priors, starts and the ODE: the scale of {data.unscaled} stays unknown. "
            f"{why} Expected scales={{...}}, roughly their standard deviation, if all is right."
        )
        raise ValueError(msg)
    solutions = np.array([solution for _, solution in found])
    mean = np.median(solutions.mean(axis=1), axis=0)
    sizes = np.maximum(solutions.std(axis=1), 0.1 * np.abs(solutions).mean(axis=1))
    scale = [np.median(size[size > 0]) if size.any() else np.nan for size in sizes.T]
    unknown = np.isnan(data.scale)
    unobserved = ~data.is_observed.any(axis=0) & (data.mean == 0)
    return data.with_scale(
        np.where(unknown | unobserved, mean, data.mean), np.where(unknown, scale, data.scale)
    )


def _why_not_finite(problem: Problem, x, start, theta) -> str:
    """Return where slopes at states x, or a solution from a start, are not finite, for a draw."""
    ode, t = problem.ode, problem.gp.t
    where = "" if x is None else explain_nonfinite(ode, t, x, theta)
    where = where or explain_failure(ode, t, problem.start.with_known(theta, start), theta)
    return f"For one, {where}" if where else ""
