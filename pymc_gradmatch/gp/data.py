"""Observations at some times, checked once, and what states leave of them: noise or not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heapreplace
from typing import Any, NamedTuple, Self

import numpy as np
import pandas as pd
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable
from scipy.stats import beta

from pymc_gradmatch.arguments import as_numbers, columns_in_order, labels_of

# Kernels see times through differences of squares: beyond this many sampling
# intervals from zero, rounding spoils the distances between neighbours.
FARTHEST_START = 3e4
LONG_GAP = 3.0  # median gaps
FEWEST_OBSERVATIONS = 3  # observations to which a state's Gaussian process is fitted
SHORTLY = 0.1  # grid steps
EQUAL = 1e-12  # of the largest, by which values differ that only rounding parts
FEWEST = 8  # data of a state whose residuals are judged
LEAST_SHARE = 0.1  # share of their variance that is next to nothing
PART = 0.25  # share that is more than a lesser flaw of the equations leaves
AUTOCORRELATED = 2.5  # standard errors of an autocorrelation, above which there is one
OUTLYING = 1e-3  # chance that normal noise has so large an outlier
TINY = np.finfo(float).tiny
SAME_TIME = 1e-15  # of the farthest time, up to which two times are one


@dataclass(frozen=True, eq=False)
class Data:
    """Observations of states at some times, checked once by :meth:`of` and handed down.

    Times are increasing, ``(time,)``; observations ``(time, state)`` are NaN where a state was not
    observed.  States have names, or numbers where the user gave none.  Mean and scale,
    ``(state,)``, are what standardises their levels, and need not come from the observations.  The
    level of a ``positive`` state is its logarithm, that of another one is the state itself, in the
    data's units. ``experiment`` is empty for the only one.
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
        y: ArrayLike | SharedVariable | None,
        *,
        states: Sequence[str] | None = None,
        scales: Mapping[Any, float] | None = None,
        standardize: bool = True,
        positive: bool | Sequence[bool] = False,
    ) -> Self:
        """Check times and observations, or say what is wrong with them.

        Arguments are those of :class:`~pymc_gradmatch.StateGP`; without y all states are hidden.
        Mean and scale are those of each state's data; a state with hardly an observation, or with
        one value at all times, has the scale that is given, or NaN. ``states`` are names of an
        array's columns, or what a table's are put in the order of.
        """
        times = _as_times(t)
        if y is None and states is not None:
            y = np.full((len(times), len(states)), np.nan)
        observations, names = _as_observations(y, times, states)
        given = _as_scales(scales or {}, names)
        is_positive = _as_truths(positive, len(names))
        _check_positive(observations, is_positive, names)
        mean, scale = np.zeros(len(names)), np.ones(len(names))
        if standardize:
            known = levels_of(observations, is_positive).copy()
            known[:, np.isnan(known).all(axis=0)] = 0
            mean, scale = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
        data = cls(times, observations, names, read_only(mean), read_only(scale), is_positive)
        if not standardize:
            return data
        scale = np.where(data.is_sparse, np.nan, scale)
        return data.with_scale(mean, np.where(np.isnan(given), scale, given))

    @property
    def levels(self) -> NDArray[np.float64]:
        """The observations, logarithms where states are positive, shape ``(time, state)``."""
        return levels_of(self.y, self.positive)

    @property
    def is_sparse(self) -> NDArray[np.bool_]:
        """Of which states the data determine neither size nor kernel, shape ``(state,)``.

        There are too few observations, or all are the same.
        """
        return (self.is_observed.sum(axis=0) < FEWEST_OBSERVATIONS) | self.is_constant

    @cached_property
    def is_constant(self) -> NDArray[np.bool_]:
        """Which states have three observations at least, all the same, shape ``(state,)``."""
        seen = [y[~np.isnan(y)] for y in self.y.T]
        return np.array([len(y) >= FEWEST_OBSERVATIONS and not differ(y) for y in seen])

    def are_all(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which states were always seen at these values, ``(state,)``; NaN is none."""
        pairs = zip(self.y.T, values, strict=True)
        seen = [np.append(y[~np.isnan(y)], value) for y, value in pairs]
        return np.array([len(y) > 1 and not np.isnan(y[-1]) and not differ(y) for y in seen])

    def without(self, states: NDArray[np.bool_]) -> Self:
        """Return the data without the observations of some states."""
        y = np.where(states, np.nan, self.y)
        return replace(self, y=read_only(y))

    @property
    def unscaled(self) -> list:
        """Names of states whose scale neither the data nor the user give."""
        return [name for name, s in zip(self.states, self.scale, strict=True) if np.isnan(s)]

    def with_scale(self, mean: NDArray[np.float64], scale: NDArray[np.float64]) -> Self:
        """Return the same data with another mean and scale of the states."""
        return replace(self, mean=read_only(mean), scale=read_only(scale))

    def scaled(self) -> Self:
        """Return the data, or raise if the scale of a state is missing."""
        if not self.is_observed.any():
            msg = (
                "y holds no observation at all (all NaN), to which Gaussian processes could be "
                "fitted; expected some. Where a likelihood is given, preset 'refined' needs none."
            )
            raise ValueError(msg)
        if self.unscaled:
            msg = (
                f"y has fewer than {FEWEST_OBSERVATIONS} observations of the states "
                f"{self.unscaled}, or the same at all times, which do not tell how large they are; "
                f"expected scales={{{self.unscaled[0]!r}: 1.0}}, roughly their standard deviation. "
                "gm.build_model and gm.fit find it by the ODE."
            )
            raise ValueError(msg)
        return self

    @property
    def is_long_gap(self) -> NDArray[np.bool_]:
        """Which times are followed by a gap of more than three median ones, ``(time - 1,)``."""
        gaps = np.diff(self.t)
        return gaps > LONG_GAP * np.median(gaps)

    @property
    def times_of_each(self) -> list[NDArray[np.float64]]:
        """Each state's times, at which it was observed.

        Without any observation, where a likelihood alone knows the data, all times.
        """
        seen = self.is_observed if self.is_observed.any() else np.full_like(self.is_observed, True)
        return [self.t[of_one] for of_one in seen.T]

    @cached_property
    def is_observed(self) -> NDArray[np.bool_]:
        """Where there is an observation, shape ``(time, state)``."""
        return ~np.isnan(self.y)

    def thinned(self, most: int) -> Self:
        """Return every so many-th observation of each state, at most so many of these.

        Observations of other states at the same times stay, the first time and the last too.
        """
        seen = [np.flatnonzero(of_one) for of_one in self.is_observed.T]
        kept = [rows[:: -(-len(rows) // most)] for rows in seen if len(rows)]
        rows = np.unique(np.concatenate([*kept, [0, len(self.t) - 1]]))
        return replace(self, t=read_only(self.t[rows]), y=read_only(self.y[rows]))

    @property
    def is_complete(self) -> bool:
        """Whether every state was observed at every time."""
        return bool(self.is_observed.all())

    @property
    def places(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Places of the observations in time and among the states, time by time."""
        time, state = np.nonzero(self.is_observed)
        return time, state

    def labels(self, states: Sequence) -> list[str]:
        """Return a label for each observation: ``prey[0.5]`` for the state and its time."""
        times = self.t.tolist()
        return [f"{states[k]}[{times[j]!r}]" for j, k in zip(*self.places, strict=True)]

    @property
    def counted(self) -> NDArray[np.float64]:
        """How many observations a state has had before each time, the mean over states.

        It grows evenly from one of a state's observations to the next.
        """
        often = [seen for seen in self.is_observed.T if seen.sum() >= FEWEST_OBSERVATIONS]
        counts = [_counted(self.t, self.t[seen]) for seen in often]
        return np.mean(counts, axis=0) if counts else np.arange(len(self.t), dtype=float)

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
            f"t[{where + 1}] = {times[where + 1]:g}. Sort t and the rows of y together: of a "
            "table with the times as index y = y.sort_index(); t = y.index, of arrays "
            "order = np.argsort(t); t, y = t[order], y[order]."
        )
        raise ValueError(msg)
    if (steps == 0).any():
        where = int(np.argmax(steps == 0))
        msg = (
            f"t repeats the time {times[where]:g} (index {where} and {where + 1}). Expected each "
            "time once. Average replicates, of a table with the times as index "
            "y.groupby(level=0).mean(); or give each time once and let a likelihood say of which "
            "a measurement is; or give replicates as experiments, gm.Experiment(t, y), which share "
            "parameters and noise, and a start as a parameter, "
            "start={'prey': lambda theta: theta.prey0}."
        )
        raise ValueError(msg)
    if len(steps) > FARTHEST_START:
        keep = int(np.ceil(len(steps) / FARTHEST_START))
        msg = (
            f"t has {times.size} times; with more than {FARTHEST_START:g} steps kernels lose their "
            f"precision. Take fewer of them, t[::{keep}] and y[::{keep}], or means of neighbours."
        )
        raise ValueError(msg)
    farthest = FARTHEST_START * np.median(steps)
    if np.ptp(times) > farthest:
        positive = "" if times[0] > 0 else " Leave out the times that are not positive."
        msg = (
            f"t goes from {times[0]:g} to {times[-1]:g}, more than {FARTHEST_START:g} times its "
            "median step, where kernels lose their precision. For times spread over decades count "
            "s = np.log(t), and write the ODE as dx/ds = t f(t, x, theta) with t = exp(s)."
            f"{positive} Of times that nearly coincide make one, with the mean of what was seen."
        )
        raise ValueError(msg)
    if np.abs(times).max() > farthest:
        msg = (
            f"t starts at {times[0]:g}, more than {FARTHEST_START:g} sampling intervals from zero, "
            "where kernels lose their precision. Count time from the start: t - t[0]."
        )
        raise ValueError(msg)
    return read_only(times)


