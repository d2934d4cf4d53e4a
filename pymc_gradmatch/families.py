"""Kernel families with free hyperparameters, and the bounds within which they are fitted."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray

from pymc_gradmatch.kernels import Sigmoid

__all__ = ["Bounds", "CovFunction", "KernelFamily", "default_bounds", "kernel_family"]

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
    step, span = np.diff(t).min(), t[-1] - t[0]
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


def kernel_family(
    cov: str | CovFunction,
    t: NDArray[np.float64],
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> KernelFamily:
    """Look up a kernel by name, or take the user's function with its bounds."""
    if isinstance(cov, str):
        if cov not in NAMED:
            msg = (
                f"cov is {cov!r}; expected one of {', '.join(map(repr, NAMED))}, "
                "or a function of hyperparameters that returns a pm.gp.cov kernel."
            )
            raise ValueError(msg)
        build = NAMED[cov]
        known = default_bounds(t)
    elif callable(cov) and not isinstance(cov, pm.gp.cov.BaseCovariance):
        build = cov
        known = {"sigma": default_bounds(t)["sigma"]}
    else:
        msg = (
            f"cov is a {type(cov).__name__}; expected the name of a kernel or a function of "
            "hyperparameters. For a kernel with fixed hyperparameters use pymc_gradmatch.StateGP."
        )
        raise TypeError(msg)

    given = {name: Bounds(*pair) for name, pair in (bounds or {}).items()}
    names = (*inspect.signature(build).parameters, "sigma")
    missing = [name for name in names if name not in known | given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        msg = (
            f"bounds are missing for {missing} and given for unknown {unknown}; "
            f"this kernel's hyperparameters are {list(names)}."
        )
        raise ValueError(msg)
    chosen = {name: (known | given)[name] for name in names}
    for name, (low, high) in chosen.items():
        if not 0 < low < high < np.inf:
            msg = f"bounds of {name!r} are ({low}, {high}); expected 0 < low < high < infinity."
            raise ValueError(msg)
    return KernelFamily(build, chosen)
