r"""The settings of ``preset="refined"``: Theorem 1 without its smoothing bias.

One rule for all problems; docs/accuracy.md has the study behind it.

1. *Grid*: four steps from one observation to the next (more for short series,
   fewer for long ones).
2. *Time* is counted in observations: people observe where things change.
3. A wide Gaussian process finds the solution: Matern52 with a lengthscale of
   four observations and an amplitude of ten standard deviations of the data,
   re-centred until theta settles.
4. A narrow one describes the distance from it: ExpQuad with a lengthscale of
   two grid steps and an amplitude of 30 sigma, so that A, the tolerance that
   the Gaussian process itself has, follows the noise.  Re-centred again.
5. gamma is a millionth of the prior variance of the slopes.
"""

import warnings
from collections.abc import Mapping
from functools import reduce
from math import ceil
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable
from scipy.interpolate import PchipInterpolator

from pymc_gradmatch.checks import check_states
from pymc_gradmatch.climbing import climb_from_prior
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.naming import in_order
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.parameters import parameters_of
from pymc_gradmatch.progress import reporting
from pymc_gradmatch.recentring import SEARCHING, distance_from_solution, follow

__all__ = ["REFINED", "Refined", "RefinedSettings", "refine"]


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
    narrow_amplitude: float = 30.0
    """In sigma."""
    tolerance: float = 1e-6
    """gamma, relative to the prior variance of the slopes."""


REFINED = RefinedSettings()
NUGGET = 1e-9  # of the kernel's variance
FAR = 0.3  # sigma, between matched states and solution; docs/accuracy.md's cases stay below 0.12


class Refined(NamedTuple):
    """What :func:`refine` found; the first two go into the four lines of the model."""

    gp: StateGP
    """Grid, kernels, prior mean and sigma."""
    gamma: NDArray[np.float64]
    """One per state."""
    theta: dict[str, float]
    """The most probable parameters: a start for samplers."""
    moves: list[float]
    """How far each round moved theta, in posterior standard deviations, the most of all."""


