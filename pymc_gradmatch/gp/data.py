"""Observations of states at some times, checked once, and the residuals of solutions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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

# Sampling intervals. Kernels use differences of squared times: further from zero, rounding
# spoils the distance between neighbours.
MAX_TIME = 3e4
LONG_GAP = 3.0  # median gaps
MIN_OBSERVATIONS = 3  # of a state, to which a Gaussian process is fitted
BREAK_OFFSET = 0.1  # grid steps from a break to the grid time before it
RELATIVE_ROUNDING = 1e-12  # of the largest value: smaller differences are rounding errors
SAME_TIME = 1e-15  # of the largest time: closer times are the same
MIN_RESIDUALS = 8  # of a state, to judge its fit
LEAST_EXPLAINED = 0.1  # share of the variance that even the worst acceptable fit explains
POOR_FIT_SHARE = 0.25  # unexplained variance, above which autocorrelated residuals are a poor fit
MAX_AUTOCORRELATION = 2.5  # standard errors of the lag-1 autocorrelation of noise
OUTLIER_PROBABILITY = 1e-3  # of the largest residual under normal noise; less is an outlier
TINY = np.finfo(float).tiny


@dataclass(frozen=True, eq=False)
class Data:
    """Observations of states, checked by :meth:`of`.

    Times ``(time,)`` increase; observations ``(time, state)`` are NaN where missing.  States have
    names, or numbers where none are given.  Mean and scale, ``(state,)``, standardise the
    transformed states (logarithms of positive states); they may come from elsewhere than the
    observations.  ``experiment`` is empty if there is only one.
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
        """Check times and observations; raise if they cannot be used.

        Arguments are those of :class:`~pymc_gradmatch.StateGP`; without y no state is observed.
        Mean and scale are those of each state's data.  The scale of a state with too few
        observations, or the same value at all times, is the given one, or NaN.  ``states`` name
        an array's columns, or give the order of a table's.
        """
        times = _as_times(t)
        if y is None and states is not None:
            y = np.full((len(times), len(states)), np.nan)
        observations, names = _as_observations(y, times, states)
        given = _as_scales(scales or {}, names)
        is_positive = _as_booleans(positive, len(names))
        _check_positive(observations, is_positive, names)
        mean, scale = np.zeros(len(names)), np.ones(len(names))
        if standardize:
            known = transform_states(observations, is_positive).copy()
            known[:, np.isnan(known).all(axis=0)] = 0
            mean, scale = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
        data = cls(times, observations, names, read_only(mean), read_only(scale), is_positive)
        if not standardize:
            return data
        scale = np.where(data.is_sparse, np.nan, scale)
        return data.with_scale(mean, np.where(np.isnan(given), scale, given))

    @property
    def transformed(self) -> NDArray[np.float64]:
        """The observations, logarithms where states are positive, shape ``(time, state)``."""
        return transform_states(self.y, self.positive)

    @property
    def standardised(self) -> NDArray[np.float64]:
        """The transformed observations less their mean, divided by the scale."""
        return (self.transformed - self.mean) / self.scale

    @cached_property
    def is_observed(self) -> NDArray[np.bool_]:
        """Where there is an observation, shape ``(time, state)``."""
        return ~np.isnan(self.y)

    @property
    def is_complete(self) -> bool:
        """Whether every state was observed at every time."""
        return bool(self.is_observed.all())

    @property
    def is_sparse(self) -> NDArray[np.bool_]:
        """Which states have too few observations, or constant ones, to fit a scale or kernel."""
        return (self.is_observed.sum(axis=0) < MIN_OBSERVATIONS) | self.is_constant

    @cached_property
    def is_constant(self) -> NDArray[np.bool_]:
        """Which states have at least three observations, all equal, shape ``(state,)``."""
        observed = [y[~np.isnan(y)] for y in self.y.T]
        return np.array([len(y) >= MIN_OBSERVATIONS and not differ(y) for y in observed])

    def are_constant_at(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which states were always observed at these values, ``(state,)``, NaN for none."""
        pairs = zip(self.y.T, values, strict=True)
        observed = [np.append(y[~np.isnan(y)], value) for y, value in pairs]
        return np.array([len(y) > 1 and not np.isnan(y[-1]) and not differ(y) for y in observed])

    def without(self, states: NDArray[np.bool_]) -> Self:
        """Return the data without the observations of some states."""
        return replace(self, y=read_only(np.where(states, np.nan, self.y)))

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
                "y holds no observation at all (all NaN); expected some to fit Gaussian processes "
                "to. With a likelihood, preset 'refined' needs none."
            )
            raise ValueError(msg)
        if self.unscaled:
            msg = (
                f"y has fewer than {MIN_OBSERVATIONS} observations of the states "
                f"{self.unscaled}, or the same at all times, so their scale is unknown; "
                f"expected scales={{{self.unscaled[0]!r}: 1.0}}, roughly their standard deviation. "
                "gm.build_model and gm.fit estimate it from the ODE."
            )
            raise ValueError(msg)
        return self

    @property
    def is_long_gap(self) -> NDArray[np.bool_]:
        """Which gaps are longer than three median gaps, ``(time - 1,)``."""
        gaps = np.diff(self.t)
        return gaps > LONG_GAP * np.median(gaps)

    @property
    def times_of_each(self) -> list[NDArray[np.float64]]:
        """The times at which each state was observed; all times if there is no observation."""
        observed = self.is_observed if self.is_observed.any() else np.full(self.y.shape, True)
        return [self.t[of_one] for of_one in observed.T]

    def thinned(self, most: int) -> Self:
        """Return every n-th observation of each state, at most ``most`` of them.

        Observations of other states at the same times stay, and so do the first and last time.
        """
        observed = [np.flatnonzero(of_one) for of_one in self.is_observed.T]
        kept = [rows[:: -(-len(rows) // most)] for rows in observed if len(rows)]
        rows = np.unique(np.concatenate([*kept, [0, len(self.t) - 1]]))
        return replace(self, t=read_only(self.t[rows]), y=read_only(self.y[rows]))

    @property
    def indices(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the observations in time and among the states, time by time."""
        time, state = np.nonzero(self.is_observed)
        return time, state

    def labels(self, states: Sequence) -> list[str]:
        """Return a label for each observation: ``prey[0.5]`` for the state and its time."""
        times = self.t.tolist()
        return [f"{states[k]}[{times[j]!r}]" for j, k in zip(*self.indices, strict=True)]

    @property
    def counted(self) -> NDArray[np.float64]:
        """Number of observations of a state before each time, mean over states, interpolated."""
        often = [o for o in self.is_observed.T if o.sum() >= MIN_OBSERVATIONS]
        counts = [_counted(self.t, self.t[observed]) for observed in often]
        return np.mean(counts, axis=0) if counts else np.arange(len(self.t), dtype=float)

    def is_same(self, other: Self) -> bool:
        """Return whether times and observations are the same."""
        return np.array_equal(self.t, other.t) and np.array_equal(self.y, other.y, equal_nan=True)


def _as_times(t: ArrayLike | SharedVariable) -> NDArray[np.float64]:
    """Return the times as a read-only vector, or raise if they cannot be used."""
    given = _value_of(t, "t")
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
        msg = f"t is not finite at index {indices}; drop those observations or correct their times."
        raise ValueError(msg)
    steps = np.diff(times)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0))
        msg = (
            f"t is not sorted: t[{where}] = {times[where]:g} comes before "
            f"t[{where + 1}] = {times[where + 1]:g}. Sort t and the rows of y with it: a table "
            "with the times as index by y = y.sort_index(); t = y.index, arrays by "
            "order = np.argsort(t); t, y = t[order], y[order]."
        )
        raise ValueError(msg)
    if (steps == 0).any():
        where = int(np.argmax(steps == 0))
        msg = (
            f"t repeats the time {times[where]:g} (index {where} and {where + 1}). Expected each "
            "time once. Average replicates, in a table with the times as index by "
            "y.groupby(level=0).mean(); or give each time once and write a likelihood of all "
            "measurements; or give replicates as experiments, gm.Experiment(t, y), which share "
            "parameters and noise, and a start as a parameter, "
            "start={'prey': lambda theta: theta.prey0}."
        )
        raise ValueError(msg)
    if len(steps) > MAX_TIME:
        keep = int(np.ceil(len(steps) / MAX_TIME))
        msg = (
            f"t has {times.size} times; with more than {MAX_TIME:g} steps kernels lose their "
            f"precision. Take fewer of them, t[::{keep}] and y[::{keep}], or means of neighbours."
        )
        raise ValueError(msg)
    farthest = MAX_TIME * np.median(steps)
    if np.ptp(times) > farthest:
        positive = "" if times[0] > 0 else " Leave out the times that are not positive."
        msg = (
            f"t goes from {times[0]:g} to {times[-1]:g}, more than {MAX_TIME:g} times its "
            "median step, where kernels lose their precision. For times spread over decades use "
            "s = np.log(t), and write the ODE as dx/ds = t f(t, x, theta) with t = exp(s)."
            f"{positive} Merge times that nearly coincide, and average their observations."
        )
        raise ValueError(msg)
    if np.abs(times).max() > farthest:
        msg = (
            f"t starts at {times[0]:g}, more than {MAX_TIME:g} sampling intervals from zero, "
            "where kernels lose their precision. Measure time from the start: t - t[0]."
        )
        raise ValueError(msg)
    return read_only(times)


