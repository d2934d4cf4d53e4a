r"""Products with matrices of low rank outside their diagonal blocks.

Cut T times into N blocks of B.  The times of one block know the others through
a few numbers alone: for a Matern kernel, whose process is Markov once its
derivatives are counted in, the process' state at the block's borders.  So all
that stands outside the diagonal blocks of D, or of an inverse Cholesky factor
of C or A + gamma I, has a low rank r:

.. math:: M = \mathrm{blockdiag}(M_{nn}) + P\,S\,Q^\top

with P and Q block diagonal, of r columns per block, and S of ``(N r, N r)``.
r is at most 3 for Matern52's factors and 6 for its D, 2 and 4 for Matern32,
whatever the times, the lengthscale and gamma; smooth kernels such as ExpQuad
have about 12 numerically.  A product costs T (B + 2 r) + (T r / B)^2 instead
of T^2, which with the best B is about T^(4/3).

Such matrices are known as quasi-separable or sequentially semi-separable; the
state-space view of Gaussian processes [1]_ and celerite [2]_ rest on the same
structure.  Both run through time step by step; two levels of blocks are a few
array operations, which are faster at lengths up to thousands.

Vectors over time have shape ``(..., time, state)``, matrices
``(state, time, time)``, as in ``spectral``.

References
----------
.. [1] Särkkä, S. and Solin, A. (2019). *Applied Stochastic Differential
   Equations*. Cambridge University Press, chapter 12.
.. [2] Foreman-Mackey, D., Agol, E., Ambikasaran, S. and Angus, R. (2017). Fast
   and scalable Gaussian process modeling with applications to astronomical
   time series. *The Astronomical Journal* 154, 220.
"""

from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.spectral import matvec, per_state

__all__ = ["Compressed", "compress", "compress_if_cheaper", "product"]

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
