"""Products with one matrix per state, and eigenbases of covariances.

Vectors over time have shape ``(..., time, state)``, matrices
``(..., state, time, time)``, eigenvalues ``(..., state, time)``.
"""

from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import zero_grad
from pytensor.tensor import TensorConstant, TensorVariable

__all__ = [
    "Compressed",
    "Spectrum",
    "compress",
    "compress_if_cheaper",
    "matvec",
    "per_state",
    "product",
    "smallest_reliable",
    "spectrum",
]


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


SHORTEST = 100  # below, a dense product is about as fast and compiles faster
WORTHWHILE = 0.5  # largest share of the dense product's multiplications
TOLERANCE = 1e-8
# Data sets whose ranks differ by little then share one compiled density.
RANK_STEP = 3


class Compressed(NamedTuple):
    """A matrix per state: dense in diagonal blocks, of low rank outside of them.

    Arrays, or tensors of known shapes.
    """

    near: Any
    """Diagonal blocks, and below each one its Q', shape ``(state, N, B + r, B)``."""
    coupling: Any
    """S, from all blocks' r numbers to all blocks' r numbers, ``(state, N r, N r)``."""
    far: Any
    """P, shape ``(state, N, B, r)``."""


def compress_if_cheaper(matrices: NDArray[np.float64]) -> Compressed | None:
    """Compress where this at least halves the multiplications of a product, else return None."""
    n_time = matrices.shape[-1]
    if n_time < SHORTEST:
        return None
    trial = round((18 * n_time) ** (1 / 3))  # the best one for rank 3
    *_, rank = _bases(_padded(matrices, trial), trial)
    size = _best_size(n_time, rank)
    cost = n_time * (size + 2 * rank) + (n_time * rank / size) ** 2
    if rank == trial or cost > WORTHWHILE * n_time**2:
        return None
    return compress(matrices, size)


def compress(matrices: NDArray[np.float64], size: int) -> Compressed:
    """Cut one matrix per state into blocks, and compress what is outside the diagonal.

    Parameters
    ----------
    matrices : array of float
        Shape ``(state, time, time)``.
    size : int
        Block size B, at most T.

    Returns
    -------
    Compressed
        Singular values of a block row or block column below 1e-8 of the
        largest are left out.
    """
    padded = _padded(matrices, size)
    left, right, rank = _bases(padded, size)
    n_state, n_block = left.shape[:2]
    blocks = padded.reshape(n_state, n_block, size, n_block, size).swapaxes(2, 3)
    diagonal = np.arange(n_block)
    own = blocks[:, diagonal, diagonal]
    coupling = left.mT[:, :, None] @ blocks @ right[:, None]
    coupling[:, diagonal, diagonal] = 0
    length = n_block * rank
    return Compressed(
        near=np.concatenate([own, right.mT], axis=-2),
        coupling=coupling.swapaxes(2, 3).reshape(n_state, length, length),
        far=left,
    )


def product(matrix: Compressed | NDArray[np.float64] | TensorVariable, x):
    """Multiply each state's vector over time by its matrix; shape ``(..., time, state)``.

    Works on NumPy arrays and on PyTensor variables alike.
    """
    if not isinstance(matrix, Compressed):
        return per_state(matrix, x)
    on_numpy = all(isinstance(array, np.ndarray) for array in (*matrix, x))
    xp: Any = np if on_numpy else pt
    near, coupling, far, x = (*matrix, x) if on_numpy else map(pt.as_tensor, (*matrix, x))
    n_state, n_block, size, rank = _shape(far)
    *batch, n_time, _ = _shape(x)
    padding = xp.zeros((*batch, n_state, n_block * size - n_time))
    vectors = xp.concatenate([x.mT, padding], axis=-1)
    both = matvec(near, vectors.reshape((*batch, n_state, n_block, size)))
    there = matvec(coupling, both[..., size:].reshape((*batch, n_state, n_block * rank)))
    back = matvec(far, there.reshape((*batch, n_state, n_block, rank)))
    total = (both[..., :size] + back).reshape((*batch, n_state, n_block * size))
    return total[..., :n_time].mT


def _shape(x) -> list:
    """Return the shape in numbers, where these are known."""
    known = x.shape if isinstance(x, np.ndarray) else x.type.shape
    return [x.shape[i] if n is None else n for i, n in enumerate(known)]


def _best_size(n_time: int, rank: int) -> int:
    return min(n_time, max(8, round((2 * n_time * rank**2) ** (1 / 3))))


def _padded(matrices: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    missing = -matrices.shape[-1] % size
    return np.pad(matrices, [(0, 0), (0, missing), (0, missing)])


def _bases(matrices: NDArray[np.float64], size: int):
    """Return orthonormal bases of block rows and columns, ``(state, N, B, r)`` each, and r."""
    n_state, length, _ = matrices.shape
    outside = matrices.reshape(n_state, length // size, size, length // size, size).copy()
    diagonal = np.arange(length // size)
    outside[:, diagonal, :, diagonal] = 0
    outside = outside.reshape(n_state, length, length)
    sides = [m.reshape(n_state, -1, size, length) for m in (outside, outside.mT)]
    # Left singular vectors from a triangular factor: rows are short, columns many.
    factors = [np.linalg.qr(side.mT, mode="r").mT for side in sides]
    decomposed = [np.linalg.svd(factor, full_matrices=False)[:2] for factor in factors]
    needed = max(
        int((values > TOLERANCE * values.max(axis=(-2, -1), keepdims=True)).sum(axis=-1).max())
        for _, values in decomposed
    )
    rank = min(size, max(1, -(-needed // RANK_STEP)) * RANK_STEP)
    left, right = (vectors[..., :rank] for vectors, _ in decomposed)
    return left, right, rank
