r"""Matrices, one per state, normal vectors in independent coordinates, and modes of densities.

Vectors over time have shape ``(..., time, state)``, matrices ``(..., state, time, time)``,
eigenvalues ``(..., state, time)``.

**Normal vectors.**  Both normal factors of Theorem 1, the prior of the states and the
mismatch of the gradients, are products over states of

.. math:: N(r_k \mid 0, F_k\,\mathrm{diag}(v_k)\,F_k^\top)

The coordinates :math:`F_k^{-1} r_k` are independent with variances :math:`v_k`, so a density
needs one product and no factorisation.  F has the eigenvectors (:class:`Spectrum`), so that a
random multiple of the identity, such as ``gamma I``, is added to v; or it is triangular
(:class:`Innovations`), which is cheap for long series.

**Long series.**  Cut T times into N blocks of B.  Outside the diagonal blocks D, and the
triangular factors of C and A + gamma I, have low rank r, because blocks depend on each other
only through the state of a Markov process at their borders:

.. math:: M = \mathrm{blockdiag}(M_{nn}) + P\,S\,Q^\top

with block diagonal P and Q of r columns per block and S of ``(N r, N r)``; r is 3 for the
factors of Matern52 and 6 for its D.  A product costs T (B + 2 r) + (T r / B)^2, with the best B
about T^(4/3), in place of T^2.  Such matrices are called quasi-separable [1]_ [2]_; two levels
of blocks need a few array operations, no recursion over time.

BLAS gains nothing from several threads at tens to hundreds of rows, and is ten times slower
where other processes use the cores: :func:`on_one_thread`.

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
        return multiply(_transposed(self.vectors), residual).mT

    def residual(self, coordinates: TensorVariable) -> TensorVariable:
        """Return the vectors with these coordinates, ``(..., time, state)``."""
        return multiply(self.vectors, coordinates.mT)


def spectrum(covariance: NDArray[np.float64]) -> Spectrum:
    """Decompose symmetric matrices of shape ``(state, time, time)``."""
    variances, vectors = np.linalg.eigh(covariance)
    return Spectrum(vectors, variances)


def smallest_reliable(variances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the size of rounding errors in each state's eigenvalues, shape ``(state, 1)``."""
    n_time = variances.shape[-1]
    return n_time * np.finfo(float).eps * variances.max(axis=-1, keepdims=True)


def matvec(matrices, vectors):
    """Multiply vectors ``(..., n)`` by matrices ``(..., m, n)``, as :func:`numpy.matvec`.

    Works on NumPy arrays and on PyTensor variables.
    """
    if not isinstance(matrices, TensorVariable) and not isinstance(vectors, TensorVariable):
        return np.matvec(matrices, vectors)
    # Sums of products compile five times faster than BLAS calls.  Sums over rows are vectorised,
    # sums along a row are not, so value and derivative are written in two forms; what is
    # added and subtracted cancels when the graph is compiled.
    matrices, vectors = pt.as_tensor(matrices), pt.as_tensor(vectors)
    fast_value = (_transposed(matrices) * vectors[..., :, None]).sum(axis=-2)
    fast_derivative = (matrices * vectors[..., None, :]).sum(axis=-1)
    return zero_grad(fast_value) + (fast_derivative - zero_grad(fast_derivative))


def _transposed(matrices: TensorVariable) -> TensorVariable:
    if isinstance(matrices, TensorConstant):
        return pt.constant(np.ascontiguousarray(matrices.data.mT))
    return matrices.mT


class BlockLowRank(NamedTuple):
    """A matrix per state, dense in diagonal blocks and of low rank outside them."""

    blocks: Any
    """Diagonal blocks, and below each one its Q', shape ``(state, N, B + r, B)``."""
    coupling: Any
    """S, shape ``(state, N r, N r)``."""
    outputs: Any
    """P, shape ``(state, N, B, r)``."""


