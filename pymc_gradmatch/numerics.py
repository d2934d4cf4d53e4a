r"""Matrices, one per state, normal vectors in independent coordinates, and the mode of a density.

Vectors over time have shape ``(..., time, state)``, matrices ``(..., state, time, time)``,
eigenvalues ``(..., state, time)``.

**Long series.**  Cut T times into N blocks of B.  The times of one block know the
others through a few numbers alone: for a Matern kernel, whose process is Markov once
its derivatives are counted in, the process' state at the block's borders.  So all
that stands outside the diagonal blocks of D, or of an inverse Cholesky factor
of C or A + gamma I, has a low rank r:

.. math:: M = \mathrm{blockdiag}(M_{nn}) + P\,S\,Q^\top

with P and Q block diagonal, of r columns per block, and S of ``(N r, N r)``.
r is 3 for Matern52's factors and 6 for its D, whatever the times, the lengthscale and
gamma.  A product costs T (B + 2 r) + (T r / B)^2 instead of T^2, which with the best B
is about T^(4/3).

Such matrices are known as quasi-separable or sequentially semi-separable; the
state-space view of Gaussian processes [1]_ and celerite [2]_ rest on the same
structure.  Both run through time step by step; two levels of blocks are a few
array operations, which are faster at lengths up to thousands.

**Normal vectors.**  Both normal factors of Theorem 1, the prior of the states and the
mismatch of the gradients, are products over states of

.. math:: N(r_k \mid 0, F_k\,\mathrm{diag}(v_k)\,F_k^\top)

The coordinates :math:`F_k^{-1} r_k` are independent, of variance :math:`v_k`,
so that a density needs one product and no factorisation.  Two choices of F:

- :class:`Spectrum`, eigenvectors.  A multiple of the identity, such as ``gamma I``, is
  added to v alone: it can be random at no cost.
- :class:`Innovations`, a triangular F.  A coordinate is what one time adds to
  the times before it; the products are cheap for long series.

The matrices have tens to hundreds of rows.  On several threads BLAS gains nothing there
where cores are free, and loses a factor of ten where others use them:
:func:`on_one_thread`.

References
----------
.. [1] Särkkä, S. and Solin, A. (2019). *Applied Stochastic Differential
   Equations*. Cambridge University Press, chapter 12.
.. [2] Foreman-Mackey, D., Agol, E., Ambikasaran, S. and Angus, R. (2017). Fast
   and scalable Gaussian process modeling with applications to astronomical
   time series. *The Astronomical Journal* 154, 220.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from threading import RLock
from typing import Any, NamedTuple, cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import zero_grad
from pytensor.tensor import TensorConstant, TensorVariable
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from pymc_gradmatch._pymc import Setting


class Spectrum(NamedTuple):
    """Eigenvectors (in columns) and eigenvalues of one covariance per state."""

    vectors: Any
    variances: Any

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return the coordinates of vectors in the eigenbasis, ``(..., state, time)``."""
        return per_state(_transposed(self.vectors), residual).mT

    def residual(self, coordinates: TensorVariable) -> TensorVariable:
        """Return the vectors with these coordinates, ``(..., time, state)``."""
        return per_state(self.vectors, coordinates.mT)


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


