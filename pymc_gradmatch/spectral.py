"""Normal vectors in the eigenbasis of their covariance, one per state.

Both normal factors of Theorem 1, the prior of the states and the mismatch of
the gradients, are products over states of ``N(r_k | 0, V_k diag(v_k) V_k')``.
In the eigenbasis the density needs one batched product and no
factorisation, and a multiple of the identity, such as ``gamma I``, is added to
the eigenvalues alone: it can be random at no cost.

Vectors over time have shape ``(..., time, state)``, matrices
``(..., state, time, time)``, eigenvalues ``(..., state, time)``.
"""

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import zero_grad
from pytensor.tensor.variable import TensorConstant, TensorVariable

__all__ = ["Spectrum", "draw", "log_density", "per_state", "smallest_reliable", "spectrum"]


class Spectrum(NamedTuple):
    """Eigenvectors (in columns) and eigenvalues of one covariance per state."""

    vectors: NDArray[np.float64]
    variances: NDArray[np.float64]


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
    if not isinstance(matrices, TensorVariable) and not isinstance(x, TensorVariable):
        return np.matvec(matrices, x.mT).mT
    # Sums of products instead of BLAS calls: they compile five times faster.
    # A sum over rows is vectorised, one along a row is not, so the value and
    # the derivative are each written in the form whose loop is fast; what is
    # added and subtracted cancels when the graph is compiled.
    matrices, vectors = pt.as_tensor(matrices), pt.as_tensor(x).mT
    fast_value = (_transposed(matrices) * vectors[..., :, None]).sum(axis=-2)
    fast_derivative = (matrices * vectors[..., None, :]).sum(axis=-1)
    return (zero_grad(fast_value) + (fast_derivative - zero_grad(fast_derivative))).mT


def _transposed(matrices: TensorVariable) -> TensorVariable:
    if isinstance(matrices, TensorConstant):
        return pt.constant(np.ascontiguousarray(matrices.data.mT))
    return matrices.mT


def log_density(
    residual: TensorVariable, vectors: TensorVariable, variances: TensorVariable
) -> TensorVariable:
    r"""Write the log density of residuals, summed over times and states.

    .. math:: \sum_k \log N(r_k \mid 0, V_k\,\mathrm{diag}(v_k)\,V_k^\top)

    The result has the batch shape of the arguments.
    """
    coordinates = per_state(_transposed(vectors), residual).mT
    terms = pt.square(coordinates) / variances + pt.log(2 * np.pi * variances)
    return -0.5 * terms.sum(axis=(-2, -1))


def draw(rng, size, vectors: TensorVariable, variances: TensorVariable):
    """Draw residuals exactly; returns the next generator and ``(*size, time, state)``."""
    shape = variances.shape if size is None else (*size, *variances.shape[-2:])
    next_rng, noise = pt.random.normal(size=shape, rng=rng, return_next_rng=True)
    return next_rng, per_state(vectors, (pt.sqrt(variances) * noise).mT)
