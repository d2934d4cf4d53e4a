"""C, D and A: what a Gaussian process on the states says about their derivatives."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch.gp.data import read_only
from pymc_gradmatch.gp.derivatives import Blocks, evaluate_blocks, write_blocks
from pymc_gradmatch.gp.kernels import is_random
from pymc_gradmatch.numerics import bases, cholesky, products

__all__ = [
    "Operators",
    "Processes",
    "blocks_of",
    "conditional_operators",
    "log_evidence",
    "smoothed",
    "stacked",
]


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
    vectors, variances = products.spectrum(C)
    singular = (variances <= products.smallest_reliable(variances)).any(axis=-1)
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
) -> Blocks:
    """Evaluate the blocks of one kernel per state; a kernel that is shared, only once.

    Where a hyperparameter is random, the blocks are graphs.
    """
    distinct = {id(cov): cov for cov in covs}
    random = any(is_random(cov) for cov in distinct.values())
    evaluated = {
        key: write_blocks(cov, t) if random else evaluate_blocks(cov, t)
        for key, cov in distinct.items()
    }
    return stacked([evaluated[id(cov)] for cov in covs])


def stacked(per_state: Sequence[Blocks]) -> Blocks:
    """Return the blocks of all states in one, ``(state, time, time)`` each."""
    stack: Any = pt.stack if isinstance(per_state[0].k, TensorVariable) else np.stack
    return Blocks(*(stack(matrices) for matrices in zip(*per_state, strict=True)))


@dataclass(frozen=True, eq=False)
class Processes:
    """Kernels and nuggets on a grid of times, one per state, whatever the data.

    In standardised units; graphs where hyperparameters are random.  Bases are
    computed when they are first asked for.

    Parameters
    ----------
    t : array of float
        The grid, shape ``(time,)``.
    covs : tuple of pymc.gp.cov.BaseCovariance
        One kernel per state.
    nugget : array of float
        Shape ``(state,)``.
    blocks : Blocks
        The kernels and their derivatives on the grid, each ``(state, time, time)``.

    Attributes
    ----------
    operators : Operators
        C, D and A, which follow from blocks and nugget.
    """

    t: NDArray[np.float64]
    covs: tuple[pm.gp.cov.BaseCovariance, ...]
    nugget: NDArray[np.float64]
    blocks: Blocks
    operators: Operators = field(init=False)

    def __post_init__(self):
        operators = conditional_operators(self.blocks, self.nugget)
        object.__setattr__(self, "operators", operators)

    def with_covs(self, covs: tuple[pm.gp.cov.BaseCovariance, ...]) -> Self:
        """Return other kernels on the same grid."""
        return replace(self, covs=covs, blocks=blocks_of(covs, self.t))

    def with_grid(self, t: NDArray[np.float64]) -> Self:
        """Return the same kernels on another grid."""
        return replace(self, t=t, blocks=blocks_of(self.covs, t))

    def multiplied(self, factors: NDArray[np.float64]) -> Self:
        """Return the kernels times one factor each, and the nugget as it is."""
        covs = tuple(float(f) * cov for f, cov in zip(factors, self.covs, strict=True))
        blocks = Blocks(*(factors[:, None, None] * block for block in self.blocks))
        return replace(self, covs=covs, blocks=blocks)

    @property
    def is_random(self) -> bool:
        """Whether a kernel has random hyperparameters."""
        return isinstance(self.operators.C, TensorVariable)

    @property
    def slope_variance(self) -> NDArray[np.float64]:
        """The prior variance of the slopes, the median over time, shape ``(state,)``."""
        return np.median(np.diagonal(np.asarray(self.blocks.d2k), axis1=-2, axis2=-1), axis=-1)

    @cached_property
    def prior_spectrum(self) -> products.Spectrum:
        """Eigenbasis of C."""
        return products.spectrum(self.operators.C)

    @cached_property
    def prior_basis(self) -> bases.Basis:
        """Independent coordinates of the states, those whose density costs the least."""
        if self.is_random:
            return bases.cholesky(self.operators.C)
        return bases.innovations(self.operators.C) or self.prior_spectrum

    @cached_property
    def conditional_spectrum(self) -> products.Spectrum:
        """Eigenbasis of A."""
        return products.spectrum(self.operators.A)

    @cached_property
    def slope_operator(self) -> products.Compressed | NDArray[np.float64] | TensorVariable:
        """D, compressed where that makes its product cheaper."""
        if self.is_random:
            return self.operators.D
        return products.compress_if_cheaper(self.operators.D) or self.operators.D


def smoothed(C, noise, residual: NDArray[np.float64], observed: NDArray[np.intp]):
    r"""Return the posterior mean of every state on the grid, shape ``(time, state)``.

    .. math:: C_{:o}\,(C_{oo} + v I)^{-1}\,r

    Parameters
    ----------
    C : array of float or TensorVariable
        Covariance of the states, shape ``(state, time, time)``.
    noise : array of float or TensorVariable
        Variance v of each state's noise, shape ``(state,)``.
    residual : array of float
        Observations less their prior mean, shape ``(observation, state)``.
    observed : array of int
        Where in the grid the observations are, shape ``(observation,)``.

    Returns
    -------
    array of float or TensorVariable
        A graph where C or the noise is one.
    """
    K = _covariance(C, noise, observed)
    solve = pt.linalg.solve if isinstance(K, TensorVariable) else np.linalg.solve
    weights = solve(K, residual.T[..., None])
    return (C[:, :, observed] @ weights)[..., 0].T


def log_evidence(
    C: NDArray[np.float64],
    noise: NDArray[np.float64],
    residual: NDArray[np.float64],
    observed: NDArray[np.intp],
) -> NDArray[np.float64]:
    r"""Return :math:`\log N(r_k \mid 0, C_{k,oo} + v_k I)` of each state, shape ``(state,)``.

    Parameters are those of :func:`smoothed`, all of them numbers.
    """
    K = _covariance(C, noise, observed)
    misfit = (residual.T * np.linalg.solve(K, residual.T[..., None])[..., 0]).sum(axis=-1)
    return -0.5 * (misfit + np.linalg.slogdet(2 * np.pi * K).logabsdet)


def _covariance(C, noise, observed) -> Any:
    return C[:, observed[:, None], observed] + noise[:, None, None] * np.eye(len(observed))