def of_recursion(
    transition: NDArray[np.float64],
    entering: NDArray[np.float64],
    leaving: NDArray[np.float64],
    direct: NDArray[np.float64],
    size: int,
    *,
    backward: bool = False,
) -> Compressed:
    r"""Compress what a linear recursion over time makes of its input, in time O(T B).

    .. math:: o_i = l_i^\top a_i + d_i u_i, \qquad a_{i+1} = M_i a_i + e_i u_i, \qquad a_0 = 0

    as the matrix that maps u to o: lower triangular, or upper where time runs backward and
    :math:`a_{i-1}` follows :math:`a_i`.  M, e, l and d are ``(state, time, r, r)``, twice
    ``(state, time, r)``, and ``(state, time)``; the block size B is at most T.
    """
    (n_state, n_time, rank), missing = entering.shape, -entering.shape[1] % size
    n_block = (n_time + missing) // size
    turn = slice(None, None, -1 if backward else 1)

    def cut(array: NDArray) -> NDArray:
        padded = np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])
        return padded[:, turn].reshape(n_state, n_block, size, *array.shape[2:])

    M, e, o, d = map(cut, (transition, entering, leaving, direct))
    near = np.zeros((n_state, n_block, size + rank, size))
    far = np.empty((n_state, n_block, size, rank))
    # What the block's inputs, and what it began with, have made of a.
    made = np.zeros((n_state, n_block, rank, size + rank))
    made[..., size:] = np.eye(rank)
    for i in range(size):
        near[:, :, i], far[:, :, i] = np.split(np.matvec(made.mT, o[:, :, i]), [size], axis=-1)
        near[:, :, i, i] += d[:, :, i]
        made = M[:, :, i] @ made
        made[..., i] += e[:, :, i]
    near[:, :, size:] = made[..., :size]
    coupling = np.zeros((n_state, n_block, rank, n_block, rank))
    for n in range(1, n_block):
        coupling[:, n] = np.einsum("kij,kjmr->kimr", made[:, n - 1, :, size:], coupling[:, n - 1])
        coupling[:, n, :, n - 1] += np.eye(rank)
    if backward:
        near = near[:, ::-1, :, ::-1]
        near = np.concatenate([near[:, :, size - 1 :: -1], near[:, :, size:]], axis=2)
        coupling, far = coupling[:, ::-1, :, ::-1], far[:, ::-1, ::-1]
    return Compressed(near, coupling.reshape(n_state, *(n_block * rank,) * 2), far)


def product(matrix: Compressed | NDArray[np.float64], x):
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


def best_size(n_time: int, rank: int) -> int:
    """Return the block size B with which a product of this rank costs the least."""
    return min(n_time, max(8, round((2 * n_time * rank**2) ** (1 / 3))))


class Innovations(NamedTuple):
    """Unit triangular F and v of one covariance per state: F's inverse and F itself, compressed."""

    variances: Any
    near: Any
    coupling: Any
    far: Any
    factor_near: Any
    factor_coupling: Any
    factor_far: Any

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return what each time adds to those before it, or after, ``(..., state, time)``."""
        return product(Compressed(self.near, self.coupling, self.far), residual).mT

    def residual(self, coordinates: TensorVariable) -> TensorVariable:
        """Return the vectors with these coordinates, ``(..., time, state)``."""
        factor = Compressed(self.factor_near, self.factor_coupling, self.factor_far)
        return product(factor, coordinates.mT)


Basis = Spectrum | Innovations


def basis_of(parameters) -> Basis:
    """Return the basis that was unpacked into the parameters of a random variable."""
    kinds: dict[int, type] = {2: Spectrum, 7: Innovations}
    return kinds[len(parameters)](*parameters)


def basis_signature(parameters) -> str:
    """Return the core shapes of a basis' parameters, as NumPy writes signatures."""
    cores = {
        2: ["(k,t,t)", "(k,t)"],
        7: ["(k,t)", "(k,n,m,b)", "(k,q,q)", "(k,n,b,r)", "(k,n,i,b)", "(k,j,j)", "(k,n,b,h)"],
    }
    return ",".join(cores[len(parameters)])


def normal_log_density(residual: TensorVariable, basis: Basis) -> TensorVariable:
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


def draw_normal(rng, size, basis: Basis):
    """Draw residuals exactly; returns the next generator and ``(*size, time, state)``."""
    variances = basis.variances
    shape = variances.shape if size is None else (*size, *variances.shape[-2:])
    next_rng, noise = pt.random.normal(size=shape, rng=rng, return_next_rng=True)
    return next_rng, basis.residual(pt.sqrt(variances) * noise)


on_one_thread = Setting(partial(threadpool_limits, limits=1, user_api="blas"))
"""Decorates a function so that the BLAS calls inside it use one thread."""