def of_label(label: str) -> tuple[str, float]:
    """Return the state, as text, and the time of one of :meth:`Data.labels`."""
    state, time = label.removesuffix("]").rsplit("[", 1)
    return state, float(time)


def _counted(t: NDArray[np.float64], observed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Count observed times up to each t: linear in between, at the mean rate outside."""
    rate = (len(observed) - 1) / (observed[-1] - observed[0])
    within = np.interp(t, observed, np.arange(len(observed)))
    before, after = np.minimum(t - observed[0], 0), np.maximum(t - observed[-1], 0)
    return within + rate * (before + after)


def _as_observations(
    y: ArrayLike | SharedVariable | None,
    t: NDArray[np.float64],
    states: Sequence[str] | None,
) -> tuple[NDArray[np.float64], tuple]:
    """Return a read-only ``(time, state)`` array and names, or raise if y cannot be used."""
    given = _value_of(y, "y")
    if isinstance(given, pd.Series):
        given = given.to_frame()
    values = np.ma.filled(given.astype(float), np.nan) if np.ma.isMA(given) else given
    values = as_numbers(values, "y")
    if values.ndim != 2 or len(values) != len(t) or values.shape[1] == 0:
        hint = ""
        if values.ndim == 1:
            hint = (
                " For a single state pass y[:, None], for one of several a table, "
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
    """Raise if a table's index holds times other than t in any unit.

    An index of integers may be row numbers and is not checked.
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
        "its index is not t in any unit. Expected the same times in the same order, such as "
        "t = y.index; if the index holds something else, y.reset_index(drop=True)."
    )
    raise ValueError(msg)