def of_label(label: str) -> tuple[str, float]:
    """Return the state, as text, and the time of one of :meth:`Data.labels`."""
    state, time = label.removesuffix("]").rsplit("[", 1)
    return state, float(time)


def _counted(t: NDArray[np.float64], observed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Count observed times up to each t; evenly in between, beyond the ends at the mean rate."""
    rate = (len(observed) - 1) / (observed[-1] - observed[0])
    within = np.interp(t, observed, np.arange(len(observed)))
    before, after = np.minimum(t - observed[0], 0), np.maximum(t - observed[-1], 0)
    return within + rate * (before + after)


def _as_observations(
    y: ArrayLike | SharedVariable | None,
    t: NDArray[np.float64],
    states: Sequence[str] | None,
) -> tuple[NDArray[np.float64], tuple]:
    """Return a read-only ``(time, state)`` array and names, or say what is wrong."""
    given = _held(y, "y")
    if isinstance(given, pd.Series):
        given = given.to_frame()
    values = np.ma.filled(given.astype(float), np.nan) if np.ma.isMA(given) else given
    values = as_numbers(values, "y")
    if values.ndim != 2 or len(values) != len(t) or values.shape[1] == 0:
        hint = ""
        if values.ndim == 1:
            hint = (
                " For a single state pass y[:, None], for some of several a table, "
                "pd.DataFrame({'prey': y})."
            )
        elif values.ndim == 2 and values.shape[1] == len(t):
            hint = " Pass y.T."
        msg = (
            f"y has shape {values.shape}; expected (time, state) with {len(t)} times, "
            f"one row for each entry of t.{hint}"
        )
        raise ValueError(msg)
    names = labels_of(given) or tuple(range(values.shape[1]))
    if isinstance(given, pd.DataFrame):
        _check_index(given.index, t)
    if states is not None:
        if names != tuple(range(len(names))):
            values, names = columns_in_order(values, names, tuple(states)), tuple(states)
        elif len(names) == len(states):
            names = tuple(states)
    if np.isinf(values).any():
        row, column = np.argwhere(np.isinf(values))[0].tolist()
        msg = (
            f"y is infinite at time index {row}, state {names[column]!r}; expected finite numbers, "
            "or NaN where nothing was measured."
        )
        raise ValueError(msg)
    return read_only(values), names


def _check_index(index: pd.Index, t: NDArray[np.float64]):
    """Raise if a table has times as index, and these are others than t in every unit.

    Whole numbers may be those of rows.
    """
    if index.dtype.kind != "f" or index.hasnans:
        return
    own = index.to_numpy(float)
    ratio = np.ptp(t) / (np.ptp(own) or np.inf)
    if np.allclose(t - t[0], ratio * (own - own[0]), rtol=1e-6, atol=1e-6 * np.ptp(t)):
        return
    where = int(np.argmax(np.abs(t - t[0] - ratio * (own - own[0]))))
    msg = (
        f"y is a table with the index {own[where]:g} in the row {where} of time {t[where]:g}, and "
        "there is no unit in which its index is t. Expected the same times in the same order, such "
        "as t = y.index; where the index is something else, y.reset_index(drop=True)."
    )
    raise ValueError(msg)


def _as_scales(scales: Mapping[Any, float], names: tuple) -> NDArray[np.float64]:
    """Return the scales that are given, NaN for the other states, or say what is wrong."""
    unknown = [name for name in scales if name not in names]
    given = {name: as_numbers(scale, f"the scale of {name!r}") for name, scale in scales.items()}
    bad = [name for name, s in given.items() if s.ndim or not (np.isfinite(s) and s > 0)]
    if unknown or bad:
        msg = (
            f"scales are {dict(scales)}; expected a positive number for some of the states "
            f"{list(names)}."
        )
        raise ValueError(msg)
    return np.array([float(given.get(name, np.nan)) for name in names])


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


def staircase(
    mean: NDArray[np.float64],
    t: NDArray[np.float64],
    breaks: NDArray[np.float64],
    steps: tuple[NDArray[np.float64], NDArray[np.float64]],
    positive: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return the levels of states that do nothing but jump, shape ``(time, state)``.

    Their levels before the first jump are ``mean``, ``(state,)``; at each break a state becomes
    ``factor * x + amount``, of which ``steps`` are ``(break, state)`` each.
    """
    levels = [mean]
    for factor, amount in zip(*steps, strict=True):
        # Nothing that is positive becomes negative: there the level stays.
        natural = factor * states_of(levels[-1], positive) + amount
        natural = np.where(positive & (natural <= 0), states_of(levels[-1], positive), natural)
        levels.append(levels_of(natural, positive))
    return np.array(levels)[np.searchsorted(breaks, t, side="right")]


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
            "positive, as one that starts at zero. What was below a limit of detection is NaN, or "
            "pm.Censored in a likelihood. Where noise or counting makes zeros, write likelihood= "
            "in place of y; in the four lines fit the Gaussian process to np.maximum(y, small)."
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


def as_sigma(sigma: ArrayLike | TensorVariable, states: Sequence):
    """Return one positive standard deviation per state, or say what is wrong."""
    if not isinstance(sigma, TensorVariable):
        return as_positive(sigma, states, "sigma")
    if not fits_states(sigma, len(states)):
        msg = (
            f"sigma is a variable of shape {sigma.type.shape}; expected one number, or one for "
            f"each of {len(states)} states."
        )
        raise ValueError(msg)
    return pt.broadcast_to(sigma, (len(states),))


def as_noise(sigma: ArrayLike, data: Data) -> NDArray[np.float64]:
    """Return a known sigma for each observation, ``(time, state)``, NaN where there is none.

    Given as a number, one per state, or one per observation; or as a series or a table with names
    of the states that were observed.
    """
    expected = "'fixed', 'random', a prior such as pm.HalfNormal.dist(0.5), or standard deviations"
    values, (n_times, n_states) = as_numbers(sigma, "sigma", expected), data.y.shape
    columns = labels_of(sigma)
    if columns is not None and values.shape in ((len(columns),), (n_times, len(columns))):
        values = columns_in_order(values, columns, tuple(data.states), "sigma")
    if values.shape not in ((), (n_states,), (n_times, n_states)):
        msg = (
            f"sigma has shape {values.shape}; expected a number, one for each of {n_states} "
            f"states, or one for each observation, {(n_times, n_states)}: standard deviations, "
            "NaN where nothing was measured."
        )
        raise ValueError(msg)
    noise = np.where(data.is_observed, values, np.nan)
    unknown = data.is_observed & ~(np.isfinite(noise) & (noise > 0))
    if unknown.any():
        row, column = np.argwhere(unknown)[0].tolist()
        msg = (
            f"sigma is {noise[row, column]:g} at t = {data.t[row]:g}, state "
            f"{data.states[column]!r}, where there is an observation; expected positive numbers."
        )
        raise ValueError(msg)
    return noise


def fits_states(variable: TensorVariable, n_states: int) -> bool:
    """Tell whether a variable is one number or one per state; with dims, its length is unknown."""
    return variable.type.shape in ((), (n_states,), (None,))


def as_nugget(nugget: ArrayLike, states: Sequence) -> NDArray[np.float64]:
    """Return one nugget per state, or say what is wrong."""
    values = _per_state(nugget, states, "nugget")
    if not (np.isfinite(values) & (values >= 0)).all():
        msg = f"nugget is {np.unique(values).tolist()}; expected numbers that are not negative."
        raise ValueError(msg)
    return read_only(values)


def as_positive(numbers: ArrayLike, states: Sequence, name: str) -> NDArray[np.float64]:
    """Return one positive number per state, or say what is wrong with ``name``."""
    values = _per_state(numbers, states, name)
    if not (np.isfinite(values) & (values > 0)).all():
        msg = f"{name} is {values.tolist()}; expected positive numbers."
        raise ValueError(msg)
    return read_only(values)


def _per_state(numbers: ArrayLike, states: Sequence, name: str) -> NDArray[np.float64]:
    expected = f"one number or one for each of {len(states)} states"
    values, columns = as_numbers(numbers, name, expected), labels_of(numbers)
    if columns is not None and values.shape == (len(columns),):
        values = columns_in_order(values, columns, tuple(states), name)
    if values.shape not in ((), (1,), (len(states),)):
        msg = f"{name} has shape {values.shape}; expected {expected}."
        raise ValueError(msg)
    return np.broadcast_to(values, len(states))


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


def breaks_within(
    t: NDArray[np.float64],
    times: NDArray[np.float64],
    steps: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> tuple[NDArray[np.float64], tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return the breaks that count on a grid t, in order, and what states do there.

    Steps are factor and amount of each state, ``(break, state)`` each.  Times that only rounding
    parts are one, that of the grid if it has it; what states do at them happens in turn.  Where
    states jump, a break at the end of the grid counts too.
    """
    near = SAME_TIME * np.abs(t).max()
    nearest = t[np.abs(t[:, None] - times).argmin(axis=0)]
    times = np.where(np.abs(nearest - times) <= near, nearest, times)
    order = np.argsort(times, kind="stable")
    times, factor, amount = times[order], steps[0][order], steps[1][order]
    is_last = np.append(np.diff(times) > near, True)[: len(times)]
    for k in np.flatnonzero(~is_last):
        times[k + 1] = times[k]
        amount[k + 1] += factor[k + 1] * amount[k]
        factor[k + 1] *= factor[k]
    is_jump = ((factor != 1) | (amount != 0)).any(axis=1)
    counts = is_last & (times > t[0]) & ((times < t[-1]) | (is_jump & (times == t[-1])))
    return times[counts], (factor[counts], amount[counts])


def around_breaks(t: NDArray[np.float64], breaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a grid with breaks among its times, and a time shortly before each of them."""
    whole = np.union1d(t, breaks)
    last = whole[np.searchsorted(whole, breaks) - 1]
    return np.union1d(whole, breaks - SHORTLY * (breaks - last))


def divided_further(t: NDArray[np.float64], n_more: int) -> NDArray[np.float64]:
    """Return times with so many more among them, evenly between neighbours, where gaps are wide."""
    gaps = np.diff(t)
    n_steps = np.ones(len(gaps), dtype=int)
    widest = [(-gap, k) for k, gap in enumerate(gaps.tolist())]
    heapify(widest)
    for _ in range(n_more):
        k = widest[0][1]
        n_steps[k] += 1
        heapreplace(widest, (-gaps[k] / n_steps[k], k))
    fine = [
        np.linspace(a, b, n, endpoint=False) for a, b, n in zip(t, t[1:], n_steps, strict=False)
    ]
    return np.append(np.concatenate(fine), t[-1])


def read_only(array: ArrayLike) -> NDArray[np.float64]:
    """Return a copy that cannot be written to."""
    copy = np.array(array, dtype=float)
    copy.flags.writeable = False
    return copy


class Residuals(NamedTuple):
    """The residuals of one state in all experiments: data less the states that explain them.

    ``share`` is that of the data's variance; one is autocorrelated where neighbours in time are
    alike, as those of mere noise are not, and has an outlier where one is larger than normal noise
    of their size has.
    """

    state: str
    share: float
    is_autocorrelated: bool
    have_outlier: bool


def residuals(
    pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], states: Sequence[str]
) -> list[Residuals]:
    """Return the residuals of each state that has enough data.

    Pairs are data, and the states at their times, ``(time, state)``, of one experiment each.
    """
    found = []
    for number, state in enumerate(states):
        each, moved, is_moving = [], [], False
        for data, explained in pairs:
            seen = ~np.isnan(data[:, number])
            if seen.any():
                y = data[seen, number]
                each.append(y - explained[seen, number])
                moved.append(y - y.mean())
                is_moving |= differ(y)
        n = sum(map(len, each))
        if n < FEWEST or not is_moving:
            continue
        left, motion = np.concatenate(each), np.concatenate(moved)
        share = left @ left / max(motion @ motion, TINY)
        correlation = sum(float(one[1:] @ one[:-1]) for one in each) / max(left @ left, TINY)
        is_autocorrelated = bool(correlation > AUTOCORRELATED / np.sqrt(n))
        found.append(Residuals(state, share, is_autocorrelated, _have_outlier(left)))
    return found


def differ(values: NDArray[np.float64]) -> bool:
    """Tell whether values are not all the same, but for rounding."""
    return bool(np.ptp(values) > EQUAL * np.abs(values).max())


def _have_outlier(left: NDArray[np.float64]) -> bool:
    """Tell whether the largest share of a sum of squares is too much for one of normal noise."""
    n = len(left)
    largest = np.square(left).max() / max(left @ left, TINY)
    return bool(n * beta.sf(largest, 1 / 2, (n - 1) / 2) < OUTLYING)


def unexplained(left: Sequence[Residuals]) -> list[str]:
    """Return the states whose residuals are too large, and not mere noise.

    Too large is nearly all of the variance, where residuals of any state are autocorrelated; of
    a state whose own are, a good part.  This is another mode than the data's, with
    noise in the place of the motion, and all searches around it agree on that; or it is another
    ODE.
    """
    allowed = 1 - LEAST_SHARE if any(one.is_autocorrelated for one in left) else np.inf
    return [one.state for one in left if one.share > (PART if one.is_autocorrelated else allowed)]
