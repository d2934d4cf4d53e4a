"""Numerical integration of many draws at once, each with steps of its own."""

from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray

from pymc_gradmatch.derivatives import as_written
from pymc_gradmatch.explicit import RTOL, explicit_step, is_at_the_edge
from pymc_gradmatch.implicit import ORDER, implicit_step
from pymc_gradmatch.integration import size
from pymc_gradmatch.ode import ODE

__all__ = ["BatchedSolver"]

MAX_STEPS = 2000  # of one draw, explicit ones
MAX_IMPLICIT_STEPS = 1000
LOOK = 10  # steps from one look for stiffness to the next
LOOKS = 3  # at a step as long as stability allows, after which a draw counts as stiff
COST = 15  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times
MOST_NUMBERS = 4_000_000  # of matrices that are held at once
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's control of the step


class BatchedSolver:
    """``ode.solve`` for hundreds of draws: one call of the right-hand side serves all of them.

    Every draw has its own step width and its own tolerance, so a wild draw neither
    slows nor spoils the others.  All start on the Dormand-Prince pair of order 8
    with scipy's coefficients and error estimate.  A draw whose steps are bounded by
    stability, those of stiff systems, goes on by the linearly implicit Euler method
    extrapolated to order 9, and so does one that needs more than 2000 steps.  The
    relative tolerance is 1e-9 on both roads.  A draw that has not arrived after
    another 1000 steps has failed (steps to output times are not counted).

    Parameters
    ----------
    ode : ODE
        The system; its right-hand side is compiled here, once.

    Examples
    --------
    >>> import pymc_gradmatch as gm
    >>> from pymc_gradmatch.batched import BatchedSolver
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> solve = BatchedSolver(decay)
    >>> solve([0.0, 1.0], x0=[[1.0], [2.0]], theta=[[0.5], [0.5]])[:, 1, 0].round(4)
    array([0.6065, 1.2131])
    """

    def __init__(self, ode: ODE):
        self.ode = ode
        t = pt.vector("t", dtype="float64")
        x = pt.tensor("x", dtype="float64", shape=(None, len(ode.states)))
        theta = pt.tensor("theta", dtype="float64", shape=(None, len(ode.params)))
        f = ode(t, x, [theta[:, i] for i in range(len(ode.params))])
        with as_written():
            self._derivative = pytensor.function(
                [t, x, theta], f, on_unused_input="ignore", trust_input=True
            )

    def __call__(self, t, x0, theta) -> NDArray[np.float64]:
        """Integrate from every draw of start and parameters.

        Parameters
        ----------
        t : array_like of float
            Increasing times, shape ``(time,)``; ``x0`` holds at the first.
        x0, theta : array_like of float
            Starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``.

        Returns
        -------
        array of float
            Trajectories, shape ``(draw, time, state)``; NaN for draws whose
            integration failed.
        """
        t, x0, theta = (np.asarray(values, dtype=float) for values in (t, x0, theta))
        trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        with np.errstate(all="ignore"):
            front = _start(self._derivative, t, x0, theta)
            left = _advance(self._explicit_step, 8, MAX_STEPS, front, t, trajectories)
            for part in left.with_tolerances(trajectories).parts():
                _advance(self._implicit_step, ORDER, MAX_IMPLICIT_STEPS, part, t, trajectories)
        incomplete = np.isnan(trajectories).any(axis=(1, 2))
        trajectories[incomplete] = np.nan
        return trajectories

    def _explicit_step(self, time, x, f, width, theta, absolute):
        return explicit_step(self._derivative, time, x, f, width, theta, absolute)

    def _implicit_step(self, time, x, f, width, theta, absolute):
        x_new, error = implicit_step(
            self._derivative, self._jacobian, time, x, width, theta, absolute
        )
        return x_new, f, error, None  # needs no slope, and is stable everywhere

    def _jacobian(self, t, x, theta):
        return self.ode.linearised(t, x, theta)[1]


