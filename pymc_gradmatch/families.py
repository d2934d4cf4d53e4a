"""Kernel families with free hyperparameters, and the bounds within which they are fitted."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray

from pymc_gradmatch.kernels import Sigmoid, check_time_only

__all__ = [
    "Bounds",
    "CovFunction",
    "KernelFamily",
    "build_kernel",
    "default_bounds",
    "kernel_family",
]

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
    """Return the bounds of every hyperparameter that a named kernel has.

    In standardised units: variances and sigma relative to the data's
    variance and standard deviation, lengths relative to the grid of times, so
    that neither the data's units nor the unit of time matter.
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
        return build_kernel(self.build, dict(zip(self.hyperparameters, values, strict=True)))


def build_kernel(build: CovFunction, hyperparameters: Mapping) -> pm.gp.cov.BaseCovariance:
    """Call a function of hyperparameters and check that it returns a kernel of time."""
    cov = build(**hyperparameters)
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
    """Look up a kernel by name, or take the user's function with its bounds."""
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
    available = known | {name: Bounds(*pair) for name, pair in bounds.items()}
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


def _hyperparameters(build: CovFunction, bounds: Mapping) -> list[str]:
    """Return the names of a function's arguments; those of the bounds where it takes any."""
    arguments = inspect.signature(build).parameters.values()
    if any(argument.kind is argument.VAR_KEYWORD for argument in arguments):
        return [name for name in bounds if name != "sigma"]
    return [argument.name for argument in arguments]
