"""Checks of users' arguments: names, numbers, counts and priors."""

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

DRAW_DIMS = {"chain": "a dim of draws in ArviZ", "draw": "a dim of draws in ArviZ"}
RESERVED = DRAW_DIMS | {
    "time": "a dim of the states",
    "experiment": "a dim of the states",
    "state": "a dim of the states",
    "time_observed": "a dim of the observations",
    "observation": "a dim of the observations",
    "observed_state": "a dim of the noise",
}


def usable_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names; raise if some cannot be fields of a named tuple."""
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
    """Raise if variables of a model have reserved names."""
    clashes = {name: reserved[name] for name in names if name in reserved}
    if clashes:
        listed = ", ".join(f"{name!r} ({use})" for name, use in clashes.items())
        msg = (
            f"variables have reserved names: {listed}. Expected other names than "
            f"{list(reserved)}; rename the parameters."
        )
        raise ValueError(msg)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name with underscores appended until it is not taken: ``sigma_``."""
    while name in taken:
        name += "_"
    return name


def in_order(values: Mapping, names: Sequence[str], what: str) -> list:
    """Return the values in the order of the names; raise if others are given."""
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

    A table's columns are always names; other labels only if they are text.
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
    """Return columns in the order of the states, NaN for missing ones."""
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
    """Return the lists that are not empty, each after its key."""
    return " and ".join(f"{words} {list(found)}" for words, found in what.items() if found)


def with_values(names: Sequence[str], values: Any) -> str:
    """Return names with their values, as in ``"a = 1, b = 2.5"``."""
    return ", ".join(f"{n} = {v:.3g}" for n, v in zip(names, values, strict=True)) or "no parameter"


def _is_number(value: Any) -> bool:
    """Return whether an entry of a table is a number or missing."""
    try:
        is_missing = value is None or value is pd.NA
        return is_missing or (not isinstance(value, complex) and float(value) is not None)
    except (TypeError, ValueError):
        return False


def as_numbers(values: Any, name: str, expected: str = "numbers") -> NDArray[np.float64]:
    """Return an array of floats; raise if the values of ``name`` are not numbers."""
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
    """Raise unless all are None or whole numbers of at least one (``burn_in``: zero)."""
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
    """Raise unless all are None or numbers between zero and one."""
    for name, share in shares.items():
        is_number = isinstance(share, int | float | np.number) and not isinstance(share, bool)
        if share is not None and not (is_number and 0 < share < 1):
            msg = f"{name} is {share!r}; expected a number between 0 and 1, such as 0.9."
            raise ValueError(msg) if is_number else TypeError(msg)


def is_distribution(variable) -> bool:
    """Return whether a variable is random, in a model or not."""
    return isinstance(variable, TensorVariable) and is_random_variable(variable)


def is_registered(variable, model: pm.Model | None) -> bool:
    """Return whether a variable belongs to a model."""
    return model is not None and any(variable is known for known in model.named_vars.values())


def registered(
    model: pm.Model,
    name: str,
    prior: TensorVariable,
    dims: tuple[str, ...] | None = None,
) -> TensorVariable:
    """Return a prior's variable in the model, added if it is not there."""
    return prior if is_registered(prior, model) else join(model, name, prior, dims)


def join(
    model: pm.Model, name: str, prior: TensorVariable, dims: tuple[str, ...] | None = None
) -> TensorVariable:
    """Add a copy of a distribution to a model."""
    # One .dist() object may serve several parameters and models: each gets its own node and
    # random number generator.
    inputs = [
        pt.random.shared_rng(seed=None) if is_generator(variable) else variable
        for variable in prior.owner.inputs
    ]
    node = prior.owner.clone_with_new_inputs(inputs)
    return model.register_rv(node.outputs[prior.owner.outputs.index(prior)], name, dims=dims)
