"""A quick comparison of a gradient-matching posterior with the exact one."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from pymc_gradmatch.exact.multistart import optimise_locally
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.reporting import largest_changes

MAX_COORDINATES = 40  # the Hessian takes as many solutions as the square of their number
ADVICE = "Check it: gm.integrate_check(idata, model=model)."
NOT_COMPARED = "The gradient-matching posterior was not compared with the exact one"
NOT_CHECKED = f"{NOT_COMPARED}. {ADVICE}"


class QuickComparison(NamedTuple):
    """The result of :func:`compare_quickly`."""

    text: str
    is_suspicious: bool
    """Whether the gradient-matching posterior has another location or width than the exact one."""
    is_compared: bool = True


def compare_quickly(model: pm.Model, posterior: xr.Dataset) -> QuickComparison:
    """Compare draws with the normal approximation of the exact posterior at its nearest mode.

    That is found by local optimisation from the mean of the draws.  It is suspicious if a mean is
    more than an exact standard deviation from the mode, or a standard deviation is not between
    two thirds and one and a half of the exact one.  The verdict on draws is that of
    :func:`~pymc_gradmatch.integrate_check`.
    """
    try:
        target = ExactPosterior(model)
        draws = target.coordinates(posterior)
        if draws.shape[1] > MAX_COORDINATES:
            return _not_compared(f"it has {draws.shape[1]} unknowns. {ADVICE}")
        mean, sd = draws.mean(axis=0), draws.std(axis=0)
        mode = optimise_locally(target, mean[None], sd)
    except KeyboardInterrupt:
        return _not_compared(f"stopped by Ctrl-C. {ADVICE}")
    except Exception as error:  # of a user's likelihood; the draws must not be lost
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return _not_compared(f"{kind}{error}")
    if not np.isfinite(mode.log_density).any():
        text = "The ODE cannot be integrated from the mean of the gradient-matching posterior."
        return QuickComparison(f"{text} {ADVICE}", is_suspicious=True)
    exact_sd = np.sqrt(np.diagonal(mode.covariance[0]))
    moved = pd.Series((mean - mode.point[0]) / exact_sd, target.names)[~target.is_fixed]
    ratio = pd.Series(sd / exact_sd, target.names)[~target.is_fixed]
    differences = []
    if (is_far := moved.abs() > 1).any():
        differences.append(
            "its mean is away from the exact posterior's mode, most in "
            f"{largest_changes(moved[is_far])} of the exact standard deviations"
        )
    if len(other := ratio[(ratio < 2 / 3) | (ratio > 3 / 2)]):
        most = other.iloc[np.argsort(-np.log(other).abs(), kind="stable")[:3]]
        ratios = ", ".join(f"{name} {value:.2g}" for name, value in most.items())
        differences.append(f"its standard deviations are other ones, {ratios} times the exact")
    if differences:
        text = f"The gradient-matching posterior is not the exact one: {'; '.join(differences)}"
        text = f"{text} (by a normal approximation). {ADVICE}"
        return QuickComparison(text, is_suspicious=True)
    text = (
        "The gradient-matching posterior lies where the exact one does and is as wide, by a "
        "normal approximation at the mode; no more was checked."
    )
    return QuickComparison(text, is_suspicious=False)


def _not_compared(why: str) -> QuickComparison:
    return QuickComparison(f"{NOT_COMPARED}: {why}", is_suspicious=False, is_compared=False)
