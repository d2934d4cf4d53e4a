"""The grid and the kernels of the refined rule: time is counted in observations."""

import warnings
from functools import reduce
from math import ceil
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

from pymc_gradmatch.gp import StateGP, kernels
from pymc_gradmatch.ode import ODE

RELATIVE_NUGGET = 1e-9  # of the kernel's variance
STILL_SLOPE = 0.1  # of its slope in the outermost gap, below which a clock stops at the end
MOST_IN_GAP = 16.0  # median gaps that a longer one counts as, for a solution to be drawn by
MOST_CLOCK_KNOTS = 400  # of a clock
POINTS_PER_GAP = 32  # points in a gap, to measure a solution's way


class RefinedSettings(NamedTuple):
    """What the rule fixes; lengths are in observations or in grid steps."""

    steps: int = 4
    """Grid steps from one observation to the next."""
    shortest: int = 56
    """Grid steps in all below which gaps are divided further."""
    longest: int = 160
    """Grid steps in all beyond which gaps are divided no further."""
    wide_lengthscale: float = 4.0
    """In observations."""
    wide_amplitude: float = 10.0
    """In standard deviations of the data."""
    narrow_lengthscale: float = 2.0
    """In grid steps."""
    long_gap: float = 3.0
    """Mean ways of the solution in other gaps, from which on much happens in a long one."""
    most: int = 400
    """Observations, beyond which a solution is sought by fewer of them."""
    markov_lengthscale: float = 18.0
    """In grid steps, of the narrow Matern52 process of so many."""
    narrow_amplitude: float = 30.0
    """In sigma."""
    others: float = 4.0
    """How many times less than sigma the noise is with which all states see one, before that
    counts in place of sigma."""
    tolerance: float = 1e-6
    """gamma, relative to the prior variance of the slopes."""


REFINED = RefinedSettings()


class LaidOut(NamedTuple):
    """Gaussian processes on the rule's grid."""

    wide: StateGP
    """In which a solution is sought."""
    narrow: StateGP
    """For the distance from it, of unit amplitude."""


def is_long(gp: StateGP, settings: RefinedSettings) -> bool:
    """Tell whether a solution is sought by fewer of the observations."""
    return len(gp.t_observed) > settings.most


def laid_out(
    gp: StateGP, ode: ODE, settings: RefinedSettings, counts: NDArray, grid: int | ArrayLike | None
) -> LaidOut:
    """Return Gaussian processes of the data on the rule's grid, or on a given one."""
    times, states = gp.t_observed, range(len(gp.states))
    n_gaps = counts[-1] - counts[0]
    steps = _steps_per_gap(settings, n_gaps)
    clock = _clock(times, counts)
    wide = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, *clock)
    divided = _divided(times, counts, steps) if grid is None else grid
    smooth = gp.with_covs([wide for _ in states]).with_grid(divided)
    on_grid = smooth.with_breaks(ode.jumps, *ode.steps)
    step = 1 / steps if grid is None else n_gaps / (len(smooth.t) - 1)
    family, lengthscale = (
        (pm.gp.cov.Matern52, settings.markov_lengthscale)
        if is_long(gp, settings)
        else (pm.gp.cov.ExpQuad, settings.narrow_lengthscale)
    )
    narrow = _counted(family, lengthscale * step, *clock)
    wide_enough = with_amplitude(on_grid, settings.wide_amplitude)
    return LaidOut(wide_enough, on_grid.with_covs([narrow for _ in states]))


def separated(gp: StateGP, settings: RefinedSettings) -> StateGP:
    """Return wide processes of the pieces between long gaps, independent of each other."""
    times, counts, is_long_gap = gp.t_observed, gp.data.counted, gp.data.is_long_gap
    # The clock of a piece goes on in the gap: nothing is smoother at its edges than inside.
    rates = np.diff(counts) / np.diff(times)
    going = np.where(is_long_gap, np.median(rates[~is_long_gap]), rates) * np.diff(times)
    clock = _clock(times, np.append(counts[0], counts[0] + np.cumsum(going)))
    within = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, *clock)
    in_gap = (gp.t[:, None] > times[:-1][is_long_gap]) & (gp.t[:, None] <= times[1:][is_long_gap])
    pieces = kernels.Separate(within, gp.t[in_gap.any(axis=1)])
    return with_amplitude(gp.with_covs([pieces] * len(gp.states)), settings.wide_amplitude)


def stretched(
    ode: ODE, gp: StateGP, theta: NDArray, counts: NDArray, settings: RefinedSettings
) -> NDArray:
    """Return the counts of the observations' times, more for long gaps with much in them.

    The solution is the prior mean of gp, with the parameters theta.
    """
    times_longer = ways_in_long_gaps(ode, gp, gp.prior_mean[0], theta)
    counted = np.diff(counts)
    longer = np.where(times_longer > settings.long_gap, counted * times_longer, counted)
    return np.append(counts[0], counts[0] + np.cumsum(longer))


