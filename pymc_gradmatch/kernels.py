"""Kernels and their derivatives: what a Gaussian process says about a slope.

If a state has covariance ``k(t, t')``, its derivative has covariance
``d2k/dt dt'`` and the cross-covariances ``dk/dt`` and ``dk/dt'``.  PyMC's
kernels carry no derivatives; :func:`covariance_blocks` adds them for any
one-dimensional kernel by forward-mode differentiation, so that every
:mod:`pymc.gp.cov` kernel, and every sum or product of them, can be used.
"""

from numbers import Number
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pymc.pytensorf import rvs_in_graph
from pytensor.compile.mode import Mode
from pytensor.gradient import pushforward, zero_grad
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, explicit_graph_inputs
from pytensor.scalar.basic import Clip
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.variable import TensorConstant, TensorVariable

__all__ = [
    "Blocks",
    "Sigmoid",
    "check_one_dimensional",
    "covariance_blocks",
    "describe",
    "evaluate_blocks",
]

# A graph that runs a handful of times: walk it in Python, without rewriting it.
EVALUATE_ONCE = Mode(linker="py", optimizer=None)


class Sigmoid(pm.gp.cov.Covariance):
    r"""The sigmoid (arcsine) kernel, for states that move fast at first and then settle.

    .. math::

        k(t, t') = \arcsin\frac{a + b\,t\,t'}{\sqrt{(a + b\,t^2 + 1)(a + b\,t'^2 + 1)}}

    The kernel of an infinitely wide one-layer network of sigmoid units.  It is
    not stationary: the place of ``t = 0`` matters.

    Parameters
    ----------
    a : tensor_like of float
        Variance of the units' offsets, dimensionless, positive.
    b : tensor_like of float
        Variance of the units' slopes, in 1 / time squared, positive.

    References
    ----------
    .. [1] Williams, C. K. I. (1998). Computation with infinite neural networks.
       *Neural Computation* 10(5), 1203-1216, eq. 11.
    .. [2] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*,
       where it is the kernel for protein transduction.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc_gradmatch as gm
    >>> k = 2.0 * gm.kernels.Sigmoid(a=1.0, b=0.5)
    >>> k(np.array([[0.0], [1.0]])).eval().round(3)
    array([[1.047, 0.927],
           [0.927, 1.287]])
    """

    def __init__(self, a, b):
        super().__init__(input_dim=1)
        self.a = pt.as_tensor_variable(a)
        self.b = pt.as_tensor_variable(b)

    def full(self, X, Xs=None):
        """Evaluate the kernel between all rows of ``X`` and ``Xs``."""
        X, Xs = self._slice(X, Xs)
        Xs = X if Xs is None else Xs
        norm = self._norm(X)[:, None] * self._norm(Xs)[None, :]
        return pt.arcsin((self.a + self.b * X * Xs.T) / norm)

    def diag(self, X):
        """Evaluate the kernel of each row of ``X`` with itself."""
        X, _ = self._slice(X)
        return pt.arcsin(1 - 1 / pt.square(self._norm(X)))

    def _norm(self, X):
        return pt.sqrt(self.a + self.b * pt.square(X[:, 0]) + 1)


