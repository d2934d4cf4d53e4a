"""What users give: names, numbers, counts and priors, and the words for what cannot be used."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from keyword import iskeyword
from reprlib import repr as short
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import is_generator, is_random_variable

DRAWS = {"chain": "an axis of draws in ArviZ", "draw": "an axis of draws in ArviZ"}
RESERVED = DRAWS | {
    "time": "a dim of the states",
    "experiment": "a dim of the states",
    "state": "a dim of the states",
    "time_observed": "a dim of the observations",
    "observation": "a dim of the observations",
    "observed_state": "a dim of the noise",
}


def usable_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names, or say which cannot be fields of a named tuple."""
    if isinstance(names, str | Set) or not isinstance(names, Iterable):
        msg = f"{what} is {names!r}; expected a list of names, in their order."
        raise TypeError(msg)
    names = tuple(names)
    unusable = [
        name
        for name in names
        if not (isinstance(name, str) and name.isidentifier())
        or iskeyword(name)
        or name.startswith("_")
    ]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if not names or unusable or repeated:
        wrong = listed({"unusable": unusable, "repeated": repeated})
        msg = f"{what} are {list(names)}; expected distinct Python names{wrong and f' ({wrong})'}."
        raise ValueError(msg)
    return names


def refuse_reserved(names: Collection[str], reserved: Mapping[str, str] = RESERVED):
    """Raise if variables of a model would have names that something else needs."""
    clashes = {name: reserved[name] for name in names if name in reserved}
    if clashes:
        listed = ", ".join(f"{name!r} ({use})" for name, use in clashes.items())
        msg = (
            f"variables have names that are taken: {listed}. Expected other names than "
            f"{list(reserved)}; rename the parameters."
        )
        raise ValueError(msg)


def yielding(name: str, taken: Collection[str]) -> str:
    """Return a name of ours, with an underscore where a parameter has it: ``sigma_``."""
    while name in taken:
        name += "_"
    return name


def in_order(values: Mapping, names: Sequence[str], what: str) -> list:
    """Return the values in the order of the names, which must be theirs exactly."""
    if not hasattr(values, "keys"):
        msg = f"{what} a {type(values).__name__}; expected a mapping from each of {list(names)}."
        raise TypeError(msg)
    given = list(values.keys())  # a pandas Series iterates over its values
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        wrong = listed({"missing for": missing, "given for unknown": unknown})
        msg = f"{what} {wrong}; expected one for each of {list(names)}."
        raise ValueError(msg)
    return [values[name] for name in names]


def labels_of(values: Any) -> tuple | None:
    """Return the names along the last axis of a table, a series or a labelled array, or None.

    Names of a table's columns are always some; elsewhere positions and times are none.
    """
    if isinstance(values, xr.DataArray):
        index = values.indexes.get(values.dims[-1]) if values.dims else None
    elif isinstance(values, pd.Series):
        index = values.index
    else:
        columns = getattr(values, "columns", None)
        return None if columns is None else tuple(columns)
    if index is None or not all(isinstance(name, str) for name in index):
        return None
    return tuple(index)


def columns_in_order(
    values: NDArray[np.float64], columns: tuple, states: tuple, name: str = "y"
) -> NDArray[np.float64]:
    """Return what has these columns in the order of the states; NaN for those that it lacks."""
    unknown = [name for name in columns if name not in states]
    repeated = sorted({str(name) for name in columns if columns.count(name) > 1})
    if unknown or repeated:
        msg = (
            f"the columns of {name} are {list(columns)} "
            f"({listed({'unknown': unknown, 'repeated': repeated})}); "
            f"expected states of the ODE, {list(states)}, in any order. Rename columns, "
            f"{name}.rename(columns={{'old': {states[0]!r}}}), or take some, "
            f"{name}[[{states[0]!r}]]."
        )
        raise ValueError(msg)
    ordered = np.full((*values.shape[:-1], len(states)), np.nan)
    ordered[..., [states.index(name) for name in columns]] = values
    return ordered


def listed(what: Mapping[str, Collection]) -> str:
    """Return lists with words before each, without those that are empty."""
    return " and ".join(f"{words} {list(found)}" for words, found in what.items() if found)


