"""Grid and kernels of the refined rule, in which time is counted in observations."""

import warnings
from functools import reduce
from math import ceil
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator
from scipy.linalg import expm

from pymc_gradmatch.gp import StateGP, kernels
from pymc_gradmatch.model.likelihood import Likelihood
from pymc_gradmatch.ode import ODE

# The numbers of the rule, which benchmarks/levers.py varies.
STEPS = 4  # grid steps from one observation to the next
MIN_STEPS, MAX_STEPS = 56, 160  # grid steps in all, below and above which gaps have more or fewer
WIDE_LENGTHSCALE = 4.0  # observations
WIDE_AMPLITUDE = 10.0  # standard deviations of the data
NARROW_LENGTHSCALE = 2.0  # grid steps
NARROW_AMPLITUDE = 30.0  # sigma
ALL_DATA = 4.0  # times the noise of all data replaces a state's own sigma, if that is larger
TOLERANCE = 1e-6  # gamma, relative to the prior variance of the slopes
MAX_OBSERVATIONS = 400  # beyond which a subset of them leads to the solution
MARKOV_LENGTHSCALE = 18.0  # grid steps, of the narrow Matern52 process of more observations
RELATIVE_NUGGET = 1e-9  # of the kernel's variance
MIN_END_SLOPE = 0.1  # of the count, relative to the outermost gap's: below, the count would stop
POINTS_PER_GAP = 32  # to measure the path of a solution in a gap
LONG_GAP = 3.0  # median gaps, or mean paths of the solution in other gaps
MAX_GAP_COUNT = 16.0  # median gaps that a longer one counts as at most
MAX_CLOCK_KNOTS = 400


class ProcessPair(NamedTuple):
    """Gaussian processes on the rule's grid."""

    wide: StateGP
    """To find a solution."""
    narrow: StateGP
    """For the distance from it, of unit amplitude."""


def process_pair(
    gp: StateGP,
    ode: ODE,
    grid: int | ArrayLike | None,
    is_markov: bool = False,
    counts: NDArray[np.float64] | None = None,
) -> ProcessPair:
    """Return Gaussian processes of the data on the rule's grid, or on a given one.

    ``counts`` are those of the observed times, by default of the observations.
    """
    times, states = gp.t_observed, range(len(gp.states))
    counts = gp.data.counted if counts is None else counts
    n_gaps = counts[-1] - counts[0]
    steps = _steps_per_gap(n_gaps)
    clock = _clock(times, counts)
    wide = kernel_in_observations(pm.gp.cov.Matern52, WIDE_LENGTHSCALE, *clock)
    divided = _divided(times, counts, steps) if grid is None else grid
    smooth = gp.with_covs([wide for _ in states]).with_grid(divided)
    on_grid = smooth.with_breaks(ode.jumps, *ode.steps)
    step = 1 / steps if grid is None else n_gaps / (len(smooth.t) - 1)
    family, lengthscale = (
        (pm.gp.cov.Matern52, MARKOV_LENGTHSCALE)
        if is_markov
        else (pm.gp.cov.ExpQuad, NARROW_LENGTHSCALE)
    )
    narrow = kernel_in_observations(family, lengthscale * step, *clock)
    wide_enough = with_amplitude(on_grid, WIDE_AMPLITUDE)
    return ProcessPair(wide_enough, on_grid.with_covs([narrow for _ in states]))


def narrow_process(
    unit: StateGP, ode: ODE, gp: StateGP, theta: NDArray[np.float64], likelihood: Likelihood
) -> StateGP:
    """Return processes of unit amplitude around the prior mean of gp, as wide as the noise."""
    around = unit.with_sigma(likelihood.sigma).with_mean(gp.prior_mean, gp.prior_slope)
    noise = np.fmin(likelihood.sigma, ALL_DATA * noise_of_all_data(ode, gp, theta, likelihood))
    return with_amplitude(around, NARROW_AMPLITUDE * noise / gp.scale)


def gamma_of(gp: StateGP) -> NDArray[np.float64]:
    """Return the rule's gamma, which only keeps A positive definite."""
    return TOLERANCE * gp.slope_variance()


def grid_of(gp: StateGP) -> int | NDArray[np.float64]:
    """Return the grid of a solution at the times of the data, long gaps divided by their length."""
    times, counts = gp.t_observed, gp.data.counted
    steps = _steps_per_gap(counts[-1] - counts[0])
    gaps = np.diff(times)
    longer = np.minimum(gaps / np.median(gaps), MAX_GAP_COUNT)
    counted = np.where(longer > LONG_GAP, np.maximum(longer, np.diff(counts)), np.diff(counts))
    return _divided(times, np.append(0.0, np.cumsum(counted)), steps)


def processes_between_gaps(gp: StateGP) -> StateGP:
    """Return wide processes that are independent on the two sides of each long gap."""
    times, counts, is_long_gap = gp.t_observed, gp.data.counted, gp.data.is_long_gap
    # Counts go on in the gap as elsewhere, so that curves are no smoother at its edges.
    rates = np.diff(counts) / np.diff(times)
    rates = np.where(is_long_gap, np.median(rates[~is_long_gap]), rates)
    clock = _clock(times, np.append(counts[0], counts[0] + np.cumsum(rates * np.diff(times))))
    within = kernel_in_observations(pm.gp.cov.Matern52, WIDE_LENGTHSCALE, *clock)
    starts, ends = times[:-1][is_long_gap], times[1:][is_long_gap]
    in_gap = ((gp.t[:, None] > starts) & (gp.t[:, None] <= ends)).any(axis=1)
    separate = kernels.Separate(within, gp.t[in_gap])
    return with_amplitude(gp.with_covs([separate] * len(gp.states)), WIDE_AMPLITUDE)


