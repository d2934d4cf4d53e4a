r"""The most probable states and parameters of Theorem 1, by Gauss-Newton.

Given hyperparameters, minus the log of Theorem 1 is half a sum of squares
(prior and mismatch, each whitened), minus what the observations say and the prior
of theta.  Its Hessian without the second derivatives of f is exact where the
mismatch is small, however tight the constraint: Levenberg and Marquardt's method needs a
handful of steps where a gradient method would need thousands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.gp import Data, StateGP
from pymc_gradmatch.model.constraint import residuals
from pymc_gradmatch.model.likelihood import Likelihood, Normal
from pymc_gradmatch.model.priors import Parameters
from pymc_gradmatch.model.start import KnownOfStart, Start
from pymc_gradmatch.numerics import N_STARTS, matvec, on_one_thread, search_mode
from pymc_gradmatch.ode import ODE, Solver, explain_failure, explain_nonfinite

N_SURVEYED = 500  # solutions from draws, where climbs have nothing else to start from
MOST_CLIMB_STEPS = 100  # of a climb
SOFTEST = 1e-10  # of the largest curvature, that draws around a point follow
MOST_DAMPING, RISING = 1e10, 1e-4  # a climb ends: no damping helps, or it rises by less


@dataclass(frozen=True, eq=False)
class Problem:
    """States and parameters that are sought: those of one experiment.

    The ODE is that of levels.  Gamma, the variance of the mismatch, ``(state,)``, is empty where
    none is needed; ``known`` is what is known of x(t0).
    """

    ode: ODE
    gp: StateGP
    parameters: Parameters
    gamma: NDArray[np.float64]
    likelihood: Likelihood
    known: Start

    @classmethod
    def of(
        cls,
        ode: ODE,
        gp: StateGP,
        parameters: Parameters,
        gamma: NDArray[np.float64] | None = None,
        likelihood: Likelihood | None = None,
        known: Start | None = None,
    ) -> "Problem":
        """Put one together; the likelihood is that of the data by default."""
        likelihood = Normal(gp) if likelihood is None else likelihood
        gamma = np.zeros(0) if gamma is None else gamma
        return cls(ode, gp, parameters, gamma, likelihood, known or Start(ode))

    def theta(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parameters at unconstrained ones."""
        return self.parameters.natural(u)[0]

    def height(self, u: NDArray[np.float64], solution: NDArray[np.float64]) -> float:
        """Return the log likelihood of a solution; minus infinity where it is none."""
        value = self.likelihood(self.theta(u), solution).log_density
        return -np.inf if np.isnan(value) else value


@dataclass(frozen=True, eq=False)
class Shared:
    """Which parameters several experiments have in common.

    ``log_prior`` is the log density of these, with its gradient and curvature.
    """

    among: NDArray[np.bool_]
    log_prior: Callable[[NDArray], tuple[NDArray, NDArray, NDArray]]

    @classmethod
    def nothing(cls, n_params: int) -> "Shared":
        """Return that none of so many parameters is shared."""
        return cls(np.zeros(n_params, dtype=bool), lambda _: (np.array(0.0), *np.zeros((2, 0))))

    def counted_again(self, points: Sequence[NDArray]) -> tuple:
        """Return what adds their prior, which each of some experiments subtracts, all but once.

        The log density at points, its gradient and curvature.
        """
        u = points[0][: len(self.among)][self.among]
        return tuple((len(points) - 1) * part for part in self.log_prior(u))


class Mode(NamedTuple):
    """The most probable states and parameters."""

    u: NDArray[np.float64]
    """Parameters, unconstrained, shape ``(param,)``."""
    x: NDArray[np.float64]
    """States on the grid, shape ``(time, state)``, in the data's units."""
    sd: NDArray[np.float64]
    """Posterior standard deviations of u, from the Hessian."""
    reached_limit: bool = False
    """Whether the climb to them was cut short, after so many steps."""


