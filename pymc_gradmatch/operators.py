"""C, D and A: what a Gaussian process on the states says about their derivatives."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch import spectral
from pymc_gradmatch.derivatives import Blocks, evaluate_blocks
from pymc_gradmatch.series import read_only

__all__ = ["Operators", "blocks_of", "conditional_operators"]


class Operators(NamedTuple):
    """The matrices of Theorem 1, one per state, shape ``(state, time, time)``.

    In standardised units: C has no unit, D is in 1 / time, A in 1 / time squared.
    """

    C: NDArray[np.float64]
    """Covariance of the states, with the nugget."""
    D: NDArray[np.float64]
    """Maps states to the mean of their derivatives."""
    A: NDArray[np.float64]
    """Covariance of the derivatives given the states, without gamma."""


def conditional_operators(blocks: Blocks, nugget: ArrayLike) -> Operators:
    r"""Condition a Gaussian process' derivative on its values.

    .. math::

        C = k + \epsilon I, \qquad D = {'C}\,C^{-1}, \qquad
        A = C'' - {'C}\,C^{-1}\,C'

    so that :math:`p(\dot x \mid x) = N(D x, A)` (Wenk et al. 2019, eq. 6 to 9).
    The nugget :math:`\epsilon` stands wherever C stands and on no derivative
    block, as in the reference implementation.

    Parameters
    ----------
    blocks : Blocks
        The kernel and its derivatives, arrays of shape ``(state, time, time)``.
    nugget : array_like of float
        Added to the diagonal of the kernel matrix, in standardised units squared;
        one number, or one per state.

    Returns
    -------
    Operators

    Raises
    ------
    ValueError
        If C is not numerically positive definite.
    """
    n_states, n_times, _ = blocks.k.shape
    nuggets = np.broadcast_to(nugget, n_states)
    C = blocks.k + nuggets[:, None, None] * np.eye(n_times)
    vectors, variances = spectral.spectrum(C)
    singular = (variances <= spectral.smallest_reliable(variances)).any(axis=-1)
    if singular.any():
        msg = (
            f"the covariance C of state {np.flatnonzero(singular).tolist()} is not positive "
            f"definite with nugget={nuggets.min():g}: the kernel is too smooth for this grid. "
            "Use a larger nugget (the paper's is 1e-4), or a shorter lengthscale."
        )
        raise ValueError(msg)
    D = (blocks.dk_dt1 @ vectors / variances[:, None, :]) @ vectors.mT
    A = blocks.d2k - D @ blocks.dk_dt2
    return Operators(*map(read_only, (C, D, (A + A.mT) / 2)))


def blocks_of(
    covs: Sequence[pm.gp.cov.BaseCovariance],
    t: NDArray[np.float64],
    evaluate: Callable[..., Blocks] = evaluate_blocks,
) -> Blocks:
    """Evaluate the blocks of one kernel per state; a kernel that is shared, only once."""
    distinct = {id(cov): cov for cov in covs}
    evaluated = {key: evaluate(cov, t) for key, cov in distinct.items()}
    per_state = [evaluated[id(cov)] for cov in covs]
    return Blocks(*(np.stack(matrices) for matrices in zip(*per_state, strict=True)))
