"""The Gaussian processes at the times of a grid: C, D, A, and bases for their densities."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch import normal, spectral, structured
from pymc_gradmatch.derivatives import Blocks
from pymc_gradmatch.operators import Operators, blocks_of, conditional_operators

__all__ = ["GridProcess"]


@dataclass(frozen=True, eq=False)
class GridProcess:
    """Kernels and nuggets on a grid, one per state, whatever the data.

    In standardised units; graphs where hyperparameters are random.  Bases are
    computed when they are first asked for.

    Parameters
    ----------
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

    covs: tuple[pm.gp.cov.BaseCovariance, ...]
    nugget: NDArray[np.float64]
    blocks: Blocks
    operators: Operators = field(init=False)

    def __post_init__(self):
        operators = conditional_operators(self.blocks, self.nugget)
        object.__setattr__(self, "operators", operators)

    def with_covs(self, covs: tuple[pm.gp.cov.BaseCovariance, ...], t: NDArray[np.float64]) -> Self:
        """Return kernels on a grid of their own, with the same nugget."""
        return replace(self, covs=covs, blocks=blocks_of(covs, t))

    def with_nugget(self, nugget: NDArray[np.float64]) -> Self:
        """Return the same kernels with another nugget."""
        return replace(self, nugget=nugget)

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
    def prior_spectrum(self) -> spectral.Spectrum:
        """Eigenbasis of C."""
        return spectral.spectrum(self.operators.C)

    @cached_property
    def prior_basis(self) -> normal.Basis:
        """Independent coordinates of the states, those whose density costs the least."""
        if self.is_random:
            return normal.cholesky(self.operators.C)
        return normal.innovations(self.operators.C) or self.prior_spectrum

    @cached_property
    def conditional_spectrum(self) -> spectral.Spectrum:
        """Eigenbasis of A."""
        return spectral.spectrum(self.operators.A)

    @cached_property
    def slope_operator(self) -> structured.Compressed | NDArray[np.float64] | TensorVariable:
        """D, compressed where that makes its product cheaper."""
        if self.is_random:
            return self.operators.D
        return structured.compress_if_cheaper(self.operators.D) or self.operators.D