def with_values(names: Sequence[str], values: Any) -> str:
    """Return names with their values, as in ``"a = 1, b = 2.5"``."""
    return ", ".join(f"{n} = {v:.3g}" for n, v in zip(names, values, strict=True)) or "no parameter"


def _is_number(value: Any) -> bool:
    """Tell whether an entry of a table is a number, or missing: None and pd.NA are NaN."""
    try:
        is_missing = value is None or value is pd.NA
        return is_missing or (not isinstance(value, complex) and float(value) is not None)
    except (TypeError, ValueError):
        return False


def as_numbers(values: Any, name: str, expected: str = "numbers") -> NDArray[np.float64]:
    """Return an array, or say what was expected of ``name``."""
    with suppress(TypeError, ValueError):
        array = np.asarray(values)
        if array.dtype.kind == "O":
            array = np.where(pd.isna(array), np.nan, array)  # None, pd.NA
        if array.dtype.kind not in "USc":  # text and complex numbers
            return np.asarray(array, dtype=float)
    what, cure = f"{name} is a {type(values).__name__}, {short(values)}", ""
    if isinstance(values, pd.DataFrame):
        cure = (
            " pd.to_numeric(column, errors='coerce') makes text a missing value, and "
            "pd.read_csv(..., decimal=',') reads decimal commas."
        )
        entries = []
        for k, column in enumerate(values.columns):
            rows = [row for row, value in enumerate(values.iloc[:, k]) if not _is_number(value)]
            if rows:
                more = f" and no number in {len(rows) - 1} more" if len(rows) > 1 else ""
                entries.append(f"{column!r} is {values.iat[rows[0], k]!r} in row {rows[0]}{more}")
        what = f"{name} is a table, of which not all are numbers: {', '.join(entries)}"
    msg = f"{what}; expected {expected}.{cure}"
    raise TypeError(msg)


def check_counts(**counts: Any):
    """Raise unless all are whole numbers from one on (``burn_in``: from zero), or None."""
    for name, count in counts.items():
        least, word = (0, "zero") if name == "burn_in" else (1, "one")
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            msg = f"{name} is {count!r}; expected a whole number."
            raise TypeError(msg)
        if count < least:
            msg = f"{name} is {count}; expected at least {word}."
            raise ValueError(msg)


def check_share(**shares: Any):
    """Raise unless all are numbers between zero and one, or None."""
    for name, share in shares.items():
        if share is None:
            continue
        if isinstance(share, bool) or not isinstance(share, int | float | np.number):
            msg = f"{name} is {share!r}; expected a number between 0 and 1, such as 0.9."
            raise TypeError(msg)
        if not 0 < share < 1:
            msg = f"{name} is {share}; expected a number between 0 and 1, such as 0.9."
            raise ValueError(msg)


def is_distribution(variable) -> bool:
    """Tell whether a variable is drawn from a distribution, in a model or not."""
    return isinstance(variable, TensorVariable) and is_random_variable(variable)


def is_registered(variable, model: pm.Model | None) -> bool:
    """Tell whether a variable already belongs to a model."""
    return model is not None and any(variable is known for known in model.named_vars.values())


def registered(
    model: pm.Model,
    name: str,
    prior: TensorVariable,
    dims: tuple[str, ...] | None = None,
) -> TensorVariable:
    """Return the model's variable of a prior: itself, if it is there, or a new one."""
    return prior if is_registered(prior, model) else join(model, name, prior, dims)


def join(
    model: pm.Model, name: str, prior: TensorVariable, dims: tuple[str, ...] | None = None
) -> TensorVariable:
    """Add a copy of a distribution to a model."""
    # The same .dist() object may serve several parameters and models: each
    # gets a node, and a stream of random numbers, of its own.
    inputs = [
        pt.random.shared_rng(seed=None) if is_generator(variable) else variable
        for variable in prior.owner.inputs
    ]
    node = prior.owner.clone_with_new_inputs(inputs)
    return model.register_rv(node.outputs[prior.owner.outputs.index(prior)], name, dims=dims)
