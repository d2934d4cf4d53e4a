"""Observations at some times, checked once, before anything is computed from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import as_numbers

# Kernels see times through differences of squares: beyond this many sampling
# intervals from zero, rounding spoils the distances between neighbours.
FARTHEST_START = 3e4
SHORTLY = 0.1  # grid steps
ROUNDING = 1e-15  # relative, up to which two times are one


@dataclass(frozen=True, eq=False)
class Data:
    """Observations of states at some times, checked once and handed down.

    :meth:`of` makes it from what a user gives.

    Parameters
    ----------
    t : array of float
        Times, shape ``(time,)``, increasing.
    y : array of float
        Observations, shape ``(time, state)``; NaN where a state was not observed.
    states : tuple
        Names of the states; numbers where the user gave none.
    mean, scale : array of float
        What standardises the levels of the states, shape ``(state,)``.  They need not come
        from the observations.
    positive : array of bool
        Which states are positive, shape ``(state,)``.  The level of such a state is its
        logarithm, that of another one is the state itself, in the data's units.
    experiment : str
        Name of the experiment; empty if it is the only one.
    """

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    states: tuple
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    positive: NDArray[np.bool_]
    experiment: str = ""

    @classmethod
    def of(
        cls,
        t: ArrayLike | SharedVariable,
        y: ArrayLike | SharedVariable,
        *,
        standardize: bool = True,
        positive: bool | Sequence[bool] = False,
    ) -> Self:
        """Check times and observations; mean and scale are those of each state's data.

        Raises
        ------
        ValueError, TypeError
            If they cannot be used; the message says why.
        """
        times = _as_times(t)
        observations = _as_observations(y, times)
        n_states = observations.shape[1]
        columns = tuple(getattr(y, "columns", range(n_states)))
        is_positive = _as_truths(positive, n_states)
        _check_positive(observations, is_positive, columns)
        mean, scale = np.zeros(n_states), np.ones(n_states)
        if standardize:
            levels = levels_of(observations, is_positive)
            mean, scale = np.nanmean(levels, axis=0), np.nanstd(levels, axis=0)
        moments = read_only(mean), read_only(scale)
        return cls(times, observations, columns, *moments, is_positive)

    @property
    def levels(self) -> NDArray[np.float64]:
        """The observations, logarithms where states are positive, shape ``(time, state)``."""
        return levels_of(self.y, self.positive)

    @property
    def is_observed(self) -> NDArray[np.bool_]:
        """Where there is an observation, shape ``(time, state)``."""
        return ~np.isnan(self.y)

    @property
    def standardised(self) -> NDArray[np.float64]:
        """The levels less their mean, divided by the scale, shape ``(time, state)``."""
        return (self.levels - self.mean) / self.scale

    def is_same(self, other: Self) -> bool:
        """Tell whether times and observations are the same."""
        return np.array_equal(self.t, other.t) and np.array_equal(self.y, other.y, equal_nan=True)


def _as_times(t: ArrayLike | SharedVariable) -> NDArray[np.float64]:
    """Return the times as a read-only vector, or say what is wrong with them."""
    given = _held(t, "t")
    if np.asarray(given).dtype.kind in "mM":
        msg = "t holds dates; expected numbers, for example (t - t[0]) / np.timedelta64(1, 'D')."
        raise TypeError(msg)
    times = as_numbers(given, "t")
    if times.ndim != 1:
        msg = f"t has shape {times.shape}; expected one dimension, one entry per observation time."
        raise ValueError(msg)
    if times.size < 3:
        msg = f"t has {times.size} times; gradient matching needs at least three."
        raise ValueError(msg)
    if not np.isfinite(times).all():
        indices = np.flatnonzero(~np.isfinite(times)).tolist()
        msg = f"t is not finite at index {indices}; drop those observations or mend their times."
        raise ValueError(msg)
    steps = np.diff(times)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0))
        msg = (
            f"t is not sorted: t[{where}] = {times[where]:g} comes before "
            f"t[{where + 1}] = {times[where + 1]:g}. Sort t and the rows of y together, "
            "for example order = np.argsort(t); t, y = t[order], y[order]."
        )
        raise ValueError(msg)
    if (steps == 0).any():
        where = int(np.argmax(steps == 0))
        msg = (
            f"t repeats the time {times[where]:g} (index {where} and {where + 1}). Expected each "
            "time once: average the replicates, or give each its own likelihood in the model."
        )
        raise ValueError(msg)
    farthest = FARTHEST_START * np.median(steps)
    if np.ptp(times) > farthest:
        positive = "" if times[0] > 0 else " Leave out the times that are not positive."
        msg = (
            f"t goes from {times[0]:g} to {times[-1]:g}, more than {FARTHEST_START:g} times its "
            "median step, where kernels lose their precision. For times spread over decades count "
            "s = np.log(t), and write the ODE as dx/ds = t f(t, x, theta) with t = exp(s)."
            f"{positive}"
        )
        raise ValueError(msg)
    if np.abs(times).max() > farthest:
        msg = (
            f"t starts at {times[0]:g}, more than {FARTHEST_START:g} sampling intervals from zero, "
            "where kernels lose their precision. Count time from the start: t - t[0]."
        )
        raise ValueError(msg)
    return read_only(times)


def _as_observations(y: ArrayLike | SharedVariable, t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the observations as a read-only ``(time, state)`` array, or say what is wrong."""
    given = _held(y, "y")
    values = np.ma.filled(given.astype(float), np.nan) if np.ma.isMA(given) else given
    values = as_numbers(values, "y")
    if values.ndim != 2 or len(values) != len(t) or values.shape[1] == 0:
        hint = ""
        if values.ndim == 1:
            hint = " For a single state pass y[:, None]."
        elif values.ndim == 2 and values.shape[1] == len(t):
            hint = " Pass y.T."
        msg = (
            f"y has shape {values.shape}; expected (time, state) with {len(t)} times, "
            f"one row for each entry of t.{hint}"
        )
        raise ValueError(msg)
    unobserved = np.isnan(values).all(axis=0)
    if unobserved.any():
        msg = (
            f"y has no observation of state {np.flatnonzero(unobserved).tolist()} (all NaN). "
            "Unobserved states are not supported yet; every state needs data."
        )
        raise ValueError(msg)
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0].tolist()
        msg = f"y is infinite at time index {row}, state {column}; expected finite numbers."
        raise ValueError(msg)
    if np.isnan(values).any():
        row, column = np.argwhere(np.isnan(values))[0].tolist()
        msg = (
            f"y has {int(np.isnan(values).sum())} missing values (NaN), the first at time index "
            f"{row}, state {column}. Missing observations are not supported yet: drop the times "
            "at which a state was not observed."
        )
        raise ValueError(msg)
    constant = np.ptp(values, axis=0) <= 1e-12 * np.abs(values).max(axis=0)
    if constant.any():
        msg = (
            f"y is constant (zero variance) for state {np.flatnonzero(constant).tolist()}: it says "
            "nothing about a rate of change. Leave that state out and put its value into the ODE."
        )
        raise ValueError(msg)
    return read_only(values)


