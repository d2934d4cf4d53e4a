r"""The mode of Theorem 1 by Gauss-Newton.

Given hyperparameters, minus the log of Theorem 1 is half a sum of squares (prior and mismatch,
each whitened), minus the log likelihood and the log prior of theta.  Its Hessian without the
second derivatives of f is exact where the mismatch is small, however tight the constraint:
Levenberg and Marquardt's method needs a handful of steps where a gradient method would need
thousands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.model.constraint import residuals
from pymc_gradmatch.model.likelihood import Likelihood, NormalLikelihood
from pymc_gradmatch.model.priors import Parameters
from pymc_gradmatch.model.start import Start, StartTerms
from pymc_gradmatch.numerics import matvec, on_one_thread
from pymc_gradmatch.ode import ODE

MAX_STEPS = 100  # of an optimisation
MAX_DAMPING = 1e10  # beyond which a step is within rounding
MIN_DECREASE = 1e-4  # of minus the log density: less ends the optimisation


@dataclass(frozen=True, eq=False)
class Problem:
    """Theorem 1 of one experiment, as a function of parameters and states.

    The ODE is that of levels (:attr:`ODE.transformed`).  Gamma, the variance of the mismatch, has
    the shape ``(state,)``, and is empty where none is needed.
    """

    ode: ODE
    gp: StateGP
    parameters: Parameters
    gamma: NDArray[np.float64]
    likelihood: Likelihood
    start: Start

    @classmethod
    def of(
        cls,
        ode: ODE,
        gp: StateGP,
        parameters: Parameters,
        gamma: NDArray[np.float64] | None = None,
        likelihood: Likelihood | None = None,
        start: Start | None = None,
    ) -> "Problem":
        """Return a problem, by default with the normal likelihood of the data."""
        likelihood = NormalLikelihood(gp) if likelihood is None else likelihood
        gamma = np.zeros(0) if gamma is None else gamma
        return cls(ode, gp, parameters, gamma, likelihood, start or Start(ode))

    def theta(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parameters at unconstrained ones."""
        return self.parameters.natural(u)[0]

    def log_likelihood(self, u: NDArray[np.float64], solution: NDArray[np.float64]) -> float:
        """Return the log likelihood of a solution; minus infinity where it is NaN."""
        value = self.likelihood(self.theta(u), solution).log_density
        return -np.inf if np.isnan(value) else value


@dataclass(frozen=True, eq=False)
class SharedParameters:
    """Which parameters several experiments share, and the log prior of these.

    ``log_prior`` returns the log density with its gradient and curvature.
    """

    is_shared: NDArray[np.bool_]
    log_prior: Callable[[NDArray], tuple[NDArray, NDArray, NDArray]]

    @classmethod
    def none(cls, n_params: int) -> "SharedParameters":
        """Return that none of so many parameters is shared."""
        return cls(np.zeros(n_params, dtype=bool), lambda _: (np.array(0.0), *np.zeros((2, 0))))

    def excess_prior(self, points: Sequence[NDArray]) -> tuple:
        """Return their log prior, gradient and curvature, once less than there are experiments.

        Each experiment's density contains this prior, but it counts once.
        """
        u = points[0][: len(self.is_shared)][self.is_shared]
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
    """Whether the optimisation ended at its step limit."""


class _Linearised(NamedTuple):
    """The mismatch at a point and its derivatives, state by state."""

    mismatch: NDArray[np.float64]
    """Whitened, shape ``(state, time)``."""
    by_u: NDArray[np.float64]
    """Its derivatives by the parameters, shape ``(state, time, param)``."""
    by_x: NDArray[np.float64]
    """Derivatives of f, not whitened, by the states of the same time, ``(state, state, time)``."""


