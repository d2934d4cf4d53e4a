"""Residuals: how much of the data states leave, and whether that can be noise."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

EQUAL = 1e-12  # of the largest, by which values differ that only rounding parts
FEWEST = 8  # data of a state whose residuals are judged
LEAST_SHARE = 0.1  # share of their variance that is next to nothing
PART = 0.25  # share that is more than a lesser flaw of the equations leaves
AUTOCORRELATED = 2.5  # standard errors of an autocorrelation, above which there is one
OUTLYING = 1e-3  # chance that normal noise has so large an outlier
TINY = np.finfo(float).tiny


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