def compress_recursion(
    transition: NDArray[np.float64],
    entering: NDArray[np.float64],
    leaving: NDArray[np.float64],
    direct: NDArray[np.float64],
    size: int,
    *,
    backward: bool = False,
) -> BlockLowRank:
    r"""Return the matrix of a linear recursion from u to o, in time O(T B).

    .. math:: o_i = l_i^\top a_i + d_i u_i, \qquad a_{i+1} = M_i a_i + e_i u_i, \qquad a_0 = 0

    It is lower triangular, or upper if time runs backward and :math:`a_{i-1}` follows
    :math:`a_i`.  M, e, l and d have shapes ``(state, time, r, r)``, twice ``(state, time, r)``,
    and ``(state, time)``; the block size B is at most T.
    """
    (n_state, n_time, rank), missing = entering.shape, -entering.shape[1] % size
    n_block = (n_time + missing) // size
    in_order = slice(None, None, -1 if backward else 1)

    def cut(array: NDArray) -> NDArray:
        padded = np.pad(array, [(0, 0), (0, missing), *[(0, 0)] * (array.ndim - 2)])
        return padded[:, in_order].reshape(n_state, n_block, size, *array.shape[2:])

    M, e, o, d = map(cut, (transition, entering, leaving, direct))
    blocks = np.zeros((n_state, n_block, size + rank, size))
    outputs = np.empty((n_state, n_block, size, rank))
    # a as a linear function of the block's inputs and of a at its start.
    a = np.zeros((n_state, n_block, rank, size + rank))
    a[..., size:] = np.eye(rank)
    for i in range(size):
        blocks[:, :, i], outputs[:, :, i] = np.split(np.matvec(a.mT, o[:, :, i]), [size], axis=-1)
        blocks[:, :, i, i] += d[:, :, i]
        a = M[:, :, i] @ a
        a[..., i] += e[:, :, i]
    blocks[:, :, size:] = a[..., :size]
    coupling = np.zeros((n_state, n_block, rank, n_block, rank))
    for n in range(1, n_block):
        coupling[:, n] = np.einsum("kij,kjmr->kimr", a[:, n - 1, :, size:], coupling[:, n - 1])
        coupling[:, n, :, n - 1] += np.eye(rank)
    if backward:
        blocks = blocks[:, ::-1, :, ::-1]
        blocks = np.concatenate([blocks[:, :, size - 1 :: -1], blocks[:, :, size:]], axis=2)
        coupling, outputs = coupling[:, ::-1, :, ::-1], outputs[:, ::-1, ::-1]
    return BlockLowRank(blocks, coupling.reshape(n_state, *(n_block * rank,) * 2), outputs)


def multiply(matrix: BlockLowRank | Any, x):
    """Multiply each state's vector over time, ``(..., time, state)``, by its matrix.

    Works on NumPy arrays and on PyTensor variables.
    """
    if not isinstance(matrix, BlockLowRank):
        return matvec(matrix, x.mT).mT
    on_numpy = all(isinstance(array, np.ndarray) for array in (*matrix, x))
    xp: Any = np if on_numpy else pt
    blocks, coupling, outputs, x = (*matrix, x) if on_numpy else map(pt.as_tensor, (*matrix, x))
    n_state, n_block, size, rank = _shape(outputs)
    *batch, n_time, _ = _shape(x)
    padding = xp.zeros((*batch, n_state, n_block * size - n_time))
    vectors = xp.concatenate([x.mT, padding], axis=-1)
    within = matvec(blocks, vectors.reshape((*batch, n_state, n_block, size)))
    coupled = matvec(coupling, within[..., size:].reshape((*batch, n_state, n_block * rank)))
    across = matvec(outputs, coupled.reshape((*batch, n_state, n_block, rank)))
    total = (within[..., :size] + across).reshape((*batch, n_state, n_block * size))
    return total[..., :n_time].mT


def _shape(x) -> list:
    """Return the shape, in numbers where these are known."""
    known = x.shape if isinstance(x, np.ndarray) else x.type.shape
    return [x.shape[i] if n is None else n for i, n in enumerate(known)]


def block_size(n_time: int, rank: int) -> int:
    """Return the block size B with which a product of this rank costs the least."""
    return min(n_time, max(8, round((2 * n_time * rank**2) ** (1 / 3))))


class Innovations(NamedTuple):
    """v, and F's inverse and F itself in block low-rank form, of one covariance per state."""

    variances: Any
    inverse_blocks: Any
    inverse_coupling: Any
    inverse_outputs: Any
    factor_blocks: Any
    factor_coupling: Any
    factor_outputs: Any

    def coordinates(self, residual: TensorVariable) -> TensorVariable:
        """Return the innovations of vectors, ``(..., state, time)``."""
        return multiply(BlockLowRank(*self[1:4]), residual).mT

    def residual(self, coordinates: TensorVariable) -> TensorVariable:
        """Return the vectors with these coordinates, ``(..., time, state)``."""
        return multiply(BlockLowRank(*self[4:]), coordinates.mT)


Basis = Spectrum | Innovations


def basis_of(parameters) -> Basis:
    """Return the basis that was unpacked into the parameters of a random variable."""
    return (Spectrum if len(parameters) == 2 else Innovations)(*parameters)


def basis_signature(parameters) -> str:
    """Return the core shapes of a basis' parameters, as NumPy writes signatures."""
    if len(parameters) == 2:
        return "(k,t,t),(k,t)"
    return "(k,t),(k,n,m,b),(k,q,q),(k,n,b,r),(k,n,i,b),(k,j,j),(k,n,b,h)"


