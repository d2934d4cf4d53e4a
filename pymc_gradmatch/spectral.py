"""Products with one matrix per state, and eigenbases of covariances.

Vectors over time have shape ``(..., time, state)``, matrices
``(..., state, time, time)``, eigenvalues ``(..., state, time)``.
"""

from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import zero_grad
from pytensor.tensor.variable import TensorConstant, TensorVariable

__all__ = ["Spectrum", "matvec", "per_state", "smallest_reliable", "spectrum"]


class Spectrum(NamedTuple):
    """Eigenvectors (in columns) and eigenvalues of one covariance per state."""

    vectors: Any
    variances: Any

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return the coordinates of vectors in the eigenbasis, ``(..., state, time)``."""
        return per_state(_transposed(self.vectors), residual).mT


def spectrum(covariance: NDArray[np.float64]) -> Spectrum:
    """Decompose symmetric matrices of shape ``(state, time, time)``."""
    variances, vectors = np.linalg.eigh(covariance)
    return Spectrum(vectors, variances)


def smallest_reliable(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the size of rounding errors in each state's eigenvalues, shape ``(state, 1)``."""
    n_time = variances.shape[-1]
    return n_time * np.finfo(float).eps * variances.max(axis=-1, keepdims=True)


def per_state(matrices, x):
    """Multiply each state's vector over time by its matrix: one batched product.

    Works on NumPy arrays and on PyTensor variables alike.
    """
    return matvec(matrices, x.mT).mT


def matvec(matrices, vectors):
    """Multiply vectors ``(..., n)`` by matrices ``(..., m, n)``, as :func:`numpy.matvec`.

    Works on NumPy arrays and on PyTensor variables alike.
    """
    if not isinstance(matrices, TensorVariable) and not isinstance(vectors, TensorVariable):
        return np.matvec(matrices, vectors)
    # Sums of products instead of BLAS calls: they compile five times faster.
    # A sum over rows is vectorised, one along a row is not, so the value and
    # the derivative are each written in the form whose loop is fast; what is
    # added and subtracted cancels when the graph is compiled.
    matrices, vectors = pt.as_tensor(matrices), pt.as_tensor(vectors)
    fast_value = (_transposed(matrices) * vectors[..., :, None]).sum(axis=-2)
    fast_derivative = (matrices * vectors[..., None, :]).sum(axis=-1)
    return zero_grad(fast_value) + (fast_derivative - zero_grad(fast_derivative))


def _transposed(matrices: TensorVariable) -> TensorVariable:
    if isinstance(matrices, TensorConstant):
        return pt.constant(np.ascontiguousarray(matrices.data.mT))
    return matrices.mT