@on_one_thread
def climb_from_prior(problem: Problem, x: NDArray[np.float64], rng: np.random.Generator) -> Mode:
    """Climb from prior draws, the parameters alone at first, given the states x.

    Where states are hidden, or the density is zero at x, climbs start from solutions of the ODE
    (:func:`solutions_of_prior`).  Hidden states climb with the parameters.
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
    none = Shared.nothing(theorem.n_params)
    best = search_mode(
        [theorem.flat(*start) for start in starts],
        lambda point: -theorem.value(point)[0],
        alone=lambda point: _climb([theorem], [point], none, free)[0][0],
        together=lambda point: _climb([theorem], [point], none)[0][0],
    )
    if best is None:
        theta = problem.theta(draws[0])
        zero = problem.likelihood.impossible(theta, x)
        msg = (
            f"the right-hand side is finite for none of {N_STARTS} draws of the parameters from "
            "their prior, at the states' posterior mean; check the priors and the ODE. "
            f"{_why_none(problem, x, x[0], theta)}"
        )
        if zero:
            msg = (
                f"the likelihood is zero at {zero}, at the states' posterior mean as at all of "
                f"{N_SURVEYED} solutions from draws of the prior; check priors and likelihood."
            )
        raise ValueError(msg)
    return theorem.mode(best)


def solutions_around(problem: Problem, mode: Mode, rng: np.random.Generator) -> list[Mode]:
    """Return draws of the parameters with solutions of the ODE, the most probable first.

    Draws of parameters and x(t0) of the normal approximation of Theorem 1 around a point.
    """
    theorem, gp = Theorem1(problem), problem.gp
    point = theorem.flat(mode.u, mode.x)
    variances, axes = np.linalg.eigh(theorem.hessian(point))
    n_params, n_times = theorem.n_params, len(gp.t)
    needed = np.append(np.arange(n_params), np.arange(n_params, len(point), n_times))
    factor = axes[needed] / np.sqrt(np.maximum(variances, variances.max() * SOFTEST))
    drawn = point[needed] + rng.normal(size=(N_SURVEYED, len(point))) @ factor.T
    draws, deviation = drawn[:, :n_params], drawn[:, n_params:]
    starts = gp.prior_mean[0] + gp.scale * deviation
    found = _solved(problem, draws, starts)
    return [Mode(u, solution, mode.sd) for u, solution in found]


def solutions_of_prior(problem: Problem, rng: np.random.Generator) -> list[tuple[NDArray, NDArray]]:
    """Return draws of the parameters with solutions of the ODE, the most probable first.

    A solution starts where the data, smoothed, do; what is hidden, at random, within two
    powers of ten of its scale, unless it is known or has a prior, of which it is a draw.
    """
    gp, known = problem.gp, problem.known
    seeds = rng.integers(2**31, size=N_SURVEYED)
    draws = np.array([problem.parameters.draw(seed) for seed in seeds])
    shape = (N_SURVEYED, len(gp.states))
    size = gp.scale * 10 ** rng.uniform(-1.5, 1, size=shape) * rng.choice([1, 1, 1, -1], size=shape)
    hidden = gp.data.is_sparse
    smoothed = known.possible(gp.posterior_mean())
    starts = known.drawn(np.where(hidden, gp.mean + size, smoothed[0]), hidden, rng)
    return _solved(problem, draws, starts)


def _solved(problem: Problem, draws, starts) -> list[tuple[NDArray, NDArray]]:
    known, theta = problem.known, np.array([problem.theta(u) for u in draws])
    starts = np.array([known.filled(*pair) for pair in zip(theta, starts, strict=True)])
    solutions = Solver(problem.ode.equations(), problem.gp.t)(starts, theta).x
    solved = np.flatnonzero(np.isfinite(solutions).all(axis=(1, 2)))
    heights = np.array([problem.likelihood.log_density(theta[i], solutions[i]) for i in solved])
    if known.priors:
        heights += [known.evaluated(theta[i], starts[i]).log_prior for i in solved]
    best = [solved[i] for i in np.argsort(-heights) if np.isfinite(heights[i])]
    return [(draws[i], solutions[i]) for i in best]


def scaled_by_solutions(problem: Problem, data: Data, rng: np.random.Generator) -> Data:
    """Return data with mean and scale of states that lack a scale, from probable solutions.

    A state that was never seen takes its mean from these also where its scale is given.  The scale
    of one that is zero in all of them stays unknown.  The problem has the same data in Gaussian
    processes that are not fitted.
    """
    found = solutions_of_prior(problem, rng)[:N_STARTS]
    if not found:
        known, likelihood, gp = problem.known, problem.likelihood, problem.gp
        theta = problem.theta(problem.parameters.draw(int(rng.integers(2**31))))
        smoothed = known.possible(gp.posterior_mean())
        why = _why_none(problem, None, smoothed[0], theta)
        start = known.filled(theta, smoothed[0])
        if not why and (zero := likelihood.impossible(theta, np.tile(start, (len(gp.t), 1)))):
            why = (
                f"For one, the likelihood is zero at {zero} where the solution starts. Where a "
                "count or a positive number has a state that starts at zero as its mean, give the "
                "start a prior, or write pm.math.maximum(x.state, 1e-9)."
            )
        msg = (
            f"none of {N_SURVEYED} solutions from draws of the prior is finite where the data "
            f"are; check priors, starts and the ODE: the scale of {data.unscaled} stays unknown. "
            f"{why} Expected scales={{...}}, roughly their standard deviation, if all is right."
        )
        raise ValueError(msg)
    solutions = np.array([solution for _, solution in found])
    mean = np.median(solutions.mean(axis=1), axis=0)
    sizes = np.maximum(solutions.std(axis=1), 0.1 * np.abs(solutions).mean(axis=1))
    scale = [np.median(size[size > 0]) if size.any() else np.nan for size in sizes.T]
    unknown = np.isnan(data.scale)
    unseen = ~data.is_observed.any(axis=0) & (data.mean == 0)
    return data.with_scale(
        np.where(unknown | unseen, mean, data.mean), np.where(unknown, scale, data.scale)
    )


def _why_none(problem: Problem, x, start, theta) -> str:
    """Say where slopes at states x, or a solution from a start, are not finite, with a draw."""
    ode, t = problem.ode, problem.gp.t
    where = "" if x is None else explain_nonfinite(ode, t, x, theta)
    where = where or explain_failure(ode, t, problem.known.filled(theta, start), theta)
    return f"For one, {where}" if where else ""


class _Linearised(NamedTuple):
    """The mismatch at a point and its derivatives, state by state."""

    mismatch: NDArray[np.float64]
    """Whitened, shape ``(state, time)``."""
    by_u: NDArray[np.float64]
    """Its derivatives by the parameters, shape ``(state, time, param)``."""
    by_x: NDArray[np.float64]
    """Derivatives of f, not whitened, by the states of the same time, ``(state, state, time)``."""


class Squares(NamedTuple):
    r"""What the prior of the states and their mismatch are half a sum of squares of.

    With W such that :math:`W^T W = (A + \gamma I)^{-1}` and :math:`\tilde x` in standard
    deviations of the data from the prior mean, the squares are those of :math:`W g` and of
    :math:`C^{-1/2} \tilde x`; arrays have the shape ``(state, time, time)``.
    """

    whiten: NDArray[np.float64]
    """W."""
    slope: NDArray[np.float64]
    """W D."""
    precision: NDArray[np.float64]
    """The inverse of C."""
    weights: NDArray[np.float64]
    cross: NDArray[np.float64]
    fixed: NDArray[np.float64]

    @classmethod
    def of(cls, gp: StateGP, gamma: NDArray[np.float64]) -> "Squares":
        """Return those of Gaussian processes and a tolerance, shape ``(state,)``."""
        vectors, variances = gp.processes.conditional_spectrum
        spread = np.sqrt(np.maximum(variances, 0) + gamma[:, None])
        whiten = (vectors / spread[:, None]).mT
        slope = whiten @ gp.operators().D
        vectors, variances = gp.processes.prior_spectrum
        precision = (vectors / variances[:, None]) @ vectors.mT
        return cls(
            whiten, slope, precision,
            weights=whiten.mT @ whiten, cross=slope.mT @ whiten, fixed=slope.mT @ slope + precision,
        )  # fmt: skip

    def hessian(self, by_x: NDArray[np.float64]) -> NDArray[np.float64]:
        r"""Return :math:`J^T J`, shape ``(state, time, state, time)``.

        J is the Jacobian of all that is squared, where the right-hand side has these derivatives
        by the states of the same time, shape ``(state, state, time)``.
        """
        # The ODE's blocks of two states are products of entries, not of matrices: what happens
        # at one time depends on the states of that time alone.
        n_states, n_times = by_x.shape[1:]
        found = np.zeros((n_states, n_times, n_states, n_times))
        for m in range(n_states):
            entering = np.flatnonzero(by_x[m].any(axis=1))
            found[m, :, m, :] += self.fixed[m]
            for j in entering:
                crossed = self.cross[m] * by_x[m, j]
                found[m, :, j, :] -= crossed
                found[j, :, m, :] -= crossed.T
                weighted = by_x[m, j, :, None] * self.weights[m]
                for i in entering:
                    found[j, :, i, :] += weighted * by_x[m, i]
        return found


class Theorem1:
    """Minus the log of Theorem 1 as a function of one vector: u, then states by state.

    States count in standard deviations of the data from their prior mean.
    """

    def __init__(self, problem: Problem):
        self.ode, self.gp, self.parameters = problem.ode, problem.gp, problem.parameters
        self.likelihood, self.known = problem.likelihood, problem.known
        self.shape = self.gp.prior_mean.shape
        self.n_params = len(self.parameters.names)
        n_times, n_states = self.shape
        places = np.arange(n_states)[:, None] * n_times + self.likelihood.rows
        self.observed_entries = np.append(np.arange(self.n_params), self.n_params + places.ravel())
        self.squares = Squares.of(self.gp, problem.gamma)
        self.at: tuple = (None, None)

    def flat(self, u, x) -> NDArray:
        """Return parameters and states, in the data's units, as one vector."""
        return np.concatenate([u, ((x - self.gp.prior_mean) / self.gp.scale).T.ravel()])

    def states(self, point) -> NDArray:
        """Return the states of a point, shape ``(time, state)``, in the data's units."""
        return self.gp.prior_mean + self.gp.scale * self._deviation(point).T

    def mode(self, point) -> Mode:
        """Return a point as parameters and states."""
        return Mode(point[: self.n_params], self.states(point), self.sd(point))

    def _deviation(self, point):
        return point[self.n_params :].reshape(self.shape[::-1])

    def _linearised(self, point) -> _Linearised:
        if self.at[0] is not None and np.array_equal(self.at[0], point):
            return self.at[1]
        gp = self.gp
        theta, dtheta = self.parameters.natural(point[: self.n_params])
        with np.errstate(all="ignore"):
            x = self.states(point)
            f, df_dx, df_dtheta = self.ode.linearised(gp.t, x, theta)
            mismatch = matvec(self.squares.whiten, residuals(f, x, gp).T)
            by_u = self.squares.whiten @ (
                (df_dtheta * dtheta).swapaxes(0, 1) / gp.scale[:, None, None]
            )
            by_x = (df_dx * gp.scale / gp.scale[:, None]).transpose(1, 2, 0)
        self.at = (point.copy(), _Linearised(mismatch, by_u, by_x))
        return self.at[1]

    def _started(self, point) -> tuple[KnownOfStart, NDArray, NDArray]:
        """Return what is known of x(t0), and its residuals' derivatives by u and by the states."""
        theta, dtheta = self.parameters.natural(point[: self.n_params])
        start = self.known.evaluated(theta, self.states(point)[0])
        return start, start.by_theta * dtheta, start.by_start * self.gp.scale

    def value(self, point) -> tuple[float, NDArray]:
        """Return the objective and its gradient."""
        mismatch, by_u, by_x = self._linearised(point)
        log_prior, prior_gradient, _ = self.parameters.log_prior(point[: self.n_params])
        deviation = self._deviation(point)
        with np.errstate(all="ignore"):
            theta, dtheta = self.parameters.natural(point[: self.n_params])
            likelihood = self.likelihood(theta, self.states(point))
            pulled = matvec(self.squares.precision, deviation)
            value = 0.5 * np.sum(np.square(mismatch)) + 0.5 * np.sum(deviation * pulled)
            value -= log_prior + likelihood.log_density
            back = matvec(self.squares.whiten.mT, mismatch)
            by_states = (by_x * back[:, None]).sum(axis=0) + pulled
            by_states -= (likelihood.by_states * self.gp.scale).T
            by_states -= matvec(self.squares.slope.mT, mismatch)
            by_params = np.einsum("ktp,kt->p", by_u, mismatch) - prior_gradient
            by_params -= likelihood.by_theta * dtheta
            if self.known:
                start, start_by_u, start_by_x = self._started(point)
                pull = start.residual / np.square(self.known.width(self.gp))
                value += 0.5 * np.sum(start.residual * pull) - start.log_prior
                by_params += pull @ start_by_u
                by_states[:, 0] += pull @ start_by_x - start.gradient * self.gp.scale
            gradient = np.concatenate([by_params, by_states.ravel()])
        finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (float(value), gradient) if finite else (np.inf, np.zeros_like(gradient))

    def hessian(self, point) -> NDArray:
        """Return the Hessian without the second derivatives of f; of one where it is not finite.

        A climb may need it at a point at which the value is infinite.
        """
        with np.errstate(all="ignore"):
            hessian = self._hessian(point)
        return hessian if np.isfinite(hessian).all() else np.eye(len(hessian))

    def _hessian(self, point) -> NDArray:
        n_params, (n_states, n_times) = self.n_params, self.shape[::-1]
        _, by_u, by_x = self._linearised(point)
        n = n_params + n_states * n_times
        states = self.squares.hessian(by_x)
        mixed = -np.einsum("ktp,kts->pks", by_u, self.squares.slope)
        for m in range(n_states):
            entering = np.flatnonzero(by_x[m].any(axis=1))
            mixed[:, entering] += (by_u[m].T @ self.squares.whiten[m])[:, None] * by_x[m, entering]
        by_params = np.einsum("ktp,ktq->pq", by_u, by_u)
        if self.known:
            start, *by = self._started(point)
            start_by_u, start_by_x = (one / self.known.width(self.gp)[:, None] for one in by)
            by_params += start_by_u.T @ start_by_u
            mixed[:, :, 0] += start_by_u.T @ start_by_x
            prior = np.diag(start.curvature * np.square(self.gp.scale))
            states[:, 0, :, 0] += start_by_x.T @ start_by_x + prior
        hessian = np.empty((n, n))
        curvature = self.parameters.log_prior(point[:n_params])[2]
        # Heavy tails bend the other way: left out, so that variances stay positive.
        prior = np.diag(np.maximum(-curvature, 0))
        hessian[:n_params, :n_params] = by_params + prior
        hessian[:n_params, n_params:] = mixed.reshape(n_params, -1)
        hessian[n_params:, :n_params] = mixed.reshape(n_params, -1).T
        hessian[n_params:, n_params:] = states.reshape(n - n_params, n - n_params)
        theta, dtheta = self.parameters.natural(point[:n_params])
        units = np.append(dtheta, np.repeat(self.gp.scale, len(self.likelihood.rows)))
        curvature = self.likelihood.curvature(theta, self.states(point)) * units * units[:, None]
        hessian[np.ix_(self.observed_entries, self.observed_entries)] += curvature
        return hessian

    def sd(self, point) -> NDArray:
        """Return the standard deviations of the parameters by the Hessian."""
        free, given = slice(self.n_params), slice(self.n_params, None)
        hessian = self.hessian(point)
        follow = np.linalg.solve(hessian[given, given], hessian[given, free])
        marginal = hessian[free, free] - hessian[free, given] @ follow
        return np.sqrt(np.diagonal(np.linalg.pinv(marginal, hermitian=True)))


