"""Checks of the user's time series, made once, before anything is computed from them."""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.arguments import as_numbers

__all__ = [
    "GriddedData",
    "as_nugget",
    "as_observations",
    "as_positive",
    "as_sigma",
    "as_times",
    "fits_states",
    "grid_around",
    "mean_and_scale",
    "read_only",
    "state_names",
]

# Kernels see times through differences of squares: beyond this many sampling
# intervals from zero, rounding spoils the distances between neighbours.
FARTHEST_START = 3e4


def as_times(t: ArrayLike | SharedVariable) -> NDArray[np.float64]:
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


def as_observations(y: ArrayLike | SharedVariable, t: NDArray[np.float64]) -> NDArray[np.float64]:
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


def _held(data: Any, name: str):
    """Return what ``pm.Data`` holds at present; other data as they are."""
    if isinstance(data, SharedVariable):
        return data.get_value()
    if isinstance(data, Variable):
        msg = f"{name} is a symbolic {type(data).__name__}; expected numbers, or pm.Data."
        raise TypeError(msg)
    return data


def state_names(y: Any, n_states: int) -> tuple:
    """Return the column names of a table, or numbers for a plain array."""
    columns = getattr(y, "columns", None)
    return tuple(range(n_states)) if columns is None else tuple(columns)


def mean_and_scale(y: NDArray[np.float64], standardize: bool) -> tuple:
    """Return what standardises the observations: mean and population sd of each state."""
    if standardize:
        return read_only(y.mean(axis=0)), read_only(y.std(axis=0))
    return read_only(np.zeros(y.shape[1])), read_only(np.ones(y.shape[1]))


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


def grid_around(
    t: NDArray[np.float64], grid: int | ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return a grid that contains the times t, and where in it they are.

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
        times = as_times(np.append(inner.ravel(), t[-1]))
    else:
        times = as_times(grid)
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
    return read_only(exact), nearest


def read_only(array: ArrayLike) -> NDArray[np.float64]:
    """Return a copy that cannot be written to."""
    copy = np.array(array, dtype=float)
    copy.flags.writeable = False
    return copy


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GriddedData:
    """Observations at some times of a grid, and the mean and scale of the states there.

    What :class:`~pymc_gradmatch.StateGP` is built on.  Objects are immutable.

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``.
    standardize : bool, default True
        Whether mean and scale are those of the data, or zero and one.

    Attributes
    ----------
    t : array of float
        The grid, at first the times of the observations.
    observed : array of int
        Where in the grid the observations are, shape ``(observation,)``.
    states : tuple
        Names of the states.
    mean, scale : array of float
        What standardises the data, shape ``(state,)``, in the data's units.
    prior_mean, prior_slope : array of float
        The mean around which states vary and its derivative, shape ``(time,
        state)``, in the data's units, and per unit of time.

    Raises
    ------
    ValueError
        If times or observations cannot be used; the message says why.
    """

    t: NDArray[np.float64]
    y: NDArray[np.float64]
    observed: NDArray[np.intp]
    states: tuple
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    prior_mean: NDArray[np.float64]
    prior_slope: NDArray[np.float64]

    def __init__(self, t: ArrayLike, y: ArrayLike, *, standardize: bool = True):
        times = as_times(t)
        observations = as_observations(y, times)
        mean, scale = mean_and_scale(observations, standardize)
        self._fill(
            t=times,
            y=observations,
            observed=np.arange(len(times)),
            states=state_names(y, observations.shape[1]),
            mean=mean,
            scale=scale,
            **_constant_mean(mean, len(times)),
        )

    def _fill(self, **attributes):
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def _changed(self, **changes) -> Self:
        copy = object.__new__(type(self))
        copy._fill(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)
        return copy

    @property
    def t_observed(self) -> NDArray[np.float64]:
        """Times of the observations, shape ``(observation,)``."""
        return self.t[self.observed]

    def at_observations(self, x):
        """Return the rows of x, ``(..., time, state)``, that belong to the observations.

        Works on arrays and on PyTensor variables alike: what the likelihood is about.
        """
        if len(self.observed) == len(self.t):
            return x
        steps = np.diff(self.observed)
        if (steps == steps[0]).all():
            first, last = int(self.observed[0]), int(self.observed[-1])
            return x[..., first : last + 1 : int(steps[0]), :]
        return x[..., self.observed, :]

    def with_grid(self, grid: int | ArrayLike) -> Self:
        r"""Return a copy whose states live on a finer grid than the observations.

        Theorem 1 holds on any grid; observations are of some of its times.

        Parameters
        ----------
        grid : int or array_like of float
            Steps between one observation and the next (1: the observation
            times alone), or sorted times with the observation times among them.

        Raises
        ------
        ValueError
            If an observation time is missing, or the prior mean is a
            trajectory, which is known on its own grid only.
        """
        if (self.prior_slope != 0).any() or (self.prior_mean != self.mean).any():
            msg = "the prior mean is a trajectory on the present grid; call with_grid before it."
            raise ValueError(msg)
        times, observed = grid_around(self.t_observed, grid)
        return self._changed(t=times, observed=observed, **_constant_mean(self.mean, len(times)))

    def with_mean(self, x: ArrayLike, slope: ArrayLike) -> Self:
        r"""Return a copy whose prior mean is a trajectory m(t) in place of a constant.

        Theorem 1 holds for any mean: :math:`N(x \mid m, C)` and
        :math:`N(f(x, \theta) \mid \dot m + D (x - m), A + \gamma I)`.

        Parameters
        ----------
        x, slope : array_like of float
            The trajectory on the grid and its derivative, shape ``(time,
            state)``, in the data's units, and per unit of time.
        """
        trajectories = []
        for name, values in {"x": x, "slope": slope}.items():
            array = read_only(values)
            expected = (len(self.t), len(self.states))
            if array.shape != expected or not np.isfinite(array).all():
                msg = (
                    f"{name} has shape {array.shape}; expected finite values of shape (time, "
                    f"state) = {expected}, on the grid gp.t."
                )
                raise ValueError(msg)
            trajectories.append(array)
        return self._changed(prior_mean=trajectories[0], prior_slope=trajectories[1])


def _constant_mean(mean: NDArray[np.float64], n_times: int) -> dict[str, NDArray[np.float64]]:
    shape = (n_times, len(mean))
    return {
        "prior_mean": read_only(np.broadcast_to(mean, shape)),
        "prior_slope": read_only(np.zeros(shape)),
    }
