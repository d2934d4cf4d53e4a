"""A stack of posteriors of many data sets, in memory or in a file to which fits are added.

The file is a zarr group with one chunk for each data set and variable.  A chunk is written as a
whole, and ``failure``, which marks a data set as done, is written last, so that a fit that was
interrupted does not count.  One process writes.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from os import PathLike
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, cast

import numpy as np
import pandas as pd
import pytensor
import xarray as xr
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import graph_inputs

from pymc_gradmatch.ode import ODE

REPLICATE, TIME, TIMES = "replicate", "time", "times"
NOT_YET = "not fitted yet"
CHUNK_OF_SCALARS = 1_000  # data sets in one chunk of a variable with one value for each
MAX_DEPTH = 6  # nested attributes of functions and objects that a fingerprint reads


class InMemory:
    """Named arrays in memory."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[tuple[str, ...], NDArray, Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __getitem__(self, name: str) -> NDArray:
        return self.arrays[name][1]

    def __delitem__(self, name: str):
        del self.arrays[name]

    def create(self, name: str, dims: tuple, shape: tuple, dtype: Any, fill: Any):
        """Add an array filled with one value."""
        kind = object if dtype is str else dtype
        self.arrays[name] = (tuple(dims), np.full(shape, fill, dtype=kind), fill)

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dims of an array."""
        return self.arrays[name][0]

    def grow(self, name: str, shape: tuple[int, ...]):
        """Extend an array to a larger shape."""
        dims, array, fill = self.arrays[name]
        more = [(0, new - old) for new, old in zip(shape, array.shape, strict=True)]
        self.arrays[name] = (dims, np.pad(array, more, constant_values=fill), fill)

    def dataset(self) -> xr.Dataset:
        """Return all arrays."""
        return xr.Dataset(
            {
                name: (dims, array.astype(str) if array.dtype == object else array)
                for name, (dims, array, _) in self.arrays.items()
            }
        )


class InFile:
    """Named arrays of a zarr group."""

    def __init__(self, group):
        self.group = group
        self.arrays = dict(group.arrays())  # group[name] would read its metadata each time

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __getitem__(self, name: str):
        return self.arrays[name]

    def __delitem__(self, name: str):
        del self.group[name]
        del self.arrays[name]

    def create(self, name: str, dims: tuple, shape: tuple, dtype: Any, fill: Any):
        """Add an array filled with one value; draws have one chunk for each data set."""
        of_each = dims[0] == REPLICATE and len(dims) > 1
        first = 1 if of_each else min(shape[0], CHUNK_OF_SCALARS)
        self.arrays[name] = self.group.create_array(
            name,
            shape=shape,
            chunks=(first, *shape[1:]),
            dtype=dtype,
            fill_value=fill,
            dimension_names=dims,
        )

    def dims(self, name: str) -> tuple[str, ...]:
        """Return the dims of an array."""
        return tuple(self.arrays[name].metadata.dimension_names)

    def grow(self, name: str, shape: tuple[int, ...]):
        """Extend an array to a larger shape."""
        self.arrays[name].resize(shape)

    def dataset(self) -> xr.Dataset:
        """Return all arrays, read lazily."""
        import zarr

        with warnings.catch_warnings():  # its metadata are not part of zarr's format 3 yet
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(self.group.store)
        return xr.open_dataset(self.group.store, engine="zarr", consolidated=True, chunks=None)


class Stack:
    """Posteriors of ``n`` data sets, added one by one.

    Parameters
    ----------
    n : int
        Number of data sets.
    arrays : InMemory or InFile
        Where they are stored; may have fits of an earlier run.
    attributes : mapping of str to number or str
        Attributes of posteriors that become variables, with their values where a fit fails.
    names : sequence of str or int, optional
        Labels of the data sets.
    """

    def __init__(
        self,
        n: int,
        arrays: InMemory | InFile,
        attributes: Mapping[str, Any],
        names: Sequence | None = None,
    ):
        self.n, self.arrays, self.attributes = n, arrays, attributes
        self._known_labels: dict[str, list] = {}  # read from the file once
        for name, value in {"failure": NOT_YET, **attributes}.items():
            if name not in arrays:
                arrays.create(name, (REPLICATE,), (n,), type(value), value)
        if names is not None and REPLICATE not in arrays:
            is_text = isinstance(names[0], str)
            arrays.create(REPLICATE, (REPLICATE,), (n,), str if is_text else int, names[0])
            arrays[REPLICATE][:] = np.array(names, dtype=object if is_text else int)

    @property
    def failures(self) -> NDArray:
        """Why a data set has no draws; empty where it has; shape ``(replicate,)``."""
        return np.array([str(failure) for failure in self.arrays["failure"][:]])

    def missing(self) -> list[int]:
        """Return the places of data sets that are not fitted yet."""
        return np.flatnonzero(np.char.startswith(self.failures, NOT_YET)).tolist()

    def fail(self, place: int, why: str):
        """Record why a data set has no draws."""
        self.arrays["failure"][place] = why

    def add(self, place: int, posterior: xr.Dataset):
        """Store the draws of a data set."""
        variables = self._prepare(posterior)
        arrays = self.arrays
        if TIMES in arrays:
            arrays[TIMES][place, : posterior.sizes[TIME]] = posterior[TIME].to_numpy()
        for name, variable in variables.items():
            places = [self._places(dim, variable) for dim in variable.dims]
            if all(np.array_equal(at, np.arange(len(at))) for at in places):
                there: Any = (place, *map(slice, variable.shape))
                arrays[name][there] = variable.to_numpy()
            else:
                block = np.array(arrays[name][place])
                block[np.ix_(*places)] = variable
                arrays[name][place] = block
        for name in self.attributes:
            arrays[name][place] = posterior.attrs[name]
        arrays["failure"][place] = ""

    def _places(self, dim: Hashable, variable: xr.DataArray) -> NDArray[np.int64]:
        """Return the places of a variable's labels among all labels of a dim."""
        if not _has_labels(variable, dim):
            return np.arange(variable.sizes[dim])
        known, labels = self._labels(str(dim)), variable[dim].to_numpy().tolist()
        return np.arange(len(known)) if labels == known else pd.Index(known).get_indexer(labels)

    def _labels(self, dim: str) -> list:
        if dim not in self._known_labels:
            self._known_labels[dim] = self.arrays[dim][:].tolist()
        return self._known_labels[dim]

    def dataset(self) -> xr.Dataset:
        """Return all that is stored."""
        found = self.arrays.dataset()
        return found.set_coords([TIMES]) if TIMES in found else found

    def _prepare(self, posterior: xr.Dataset) -> dict[str, xr.DataArray]:
        """Create or extend arrays for a posterior; return its variables.

        Dims are renamed to those of the first posterior, which may be observed in all states
        where this one is observed in some.
        """
        arrays, variables = self.arrays, {}
        for name, variable in _named(posterior.data_vars):
            dims = arrays.dims(name)[1:] if name in arrays else variable.dims
            pairs = zip(variable.dims, dims, strict=True)
            others = {old: new for old, new in pairs if old != new}
            variables[name] = variable.rename(others) if others else variable  # renaming copies
        for name, coord in [pair for v in variables.values() for pair in _named(v.coords)]:
            values = coord.to_numpy()
            if name in arrays and coord.dims == (name,) and name != TIME:
                self._prepare_labels(name, values.tolist())
            elif name not in arrays and not (name == TIME and TIMES in arrays):
                kind: Any = str if values.dtype.kind in "OUT" else values.dtype
                arrays.create(name, coord.dims, values.shape, kind, values.ravel()[0])
                arrays[name][:] = values
        for name, variable in variables.items():
            if name not in arrays:
                shape = [
                    len(self._labels(str(dim)))
                    if _has_labels(variable, dim)
                    else variable.sizes[dim]
                    for dim in variable.dims
                ]
                is_bool = variable.dtype == bool
                kind = bool if is_bool else np.result_type(variable.dtype, float)  # which has NaN
                dims, fill = (REPLICATE, *variable.dims), False if is_bool else np.nan
                arrays.create(name, dims, (self.n, *shape), kind, fill)
        if TIME in posterior.sizes:
            self._prepare_times(posterior[TIME].to_numpy())
        return variables

    def _prepare_labels(self, dim: str, labels: list):
        """Extend a dim by labels that no posterior had until now."""
        known = self._labels(dim)
        if labels == known:
            return
        more = list(dict.fromkeys([*known, *labels]))
        if len(more) > len(known):
            self._extend(dim, len(more))
            self.arrays[dim][:] = np.array(more, dtype=object if isinstance(more[0], str) else None)
            self._known_labels[dim] = more

    def _extend(self, dim: str, size: int):
        """Extend all arrays along a dim, its coordinate last, so that a killed run can resume."""
        arrays = self.arrays
        for name in sorted(arrays, key=lambda name: name in {dim, TIMES}):
            if dim in arrays.dims(name):
                longer = zip(arrays.dims(name), arrays[name].shape, strict=True)
                arrays.grow(name, tuple(size if d == dim else n for d, n in longer))

    def _prepare_times(self, t: NDArray[np.float64]):
        # In an order in which a run that is killed at any point can resume.
        arrays = self.arrays
        if TIME in arrays:
            known = arrays[TIME][:]
            if TIMES not in arrays:
                if np.array_equal(known, t):
                    return
                # Until now all had the same times.
                arrays.create(TIMES, (REPLICATE, TIME), (self.n, len(known)), float, np.nan)
            for place in np.flatnonzero(self.failures == "").tolist():
                arrays[TIMES][place, : len(known)] = known
            del arrays[TIME]
        if len(t) > arrays[TIMES].shape[1]:
            self._extend(TIME, len(t))