def _as_scales(scales: Mapping[Any, float], names: tuple) -> NDArray[np.float64]:
    """Return the given scales, NaN for the other states, or raise if one is unusable."""
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


def transform_states(x, positive: NDArray[np.bool_]):
    """Return the logarithms of positive states, and the other states as they are.

    Works on arrays and PyTensor variables of shape ``(..., state)``.
    """
    return _where_positive(x, positive, np.log, pt.log, 1.0)


def back_transform(transformed, positive: NDArray[np.bool_]):
    """Return the states in the data's units, the inverse of :func:`transform_states`."""
    return _where_positive(transformed, positive, np.exp, pt.exp, 0.0)


def _where_positive(x, positive, function: Callable, symbolic: Callable, neutral: float):
    """Apply a function to the positive states alone; others pass it a neutral number."""
    if not positive.any():
        return x
    if isinstance(x, Variable):
        if positive.all():
            return symbolic(x)
        return pt.switch(positive, symbolic(pt.switch(positive, x, neutral)), x)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(positive, function(np.where(positive, x, neutral)), x)


def piecewise_mean(
    mean: NDArray[np.float64],
    t: NDArray[np.float64],
    breaks: NDArray[np.float64],
    steps: tuple[NDArray[np.float64], NDArray[np.float64]],
    positive: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Return transformed states that are constant between jumps, shape ``(time, state)``.

    Before the first jump they are ``mean``, ``(state,)``; at each break a state becomes
    ``factor * x + amount``, with ``steps = (factor, amount)`` of shape ``(break, state)`` each.
    """
    pieces = [mean]
    for factor, amount in zip(*steps, strict=True):
        before = back_transform(pieces[-1], positive)
        after = factor * before + amount
        # A positive state that would become negative stays as it is.
        after = np.where(positive & (after <= 0), before, after)
        pieces.append(transform_states(after, positive))
    return np.array(pieces)[np.searchsorted(breaks, t, side="right")]


def _as_booleans(positive: bool | Sequence[bool], n_states: int) -> NDArray[np.bool_]:
    given = np.asarray(positive)
    if given.dtype != bool or given.shape not in ((), (n_states,)):
        msg = (
            f"positive is {positive!r}; expected True, False, or one of these for each of "
            f"{n_states} states: ode.is_positive."
        )
        raise ValueError(msg)
    return np.broadcast_to(given, n_states)


def _check_positive(y: NDArray[np.float64], positive: NDArray[np.bool_], columns: tuple):
    bad = (y <= 0) & positive
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        msg = (
            f"y is {y[row, column]:g} at time index {row}, state {columns[column]}, one of "
            f"{int(bad.sum())} values not above zero of states declared positive, whose logarithm "
            "is taken. Expected positive numbers; do not declare a state positive that starts at "
            "zero. Values below a limit of detection are NaN, or pm.Censored in a likelihood. If "
            "noise or counting makes zeros, write likelihood= in place of y; in the four lines "
            "fit the Gaussian process to np.maximum(y, small)."
        )
        raise ValueError(msg)


def _value_of(data: Any, name: str):
    """Return the present value of ``pm.Data``; other data as they are."""
    if isinstance(data, SharedVariable):
        return data.get_value()
    if isinstance(data, Variable):
        msg = f"{name} is a symbolic {type(data).__name__}; expected numbers, or pm.Data."
        raise TypeError(msg)
    return data


def as_sigma(sigma: ArrayLike, states: Sequence) -> NDArray[np.float64]:
    """Return one positive standard deviation per state, or raise if sigma is unusable."""
    if isinstance(sigma, Variable):
        msg = (
            "sigma of Gaussian processes is a variable; expected numbers, such as "
            "gp.with_sigma(0.1). A prior of sigma belongs into the model: "
            "gm.build_model(..., sigma=pm.HalfNormal.dist(0.5))."
        )
        raise TypeError(msg)
    return as_positive(sigma, states, "sigma")


def as_noise(sigma: ArrayLike, data: Data) -> NDArray[np.float64]:
    """Return a known sigma for each observation, ``(time, state)``, NaN where there is none.

    Given as a number, one per state, one per observation, or a labelled series or table.
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
    """Return whether a variable is scalar or one number per state, possibly of unknown length."""
    return variable.type.shape in ((), (n_states,), (None,))


def as_nugget(nugget: ArrayLike, states: Sequence) -> NDArray[np.float64]:
    """Return one nugget per state, or raise if it is unusable."""
    return as_positive(nugget, states, "nugget", or_zero=True)


def as_positive(
    numbers: ArrayLike, states: Sequence, name: str, *, or_zero: bool = False
) -> NDArray[np.float64]:
    """Return one positive number, or zero, per state, or raise if ``name`` is unusable."""
    expected = f"one number or one for each of {len(states)} states"
    values, columns = as_numbers(numbers, name, expected), labels_of(numbers)
    if columns is not None and values.shape == (len(columns),):
        values = columns_in_order(values, columns, tuple(states), name)
    if values.shape not in ((), (1,), (len(states),)):
        msg = f"{name} has shape {values.shape}; expected {expected}."
        raise ValueError(msg)
    is_usable = np.isfinite(values) & ((values > 0) | (or_zero & (values == 0)))
    if not is_usable.all():
        which = "numbers that are not negative" if or_zero else "positive numbers"
        msg = f"{name} is {np.broadcast_to(values, len(states)).tolist()}; expected {which}."
        raise ValueError(msg)
    return read_only(np.broadcast_to(values, len(states)))


def grid_with(t: NDArray[np.float64], grid: int | ArrayLike) -> NDArray[np.float64]:
    """Return a grid that contains the times t; an integer is the number of steps in every gap."""
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
    """Return the breaks inside a grid t, in order, with their steps.

    Steps are factor and amount of each state, ``(break, state)`` each.  Times that differ by
    rounding are merged, if possible to that of the grid; their steps are composed.  A break at
    the end of the grid counts only where states jump.
    """
    rounding = SAME_TIME * np.abs(t).max()
    nearest = t[np.abs(t[:, None] - times).argmin(axis=0)]
    times = np.where(np.abs(nearest - times) <= rounding, nearest, times)
    order = np.argsort(times, kind="stable")
    times, factor, amount = times[order], steps[0][order], steps[1][order]
    is_last = np.append(np.diff(times) > rounding, True)[: len(times)]
    for k in np.flatnonzero(~is_last):
        times[k + 1] = times[k]
        amount[k + 1] += factor[k + 1] * amount[k]
        factor[k + 1] *= factor[k]
    is_jump = ((factor != 1) | (amount != 0)).any(axis=1)
    counts = is_last & (times > t[0]) & ((times < t[-1]) | (is_jump & (times == t[-1])))
    return times[counts], (factor[counts], amount[counts])


def grid_with_breaks(t: NDArray[np.float64], breaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a grid with the breaks among its times, and a time shortly before each break."""
    whole = np.union1d(t, breaks)
    last = whole[np.searchsorted(whole, breaks) - 1]
    return np.union1d(whole, breaks - BREAK_OFFSET * (breaks - last))


def refined_grid(t: NDArray[np.float64], n_more: int) -> NDArray[np.float64]:
    """Return times with ``n_more`` added, always in the gap whose steps are widest."""
    gaps = np.diff(t)
    n_steps = np.ones(len(gaps), dtype=int)
    for _ in range(n_more):
        n_steps[np.argmax(gaps / n_steps)] += 1
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
    """Properties of the residuals of one state, data less solution, in all experiments."""

    state: str
    share: float
    """Their share of the data's variance."""
    is_autocorrelated: bool
    """Whether neighbours in time are correlated, as noise is not."""
    have_outlier: bool
    """Whether the largest is too large for normal noise."""


def residuals(
    pairs: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], states: Sequence[str]
) -> list[Residuals]:
    """Return the residuals of each state that has enough data.

    Pairs are the data and the states at their times, ``(time, state)``, of one experiment each.
    """
    found = []
    for number, state in enumerate(states):
        each, deviations, varies = [], [], False
        for data, solution in pairs:
            observed = ~np.isnan(data[:, number])
            if observed.any():
                y = data[observed, number]
                each.append(y - solution[observed, number])
                deviations.append(y - y.mean())
                varies |= differ(y)
        n = sum(map(len, each))
        if n < MIN_RESIDUALS or not varies:
            continue
        residual, deviation = np.concatenate(each), np.concatenate(deviations)
        total = residual @ residual
        share = total / max(deviation @ deviation, TINY)
        correlation = sum(float(one[1:] @ one[:-1]) for one in each) / max(total, TINY)
        is_autocorrelated = bool(correlation > MAX_AUTOCORRELATION / np.sqrt(n))
        largest = np.square(residual).max() / max(total, TINY)
        # The largest share of the sum of squares of n normal numbers.
        have_outlier = bool(n * beta.sf(largest, 1 / 2, (n - 1) / 2) < OUTLIER_PROBABILITY)
        found.append(Residuals(state, share, is_autocorrelated, have_outlier))
    return found


def differ(values: NDArray[np.float64]) -> bool:
    """Return whether values are not all equal up to rounding."""
    return bool(np.ptp(values) > RELATIVE_ROUNDING * np.abs(values).max())


def poorly_fitted(residuals: Sequence[Residuals]) -> list[str]:
    """Return the states whose residuals are too large and not just noise.

    A state's autocorrelated residuals are too large beyond a quarter of the variance; others
    beyond 90 %, if those of any state are autocorrelated.  Then the solution belongs to another
    mode, or the ODE is wrong.
    """
    any_autocorrelated = any(one.is_autocorrelated for one in residuals)
    limit = 1 - LEAST_EXPLAINED if any_autocorrelated else np.inf
    return [
        one.state
        for one in residuals
        if one.share > (POOR_FIT_SHARE if one.is_autocorrelated else limit)
    ]
