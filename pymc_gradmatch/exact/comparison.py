"""A first look at whether a gradient-matching posterior is where the exact one is."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

from pymc_gradmatch.exact.climb import climb
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.reporting import largest_changes

ELSEWHERE = 1.0  # exact standard deviations
NARROW, WIDE = 2 / 3, 3 / 2  # standard deviations by gradient matching, in exact ones
MOST_COORDINATES = 40  # the Hessian takes as many solutions as its square
ADVICE = "Check it: gm.integrate_check(idata, model=model)."
UNCOMPARED = "The gradient-matching posterior was not compared with the exact one"
UNCHECKED = f"{UNCOMPARED}. {ADVICE}"


class Glance(NamedTuple):
    """What :func:`glance` saw.

    Attributes
    ----------
    text : str
        In one or two sentences.
    is_suspicious : bool
        Whether the gradient-matching posterior lies elsewhere than the exact one, or is
        much narrower or wider.
    is_compared : bool
        Whether it could be compared at all.
    table : pandas.DataFrame or None
        One row per unconstrained coordinate: ``moved``, from the exact mode to
        the mean of the draws in the exact mode's standard deviations, and ``sd_ratio``, of
        the draws to the exact.
    """

    text: str
    is_suspicious: bool
    is_compared: bool = True
    table: pd.DataFrame | None = None


def glance(model: pm.Model, posterior: xr.Dataset) -> Glance:
    r"""Compare draws with the normal approximation of the exact posterior at its mode.

    .. math:: N\bigl(\hat\phi,\; H^{-1}\bigr), \qquad
        H = -\nabla\nabla \log p(\hat\phi \mid y)

    of the density of :class:`~pymc_gradmatch.exact.ExactPosterior`, climbed to from the
    mean of the draws, with differences for derivatives: some hundred solutions of
    the ODE.  A normal approximation is no verdict; that is
    :func:`~pymc_gradmatch.integrate_check`'s.

    Parameters
    ----------
    model : pymc.Model
        The model.
    posterior : xarray.Dataset
        Its draws.
    """
    try:
        target = ExactPosterior(model)
        draws = target.coordinates(posterior)
        if draws.shape[1] > MOST_COORDINATES:
            return _uncompared(f"it has {draws.shape[1]} unknowns. {ADVICE}")
        mean = draws.mean(axis=0)
        local = climb(target, mean[None], draws.std(axis=0))
    except KeyboardInterrupt:
        return _uncompared(f"stopped by Ctrl-C. {ADVICE}")
    except ValueError as error:
        return _uncompared(str(error))
    except Exception as error:  # a likelihood that nobody foresaw; the draws come first
        return _uncompared(f"{type(error).__name__}: {error}")
    if not len(local.height) or not np.isfinite(local.height).all():
        text = "The ODE cannot be integrated from the mean of the gradient-matching posterior."
        return Glance(f"{text} {ADVICE}", is_suspicious=True)
    exact_sd = np.sqrt(np.diagonal(local.covariance[0]))
    table = pd.DataFrame(
        {
            "moved": (mean - local.point[0]) / exact_sd,
            "sd_ratio": draws.std(axis=0) / exact_sd,
        },
        index=target.names,
    )[~target.is_held]
    seen = []
    if (far := table["moved"].abs() > ELSEWHERE).any():
        seen.append(
            f"its mean is away from the exact posterior's mode, most in "
            f"{largest_changes(table['moved'][far])} of the exact standard deviations"
        )
    if (other := (table["sd_ratio"] < NARROW) | (table["sd_ratio"] > WIDE)).any():
        most = np.log(table["sd_ratio"][other]).abs().sort_values(ascending=False).index[:3]
        ratios = ", ".join(f"{name} {table['sd_ratio'][name]:.2g}" for name in most)
        seen.append(f"its standard deviations are other ones, {ratios} times the exact")
    if seen:
        text = f"The gradient-matching posterior is not the exact one: {'; '.join(seen)}"
        text = f"{text} (by a normal approximation). {ADVICE}"
        return Glance(text, is_suspicious=True, table=table)
    text = (
        "The gradient-matching posterior lies where the exact one does and is as wide, by a "
        "normal approximation at the mode; no more was checked."
    )
    return Glance(text, is_suspicious=False, table=table)


def _uncompared(why: str) -> Glance:
    return Glance(f"{UNCOMPARED}: {why}", is_suspicious=False, is_compared=False)