@on_one_thread
def climb(
    problems: Sequence[Problem], starts: Sequence[Mode], shared: Shared | None = None
) -> list[Mode]:
    r"""Climb in the parameters and states of one or several experiments at once.

    The Hessian is an arrow: a block for each experiment's own unknowns, and a border of what all
    share.  Each step of Levenberg and Marquardt eliminates the blocks one by one,

    .. math:: \Bigl(\sum_e H^e_{ss} - H^e_{so} (H^e_{oo})^{-1} H^e_{os}\Bigr)\, \delta_s = \dots

    so that time and memory are linear in the number of experiments.  Each problem has the whole
    prior of its parameters; that of the shared ones, the same in all starts, counts once.
    """
    theorems = [Theorem1(problem) for problem in problems]
    points = [
        theorem.flat(start.u, start.x) for theorem, start in zip(theorems, starts, strict=True)
    ]
    points, reached_limit = _climb(theorems, points, shared or Shared.nothing(theorems[0].n_params))
    if shared is None:
        sds = [theorem.sd(point) for theorem, point in zip(theorems, points, strict=True)]
    else:
        parts, _, hessian = _blocks(theorems, points, shared)
        sds = [*np.sqrt(_marginal(parts, hessian, shared.among))]
    return [
        Mode(point[: theorem.n_params], theorem.states(point), sd, reached_limit)
        for theorem, point, sd in zip(theorems, points, sds, strict=True)
    ]