class SquaredTerms(NamedTuple):
    r"""Matrices of the squares that the log prior of the states and the mismatch consist of.

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
    def of(cls, gp: StateGP, gamma: NDArray[np.float64]) -> "SquaredTerms":
        """Return them for Gaussian processes and gamma, shape ``(state,)``."""
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
        self.likelihood, self.start = problem.likelihood, problem.start
        self.shape = self.gp.prior_mean.shape
        self.n_params = len(self.parameters.names)
        n_times, n_states = self.shape
        places = np.arange(n_states)[:, None] * n_times + self.likelihood.rows
        self.observed_entries = np.append(np.arange(self.n_params), self.n_params + places.ravel())
        self.squares = SquaredTerms.of(self.gp, problem.gamma)
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

    def _start_terms(self, point) -> tuple[StartTerms, NDArray, NDArray]:
        """Return the terms of x(t0), and their residuals' derivatives by u and by the states."""
        theta, dtheta = self.parameters.natural(point[: self.n_params])
        start = self.start.evaluated(theta, self.states(point)[0])
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
            if self.start:
                start, start_by_u, start_by_x = self._start_terms(point)
                pull = start.residual / np.square(self.start.width(self.gp))
                value += 0.5 * np.sum(start.residual * pull) - start.log_prior
                by_params += pull @ start_by_u
                by_states[:, 0] += pull @ start_by_x - start.gradient * self.gp.scale
            gradient = np.concatenate([by_params, by_states.ravel()])
        finite = np.isfinite(value) and np.isfinite(gradient).all()
        return (float(value), gradient) if finite else (np.inf, np.zeros_like(gradient))

    def hessian(self, point) -> NDArray:
        """Return the Hessian without the second derivatives of f; the identity if not finite.

        Optimisation may start where the value is infinite.
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
        if self.start:
            start, *by = self._start_terms(point)
            start_by_u, start_by_x = (one / self.start.width(self.gp)[:, None] for one in by)
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
def optimise(
    problems: Sequence[Problem], starts: Sequence[Mode], shared: SharedParameters | None = None
) -> list[Mode]:
    r"""Return the local optimum in parameters and states of one or several experiments, jointly.

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
    none = SharedParameters.none(theorems[0].n_params)
    points, reached_limit = _local_optimum(theorems, points, shared or none)
    if shared is None:
        sds = [theorem.sd(point) for theorem, point in zip(theorems, points, strict=True)]
    else:
        parts, _, hessian = _blocks(theorems, points, shared)
        sds = [*np.sqrt(_marginal(parts, hessian, shared.is_shared))]
    return [
        Mode(point[: theorem.n_params], theorem.states(point), sd, reached_limit)
        for theorem, point, sd in zip(theorems, points, sds, strict=True)
    ]


def local_optimum(
    theorem: Theorem1, point: NDArray[np.float64], free: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return the local optimum of one experiment, perhaps in some entries of the point alone."""
    points, _ = _local_optimum([theorem], [point], SharedParameters.none(theorem.n_params), free)
    return points[0]


def _local_optimum(
    theorems, points, shared: SharedParameters, free=None
) -> tuple[list[NDArray], bool]:
    """Return the points of a local optimum, and whether the step limit was reached."""

    def value_at(points) -> float:
        values = [theorem.value(point)[0] for theorem, point in zip(theorems, points, strict=True)]
        return float(sum(values) + shared.excess_prior(points)[0])

    places = _places(points, shared, free)
    value, damping = value_at(points), 1e-3
    for _ in range(MAX_STEPS):
        parts, gradient, hessian = _blocks(theorems, points, shared, free)
        while damping < MAX_DAMPING:
            moves = _arrow_step(parts, gradient, hessian, damping)
            tried = [_moved(*one) for one in zip(points, places, moves, strict=True)]
            with np.errstate(all="ignore"):
                there = value_at(tried)
            if there < value:
                break
            damping *= 5
        else:
            return points, False
        decrease, points, value = value - there, tried, there
        damping = max(damping / 10, 1e-12)
        if decrease < MIN_DECREASE:
            return points, False
    return points, True


def _places(
    points, shared: SharedParameters, free=None
) -> list[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Return which entries of each point are shared, and which its own."""
    is_shared = shared.is_shared
    border = [np.append(is_shared, np.zeros(len(p) - len(is_shared), dtype=bool)) for p in points]
    return [(s, ~s if free is None else free) for s in border]


def _blocks(theorems, points, shared: SharedParameters, free=None):
    """Return each experiment's parts of gradient and Hessian, and these of what is shared."""
    parts = []
    for theorem, point, (s, o) in zip(theorems, points, _places(points, shared, free), strict=True):
        gradient, hessian = theorem.value(point)[1], theorem.hessian(point)
        blocks = hessian[np.ix_(s, s)], hessian[np.ix_(s, o)], hessian[np.ix_(o, o)]
        parts.append((gradient[s], gradient[o], *blocks))
    _, gradient, curvature = shared.excess_prior(points)
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