def _has_labels(variable: xr.DataArray, dim: Hashable) -> bool:
    return dim != TIME and dim in variable.coords


def _named(variables: Mapping) -> list[tuple[str, xr.DataArray]]:
    return [(str(name), variable) for name, variable in variables.items()]


def open_file(out: str | PathLike, problem: Mapping[str, Any]) -> Any:
    """Open the zarr group of a problem, or create it.

    Parameters
    ----------
    out : path
        A new folder, or one that an earlier call created.
    problem : mapping of str to anything
        The arguments of the fits.  With a ``random_seed`` of None that of the file is used.

    Returns
    -------
    zarr.Group
        With the seed's entropy in ``attrs["random_seed"]``.

    Raises
    ------
    ValueError
        If it holds fits of another problem, or something else.
    ImportError
        If zarr is missing.
    """
    try:
        import zarr
    except ImportError as error:
        msg = 'out= writes a zarr file: pip install "pymc-gradmatch[zarr]", or pip install zarr.'
        raise ImportError(msg) from error
    path = Path(out)
    described = {name: fingerprint(value) for name, value in problem.items()}
    entries = [p for p in path.iterdir() if p.suffix != ".partial"] if path.is_dir() else []
    if not entries and not path.is_file():
        seed = problem["random_seed"]
        entropy = np.random.SeedSequence().entropy if seed is None else seed
        about = {"problem": described, "random_seed": entropy}
        return zarr.create_group(path, attributes=about, overwrite=path.is_dir())
    there: Any = None
    if path / "zarr.json" in entries:
        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        there = group.attrs.get("problem")
    if there is None:
        msg = (
            f"{path} exists and holds no fits of gm.fit_many; expected the name of a new file, "
            "or one that an earlier call with the same arguments created."
        )
        raise ValueError(msg)
    seed = "random_seed"
    others = [n for n in {**there, **described} if there.get(n) != described.get(n)]
    others = [n for n in others if not (n == seed and problem[seed] is None)]
    if others:
        msg = (
            f"{path} holds fits of another problem: it was made with other {', '.join(others)}. "
            "Expected the same arguments, to continue, or the name of a new file; delete it to "
            "start again."
        )
        raise ValueError(msg)
    return group


