"""What verdicts have in common: rows of scalars by name, the largest moves, one way to print."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pymc_gradmatch.ode import ODE
from pymc_gradmatch.target import START

__all__ = ["furthest", "ordered", "printed", "scalars"]


def ordered(variables: Mapping[str, NDArray], ode: ODE) -> dict[str, NDArray]:
    """Return the ODE's parameters first, then x(t0)."""
    return {name: variables[name] for name in dict.fromkeys([*ode.params, START, *variables])}


def scalars(variables: Mapping[str, NDArray], ode: ODE, n_batch: int = 1) -> dict[str, NDArray]:
    """Return every scalar by a label such as ``x0[prey]``, its batch axes kept."""
    columns = {}
    for name, values in ordered(variables, ode).items():
        shape = values.shape[n_batch:]
        for index in np.ndindex(shape):
            per_state = shape == (len(ode.states),)
            label = ode.states[index[0]] if per_state else ", ".join(map(str, index))
            columns[f"{name}[{label}]" if index else name] = values[..., *index]
    return columns


def furthest(moved: pd.Series, decimals: int = 1) -> str:
    """Name the three largest moves, with their sizes."""
    most = moved[moved.abs().sort_values(ascending=False).index[:3]]
    return ", ".join(f"{name} by {value:+.{decimals}f}" for name, value in most.items())


def printed(verdict: str, table: pd.DataFrame) -> str:
    """Return a verdict and its table as text."""
    return f"{verdict}\n\n{table.to_string(float_format='{:.3g}'.format)}"