def _climb(theorems, points, shared: Shared, free=None) -> tuple[list[NDArray], bool]:
    """Return where a climb ends, and whether that is after as many steps as there may be.

    Of one experiment perhaps in some entries alone, which are free.
    """

    def value_at(points) -> float:
        values = [theorem.value(point)[0] for theorem, point in zip(theorems, points, strict=True)]
        return float(sum(values) + shared.counted_again(points)[0])

    places = _places(points, shared, free)
    value, damping = value_at(points), 1e-3
    for _ in range(MOST_CLIMB_STEPS):
        parts, gradient, hessian = _blocks(theorems, points, shared, free)
        while damping < MOST_DAMPING:
            moves = _arrow_step(parts, gradient, hessian, damping)
            tried = [_moved(*one) for one in zip(points, places, moves, strict=True)]
            with np.errstate(all="ignore"):
                there = value_at(tried)
            if there < value:
                break
            damping *= 5
        else:
            return points, False
        risen, points, value = value - there, tried, there
        damping = max(damping / 10, 1e-12)
        if risen < RISING:
            return points, False
    return points, True


def _places(points, shared: Shared, free=None) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Return which entries of each point are shared, and which its own."""
    among = shared.among
    border = [np.append(among, np.zeros(len(p) - len(among), dtype=bool)) for p in points]
    return [(s, ~s if free is None else free) for s in border]


def _blocks(theorems, points, shared: Shared, free=None):
    """Return each experiment's parts of gradient and Hessian, and these of what is shared."""
    parts = []
    for theorem, point, (s, o) in zip(theorems, points, _places(points, shared, free), strict=True):
        gradient, hessian = theorem.value(point)[1], theorem.hessian(point)
        blocks = hessian[np.ix_(s, s)], hessian[np.ix_(s, o)], hessian[np.ix_(o, o)]
        parts.append((gradient[s], gradient[o], *blocks))
    _, gradient, curvature = shared.counted_again(points)
    hessian = np.diag(np.minimum(curvature, 0))
    return parts, gradient + sum(p[0] for p in parts), hessian + sum(p[2] for p in parts)