def fingerprint(value: Any) -> str:
    """Return a hash of arguments that is the same in every process.

    Of functions it covers code, defaults and closures, but not globals that they read: pass the
    graphs that they write instead.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.sampling.stack import fingerprint
    >>> fingerprint({"t": np.arange(3.0)}) == fingerprint({"t": np.arange(3.0)})
    True
    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 2)
    False
    """
    return hashlib.sha256(json.dumps(_as_json(value)).encode()).hexdigest()[:16]


def _as_json(value: Any, depth: int = 0) -> Any:
    """Return the contents of a value as JSON."""
    kind, again = type(value).__name__, depth + 1
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth > MAX_DEPTH:
        return kind
    if isinstance(value, Variable):
        text = cast("str", pytensor.dprint(value, file="str", id_type="CHAR"))
        inputs = [*graph_inputs([value])]  # of which the text shows a few digits
        held = [v.data for v in inputs if isinstance(v, Constant)]
        held += [v.get_value() for v in inputs if isinstance(v, SharedVariable)]
        numbers = [
            _as_json(np.asarray(one)) for one in held if not isinstance(one, np.random.Generator)
        ]
        return [re.sub(r"0x[0-9A-Fa-f]+", "", text), numbers]
    if isinstance(value, ODE):
        graphs = [_as_json(graph) for graph in value.symbolic.derivatives]
        return [graphs, *(_as_json(part, again) for part in value.__reduce__()[1][1:])]
    if isinstance(value, pd.DataFrame):
        return [_as_json(value.columns.tolist()), _as_json(value.to_numpy())]
    if isinstance(value, Mapping):
        return [[str(name), _as_json(part, again)] for name, part in value.items()]
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, Sequence):
        return [_as_json(part, again) for part in value]
    if isinstance(value, pd.Series):
        return [_as_json(value.index), _as_json(value.to_numpy(), again)]
    if isinstance(value, xr.DataArray):
        labels = {dim: value.indexes[dim] for dim in value.dims if dim in value.indexes}
        return [[*value.dims], _as_json(labels, again), _as_json(value.to_numpy(), again)]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype == object:
            return [_as_json(part, again) for part in array.ravel().tolist()]
        return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if isinstance(value, AbstractSet):
        return sorted(json.dumps(_as_json(part, again)) for part in value)
    if isinstance(value, partial):
        return [_as_json(part, again) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
        return [_as_json(part, again) for part in parts]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, _as_json(value.co_consts, again)]
    return [kind, _as_json(_parts(value), again)]


def _parts(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    slots = [np.atleast_1d(vars(base).get("__slots__", ())) for base in type(value).__mro__]
    in_slots = {slot: getattr(value, slot, None) for slot in np.concatenate(slots).tolist()}
    return in_slots | getattr(value, "__dict__", {})
