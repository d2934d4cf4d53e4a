"""Numerical integration of many draws at once, each with steps of its own."""

import warnings
from collections.abc import Callable

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from scipy.integrate import DOP853

from pymc_gradmatch.derivatives import as_written
from pymc_gradmatch.integration import size
from pymc_gradmatch.ode import ODE

__all__ = ["BatchedSolver"]

RTOL = 1e-9
MAX_STEPS = 2000  # of one draw; what needs more is stiff, and left to LSODA
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's control of the step


class BatchedSolver:
    """``ode.solve`` for hundreds of draws: one call of the right-hand side serves all of them.

    The Dormand-Prince pair of order 8 with scipy's coefficients and error
    estimate.  Every draw has its own step width and its own tolerance, so a wild
    draw neither slows nor spoils the others.  A draw that needs more than
    ``MAX_STEPS`` steps, as those of stiff systems do, is integrated by
    :meth:`ODE.solve <pymc_gradmatch.ODE.solve>` instead.

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
        with np.errstate(all="ignore"):
            trajectories, unfinished = _integrate(self._derivative, t, x0, theta)
        if len(unfinished):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                trajectories[unfinished] = self.ode.solve(t, x0[unfinished], theta[unfinished])
        return trajectories


def _integrate(derivative: Callable, t, x0, theta):
    """Return trajectories, and which draws took too many steps."""
    trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
    trajectories[:, 0] = x0
    time = np.full(len(x0), t[0])
    x, f = x0, derivative(time, x0, theta)
    absolute = 1e-2 * RTOL * size(x0, f, t[-1] - t[0])
    step = 0.01 * np.min(absolute / (1e-2 * RTOL) / np.abs(f), axis=1)
    step = np.fmin(step, t[-1] - t[0])
    draw = np.arange(len(x0))
    goal = np.ones(len(x0), dtype=int)
    smallest = 10 * np.spacing(np.abs(t).max())
    for _ in range(MAX_STEPS):
        if not len(draw):
            break
        arrives = time + step >= t[goal]
        width = np.where(arrives, t[goal] - time, step)
        x_new, f_new, error = _try_step(derivative, time, x, f, width, theta, absolute)
        accepted = error < 1
        factor = np.clip(SAFETY * error ** (-1 / 8), SHRINK, GROW)
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
        if not going.all():
            arrays = (draw, goal, time, step, x, f, theta, absolute)
            draw, goal, time, step, x, f, theta, absolute = (a[going] for a in arrays)
    incomplete = np.isnan(trajectories).any(axis=(1, 2))
    trajectories[incomplete] = np.nan
    return trajectories, draw


def _try_step(derivative, time, x, f, width, theta, absolute):
    """Return states and slopes after one step, and its error in units of the tolerance."""
    shape = x.shape
    slopes = np.empty((DOP853.n_stages + 1, x.size))
    slopes[0] = f.ravel()
    for stage in range(1, DOP853.n_stages):
        move = (DOP853.A[stage, :stage] @ slopes[:stage]).reshape(shape)
        at = time + DOP853.C[stage] * width
        slopes[stage] = derivative(at, x + width[:, None] * move, theta).ravel()
    x_new = x + width[:, None] * (DOP853.B @ slopes[:-1]).reshape(shape)
    f_new = derivative(time + width, x_new, theta)
    slopes[-1] = f_new.ravel()
    scale = absolute + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    fifth, third = (
        (((weights @ slopes).reshape(shape) / scale) ** 2).sum(axis=1)
        for weights in (DOP853.E5, DOP853.E3)
    )
    error = np.abs(width) * fifth / np.sqrt((fifth + 0.01 * third) * shape[1])
    return x_new, f_new, np.where((fifth == 0) & (third == 0), 0.0, error)