def _moved(point, places, move) -> NDArray[np.float64]:
    moved = point.copy()
    for place, step in zip(places, move, strict=True):
        moved[place] += step
    return moved


def _damped(matrix, damping: float) -> NDArray[np.float64]:
    return matrix + np.diag(damping * np.maximum(np.diagonal(matrix), 1e-8))


def _arrow_step(parts, gradient, hessian, damping: float) -> list[tuple[NDArray, NDArray]]:
    """Return a damped Newton step of the shared unknowns and of each experiment's own."""
    left, right = _damped(hessian, damping), gradient.copy()
    eliminated = []
    for _, own, _, mixed, block in parts:
        solved = np.linalg.solve(_damped(block, damping), np.column_stack([own, mixed.T]))
        eliminated.append(solved)
        right -= mixed @ solved[:, 0]
        left -= mixed @ solved[:, 1:]
    step = np.linalg.solve(left, -right) if len(right) else -right
    return [(step, -solved[:, 0] - solved[:, 1:] @ step) for solved in eliminated]


def _marginal(parts, hessian, shared) -> NDArray[np.float64]:
    """Return variances of the parameters, shape ``(experiment, param)``."""
    inverses = [np.linalg.inv(block) for *_, block in parts]
    follows = [inverse @ mixed.T for inverse, (*_, mixed, _) in zip(inverses, parts, strict=True)]
    for follow, (*_, mixed, _) in zip(follows, parts, strict=True):
        hessian = hessian - mixed @ follow
    of_shared = np.linalg.pinv(hessian, hermitian=True)
    n_own = int((~shared).sum())
    variances = np.empty((len(parts), len(shared)))
    variances[:, shared] = np.diagonal(of_shared)
    for number, (inverse, follow) in enumerate(zip(inverses, follows, strict=True)):
        own = inverse[:n_own, :n_own] + follow[:n_own] @ of_shared @ follow[:n_own].T
        variances[number, ~shared] = np.diagonal(own)
    return np.maximum(variances, 0)
