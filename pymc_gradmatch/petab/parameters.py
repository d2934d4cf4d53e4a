"""Estimated parameters: their scale, their bounds, their prior."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from pytensor.tensor import TensorVariable

from pymc_gradmatch.sbml import usable

LOG10 = np.log(10.0)


@dataclass(frozen=True)
class Parameter:
    """One estimated parameter of a problem.

    Attributes
    ----------
    id : str
        Its name in the files.
    scale : {"lin", "log", "log10"}
        On which it is estimated: that of the table, but natural where its prior is.
    lower, upper : float
        Bounds, natural.
    nominal : float
        Natural.
    prior_type : str
        PEtab's word for its prior.
    prior_parameters : tuple of float
        Parameters of it.
    """

    id: str
    scale: str
    lower: float
    upper: float
    nominal: float
    prior_type: str
    prior_parameters: tuple[float, ...]

    @classmethod
    def of_row(cls, name: str, row: Mapping[str, Any], place: str) -> "Parameter":
        """Read a row of the parameter table."""
        scale = text(row.get("parameterScale"), "lin")
        bounds = float(row["lowerBound"]), float(row["upperBound"])
        prior = text(row.get("objectivePriorType"), "parameterScaleUniform")
        numbers = text(row.get("objectivePriorParameters"), "")
        parameters = tuple(float(one) for one in numbers.split(";")) if numbers else ()
        if not prior.startswith("parameterScale"):
            scale = "lin"  # where its density is written
        if not parameters:  # between the bounds
            parameters = tuple(float(one) for one in _scaled(np.array(bounds), scale))
        if prior not in PRIORS:
            msg = (
                f"{place}: parameter {name!r} has the prior {prior!r}, which is not supported; "
                f"expected one of {sorted(PRIORS)}."
            )
            raise NotImplementedError(msg)
        nominal = float(row.get("nominalValue", np.nan))
        one = cls(name, scale, bounds[0], bounds[1], nominal, prior, parameters)
        if prior.endswith(("Uniform", "uniform")) and not np.isfinite(one.bounds).all():
            msg = (
                f"{place}: parameter {name!r} has the bounds {bounds} on the scale {scale}; "
                "expected finite ones there, or a prior that is not uniform."
            )
            raise ValueError(msg)
        return one

    @property
    def name(self) -> str:
        """What it is called in the ODE and in the model: with its scale."""
        return usable(self.id if self.scale == "lin" else f"{self.scale}_{self.id}")

    @property
    def bounds(self) -> np.ndarray:
        """Lower and upper bound on its scale."""
        return _scaled(np.array([self.lower, self.upper]), self.scale)

    @property
    def prior(self) -> TensorVariable:
        """The prior on its scale, cut off at the bounds."""
        lower, upper = self.bounds
        first, second = self.prior_parameters
        return PRIORS[self.prior_type](first, second, lower, upper)

    def scaled(self, natural: Any) -> Any:
        """Return a natural value, or values, on the scale."""
        return _scaled(natural, self.scale)

    def natural(self, value: Any) -> Any:
        """Return a value on the scale as a natural one: numbers or a tensor."""
        if self.scale == "lin":
            return value
        factor = LOG10 if self.scale == "log10" else 1.0
        exp = np.exp if isinstance(value, float | np.ndarray) else pt.exp
        return exp(factor * value)


def _scaled(value: Any, scale: str) -> Any:
    if scale == "lin":
        return value
    with np.errstate(divide="ignore"):
        return np.log10(value) if scale == "log10" else np.log(value)


def text(value: Any, default: str) -> str:
    """Return an entry of a table, or what an empty one means."""
    return default if value is None or pd.isna(value) or value == "" else str(value)


def _uniform(first: float, last: float, lower: float, upper: float) -> TensorVariable:
    return pm.Uniform.dist(max(first, lower), min(last, upper))


def _normal(mean: float, sd: float, lower: float, upper: float) -> TensorVariable:
    return pm.TruncatedNormal.dist(mean, sd, lower=lower, upper=upper)


def _laplace(mean: float, scale: float, lower: float, upper: float) -> TensorVariable:
    return pm.Truncated.dist(pm.Laplace.dist(mean, scale), lower=lower, upper=upper)


def _log_normal(mean: float, sd: float, lower: float, upper: float) -> TensorVariable:
    return pm.Truncated.dist(pm.LogNormal.dist(mean, sd), lower=lower, upper=upper)


PRIORS = {
    "uniform": _uniform, "parameterScaleUniform": _uniform,
    "normal": _normal, "parameterScaleNormal": _normal,
    "laplace": _laplace, "parameterScaleLaplace": _laplace,
    "logNormal": _log_normal,
}  # fmt: skip
