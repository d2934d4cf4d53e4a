r"""Normal vectors over time, one covariance per state, in independent coordinates.

Both normal factors of Theorem 1, the prior of the states and the mismatch of
the gradients, are products over states of

.. math:: N(r_k \mid 0, F_k\,\mathrm{diag}(v_k)\,F_k^\top)

The coordinates :math:`F_k^{-1} r_k` are independent, of variance :math:`v_k`,
so that a density needs one product and no factorisation.  Two choices of F:

- :class:`~pymc_gradmatch.numerics.products.Spectrum`, eigenvectors.  A multiple of the
  identity, such as ``gamma I``, is added to v alone: it can be random at no cost.
- :class:`Innovations`, a triangular F.  A coordinate is what one time adds to
  the times before it; the products are cheap for long series, see
  ``structured``.
- :class:`Cholesky`, the same F of a covariance that is a graph, because its
  hyperparameters are random: it is factorised at every evaluation.
"""

from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor import TensorConstant, TensorVariable
from scipy.linalg import solve_triangular

from pymc_gradmatch.numerics import products
from pymc_gradmatch.numerics.products import (
    Compressed,
    Spectrum,
    compress_if_cheaper,
    per_state,
    product,
)

__all__ = [
    "Basis",
    "Cholesky",
    "Innovations",
    "basis_of",
    "cholesky",
    "draw",
    "innovations",
    "log_density",
    "signature",
]


class Innovations(NamedTuple):
    """Unit lower triangular F and v of one covariance per state, and F's compressed inverse."""

    vectors: Any
    variances: Any
    near: Any
    coupling: Any
    far: Any

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return what each time adds to the times before it, ``(..., state, time)``."""
        return product(Compressed(self.near, self.coupling, self.far), residual).mT


class Cholesky(NamedTuple):
    """The lower triangular factor of one covariance per state."""

    factor: TensorVariable

    @property
    def vectors(self) -> TensorVariable:
        """F, unit lower triangular."""
        return self.factor / self._scales[..., None, :]

    @property
    def variances(self) -> TensorVariable:
        """Variances v of the coordinates, ``(state, time)``."""
        return pt.square(self._scales)

    @property
    def _scales(self) -> TensorVariable:
        return pt.diagonal(self.factor, axis1=-2, axis2=-1)

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return what each time adds to the times before it, ``(..., state, time)``."""
        return self._scales * pt.linalg.solve_triangular(
            self.factor, residual.mT, lower=True, b_ndim=1
        )


Basis = Spectrum | Innovations | Cholesky


def cholesky(covariance: TensorVariable) -> Cholesky:
    """Factorise ``(state, time, time)``; NaN, to samplers a density of zero, where that fails."""
    return Cholesky(pt.linalg.cholesky(covariance, on_error="nan"))


def innovations(covariance: NDArray[np.float64]) -> Innovations | None:
    """Factorise matrices of shape ``(state, time, time)``; None where this does not pay."""
    if covariance.shape[-1] < products.SHORTEST:
        return None
    try:
        factors = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return None
    scales = np.diagonal(factors, axis1=-2, axis2=-1)
    unit = factors / scales[:, None, :]
    identity = np.eye(covariance.shape[-1])
    inverse = [solve_triangular(f, identity, lower=True, unit_diagonal=True) for f in unit]
    compressed = compress_if_cheaper(np.stack(inverse))
    return compressed and Innovations(unit, scales**2, *compressed)


def basis_of(parameters) -> Basis:
    """Return the basis that was unpacked into the parameters of a random variable."""
    kinds: dict[int, type] = {1: Cholesky, 2: Spectrum, 5: Innovations}
    return kinds[len(parameters)](*parameters)


def signature(parameters) -> str:
    """Return the core shapes of a basis' parameters, as NumPy writes signatures."""
    return ",".join(["(k,t,t)", "(k,t)", "(k,n,m,b)", "(k,q,q)", "(k,n,b,r)"][: len(parameters)])


def log_density(residual: TensorVariable, basis: Basis) -> TensorVariable:
    r"""Write the log density of residuals, summed over times and states.

    .. math:: \sum_k \log N(r_k \mid 0, F_k\,\mathrm{diag}(v_k)\,F_k^\top)

    The result has the batch shape of the residual.
    """
    terms = pt.square(basis.coordinates(residual)) * _reciprocal(basis.variances)
    terms += pt.log(2 * np.pi * basis.variances)
    return -0.5 * terms.sum(axis=(-2, -1))


def _reciprocal(variances: TensorVariable) -> TensorVariable:
    # Of a constant at once: gradients would divide in their innermost loop.
    if isinstance(variances, TensorConstant):
        return pt.constant(1 / variances.data)
    return pt.reciprocal(variances)


def draw(rng, size, basis: Basis):
    """Draw residuals exactly; returns the next generator and ``(*size, time, state)``."""
    variances = basis.variances
    shape = variances.shape if size is None else (*size, *variances.shape[-2:])
    next_rng, noise = pt.random.normal(size=shape, rng=rng, return_next_rng=True)
    return next_rng, per_state(basis.vectors, (pt.sqrt(variances) * noise).mT)