def ways_in_long_gaps(ode: ODE, gp: StateGP, start: NDArray, theta: NDArray) -> NDArray:
    """Return a solution's ways in long gaps, in mean ways of the others; zero for the others.

    NaN where it cannot be integrated.
    """
    times, is_long = gp.t_observed, gp.data.is_long_gap
    if not is_long.any():
        return np.zeros(len(is_long))
    fine = np.linspace(times[:-1], times[1:], POINTS_PER_GAP, endpoint=False, axis=1).ravel()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        solution = ode.solve(np.append(fine, times[-1]), start, theta) / gp.scale
    if not np.isfinite(solution).all():
        return np.where(is_long, np.nan, 0)
    way = np.linalg.norm(np.diff(solution, axis=0), axis=1).reshape(-1, POINTS_PER_GAP).sum(axis=1)
    return np.where(is_long, way / way[~is_long].mean(), 0)


def grid_of(gp: StateGP) -> int | NDArray[np.float64]:
    """Return the rule's grid for the times of the data, long gaps divided by their length."""
    times, counts = gp.t_observed, gp.data.counted
    steps = _steps_per_gap(REFINED, counts[-1] - counts[0])
    gaps = np.diff(times)
    longer = np.minimum(gaps / np.median(gaps), MOST_IN_GAP)
    counted = np.where(
        longer > REFINED.long_gap, np.maximum(longer, np.diff(counts)), np.diff(counts)
    )
    return _divided(times, np.append(0.0, np.cumsum(counted)), steps)


def _steps_per_gap(settings: RefinedSettings, n_gaps: float) -> int:
    fewest, most = ceil(settings.shortest / n_gaps), round(settings.longest / n_gaps)
    return max(fewest, min(settings.steps, most))


def _divided(times: NDArray, counts: NDArray, steps: int) -> int | NDArray:
    """Return the grid: so many steps per observation, the same in every gap where they are even."""
    inside = np.maximum(np.ceil(steps * np.diff(counts) - 1e-9).astype(int), 1)
    if (inside == inside[0]).all():
        return int(inside[0])
    gaps = zip(times[:-1], times[1:], inside.tolist(), strict=True)
    fine = [np.linspace(start, end, n, endpoint=False) for start, end, n in gaps]
    return np.append(np.concatenate(fine), times[-1])


def with_amplitude(gp: StateGP, amplitude) -> StateGP:
    """Return processes of unit variance with another amplitude, and a nugget in proportion."""
    variance = np.square(amplitude)
    return gp.with_amplitude(variance).with_nugget(RELATIVE_NUGGET * variance)


def _clock(times: NDArray, counts: NDArray) -> tuple[NDArray, NDArray]:
    """Return times that are one observation apart, and their counts: smoother than every time's."""
    n_gaps = min(max(round(counts[-1] - counts[0]), 2), MOST_CLOCK_KNOTS)
    even = np.linspace(counts[0], counts[-1], n_gaps + 1)
    return np.interp(even, counts, times), even


def _counted(
    family, lengthscale: float, times: NDArray, counts: NDArray
) -> pm.gp.cov.BaseCovariance:
    """Return a kernel of unit variance whose lengthscale is counted in observations."""
    gaps = np.diff(times) / np.diff(counts)
    if np.allclose(gaps, gaps[0], atol=0):
        return family(1, ls=np.float64(lengthscale * gaps[0]))
    counted = _never_still(times, counts)
    return pm.gp.cov.WarpedInput(
        1, family(1, ls=np.float64(lengthscale)), lambda t: _piecewise(counted, t)
    )


def _never_still(times: NDArray, counts: NDArray) -> PchipInterpolator:
    """Interpolate the counts; where they would stop at an end, go on as in the outermost gap."""
    slopes = np.diff(counts) / np.diff(times)
    at_ends = PchipInterpolator(times, counts).derivative()(times[[0, -1]])
    stops = at_ends < STILL_SLOPE * slopes[[0, -1]]
    for at, sign in ((0, -1), (-1, 1)):
        if stops[at]:
            gap = np.diff(times)[at]
            edge = 0 if at == 0 else len(times)
            counts = np.insert(counts, edge, counts[at] + sign * gap * slopes[at])
            times = np.insert(times, edge, times[at] + sign * gap)
    return PchipInterpolator(times, counts)


def _piecewise(polynomial: PchipInterpolator, t):
    """Write a piecewise polynomial of a column t; the outer pieces go on beyond their ends."""
    inner = polynomial.x[1:-1]
    inside = (t >= np.append(-np.inf, inner)) & (t < np.append(inner, np.inf))
    from_start = t - polynomial.x[:-1]
    values = reduce(lambda total, c: total * from_start + c, polynomial.c)
    return pt.switch(inside, values, 0).sum(axis=1, keepdims=True)
