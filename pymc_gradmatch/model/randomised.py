r"""Draws of the states given all that the ODE needs, by randomised least squares.

Given parameters and x(t0), minus the log of Theorem 1 is half a sum of squares r of the states
(prior, mismatch and, nearly, what is observed).  With J its Jacobian at the solution of the ODE
and :math:`L L^T = J^T J`, the states that solve

.. math:: L^{-1} J^T r(x) = z, \qquad z \sim N(0, I)

have the density :math:`N(z \mid 0, I)\, |\det L^{-1} J^T J(x)|` ("randomise then optimise" [1]_).
They follow what is curved of the right-hand side, from which draws of a normal approximation
are tens of nats away where the constraint is tight.

References
----------
.. [1] Bardsley, J. M., Solonen, A., Haario, H., Laine, M. (2014). Randomize-then-optimize: a
   method for sampling from posterior distributions in nonlinear inverse problems. *SIAM
   Journal on Scientific Computing* 36(4).
"""

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.model.constraint import Constraint, residuals
from pymc_gradmatch.model.gauss_newton import Squares
from pymc_gradmatch.model.likelihood import Likelihood
from pymc_gradmatch.numerics import matvec

MOST_STEPS, SOLVED = 10, 1e-3  # of Newton, and the error of z that is left
SHORTER = (1.0, 0.3, 0.1)  # of a step, where a whole one leads away
AT_ONCE = 1_000_000  # numbers in the matrices of draws that are solved for together


class Observed(NamedTuple):
    """What is observed, as a quadratic around a solution of each draw."""

    by_states: NDArray[np.float64]
    """Derivatives of the log density, shape ``(draw, time, state)``."""
    curvature: NDArray[np.float64]
    """Minus the second derivatives, by state and row, shape ``(draw, n, n)``."""
    rows: NDArray[np.intp]


