"""C, D and A: what a Gaussian process on the states says about their derivatives."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch import spectral
from pymc_gradmatch.derivatives import Blocks, evaluate_blocks, write_blocks
from pymc_gradmatch.kernels import is_random
from pymc_gradmatch.normal import cholesky
from pymc_gradmatch.series import read_only

__all__ = ["Operators", "blocks_of", "conditional_operators"]


class Operators(NamedTuple):
    """The matrices of Theorem 1, one per state, shape ``(state, time, time)``.

    In standardised units: C has no unit, D is in 1 / time, A in 1 / time squared.
    Arrays, or graphs where hyperparameters are random.
    """

    C: Any
    """Covariance of the states, with the nugget."""
    D: Any
    """Maps states to the mean of their derivatives."""
    A: Any
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
        The kernel and its derivatives, arrays or graphs of shape ``(state, time, time)``.
    nugget : array_like of float
        Added to the diagonal of the kernel matrix, in standardised units squared;
        one number, or one per state.

    Returns
    -------
    Operators

    Raises
    ------
    ValueError
        If C is an array and not numerically positive definite.
    """
    if isinstance(blocks.k, TensorVariable):
        return _conditional_graphs(*blocks, nugget)
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


def _conditional_graphs(k, _, dk_dt2, d2k, nugget: ArrayLike) -> Operators:
    n_states, n_times, _ = k.type.shape
    nuggets = np.broadcast_to(nugget, n_states)
    C = k + nuggets[:, None, None] * np.eye(n_times)
    factor = cholesky(C).factor
    half = pt.linalg.solve_triangular(factor, dk_dt2, lower=True, b_ndim=2)
    D = pt.linalg.solve_triangular(factor.mT, half, lower=False, b_ndim=2).mT
    return Operators(C, D, d2k - half.mT @ half)


def blocks_of(
    covs: Sequence[pm.gp.cov.BaseCovariance],
    t: NDArray[np.float64],
    evaluate: Callable[..., Blocks] = evaluate_blocks,
) -> Blocks:
    """Evaluate the blocks of one kernel per state; a kernel that is shared, only once.

    Where a hyperparameter is random, the blocks are graphs.
    """
    distinct = {id(cov): cov for cov in covs}
    random = any(is_random(cov) for cov in distinct.values())
    evaluated = {
        key: write_blocks(cov, t) if random else evaluate(cov, t) for key, cov in distinct.items()
    }
    per_state = [evaluated[id(cov)] for cov in covs]
    stack: Callable = pt.stack if random else np.stack
    return Blocks(*(stack(matrices) for matrices in zip(*per_state, strict=True)))
