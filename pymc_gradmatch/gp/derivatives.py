"""Derivatives of kernels, and the matrices C, D and A of Theorem 1.

If a state has covariance ``k(t, t')``, its derivative has covariance
``d2k/dt dt'`` and the cross-covariances ``dk/dt`` and ``dk/dt'``.
:func:`covariance_blocks` differentiates any one-dimensional kernel of :mod:`pymc.gp.cov`
in forward mode; :func:`conditional_operators` computes C, D and A.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.gradient import DisconnectedInputError, pushforward, zero_grad
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import GraphTemplate, in_numpy
from pymc_gradmatch.gp.data import read_only
from pymc_gradmatch.gp.kernels import Broken, describe
from pymc_gradmatch.numerics import one_at_a_time, smallest_reliable, spectrum

MAX_CHECKED = 50  # times at which differentiability is checked

type Matrix = NDArray[np.float64] | TensorVariable


class Blocks(NamedTuple):
    """The covariance of (x, x') at a set of times, in four ``(time, time)`` blocks."""

    k: Matrix
    """Cov(x(t), x(t'))."""
    dk_dt1: Matrix
    """Cov(x'(t), x(t')), the paper's 'C."""
    dk_dt2: Matrix
    """Cov(x(t), x'(t')), the paper's C'."""
    d2k: Matrix
    """Cov(x'(t), x'(t')), the paper's C''."""


def covariance_blocks(
    cov: pm.gp.cov.BaseCovariance, t1: TensorVariable, t2: TensorVariable
) -> Blocks:
    r"""Write the kernel and its derivatives as PyTensor graphs.

    .. math::

        k(t, t'), \quad {'C} = \frac{\partial k}{\partial t}, \quad
        C' = \frac{\partial k}{\partial t'}, \quad
        C'' = \frac{\partial^2 k}{\partial t\,\partial t'}

    (Wenk et al. 2019, section 3.1.)  Entry ``[i, j]`` of the kernel matrix
    depends on ``t1[i]`` and ``t2[j]`` alone, so one forward-mode product with
    a vector of ones differentiates all entries at once.

    Parameters
    ----------
    cov : pymc.gp.cov.BaseCovariance
        A kernel of one input dimension.  Its hyperparameters may be symbolic.
    t1, t2 : TensorVariable
        Two *distinct* vectors of times, shapes ``(n,)`` and ``(m,)``.

    Returns
    -------
    Blocks
        Four matrices of shape ``(n, m)``; the units are those of the kernel,
        divided by time once for each derivative.

    Examples
    --------
    >>> import pymc as pm, pytensor.tensor as pt, pymc_gradmatch as gm
    >>> a, b = pt.vector("a"), pt.vector("b")
    >>> blocks = gm.derivatives.covariance_blocks(pm.gp.cov.ExpQuad(1, ls=2.0), a, b)
    >>> float(blocks.d2k.eval({a: [0.0], b: [0.0]})[0, 0])  # 1 / lengthscale^2
    0.25
    """
    return _blocks(cov(t1[:, None], t2[:, None]), t1, t2)


def _blocks(k: TensorVariable, t1, t2) -> Blocks:
    k = _differentiable_clip(k)
    dk_dt1 = derivative(k, t1)
    return Blocks(k, dk_dt1, derivative(k, t2), derivative(dk_dt1, t2))


def derivative(k: TensorVariable, wrt: TensorVariable) -> TensorVariable:
    """Differentiate every entry of k by the one entry of ``wrt`` that it depends on."""
    return cast("TensorVariable", pushforward(k, wrt, pt.ones_like(wrt)))


def _differentiable_clip(k: TensorVariable) -> TensorVariable:
    # PyMC clips squared distances at zero.  Some compilers (fused multiply-add) round a zero
    # distance to slightly less, where the clip's derivative, and the variance of x', would be
    # zero.  So within rounding of zero derivatives ignore the clip.
    rounding = 1e-8
    smooth = {}
    for clipped in ancestors([k]):
        if clipped.owner is not None and clipped.owner.op == pt.clip:
            inner = clipped.owner.inputs[0]
            passing = inner + zero_grad(clipped - inner)
            smooth[clipped] = pt.switch(inner < -rounding, clipped, passing)
    return pt.as_tensor(graph_replace([k], replace=smooth)[0]) if smooth else k


def evaluate_blocks(cov: pm.gp.cov.BaseCovariance, t: NDArray[np.float64]) -> Blocks:
    """Evaluate :func:`covariance_blocks` of a kernel.

    Parameters
    ----------
    cov : pymc.gp.cov.BaseCovariance
        A kernel of one input dimension.
    t : array of float
        Times, shape ``(time,)``.

    Returns
    -------
    Blocks
        Four arrays of shape ``(time, time)``.

    Raises
    ------
    ValueError
        If the kernel contains white noise or is not differentiable at zero
        distance: such a process has no derivative.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> gm.derivatives.evaluate_blocks(pm.gp.cov.ExpQuad(1, ls=1.0), np.arange(3.0)).dk_dt1.round(3)
    array([[-0.   ,  0.607,  0.271],
           [-0.607, -0.   ,  0.607],
           [-0.271, -0.607, -0.   ]])
    """
    graphs = kernel_graphs(cov)
    try:
        compiled = _compiled_blocks(graphs)
    except DisconnectedInputError:
        msg = (
            f"the kernel {describe(cov)} is constant in time: such a state has no slope to match. "
            "Expected a kernel of time, such as ExpQuad, alone or in a sum."
        )
        raise ValueError(msg) from None

    def evaluate(t, other):
        return compiled(t, other, *graphs.values)

    *values, k_with_noise = evaluate(t, t)
    blocks = Blocks(*values)
    _check_differentiable(cov, blocks, k_with_noise, evaluate, t)
    return blocks


def kernel_graphs(cov: pm.gp.cov.BaseCovariance, hyperparameters: Sequence = ()) -> GraphTemplate:
    """Return the kernel at times, and between these and others, as graphs of hyperparameters.

    The graphs of kernels that differ only in numbers, such as those of many experiments, are equal.
    """
    t, other = pt.vector("t"), pt.vector("other")
    graphs = [cov(t[:, None]), cov(t[:, None], other[:, None])]
    return GraphTemplate([*hyperparameters, t, other], graphs)


@lru_cache(maxsize=16)
def _compiled_blocks(graphs: GraphTemplate) -> Callable:
    """Compile blocks of :func:`kernel_graphs`, and the kernel matrix including white noise."""
    k, between = graphs.outputs
    blocks = [*_blocks(between, *graphs.inputs[-2:]), k]
    inputs = [*graphs.inputs, *graphs.numbers]
    return one_at_a_time(in_numpy(inputs, blocks, rewrites=()))  # threads share it


def _check_differentiable(cov, blocks, k_with_noise, evaluate, t):
    advice = (
        "Gradient matching needs the covariance of the states' derivatives; use a kernel that is "
        "differentiable at zero distance, such as ExpQuad, Matern52, Matern32, RatQuad, Periodic "
        "or pymc_gradmatch.kernels.Sigmoid"
    )
    if not np.allclose(blocks.k, k_with_noise):
        msg = (
            f"the kernel {describe(cov)} contains white noise, which has no "
            f"derivative. {advice}; observation noise is `sigma`, jitter is `nugget`."
        )
        raise ValueError(msg)
    # Of a differentiable process the variance of x'(t) is the limit of its covariance with
    # x'(t + h), at least from one side: warped inputs have kinks.
    step = 1e-2 * np.diff(t).min()
    some = np.linspace(0, len(t) - 1, min(len(t), MAX_CHECKED)).round().astype(int)
    at_zero = np.diagonal(blocks.d2k)[some]
    nearby = [np.diagonal(evaluate(t[some], t[some] + h)[3]) for h in (step, -step)]
    if not np.all(np.min(np.abs(nearby - at_zero), axis=0) <= 0.5 * np.abs(at_zero)):
        msg = f"the kernel {describe(cov)} is not differentiable at zero distance. {advice}."
        raise ValueError(msg)


class Operators(NamedTuple):
    """The matrices of Theorem 1, one per state, shape ``(state, time, time)``.

    In standardised units: C has no unit, D is in 1 / time, A in 1 / time squared.
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
    The nugget :math:`\epsilon` is added to C and to no derivative block, as in the
    reference implementation.

    Parameters
    ----------
    blocks : Blocks
        The kernel and its derivatives, arrays of shape ``(state, time, time)``.
    nugget : array_like of float
        Added to the diagonal of the kernel matrix, in standardised units squared;
        one number, or one per state.

    Returns
    -------
    Operators

    Raises
    ------
    ValueError
        If C is not numerically positive definite.
    """
    n_states, n_times, _ = blocks.k.shape
    nuggets = np.broadcast_to(nugget, n_states)
    C = blocks.k + nuggets[:, None, None] * np.eye(n_times)
    vectors, variances = spectrum(C)
    singular = (variances <= smallest_reliable(variances)).any(axis=-1)
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


def state_blocks(
    covs: Sequence[pm.gp.cov.BaseCovariance],
    t: NDArray[np.float64],
    breaks: Sequence[float] | NDArray[np.float64] = (),
    carried: NDArray[np.float64] | None = None,
) -> Blocks:
    """Evaluate the blocks of one kernel per state, a shared kernel only once.

    At breaks slopes may jump, and states are multiplied by ``carried``, ``(break, state)``.
    """
    factors = np.ones((len(breaks), len(covs))) if carried is None else carried
    keys = [(id(cov), *factors[:, k].tolist()) for k, cov in enumerate(covs)]
    distinct = {
        key: Broken(cov, breaks, key[1:]) if len(breaks) else cov
        for key, cov in zip(keys, covs, strict=True)
    }
    evaluated = {key: evaluate_blocks(cov, t) for key, cov in distinct.items()}
    per_state = [evaluated[key] for key in keys]
    return Blocks(*(np.stack(matrices) for matrices in zip(*per_state, strict=True)))