def one_at_a_time[F: Callable](function: F) -> F:
    """Decorate a function so that a second thread waits until the first has left it.

    A function compiled by PyTensor keeps its arguments where the next call overwrites them.
    """
    lock = RLock()

    @wraps(function)
    def waiting(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return cast("F", waiting)


type Density = Callable[[NDArray[np.float64]], tuple[Any, NDArray[np.float64]]]

N_STARTS = 8  # of a search for the mode
N_TOGETHER = 3  # the best of these, from which states and parameters climb together
STEPS = 500
ROUNDS = 2  # each climbs in coordinates made where the one before ended
PROBES = 20  # random directions, from which the diagonal of a Hessian is estimated
SMALLEST_CURVATURE = 1e-2  # no coordinate is stretched more than tenfold in a round
MEMORY = 10  # steps that the L-BFGS of many starts remembers
SUFFICIENT_RISE = 1e-4  # of the rise that the slope promises
SHRINK = 0.3


class Laplace(NamedTuple):
    r"""A normal approximation, :math:`u = \hat u + W q` with q nearly standard normal."""

    location: NDArray[np.float64]
    r"""The mode :math:`\hat u`."""
    factor: NDArray[np.float64]
    r"""W, with :math:`W W^\top` the inverse of the negative Hessian at the mode.

    Of very many coordinates only a diagonal, as a vector.
    """
    log_density: float
    """The log density at the mode."""


def search_mode(
    starts: Iterable[NDArray[np.float64]],
    value: Callable[[NDArray[np.float64]], float],
    *,
    alone: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    together: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64] | None:
    """Return the best point reached from several starts, or None if none can be climbed from.

    From each start, where the density is finite, the parameters climb alone, given the states;
    from the best of these points states and parameters climb together.
    """
    climbed = [alone(start) for start in starts if np.isfinite(value(start))]
    climbed.sort(key=value, reverse=True)
    return max(map(together, climbed[:N_TOGETHER]), key=value, default=None)


def ascend(density: Density, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point that L-BFGS reaches."""

    def objective(point):
        value, gradient = density(point)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros_like(point)
        return -value, -gradient

    return minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS}).x


def laplace(density: Density, start: NDArray[np.float64]) -> Laplace:
    r"""Climb to the mode nearby and approximate the density by a normal there.

    Alternates between climbing in the present coordinates and choosing
    coordinates by the Hessian at the point reached, so that badly scaled
    densities need few steps.  Directions without curvature, along which the
    density is not normal at all, keep a finite scale.

    Parameters
    ----------
    density : callable
        Returns a log density and its gradient at a point.
    start : array of float
        Shape ``(n,)``.

    Returns
    -------
    Laplace

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import laplace
    >>> precision = np.array([[2.0, 1.0], [1.0, 3.0]])
    >>> fit = laplace(lambda u: (-0.5 * u @ precision @ u, -precision @ u), np.ones(2))
    >>> bool(np.allclose(fit.factor @ fit.factor.T, np.linalg.inv(precision)))
    True
    """
    fit = Laplace(start, np.eye(len(start)), density(start)[0])
    for _ in range(ROUNDS):
        fit = fit._replace(factor=_whitened(density, fit))
        top = fit.location + fit.factor @ ascend(moved(density, fit), np.zeros(len(start)))
        fit = fit._replace(location=top, log_density=density(top)[0])
    return fit._replace(factor=_whitened(density, fit))


def moved(density: Density, around: Laplace) -> Density:
    """Return the density as a function of q, where u = location + factor q."""

    def rotated(q):
        value, gradient = density(around.location + around.factor @ q)
        return value, around.factor.T @ gradient

    return rotated


def _whitened(density: Density, around: Laplace) -> NDArray[np.float64]:
    """Return the factor that the Hessian at a point asks for, starting from another."""
    curvature = -hessian(density, around.location, around.factor)
    variances, vectors = np.linalg.eigh(curvature)
    scale = 1 / np.sqrt(np.maximum(np.abs(variances), SMALLEST_CURVATURE))
    return around.factor @ (vectors * scale)


def hessian(
    density: Density, point: NDArray[np.float64], factor: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the Hessian by q at zero, from differences of gradients; u is point + factor q."""
    columns = np.array([_difference(density, point, column) for column in factor.T]) @ factor
    return np.nan_to_num((columns + columns.T) / 2)


def conditional_sd(
    density: Density, point: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Estimate each coordinate's standard deviation given the others, at a handful of gradients.

    From the diagonal of the Hessian H by Hutchinson's estimate, the mean of
    :math:`z \circ H z` over vectors z of random signs.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import conditional_sd
    >>> precision = np.array([4.0, 100.0])
    >>> rng = np.random.default_rng(1)
    >>> conditional_sd(lambda u: (0, -precision * u), np.zeros(2), rng).round(3)
    array([0.5, 0.1])
    """
    signs = rng.choice([-1.0, 1.0], size=(PROBES, len(point)))
    diagonal = np.mean([z * _difference(density, point, z) for z in signs], axis=0)
    return 1 / np.sqrt(np.maximum(np.abs(np.nan_to_num(diagonal)), SMALLEST_CURVATURE))


def _difference(density: Density, point, direction) -> NDArray[np.float64]:
    """Return the Hessian times a direction."""
    step = 1e-4
    ahead, behind = density(point + step * direction)[1], density(point - step * direction)[1]
    return (ahead - behind) / (2 * step)


def settle(
    density: Callable[[NDArray, NDArray], tuple[NDArray, NDArray]],
    starts: NDArray[np.float64],
    *,
    steps: int,
    tolerance: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Climb by L-BFGS from every start, in coordinates where the curvature is about one.

    The density maps points, ``(point, n)``, and the places of their starts to log densities and
    gradients.  A climb ends after so many steps, or where every entry of the gradient is within
    the tolerance.  Returns where climbs end, ``(start, n)``, and the largest entry of the gradient
    there.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import settle
    >>> centers = np.array([[1.0], [2.0]])
    >>> def density(z, place):
    ...     away = z - centers[place]
    ...     return -np.square(away).sum(axis=1), -2 * away
    >>> settle(density, np.zeros((2, 1)), steps=20, tolerance=1e-6)[0].round(3)
    array([[1.],
           [2.]])
    """
    tops, slopes = starts.copy(), np.full(len(starts), np.inf)
    place = np.arange(len(starts))
    z = starts
    value, gradient = density(z, place)
    width = np.ones(len(z))
    pairs = np.zeros((MEMORY, 2, *z.shape))
    direction = gradient
    for step in range(steps):
        slope = np.abs(gradient).max(axis=1)
        tops[place], slopes[place] = z, np.where(np.isfinite(value), slope, np.inf)
        going = np.isfinite(value) & (slope > tolerance)
        if not going.any():
            break
        place, z, value, gradient = place[going], z[going], value[going], gradient[going]
        width, direction, pairs = width[going], direction[going], pairs[:, :, going]

        ahead = z + width[:, None] * direction
        value_there, gradient_there = density(ahead, place)
        promised = width * (gradient * direction).sum(axis=1)
        accepted = value_there >= value + SUFFICIENT_RISE * promised
        moved = accepted[:, None]
        pairs[step % MEMORY, 0] = np.where(moved, ahead - z, 0)
        pairs[step % MEMORY, 1] = np.where(moved, gradient - gradient_there, 0)
        z = np.where(moved, ahead, z)
        value = np.where(accepted, value_there, value)
        gradient = np.where(moved, gradient_there, gradient)
        newest_first = np.roll(pairs[::-1], step % MEMORY + 1, axis=0)
        direction = _uphill(gradient, newest_first)
        width = np.where(accepted, 1.0, SHRINK * width)
    return tops, slopes


def _uphill(gradient, newest_first) -> NDArray[np.float64]:
    """Apply the inverse Hessian that pairs of moves and changes of the gradient tell of."""
    curvatures = np.einsum("mpn,mpn->mp", newest_first[:, 0], newest_first[:, 1])
    # A pair without curvature, such as that of a step not taken, is left out.
    inverse = np.where(curvatures > 0, 1 / np.where(curvatures > 0, curvatures, 1), 0)
    direction, weights = gradient, []
    for (move, change), scale in zip(newest_first, inverse, strict=True):
        weight = scale * (move * direction).sum(axis=1)
        direction = direction - weight[:, None] * change
        weights.append(weight)
    oldest_first = zip(newest_first[::-1], inverse[::-1], weights[::-1], strict=True)
    for (move, change), scale, weight in oldest_first:
        correction = weight - scale * (change * direction).sum(axis=1)
        direction = direction + correction[:, None] * move
    return direction