class Blocks(NamedTuple):
    """The covariance of (x, x') at a set of times, in four ``(time, time)`` blocks."""

    k: NDArray[np.float64] | TensorVariable
    """Cov(x(t), x(t'))."""
    dk_dt1: NDArray[np.float64] | TensorVariable
    """Cov(x'(t), x(t')), the paper's 'C."""
    dk_dt2: NDArray[np.float64] | TensorVariable
    """Cov(x(t), x'(t')), the paper's C'."""
    d2k: NDArray[np.float64] | TensorVariable
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
    >>> blocks = gm.kernels.covariance_blocks(pm.gp.cov.ExpQuad(1, ls=2.0), a, b)
    >>> float(blocks.d2k.eval({a: [0.0], b: [0.0]})[0, 0])  # 1 / lengthscale^2
    0.25
    """
    k = _without_clipping(cov(t1[:, None], t2[:, None]))
    dk_dt1 = pushforward(k, t1, pt.ones_like(t1))
    dk_dt2 = pushforward(k, t2, pt.ones_like(t2))
    d2k = pushforward(dk_dt1, t2, pt.ones_like(t2))
    return Blocks(k, dk_dt1, dk_dt2, d2k)


def _without_clipping(k: TensorVariable) -> TensorVariable:
    # PyMC clips squared distances at zero.  Rounding makes a zero distance
    # slightly negative under some compilers (fused multiply-add), and there
    # the clip's derivative, and with it the variance of x', would be zero.
    # Within rounding of zero, keep the clip's value and let derivatives pass.
    rounding = 1e-8
    smooth = {}
    for clipped in ancestors([k]):
        if _is_clip(clipped):
            inner = clipped.owner.inputs[0]
            passing = inner + zero_grad(clipped - inner)
            smooth[clipped] = pt.switch(inner < -rounding, clipped, passing)
    return clone_replace([k], replace=smooth)[0] if smooth else k


def _is_clip(var) -> bool:
    op = var.owner.op if var.owner is not None else None
    return isinstance(op, Elemwise) and isinstance(op.scalar_op, Clip)


def evaluate_blocks(cov: pm.gp.cov.BaseCovariance, t: NDArray[np.float64]) -> Blocks:
    """Evaluate :func:`covariance_blocks` of a kernel with constant hyperparameters.

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
        If the kernel has white noise in it or is not differentiable at zero
        distance: such a process has no derivative to match.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> gm.kernels.evaluate_blocks(pm.gp.cov.ExpQuad(1, ls=1.0), np.arange(3.0)).dk_dt1.round(3)
    array([[-0.   ,  0.607,  0.271],
           [-0.607, -0.   ,  0.607],
           [-0.271, -0.607, -0.   ]])
    """
    t1, t2 = pt.vector("t1"), pt.vector("t2")
    symbolic = covariance_blocks(cov, t1, t2)
    evaluate = pytensor.function(
        [t1, t2], [*symbolic, cov(t1[:, None])], mode=EVALUATE_ONCE, on_unused_input="ignore"
    )
    *blocks, k_with_noise = evaluate(t, t)
    _check_differentiable(cov, Blocks(*blocks), k_with_noise, evaluate, t)
    return Blocks(*blocks)


def _check_differentiable(cov, blocks, k_with_noise, evaluate, t):
    advice = (
        "Gradient matching needs the covariance of the states' derivatives; use a kernel that is "
        "differentiable at zero distance, such as ExpQuad, Matern52, Matern32, RatQuad, Periodic "
        "or pymc_gradmatch.kernels.Sigmoid"
    )
    if not np.allclose(blocks.k, k_with_noise):
        msg = (
            f"the kernel {describe(cov)} has white noise in it, and a noisy process has no "
            f"derivative. {advice}; observation noise is `sigma`, jitter is `nugget`."
        )
        raise ValueError(msg)
    # The variance of x' must be the limit of the covariance of x'(t) with
    # x'(t + h); for a rough kernel the two have nothing to do with each other.
    step = 1e-2 * np.diff(t).min()
    at_zero = np.diagonal(blocks.d2k)
    nearby = np.diagonal(evaluate(t, t + step)[3])
    if not np.all(np.abs(nearby - at_zero) <= 0.5 * np.abs(at_zero)):
        msg = f"the kernel {describe(cov)} is not differentiable at zero distance. {advice}."
        raise ValueError(msg)


def check_one_dimensional(cov: pm.gp.cov.BaseCovariance):
    """Raise if the kernel needs other inputs than time, or numbers it does not have."""
    input_dim = getattr(cov, "input_dim", 1)
    if input_dim != 1:
        msg = (
            f"the kernel {describe(cov)} has input_dim={input_dim}; expected 1: "
            "time is the only input of a state."
        )
        raise ValueError(msg)
    t = pt.vector("t")
    free = [var for var in explicit_graph_inputs([cov(t[:, None])]) if var is not t]
    random = rvs_in_graph([cov(t[:, None])])
    if free or random:
        msg = (
            f"the kernel {describe(cov)} has symbolic hyperparameters; expected numbers. "
            "Kernels with random hyperparameters are not supported yet."
        )
        raise ValueError(msg)


def describe(cov: pm.gp.cov.BaseCovariance) -> str:
    """Write a kernel with its hyperparameters as one line of text.

    Parameters
    ----------
    cov : pymc.gp.cov.BaseCovariance
        Any kernel, or a factor of one.

    Examples
    --------
    >>> import pymc as pm, pymc_gradmatch as gm
    >>> gm.kernels.describe(2.0 * pm.gp.cov.ExpQuad(1, ls=0.5) + pm.gp.cov.Constant(1.0))
    '2 * ExpQuad(ls=0.5) + Constant(c=1)'
    """
    if isinstance(cov, pm.gp.cov.Add):
        return " + ".join(describe(term) for term in cov._factor_list)
    if isinstance(cov, pm.gp.cov.Prod):
        factors = sorted(cov._factor_list, key=lambda f: isinstance(f, pm.gp.cov.BaseCovariance))
        return " * ".join(describe(factor) for factor in factors)
    if not isinstance(cov, pm.gp.cov.BaseCovariance):
        return _number(cov)
    settings = {
        name: value
        for name, value in vars(cov).items()
        if isinstance(value, Number | TensorVariable) and name != "input_dim"
    }
    listed = ", ".join(f"{name}={_number(value)}" for name, value in settings.items())
    return f"{type(cov).__name__}({listed})"


def _number(value) -> str:
    data = value.data if isinstance(value, TensorConstant) else value
    if isinstance(data, Number) or (isinstance(data, np.ndarray) and data.size == 1):
        return f"{float(np.asarray(data).item()):.4g}"
    return str(value)