def observed(
    told: Likelihood, theta: NDArray[np.float64], levels: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return derivatives by the states, and minus the second, of what is told of a solution."""
    n_params = len(theta)
    curvature = told.curvature(theta, levels)[n_params:, n_params:]
    return told(theta, levels).by_states, curvature


class Randomised(NamedTuple):
    """States with the log densities that they were drawn from."""

    levels: NDArray[np.float64]
    """Shape ``(draw, time, state)``."""
    log_density: NDArray[np.float64]
    """By the levels after the first time, up to a constant; infinite where none was found."""


class RandomisedStates:
    """The states of a constraint, given parameters and x(t0).

    Parameters
    ----------
    constraint : Constraint
        Of Gaussian processes and a gamma that are known.
    """

    def __init__(self, constraint: Constraint):
        self.gp: StateGP = constraint.gp
        self._ode = constraint.ode.of_levels
        self._squares = Squares.of(self.gp, _gamma_of(constraint))
        n_times, n_states = self.gp.prior_mean.shape
        self._later = np.arange(n_states * n_times).reshape(n_states, n_times)[:, 1:].ravel()

    @property
    def size(self) -> int:
        """How many numbers a draw of the states is made of."""
        return len(self._later)

    def draw(
        self,
        theta: NDArray[np.float64],
        solutions: NDArray[np.float64],
        observed: Observed,
        z: NDArray[np.float64],
    ) -> Randomised:
        """Draw the states once for each of several parameters, solutions given.

        Parameters
        ----------
        theta : array of float
            Shape ``(draw, param)``.
        solutions : array of float
            The levels of the solutions, finite, shape ``(draw, time, state)``; x(t0) stays
            as it is there.
        observed : Observed
            What is observed, around these.
        z : array of float
            Standard normal, shape ``(draw, size)``; of zeros come the states in the middle.
        """
        n_chunks = -(-len(theta) * solutions[0].size ** 2 // AT_ONCE)
        drawn = [
            self._draw(theta[part], solutions[part], observed, part, z[part])
            for part in np.array_split(np.arange(len(theta)), max(n_chunks, 1))
        ]
        return Randomised(*map(np.concatenate, zip(*drawn, strict=True)))

    def _draw(self, theta, solutions, observed: Observed, part, z) -> Randomised:
        gp, n = self.gp, len(part)
        n_times, n_states = gp.prior_mean.shape
        first = ((solutions - gp.prior_mean) / gp.scale).mT
        units = np.repeat(gp.scale, len(observed.rows))
        rows = (np.arange(n_states)[:, None] * n_times + observed.rows).ravel()
        curvature = observed.curvature[part] * units * units[:, None]
        slope = (observed.by_states[part] * gp.scale).mT
        mismatch, reference = self._linearised(theta, first)

        def pulled(by_x, places):
            matrix = self._squares.pulled_back(reference[places], by_x)
            flat = matrix.reshape(len(places), n_states * n_times, -1)
            flat[:, rows[:, None], rows] += curvature[places]
            return matrix[:, :, 1:, :, 1:].reshape(len(places), len(self._later), -1)

        def gradient(deviation, mismatch, places):
            """Return J^T r, J at the solution."""
            squares = self._squares
            back = matvec(squares.whiten.mT, mismatch)
            value = matvec(squares.precision, deviation) - matvec(squares.slope.mT, mismatch)
            value += (reference[places] * back[:, :, None]).sum(axis=1) - slope[places]
            value = value.reshape(len(places), -1)
            moved = (deviation - first[places]).reshape(len(places), -1)[:, rows]
            value[:, rows] += matvec(curvature[places], moved)
            return value[:, self._later]

        every = np.arange(n)
        matrix = pulled(reference, every)
        factor, is_definite = _cholesky(matrix)
        wanted = matvec(factor, z)
        deviation = first.copy()
        left = gradient(first, mismatch, every) - wanted  # to be zero
        log_density = np.full(n, np.inf)
        going = every[is_definite]
        matrix = matrix[going]
        for _ in range(MOST_STEPS):
            steps = -np.linalg.solve(matrix, left[going][..., None])[..., 0]
            lengths = np.linalg.norm(_solved(factor[going], left[going]), axis=1)
            by_x = np.empty((len(going), *reference.shape[1:]))
            has_moved = np.zeros(len(going), dtype=bool)
            for shorter in SHORTER:
                these = np.flatnonzero(~has_moved)
                if not len(these):
                    break
                places = going[these]
                tried = deviation[places].reshape(len(places), -1)
                tried[:, self._later] += shorter * steps[these]
                tried = tried.reshape(len(places), n_states, n_times)
                mismatch, by_x[these] = self._linearised(theta[places], tried)
                there = gradient(tried, mismatch, places) - wanted[places]
                with np.errstate(all="ignore"):
                    nearer = np.linalg.norm(_solved(factor[places], there), axis=1)
                better = nearer < lengths[these]
                deviation[places[better]], left[places[better]] = tried[better], there[better]
                has_moved[these[better]] = True
                lengths[these[better]] = nearer[better]
            going, by_x, lengths = going[has_moved], by_x[has_moved], lengths[has_moved]
            if not len(going):
                break
            matrix = pulled(by_x, going)
            solved = lengths < SOLVED
            ended = going[solved]
            found = z[ended] + _solved(factor[ended], left[ended])
            log_density[ended] = (
                np.linalg.slogdet(matrix[solved])[1]
                - np.log(np.diagonal(factor[ended], axis1=1, axis2=2)).sum(axis=1)
                - 0.5 * np.square(found).sum(axis=1)
            )
            going, matrix = going[~solved], matrix[~solved]
        return Randomised(gp.prior_mean + gp.scale * deviation.mT, log_density)

    def _linearised(self, theta, deviation) -> tuple[NDArray, NDArray]:
        """Return the whitened mismatch, and derivatives of f by the states of the same time."""
        gp, n = self.gp, len(deviation)
        n_times, n_states = gp.prior_mean.shape
        levels = gp.prior_mean + gp.scale * deviation.mT
        with np.errstate(all="ignore"):
            f, by_x, _ = self._ode.linearised(
                np.tile(gp.t, n), levels.reshape(-1, n_states), np.repeat(theta, n_times, axis=0)
            )
            gap = residuals(f.reshape(levels.shape), levels, gp).mT
            by_x = (by_x * gp.scale / gp.scale[:, None]).reshape(n, n_times, n_states, n_states)
            return matvec(self._squares.whiten, gap), by_x.transpose(0, 2, 3, 1)


def _cholesky(matrices) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return lower factors, and of which matrices they are: the identity where there is none."""
    factors = np.broadcast_to(np.eye(matrices.shape[-1]), matrices.shape).copy()
    is_definite = np.isfinite(matrices).all(axis=(1, 2))
    for place in np.flatnonzero(is_definite):
        try:
            factors[place] = np.linalg.cholesky(matrices[place])
        except np.linalg.LinAlgError:
            is_definite[place] = False
    return factors, is_definite


def _solved(factors, vectors) -> NDArray[np.float64]:
    """Return the solutions of lower triangular systems, one for each."""
    solutions = np.empty_like(vectors)
    for solution, *one in zip(solutions, factors, vectors, strict=True):
        solution[:] = solve_triangular(*one, lower=True, check_finite=False)
    return solutions


def _gamma_of(constraint: Constraint) -> NDArray[np.float64]:
    """Return what the diagonal of A + gamma I has more than that of A, shape ``(state,)``."""
    vectors, variances = (
        pt.as_tensor(part).eval(mode=EVALUATE_ONCE)
        for part in (constraint.basis.vectors, constraint.basis.variances)
    )
    total = (np.square(vectors) * variances[:, None]).sum(axis=2)
    return (total - np.diagonal(constraint.gp.operators().A, axis1=1, axis2=2)).mean(axis=1)