def counts_by_path(ode: ODE, gp: StateGP, theta: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counts of the observed times, more for long gaps in which the solution moves far.

    The solution starts where the prior mean of gp does.  A long gap in which its path is so many
    times as long as on average in the other gaps counts as many times as much, so that the grid is
    as fine along the solution there as elsewhere.
    """
    times, counts, is_long_gap = gp.t_observed, gp.data.counted, gp.data.is_long_gap
    if not is_long_gap.any():
        return counts
    fine = np.linspace(times[:-1], times[1:], POINTS_PER_GAP, endpoint=False, axis=1).ravel()
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        solution = ode.solve(np.append(fine, times[-1]), gp.prior_mean[0], theta) / gp.scale
    if not np.isfinite(solution).all():
        return counts
    steps = np.linalg.norm(np.diff(solution, axis=0), axis=1)
    paths = steps.reshape(-1, POINTS_PER_GAP).sum(axis=1)
    relative = np.where(is_long_gap, paths / paths[~is_long_gap].mean(), 0)
    longer = np.diff(counts) * np.where(relative > LONG_GAP, relative, 1)
    return np.append(counts[0], counts[0] + np.cumsum(longer))


def _steps_per_gap(n_gaps: float) -> int:
    return max(ceil(MIN_STEPS / n_gaps), min(STEPS, round(MAX_STEPS / n_gaps)))


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


def noise_of_all_data(
    ode: ODE, gp: StateGP, theta: NDArray[np.float64], likelihood: Likelihood
) -> NDArray[np.float64]:
    r"""Return the noise with which all data determine each state by the ODE, shape ``(state,)``.

    .. math::

        \sigma_k^{-2} = \frac{\sum_s \sum_i \sum_{t \ge s} \Phi_{ik}(t, s)^2 / \sigma_i^2}
                            {\sum_s \sum_{t \ge s} \Phi_{kk}(t, s)^2}

    with the flow :math:`\Phi(t, s) = \partial x(t) / \partial x(s)` along the prior mean, a
    solution, times t of observations, and any times s.  For a state that affects no other it is
    its own sigma.  The curvature of the likelihood is the precision of each state.
    """
    n_times, n_states = gp.prior_mean.shape
    _, by_state, _ = ode.linearised(gp.t, gp.prior_mean, theta)
    curvature = np.diagonal(likelihood.curvature(theta, gp.prior_mean))[len(theta) :]
    precision, is_observed = np.zeros((n_times, n_states)), np.zeros(n_times)
    precision[likelihood.rows] = curvature.reshape(n_states, -1).T
    is_observed[likelihood.rows] = 1
    # Precision of each state at a time, from all states at later times and from its own, backwards.
    places = np.arange(n_states)
    unit = np.eye(n_states)[:, :, None] * np.eye(n_states)[:, None, :]
    by_all, by_own = np.zeros((n_states,) * 2), np.zeros((n_states,) * 3)
    from_all, from_own = np.zeros(n_states), np.zeros(n_states)
    with np.errstate(all="ignore"):
        flow = expm(np.diff(gp.t)[:, None, None] * np.nan_to_num(by_state[:-1]))
        for s in reversed(range(n_times)):
            if s < n_times - 1:
                by_all = flow[s].T @ by_all @ flow[s]
                by_own = flow[s].T @ by_own @ flow[s]
            by_all = by_all + np.diag(precision[s])
            by_own = by_own + is_observed[s] * unit
            from_all += np.diagonal(by_all)
            from_own += by_own[places, places, places]
        return np.sqrt(from_own / from_all)


def _clock(times: NDArray, counts: NDArray) -> tuple[NDArray, NDArray]:
    """Return times that are one observation apart, and their counts: smoother than every time's."""
    n_gaps = min(max(round(counts[-1] - counts[0]), 2), MAX_CLOCK_KNOTS)
    even = np.linspace(counts[0], counts[-1], n_gaps + 1)
    return np.interp(even, counts, times), even


def kernel_in_observations(
    family, lengthscale: float, times: NDArray, counts: NDArray
) -> pm.gp.cov.BaseCovariance:
    """Return a kernel of unit variance whose lengthscale is counted in observations."""
    gaps = np.diff(times) / np.diff(counts)
    if np.allclose(gaps, gaps[0], atol=0):
        return family(1, ls=np.float64(lengthscale * gaps[0]))
    count = _strictly_increasing(times, counts)
    return pm.gp.cov.WarpedInput(
        1, family(1, ls=np.float64(lengthscale)), lambda t: _piecewise(count, t)
    )


def _strictly_increasing(times: NDArray, counts: NDArray) -> PchipInterpolator:
    """Interpolate the counts; beyond an end without slope as in the outermost gap."""
    slopes = np.diff(counts) / np.diff(times)
    at_ends = PchipInterpolator(times, counts).derivative()(times[[0, -1]])
    stops = at_ends < MIN_END_SLOPE * slopes[[0, -1]]
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
