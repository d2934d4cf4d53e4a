"""What is kept of a posterior in the messy study, ours and the exact one alike."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.breadth.fit import moments as _moments
from benchmarks.cases import Messy, Prior
from benchmarks.runner import table_of

__all__ = ["OF_SET", "Row", "free_starts", "long_table", "moments", "rmse_of"]

type Row = dict[str, Any]

OF_SET = "set"  # the variable of the row that holds what there is one of for each fit


def free_starts(case: Messy) -> list[str]:
    """Return names of the unknown x(t0): ``x0[prey]``."""
    known = [name for name, value in case.start.items() if not isinstance(value, Prior)]
    return [f"x0[{state}]" for state in case.ode.states if state not in known]


def moments(values: np.ndarray) -> Row:
    """Return mean, standard deviation, median and central 95 % interval of draws."""
    return _moments(values) | {"50 %": float(np.median(values))}


def rmse_of(case: Messy, x: np.ndarray) -> Row:
    """Return the error of a trajectory, shape ``(time, state)``, by state."""
    error = np.sqrt(np.square(x - case.x).mean(axis=0))
    return dict(zip(case.ode.states, map(float, error), strict=True))


def long_table(rows: Iterable[tuple[tuple, Row]], index: list[str]) -> pd.DataFrame:
    """Return a row for every variable, for every state's error, and for the fit as a whole."""
    table: dict[tuple, Row] = {}
    for key, row in rows:
        table |= {(*key, name): values for name, values in row.get("variables", {}).items()}
        table |= {(*key, f"x[{s}]"): {"rmse": error} for s, error in row.get("rmse", {}).items()}
        table[*key, OF_SET] = {n: value for n, value in row.items() if not isinstance(value, dict)}
    return table_of(table.items(), [*index, "variable"])