def refine(
    ode: ODE,
    gp: StateGP,
    *,
    priors: Mapping[str, TensorVariable],
    grid: int | ArrayLike | None = None,
    settings: RefinedSettings = REFINED,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> Refined:
    """Choose grid, kernels, prior mean and gamma so that the smoothing bias goes.

    What ``build_model(preset="refined")`` does before it writes the model; call
    it to write the four lines yourself, with another likelihood for example.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    gp : StateGP
        A fit to the data, of which sigma counts.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    grid : int or array_like of float, optional
        Steps between observations or sorted times, see
        :meth:`StateGP.with_grid`; the rule's if not given.
    settings : RefinedSettings
        The rule.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starts.
    progressbar : bool, default True
        Show what is being done, from the first second on.

    Returns
    -------
    Refined
        Named tuple ``(gp, gamma, theta, moves)``.

    Raises
    ------
    ValueError
        If names do not fit, or the right-hand side is finite at no start.

    Warns
    -----
    UserWarning
        If the ODE cannot be integrated at an estimate, or if the most probable states
        are not its solution: where it is faster than the grid.

    Examples
    --------
    .. code-block:: python

        gp, gamma, start, _ = gm.refine(ode, gm.fit_gp(t, y, cov="Matern52"), priors=priors)
        with pm.Model(coords={"time_observed": t}):
            theta = {name: pm.HalfNormal(name, 5, initval=start[name]) for name in ode.params}
            x = gp.prior("x")
            sigma = pm.HalfNormal("sigma", gp.scale, initval=gp.sigma, dims="state")
            dims = ("time_observed", "state")
            pm.Normal("y", gp.at_observations(x), sigma, observed=y, dims=dims)
            gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
            idata = gm.sample()
    """
    check_states(ode, gp.states)
    in_order(priors, ode.params, "priors are")
    parameters = parameters_of(priors, ode.params)
    times, states = gp.t_observed, range(len(gp.states))
    if grid is None:
        grid = _steps_per_gap(settings, len(times) - 1)
    wide = _counted(pm.gp.cov.Matern52, settings.wide_lengthscale, times)
    on_grid = gp.with_covs([wide for _ in states]).with_grid(grid)
    step = (len(times) - 1) / (len(on_grid.t) - 1)
    narrow = _counted(pm.gp.cov.ExpQuad, settings.narrow_lengthscale * step, times)
    unit = on_grid.with_covs([narrow for _ in states])

    def gamma_of(gp):
        return settings.tolerance * gp.slope_variance()

    def narrowed(gp):
        around = unit.with_sigma(gp.sigma).with_mean(gp.prior_mean, gp.prior_slope)
        around = _scaled(around, settings.narrow_amplitude * gp.sigma / gp.scale)
        return around, gamma_of(around)

    searching = _scaled(on_grid, settings.wide_amplitude)
    gamma = gamma_of(searching)
    start = searching.posterior_mean()
    rng = np.random.default_rng(random_seed)
    with reporting(SEARCHING, enabled=progressbar) as say:
        found = climb_from_prior(ode, searching, parameters, gamma, start, rng)
        centred, found, moves = follow(
            ode, searching, parameters, found, lambda gp: (gp, gamma), say=say
        )
        centred, found, more = follow(ode, centred, parameters, found, narrowed, say=say)
    theta = parameters.by_name(found.u)
    _warn_if_apart(distance_from_solution(ode, centred, parameters, found), ode, theta)
    return Refined(centred, gamma_of(centred), theta, moves + more)


def _warn_if_apart(distance: NDArray[np.float64], ode: ODE, theta: Mapping[str, float]):
    """Warn where states that match the ODE on the grid are not its solution."""
    apart = [
        f"{state!r} by {far:.2g}"
        for state, far in zip(ode.states, distance, strict=True)
        if not far <= FAR
    ]
    if apart:
        warnings.warn(
            f"the most probable states and the ODE's solution from the same start, with "
            f"{ {name: float(f'{value:.4g}') for name, value in theta.items()} }, differ in state "
            f"{', '.join(apart)} (sigma, root mean square; at most {FAR} is expected): between the "
            "times of the grid the system is faster than the grid, or than the data tell. Do not "
            "trust this fit by itself: take a finer grid, give fast parameters narrow priors or "
            "eliminate them (quasi-steady state), and follow it with gm.integrate_check.",
            UserWarning,
            stacklevel=3,
        )


def _steps_per_gap(settings: RefinedSettings, n_gaps: int) -> int:
    fewest, most = ceil(settings.shortest / n_gaps), round(settings.longest / n_gaps)
    return max(fewest, min(settings.steps, most))


def _scaled(gp: StateGP, amplitude) -> StateGP:
    variance = np.square(amplitude)
    return gp.with_amplitude(variance).with_nugget(NUGGET * variance)


def _counted(family, lengthscale: float, times: NDArray) -> pm.gp.cov.BaseCovariance:
    """Return a kernel of unit variance whose lengthscale is counted in observations."""
    gaps = np.diff(times)
    if np.allclose(gaps, gaps[0]):
        return family(1, ls=np.float64(lengthscale * gaps[0]))
    counted = PchipInterpolator(times, np.arange(len(times)))
    return pm.gp.cov.WarpedInput(
        1, family(1, ls=np.float64(lengthscale)), lambda t: _piecewise(counted, t)
    )


def _piecewise(polynomial: PchipInterpolator, t):
    """Write a piecewise polynomial of a column t; the outer pieces go on beyond their ends."""
    inner = polynomial.x[1:-1]
    inside = (t >= np.append(-np.inf, inner)) & (t < np.append(inner, np.inf))
    from_start = t - polynomial.x[:-1]
    values = reduce(lambda total, c: total * from_start + c, polynomial.c)
    return pt.switch(inside, values, 0).sum(axis=1, keepdims=True)
