"""Names of states and parameters: which are usable, and values in their order."""

from collections.abc import Mapping, Sequence, Set
from keyword import iskeyword

__all__ = ["in_order", "usable_names"]


def usable_names(names: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the names, or say which cannot be fields of a named tuple."""
    if isinstance(names, str | Set):
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
        msg = (
            f"{what} are {list(names)}; expected distinct Python names. "
            f"Unusable: {unusable}, repeated: {repeated}."
        )
        raise ValueError(msg)
    return names


def in_order(values: Mapping, names: Sequence[str], what: str) -> list:
    """Return the values in the order of the names, which must be theirs exactly."""
    given = list(values.keys())  # a pandas Series iterates over its values
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    if missing or unknown:
        msg = (
            f"{what} missing for {missing} and given for unknown {unknown}; "
            f"expected one for each of {list(names)}."
        )
        raise ValueError(msg)
    return [values[name] for name in names]