def normal_log_density(residual: TensorVariable, basis: Basis) -> TensorVariable:
    r"""Write the log density of residuals, summed over times and states.

    .. math:: \sum_k \log N(r_k \mid 0, F_k\,\mathrm{diag}(v_k)\,F_k^\top)

    The result has the batch shape of the residual.
    """
    terms = pt.square(basis.coordinates(residual)) * _reciprocal(basis.variances)
    terms += pt.log(2 * np.pi * basis.variances)
    return -0.5 * terms.sum(axis=(-2, -1))


def _reciprocal(variances: TensorVariable) -> TensorVariable:
    # Computed now if constant: gradients would divide in their innermost loop.
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
"""Decorates a function whose BLAS calls use one thread."""


def one_at_a_time[F: Callable](function: F) -> F:
    """Decorate a function that only one thread at a time may run.

    Such as those compiled by PyTensor, whose calls share their arguments' memory.
    """
    lock = RLock()

    @wraps(function)
    def waiting(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return cast("F", waiting)


type Density = Callable[[NDArray[np.float64]], tuple[Any, NDArray[np.float64]]]

N_STARTS = 8  # of a search for the mode
N_JOINT = 3  # best of these, from which states and parameters are optimised jointly
MAX_STEPS = 500  # of one optimisation
N_ROUNDS = 2  # of optimisation, each in coordinates made where the last ended
N_PROBES = 20  # random directions, from which the diagonal of a Hessian is estimated
SMALLEST_CURVATURE = 1e-2  # so that no coordinate is stretched more than tenfold in a round
MEMORY = 10  # steps of the L-BFGS of many starts
SUFFICIENT_INCREASE = 1e-4  # relative to the slope (Armijo)
BACKTRACKING = 0.3  # factor of the step


class Laplace(NamedTuple):
    r"""A normal approximation, :math:`u = \hat u + W q` with q nearly standard normal."""

    location: NDArray[np.float64]
    r"""The mode :math:`\hat u`."""
    factor: NDArray[np.float64]
    r"""W, with :math:`W W^\top` the inverse of the negative Hessian at the mode.

    Only a diagonal, as a vector, of very many coordinates.
    """
    log_density: float
    """The log density at the mode."""


def search_mode(
    starts: Iterable[NDArray[np.float64]],
    value: Callable[[NDArray[np.float64]], float],
    *,
    parameters: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    jointly: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64] | None:
    """Return the best point reached from several starts, or None if no start is possible.

    From each start of finite density ``parameters`` optimises the parameters given the states;
    from the best of these points ``jointly`` optimises states and parameters.
    """
    found = [parameters(start) for start in starts if np.isfinite(value(start))]
    found.sort(key=value, reverse=True)
    return max(map(jointly, found[:N_JOINT]), key=value, default=None)


def optimise(density: Density, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point that L-BFGS reaches from a point of finite density.

    SciPy's line search, which interpolates, ends at an infinite value.  So where the density is not
    finite it is taken to fall as steeply as it rises at the highest point so far, and the line
    search returns.
    """
    top, highest, ascent = start, -np.inf, np.zeros_like(start)

    def objective(point):
        nonlocal top, highest, ascent
        value, gradient = density(point)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return abs(ascent @ (point - top)) - highest, ascent
        if value > highest:
            top, highest, ascent = point.copy(), value, gradient
        return -value, -gradient

    options = {"maxiter": MAX_STEPS}
    return minimize(objective, start, jac=True, method="L-BFGS-B", options=options).x


def laplace(density: Density, start: NDArray[np.float64]) -> Laplace:
    r"""Find a mode by local optimisation and approximate the density by a normal there.

    Alternates between optimisation in the present coordinates and choosing coordinates by the
    Hessian at the point reached, so that badly scaled densities need few steps.  Directions
    without curvature keep a finite scale.

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
    for _ in range(N_ROUNDS):
        fit = fit._replace(factor=_whitened(density, fit))
        location = fit.location + fit.factor @ optimise(moved(density, fit), np.zeros(len(start)))
        fit = fit._replace(location=location, log_density=density(location)[0])
    return fit._replace(factor=_whitened(density, fit))


def moved(density: Density, around: Laplace) -> Density:
    """Return the density as a function of q, where u = location + factor q."""

    def of_q(q):
        value, gradient = density(around.location + around.factor @ q)
        return value, around.factor.T @ gradient

    return of_q


def _whitened(density: Density, around: Laplace) -> NDArray[np.float64]:
    """Return the factor in whose coordinates the Hessian is minus the identity."""
    curvature = -hessian(density, around.location, around.factor)
    variances, vectors = np.linalg.eigh(curvature)
    scale = 1 / np.sqrt(np.maximum(np.abs(variances), SMALLEST_CURVATURE))
    return around.factor @ (vectors * scale)


def hessian(
    density: Density, point: NDArray[np.float64], factor: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the Hessian by q at zero, where u = point + factor q, from differences."""
    columns = np.array([_difference(density, point, column) for column in factor.T]) @ factor
    return np.nan_to_num((columns + columns.T) / 2)


def conditional_sd(
    density: Density, point: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Estimate each coordinate's standard deviation given the others, from a few gradients.

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
    signs = rng.choice([-1.0, 1.0], size=(N_PROBES, len(point)))
    diagonal = np.mean([z * _difference(density, point, z) for z in signs], axis=0)
    return 1 / np.sqrt(np.maximum(np.abs(np.nan_to_num(diagonal)), SMALLEST_CURVATURE))


def _difference(density: Density, point, direction) -> NDArray[np.float64]:
    """Return the Hessian times a direction."""
    step = 1e-4
    ahead, behind = density(point + step * direction)[1], density(point - step * direction)[1]
    return (ahead - behind) / (2 * step)


def optimise_many(
    density: Callable[[NDArray, NDArray], tuple[NDArray, NDArray]],
    starts: NDArray[np.float64],
    *,
    steps: int,
    tolerance: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Optimise by L-BFGS from every start, in coordinates of about unit curvature.

    The density maps points, ``(point, n)``, and the indices of their starts to log densities and
    gradients.  An optimisation ends after ``steps``, or where no entry of the gradient exceeds
    the tolerance.  Returns the end points, ``(start, n)``, and the largest entry of their
    gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import optimise_many
    >>> centers = np.array([[1.0], [2.0]])
    >>> def density(z, index):
    ...     away = z - centers[index]
    ...     return -np.square(away).sum(axis=1), -2 * away
    >>> optimise_many(density, np.zeros((2, 1)), steps=20, tolerance=1e-6)[0].round(3)
    array([[1.],
           [2.]])
    """
    ends, slopes = starts.copy(), np.full(len(starts), np.inf)
    index = np.arange(len(starts))
    z = starts
    value, gradient = density(z, index)
    width = np.ones(len(z))
    pairs = np.zeros((MEMORY, 2, *z.shape))
    direction = gradient
    for step in range(steps):
        slope = np.abs(gradient).max(axis=1)
        ends[index], slopes[index] = z, np.where(np.isfinite(value), slope, np.inf)
        active = np.isfinite(value) & (slope > tolerance)
        if not active.any():
            break
        index, z, value, gradient = index[active], z[active], value[active], gradient[active]
        width, direction, pairs = width[active], direction[active], pairs[:, :, active]

        new = z + width[:, None] * direction
        new_value, new_gradient = density(new, index)
        promised = width * (gradient * direction).sum(axis=1)
        accepted = new_value >= value + SUFFICIENT_INCREASE * promised
        rows = accepted[:, None]
        pairs[step % MEMORY, 0] = np.where(rows, new - z, 0)
        pairs[step % MEMORY, 1] = np.where(rows, gradient - new_gradient, 0)
        z = np.where(rows, new, z)
        value = np.where(accepted, new_value, value)
        gradient = np.where(rows, new_gradient, gradient)
        newest_first = np.roll(pairs[::-1], step % MEMORY + 1, axis=0)
        direction = _lbfgs_direction(gradient, newest_first)
        width = np.where(accepted, 1.0, BACKTRACKING * width)
    return ends, slopes


def _lbfgs_direction(gradient, newest_first) -> NDArray[np.float64]:
    """Apply the L-BFGS inverse Hessian of pairs (step, change of the gradient) to gradients."""
    curvatures = np.einsum("mpn,mpn->mp", newest_first[:, 0], newest_first[:, 1])
    # Pairs without curvature, such as those of rejected steps, are left out.
    inverse = np.where(curvatures > 0, 1 / np.where(curvatures > 0, curvatures, 1), 0)
    direction, weights = gradient, []
    for (step, change), scale in zip(newest_first, inverse, strict=True):
        weight = scale * (step * direction).sum(axis=1)
        direction = direction - weight[:, None] * change
        weights.append(weight)
    oldest_first = zip(newest_first[::-1], inverse[::-1], weights[::-1], strict=True)
    for (step, change), scale, weight in oldest_first:
        correction = weight - scale * (change * direction).sum(axis=1)
        direction = direction + correction[:, None] * step
    return direction