def levels_of(x, positive: NDArray[np.bool_]):
    """Return the logarithms of states that are positive, and the others as they are.

    Works on arrays and on PyTensor variables alike, shape ``(..., state)``.
    """
    if not positive.any():
        return x
    if isinstance(x, Variable):
        return (
            pt.log(x)
            if positive.all()
            else pt.switch(positive, pt.log(pt.switch(positive, x, 1.0)), x)
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(positive, np.log(np.where(positive, x, 1.0)), x)


def states_of(levels, positive: NDArray[np.bool_]):
    """Return the states that have these levels, the inverse of :func:`levels_of`."""
    if not positive.any():
        return levels
    if isinstance(levels, Variable):
        return (
            pt.exp(levels)
            if positive.all()
            else pt.switch(positive, pt.exp(pt.switch(positive, levels, 0.0)), levels)
        )
    with np.errstate(over="ignore"):
        return np.where(positive, np.exp(np.where(positive, levels, 0.0)), levels)


def _as_truths(positive: bool | Sequence[bool], n_states: int) -> NDArray[np.bool_]:
    truths = np.asarray(positive)
    if truths.dtype != bool or truths.shape not in ((), (n_states,)):
        msg = (
            f"positive is {positive!r}; expected True, False, or one of these for each of "
            f"{n_states} states: ode.is_positive."
        )
        raise ValueError(msg)
    return np.broadcast_to(truths, n_states)


def _check_positive(y: NDArray[np.float64], positive: NDArray[np.bool_], columns: tuple):
    bad = (y <= 0) & positive
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        msg = (
            f"y is {y[row, column]:g} at time index {row}, state {columns[column]}, one of "
            f"{int(bad.sum())} values that are not above zero where the state is positive and its "
            "logarithm is taken. Expected positive numbers, or a state that is not called "
            "positive. Where noise or counting makes zeros, fit the Gaussian process to "
            "np.maximum(y, small), and let the likelihood observe y itself, in the four lines."
        )
        raise ValueError(msg)


def _held(data: Any, name: str):
    """Return what ``pm.Data`` holds at present; other data as they are."""
    if isinstance(data, SharedVariable):
        return data.get_value()
    if isinstance(data, Variable):
        msg = f"{name} is a symbolic {type(data).__name__}; expected numbers, or pm.Data."
        raise TypeError(msg)
    return data


def as_sigma(sigma: ArrayLike | TensorVariable, n_states: int):
    """Return one positive standard deviation per state, or say what is wrong."""
    if not isinstance(sigma, TensorVariable):
        return as_positive(sigma, n_states, "sigma")
    if not fits_states(sigma, n_states):
        msg = (
            f"sigma is a variable of shape {sigma.type.shape}; expected one number, or one for "
            f"each of {n_states} states."
        )
        raise ValueError(msg)
    return pt.broadcast_to(sigma, (n_states,))


def fits_states(variable: TensorVariable, n_states: int) -> bool:
    """Tell whether a variable is one number or one per state; with dims, its length is unknown."""
    return variable.type.shape in ((), (n_states,), (None,))


def as_nugget(nugget: ArrayLike, n_states: int) -> NDArray[np.float64]:
    """Return one nugget per state, or say what is wrong."""
    values = _per_state(nugget, n_states, "nugget")
    if not (np.isfinite(values) & (values >= 0)).all():
        msg = f"nugget is {np.unique(values).tolist()}; expected numbers that are not negative."
        raise ValueError(msg)
    return read_only(values)


def as_positive(numbers: ArrayLike, n_states: int, name: str) -> NDArray[np.float64]:
    """Return one positive number per state, or say what is wrong with ``name``."""
    values = _per_state(numbers, n_states, name)
    if not (np.isfinite(values) & (values > 0)).all():
        msg = f"{name} is {values.tolist()}; expected positive numbers."
        raise ValueError(msg)
    return read_only(values)


def _per_state(numbers: ArrayLike, n_states: int, name: str) -> NDArray[np.float64]:
    expected = f"one number or one for each of {n_states} states"
    values = as_numbers(numbers, name, expected)
    if values.shape not in ((), (1,), (n_states,)):
        msg = f"{name} has shape {values.shape}; expected {expected}."
        raise ValueError(msg)
    return np.broadcast_to(values, n_states)


def grid_around(t: NDArray[np.float64], grid: int | ArrayLike) -> NDArray[np.float64]:
    """Return a grid that contains the times t.

    An integer is the number of equal steps in every gap.
    """
    if np.ndim(grid) == 0:
        if not (isinstance(grid, int | np.integer) and grid >= 1):
            msg = (
                f"grid is {grid!r}; expected a whole number of steps per gap, or an array of times."
            )
            raise ValueError(msg)
        fractions = np.arange(grid) / grid
        inner = t[:-1, None] + np.diff(t)[:, None] * fractions
        times = _as_times(np.append(inner.ravel(), t[-1]))
    else:
        times = _as_times(grid)
    nearest = np.abs(times[:, None] - t).argmin(axis=0)
    missing = ~np.isclose(times[nearest], t, rtol=1e-12, atol=1e-9 * np.diff(times).min())
    if missing.any():
        msg = (
            f"the grid lacks the observation times {t[missing][:3].tolist()}; expected all of them "
            "among its times, for example np.union1d(grid, t)."
        )
        raise ValueError(msg)
    exact = times.copy()
    exact[nearest] = t
    return read_only(exact)


def around_breaks(t: NDArray[np.float64], breaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a grid with breaks among its times, and a time shortly before each of them."""
    whole = np.union1d(t, breaks)
    last = whole[np.searchsorted(whole, breaks) - 1]
    return np.union1d(whole, breaks - SHORTLY * (breaks - last))


def read_only(array: ArrayLike) -> NDArray[np.float64]:
    """Return a copy that cannot be written to."""
    copy = np.array(array, dtype=float)
    copy.flags.writeable = False
    return copy