class _Front(NamedTuple):
    """Where draws have arrived: arrays with one entry, or row, for each."""

    draw: NDArray[np.int_]
    goal: NDArray[np.int_]
    time: NDArray[np.float64]
    step: NDArray[np.float64]
    x: NDArray[np.float64]
    f: NDArray[np.float64]
    theta: NDArray[np.float64]
    absolute: NDArray[np.float64]
    at_the_edge: NDArray[np.int_]

    def of(self, chosen: NDArray) -> Self:
        return type(self)(*(array[chosen] for array in self))

    def parts(self) -> list[Self]:
        """Return the draws in parts whose matrices fit into memory."""
        n = max(1, MOST_NUMBERS // (ORDER * self.x.shape[1] ** 2))
        draws = np.arange(len(self.draw))
        return [self.of(part) for part in np.split(draws, draws[n::n])]

    def with_tolerances(self, trajectories: NDArray[np.float64]) -> Self:
        """Return the same with absolute tolerances for sizes that states had, not may have."""
        so_far = np.nanmax(np.abs(trajectories[self.draw]), axis=1, initial=0.0)
        reached = np.maximum(so_far, np.abs(self.x))
        absolute = 1e-2 * RTOL * size(reached, self.f, 0.0)
        return self._replace(absolute=absolute, at_the_edge=0 * self.draw)


def _start(derivative: Callable, t, x0, theta) -> _Front:
    time = np.full(len(x0), t[0])
    f = derivative(time, x0, theta)
    absolute = 1e-2 * RTOL * size(x0, f, t[-1] - t[0])
    step = 0.01 * np.min(absolute / (1e-2 * RTOL) / np.abs(f), axis=1)
    step = np.fmin(step, t[-1] - t[0])
    draw = np.arange(len(x0))
    goal = np.ones(len(x0), dtype=int)
    return _Front(draw, goal, time, step, x0, f, theta, absolute, 0 * draw)


def _advance(
    attempt: Callable, order: int, max_steps: int, front: _Front, t, trajectories
) -> _Front:
    """Fill in trajectories by steps of one method; return the draws that it does not suit."""
    unsuited = []
    smallest = 10 * np.spacing(np.abs(t).max())
    max_steps += len(t)
    for attempts in range(1, max_steps + 1):
        draw, goal, time, step, x, f, theta, absolute, at_the_edge = front
        if not len(draw):
            break
        arrives = time + step >= t[goal]
        width = np.where(arrives, t[goal] - time, step)
        x_new, f_new, error, last_stage = attempt(time, x, f, width, theta, absolute)
        accepted = error < 1
        factor = np.clip(SAFETY * error ** (-1 / order), SHRINK, GROW)
        # A step cut short by an output time says little against a longer one.
        longer = np.where(arrives & accepted, np.maximum(step, width * factor), width * factor)
        step = np.where(np.isfinite(error), longer, SHRINK * width)

        recorded = accepted & arrives
        time = np.where(recorded, t[goal], np.where(accepted, time + width, time))
        x = np.where(accepted[:, None], x_new, x)
        f = np.where(accepted[:, None], f_new, f)
        trajectories[draw[recorded], goal[recorded]] = x[recorded]
        goal = goal + recorded
        going = (goal < len(t)) & (step > smallest)
        front = _Front(draw, goal, time, step, x, f, theta, absolute, at_the_edge)
        if last_stage is not None and attempts % LOOK == 0:
            affordable = np.minimum(COST * (FEWEST + len(t) - goal), max_steps - attempts)
            far = going & accepted & (t[-1] - time > affordable * step)
            if far.any():
                edge = np.where(is_at_the_edge(width, x_new, f_new, last_stage), 1, -1)
                at_the_edge[:] = np.maximum(at_the_edge + far * edge, 0)
                leaves = far & (at_the_edge >= LOOKS)
                unsuited.append(front.of(leaves))
                going &= ~leaves
        del last_stage  # and its memory, before the next step takes as much
        if not going.all():
            front = front.of(going)
    return _Front(*map(np.concatenate, zip(*unsuited, front, strict=True)))
