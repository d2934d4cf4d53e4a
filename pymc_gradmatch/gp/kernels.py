"""Kernels that PyMC lacks, checks of kernels, and kernel families that are fitted."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Number
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.traversal import explicit_graph_inputs
from pytensor.tensor import TensorConstant, TensorVariable

from pymc_gradmatch._pymc import kernel_parts, random_ancestors
from pymc_gradmatch.arguments import as_numbers


class Sigmoid(pm.gp.cov.Covariance):
    r"""The sigmoid (arcsine) kernel, for states that change fast at first and then level off.

    .. math::

        k(t, t') = \arcsin\frac{a + b\,t\,t'}{\sqrt{(a + b\,t^2 + 1)(a + b\,t'^2 + 1)}}

    The kernel of an infinitely wide one-layer network of sigmoid units.  It is
    not stationary: it depends on the origin of time.

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
        X = self._times(X)
        Xs = X if Xs is None else self._times(Xs)
        norm = self._norm(X)[:, None] * self._norm(Xs)[None, :]
        return pt.arcsin((self.a + self.b * X * Xs.T) / norm)

    def diag(self, X):
        """Evaluate the kernel of each row of ``X`` with itself."""
        return pt.arcsin(1 - 1 / pt.square(self._norm(self._times(X))))

    def _times(self, X):
        return pt.as_tensor(X)[:, self.active_dims]

    def _norm(self, X):
        return pt.sqrt(self.a + self.b * pt.square(X[:, 0]) + 1)


class Broken(pm.gp.cov.Covariance):
    r"""A kernel of states with slopes that jump at known times.

    .. math::

        x(t) = w_0(t)\, g_0(c_0(t)) + \sum_j w_j(t) \bigl( g_j(c_j(t)) - g_j(b_j) \bigr), \qquad
        c_j(t) = \min(\max(t, b_j), b_{j+1})

    with independent processes :math:`g_j` of the same kernel, one for each interval between
    breaks :math:`b_j`.  The slope at a break is that of the interval which begins there.  At
    :math:`b_j` the state is multiplied by :math:`\rho_j`, one where states are continuous:
    :math:`w_i(t) = \prod_{i < j,\, b_j \le t} \rho_j`.  Where :math:`\rho_j` is NaN, the state
    is :math:`g_j(t)` alone, independent of the past.

    Parameters
    ----------
    cov : pymc.gp.cov.BaseCovariance
        The kernel within an interval.
    breaks : array_like of float
        Increasing times.
    carried : array_like of float, optional
        :math:`\rho_j` of each break; ones if not given.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> broken = gm.kernels.Broken(pm.gp.cov.ExpQuad(1, ls=1.0), [2.0])
    >>> slopes = gm.derivatives.evaluate_blocks(broken, np.array([1.5, 2.0, 2.5])).d2k
    >>> slopes.round(3) + 0.0
    array([[1.   , 0.   , 0.   ],
           [0.   , 1.   , 0.662],
           [0.   , 0.662, 1.   ]])
    """

    def __init__(
        self,
        cov: pm.gp.cov.BaseCovariance,
        breaks: ArrayLike,
        carried: ArrayLike | None = None,
    ):
        super().__init__(input_dim=1)
        self.cov, self.breaks = cov, np.asarray(breaks, dtype=float)
        one = np.ones(len(self.breaks))
        self.carried = one if carried is None else np.asarray(carried, dtype=float)

    def full(self, X, Xs=None):
        """Evaluate the kernel between all rows of ``X`` and ``Xs``."""
        X = pt.as_tensor(X)
        Xs = X if Xs is None else pt.as_tensor(Xs)
        edges = [-np.inf, *self.breaks, np.inf]
        first, *others = pairwise(edges)
        total = self._weighted(self.cov(_clipped(X, *first), _clipped(Xs, *first)), X, Xs, 0)
        for j, piece in enumerate(others):
            t1, t2, start = _clipped(X, *piece), _clipped(Xs, *piece), np.array([[piece[0]]])
            added = self.cov(t1, t2)
            if np.isnan(self.carried[j]):
                has_begun = pt.ge(X, piece[0]) & pt.ge(Xs.T, piece[0])
                added = pt.switch(has_begun, added, 0.0)
            else:
                added = added - self.cov(t1, start) - self.cov(start, t2) + self.cov(start)
            total += self._weighted(added, X, Xs, j + 1)
        return total

    def _weighted(self, added, X, Xs, j: int):
        """Multiply the contribution of an interval by rho of all later breaks."""
        if (self.carried[j:] == 1).all():
            return added
        rho = np.nan_to_num(self.carried[j:], nan=0.0)
        w1, w2 = (
            pt.prod(pt.switch(pt.ge(t, self.breaks[j:]), rho, 1.0), axis=1, keepdims=True)
            for t in (X, Xs)
        )
        return w1 * added * w2.T

    def diag(self, X):
        """Evaluate the kernel of each row of ``X`` with itself."""
        return pt.diagonal(self.full(X))


class Separate(pm.gp.cov.Covariance):
    r"""A kernel of independent intervals of time.

    .. math:: k'(t, t') = k(t, t') \text{ within an interval, and } 0 \text{ between two}

    Parameters
    ----------
    cov : pymc.gp.cov.BaseCovariance
        The kernel within an interval.
    begins : array_like of float
        Increasing times at which intervals begin, except the first.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> separate = gm.kernels.Separate(pm.gp.cov.ExpQuad(1, ls=1.0), [2.0])
    >>> separate(np.array([[1.5], [2.0], [2.5]])).eval().round(3)
    array([[1.   , 0.   , 0.   ],
           [0.   , 1.   , 0.882],
           [0.   , 0.882, 1.   ]])
    """

    def __init__(self, cov: pm.gp.cov.BaseCovariance, begins: ArrayLike):
        super().__init__(input_dim=1)
        self.cov, self.begins = cov, np.asarray(begins, dtype=float)

    def full(self, X, Xs=None):
        """Evaluate the kernel between all rows of ``X`` and ``Xs``."""
        X = pt.as_tensor(X)
        Xs = X if Xs is None else pt.as_tensor(Xs)
        interval, other = (pt.ge(t, self.begins).sum(axis=1) for t in (X, Xs))
        return pt.switch(pt.eq(interval[:, None], other), self.cov(X, Xs), 0.0)

    def diag(self, X):
        """Evaluate the kernel of each row of ``X`` with itself."""
        return self.cov(X, diag=True)


def _clipped(t, start: float, end: float):
    """Clip times to an interval, with derivative one at its start and zero at its end."""
    return pt.switch(t < start, start, pt.switch(t < end, t, end))


def check_kernels(covs: Sequence[pm.gp.cov.BaseCovariance], n_states: int) -> tuple:
    """Return one kernel per state, on time alone, or raise."""
    covs = tuple(covs)
    if len(covs) != n_states:
        msg = f"covs has {len(covs)} kernels for {n_states} states; expected one per state."
        raise ValueError(msg)
    for k, cov in enumerate(covs):
        if not isinstance(cov, pm.gp.cov.BaseCovariance):
            msg = f"covs[{k}] is a {type(cov).__name__}; expected a kernel from pm.gp.cov."
            raise TypeError(msg)
    for cov in {id(cov): cov for cov in covs}.values():
        check_time_only(cov)
        _check_closed(cov)
    return covs


def check_time_only(cov: pm.gp.cov.BaseCovariance):
    """Raise if the kernel has other inputs than time."""
    input_dim = getattr(cov, "input_dim", 1)
    if input_dim != 1:
        msg = (
            f"the kernel {describe(cov)} has input_dim={input_dim}; expected 1: "
            "time is the only input of a state."
        )
        raise ValueError(msg)


def _check_closed(cov: pm.gp.cov.BaseCovariance):
    t = pt.vector("t")
    graph = cov(t[:, None])
    free = [var for var in explicit_graph_inputs([graph]) if var is not t]
    if free or random_ancestors([graph]):
        msg = (
            f"the kernel {describe(cov)} has hyperparameters that are variables; expected numbers, "
            "such as those of gm.fit_gp. The posterior of gm.fit has no kernel."
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
        return " + ".join(describe(term) for term in kernel_parts(cov))
    if isinstance(cov, pm.gp.cov.Prod):
        ordered = sorted(kernel_parts(cov), key=lambda f: isinstance(f, pm.gp.cov.BaseCovariance))
        return " * ".join(describe(factor) for factor in ordered)
    if isinstance(cov, pm.gp.cov.Exponentiated):
        return f"{describe(cov.kernel)} ** {_number(cov.power)}"
    if not isinstance(cov, pm.gp.cov.BaseCovariance):
        return _number(cov)
    settings = {
        name: value
        for name, value in vars(cov).items()
        if isinstance(value, Number | TensorVariable | pm.gp.cov.BaseCovariance)
        and name != "input_dim"
    }
    listed = ", ".join(f"{name}={describe(value)}" for name, value in settings.items())
    return f"{type(cov).__name__}({listed})"


def _number(value) -> str:
    data = value.data if isinstance(value, TensorConstant) else value
    if isinstance(data, Number) or (isinstance(data, np.ndarray) and data.size == 1):
        return f"{float(np.asarray(data).item()):.4g}"
    return str(value)


type CovFunction = Callable[..., pm.gp.cov.BaseCovariance]


class Bounds(NamedTuple):
    """The range in which a positive hyperparameter is searched."""

    low: float
    high: float


NAMED: dict[str, CovFunction] = {
    "ExpQuad": lambda variance, lengthscale: variance * pm.gp.cov.ExpQuad(1, ls=lengthscale),
    "Matern52": lambda variance, lengthscale: variance * pm.gp.cov.Matern52(1, ls=lengthscale),
    "RatQuad": lambda variance, lengthscale, alpha: (
        variance * pm.gp.cov.RatQuad(1, ls=lengthscale, alpha=alpha)
    ),
    "Sigmoid": lambda variance, a, b: variance * Sigmoid(a, b),
}


def default_bounds(t: NDArray[np.float64]) -> dict[str, Bounds]:
    """Return the bounds of every hyperparameter of the named kernels.

    Variances and sigma are relative to the data's variance and standard deviation, lengths to
    the grid of times, so that no unit matters.
    """
    step, span = np.median(np.diff(t)), t[-1] - t[0]
    return {
        "variance": Bounds(1e-4, 1e2),
        "lengthscale": Bounds(step, 10 * span),
        "alpha": Bounds(1e-1, 1e2),
        "a": Bounds(1e-4, 250),
        "b": Bounds(1 / span**2, 2.5e6 / span**2),
        "sigma": Bounds(1e-4, 2.0),
    }


@dataclass(frozen=True)
class KernelFamily:
    """A function from hyperparameters to a kernel, with bounds for each, sigma's last."""

    build: CovFunction
    bounds: dict[str, Bounds]

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Names of the kernel's own hyperparameters."""
        return tuple(name for name in self.bounds if name != "sigma")

    def kernel(self, values: Iterable) -> pm.gp.cov.BaseCovariance:
        """Build the kernel from values of its hyperparameters, in their order."""
        cov = self.build(**dict(zip(self.hyperparameters, values, strict=True)))
        if not isinstance(cov, pm.gp.cov.BaseCovariance):
            msg = f"the function cov returns a {type(cov).__name__}; expected a pm.gp.cov kernel."
            raise TypeError(msg)
        check_time_only(cov)
        return cov


def kernel_family(
    cov: str | CovFunction,
    t: NDArray[np.float64],
    bounds: Mapping[str, tuple[float, float]],
) -> KernelFamily:
    """Return the kernel family of a name, or of the user's function with its bounds."""
    known = default_bounds(t)
    if isinstance(cov, str):
        if cov not in NAMED:
            msg = (
                f"cov is {cov!r}; expected one of {', '.join(map(repr, NAMED))}, "
                "or a function of hyperparameters that returns a pm.gp.cov kernel."
            )
            raise ValueError(msg)
        build = NAMED[cov]
    elif callable(cov) and not isinstance(cov, pm.gp.cov.BaseCovariance):
        build = cov
        known = {"sigma": known["sigma"]}
    else:
        msg = (
            f"cov is a {type(cov).__name__}; expected the name of a kernel or a function of "
            "hyperparameters. For a kernel with fixed hyperparameters use pymc_gradmatch.StateGP."
        )
        raise TypeError(msg)
    names = [*_hyperparameters(build, bounds), "sigma"]
    available = known | {name: _as_bounds(name, pair) for name, pair in bounds.items()}
    missing = [name for name in names if name not in available]
    if missing:
        msg = f"bounds are missing for {missing}; give (low, high) for each of {names}."
        raise ValueError(msg)
    family = KernelFamily(build, {name: available[name] for name in names})
    for name, (low, high) in family.bounds.items():
        if not 0 < low < high < np.inf:
            msg = f"bounds of {name!r} are ({low}, {high}); expected 0 < low < high < infinity."
            raise ValueError(msg)
    return family


def _as_bounds(name: str, pair) -> Bounds:
    expected = f"a pair of numbers, bounds={{{name!r}: (low, high)}}"
    shape = as_numbers(pair, f"the bound of {name!r}", expected).shape
    if shape != (2,):
        msg = f"bounds of {name!r} are {pair!r}; expected {expected}."
        raise ValueError(msg)
    return Bounds(*pair)


def _hyperparameters(build: CovFunction, bounds: Mapping) -> list[str]:
    """Return the names of a function's arguments, or those of the bounds if it has ``**kwargs``."""
    arguments = inspect.signature(build).parameters.values()
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return [name for name in bounds if name != "sigma"]
    return [argument.name for argument in arguments]
