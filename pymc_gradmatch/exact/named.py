"""Points of an exact posterior as the variables of its model, by name, as ArviZ has them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import pymc as pm
import xarray as xr
from arviz_base import from_dict
from numpy.typing import NDArray
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, with_equal_parameters
from pymc_gradmatch.data_values import DataValues
from pymc_gradmatch.exact.model import Part
from pymc_gradmatch.exact.solutions import Solutions, compile_for_draws, with_draws
from pymc_gradmatch.gp import free_variable
from pymc_gradmatch.model import changed_data


class Named(Solutions):
    """What points of a posterior say of a model's variables.

    Coordinates are the values of its free variables, one after the other, those of x(t0) last.
    """

    single_terms: dict[str, TensorVariable]
    """What the log density adds up, by name."""
    _exact: pm.Model
    """The model, with data in the place of the states."""
    _x: list[Any]
    """These data."""
    _free: list[str]
    _values: list[TensorVariable]
    """Names of the free variables, and their values."""
    _shapes: list[tuple[int, ...]]
    _named: list[str]
    _parameters: list[str]
    _parts: list[Part]
    _observed: list[Any]
    _graphs: list[Any]
    """Parameters and x(t0) of each constraint, and the named variables, of the values."""
    _natural: Callable
    """Evaluates these."""
    _number: DataValues
    _kept: deque[tuple[NDArray, list[NDArray]]]
    """Points that were evaluated, and their trajectories."""

    def unconstrained(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return points as the values u, by the names of the free variables."""
        return dict(zip(self._free, self._split(phi), strict=True))

    def natural(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return the free variables of the exact model at a point, by name."""
        free = self._exact.replace_rvs_by_values([self._exact[name] for name in self._free])
        values = compile_for_draws(self._values, free)(*self._split(phi[None]))
        arrays = with_draws(values, free, 1)
        return {name: array[0] for name, array in zip(self._free, arrays, strict=True)}

    def variables(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return what points determine, by name: parameters, x(t0), all else, the trajectories."""
        u = self._split(phi)
        return self._before_solving(u) | dict(zip(self.states, self._solved(u), strict=True))

    def _before_solving(self, u) -> dict[str, NDArray[np.float64]]:
        _, starts, natural = self._at(u)
        named = dict(zip([*self._named, *self.starts], [*natural, *starts], strict=True))
        ordered = dict.fromkeys([*self._parameters, *self.starts, *named])
        return {name: named[name] for name in ordered}

    def scalars(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return every scalar at points by a label such as ``x0[prey]``, without solving."""
        variables = self._before_solving(self._split(phi))
        return {
            label: column
            for name, values in variables.items()
            for label, column in zip(
                self.entries(name, values.shape[1:]),
                values.reshape(len(phi), -1).T,
                strict=True,
            )
        }

    def idata(self, phi: NDArray[np.float64], rng: np.random.Generator) -> xr.DataTree:
        """Return points as the draws of one chain, with the groups that ArviZ knows of a fit.

        ``posterior``, ``posterior_predictive``, ``log_likelihood`` and ``observed_data``; no
        ``posterior_predictive`` where a likelihood cannot be drawn from.
        """
        values, u, trajectories = self._at_points(phi)
        names = [str(rv.name) for rv in self._observed]
        observed = {
            name: self.model.rvs_to_values[self.model[name]].eval(mode=EVALUATE_ONCE)
            for name in names
        }
        at_solutions = partial(self._at_solutions, values=[*u, *trajectories], rng=rng)
        groups = {"posterior": values}
        with suppress(NotImplementedError):
            groups["posterior_predictive"] = at_solutions(self._drawn_data())
        groups["log_likelihood"] = at_solutions([self.single_terms[name] for name in names])
        return self._labelled(groups, observed)

    def posterior(self, phi: NDArray[np.float64]) -> xr.Dataset:
        """Return points as the draws of one chain: the group ``posterior`` of :meth:`idata`."""
        values, _, _ = self._at_points(phi)
        dims, coords = self._dims_and_coords((name, v[0]) for name, v in values.items())
        coords |= {"chain": [0], "draw": [*range(len(phi))]}
        return xr.Dataset(
            {name: (("chain", "draw", *dims[name]), array[None]) for name, array in values.items()},
            coords,
        )

    def _at_points(self, phi: NDArray[np.float64]) -> tuple[dict[str, NDArray], list, list]:
        """Return all that points determine by name, the values u, and the trajectories."""
        u = self._split(phi)
        trajectories = self._kept_or_solved(phi)
        values = self._before_solving(u)
        values |= dict(zip(self.states, trajectories, strict=True))
        return values | self._made_of_states(u, trajectories), u, trajectories

    def _kept_or_solved(self, phi: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Return the trajectories of points, most of which were evaluated before, or repeat."""
        rows = _as_bytes(phi)
        known = {row for points, _ in self._kept for row in _as_bytes(points)}
        places = {row: place for place, row in enumerate(rows)}
        left = [place for row, place in places.items() if row not in known]
        solved = [*self._kept]
        if left:
            solved.append((phi[left], self._solved(self._split(phi[left]))))
        points, trajectories = zip(*solved, strict=True)
        places = {row: place for place, row in enumerate(_as_bytes(np.concatenate(points)))}
        at = [places[row] for row in rows]
        return [np.concatenate(x)[at] for x in zip(*trajectories, strict=True)]

    def _labelled(
        self, groups: Mapping[str, Mapping[str, NDArray]], observed: dict[str, NDArray]
    ) -> xr.DataTree:
        """Return draws of one chain, and data, with their dims and coords."""
        of_draws = ((n, v[0]) for n, v in groups["posterior"].items())
        dims, coords = self._dims_and_coords([*of_draws, *observed.items()])
        in_chains: dict[str, Any] = {
            group: {name: array[None] for name, array in arrays.items()}
            for group, arrays in groups.items()
        }
        in_chains |= {"observed_data": observed} if observed else {}
        return from_dict(in_chains, coords=coords, dims=dims)

    def _dims_and_coords(
        self, arrays: Iterable[tuple[str, NDArray]]
    ) -> tuple[dict[str, list], dict[str, list]]:
        """Return the dims of variables, of which there is a value of each, and their coords."""
        dims: dict[str, list] = {}
        coords: dict[str, list] = {}
        for name, array in arrays:
            named = self.dims(name) or (None,) * array.ndim
            labels = self.labels(name, array.shape)
            dims[name] = [dim or f"{name}_dim_{k}" for k, dim in enumerate(named)]
            coords |= dict(zip(dims[name], map(list, labels), strict=True))
        return dims, coords

    @cached_property
    def _of_states(self) -> list:
        """What the model computes from the states, and names."""
        free = {self._exact[name] for name in self._free}
        strangers = {*self._exact.basic_RVs} - free
        return [
            v
            for v in self._exact.deterministics
            if v.name not in {*self._named, *self.starts} and not strangers & {*ancestors([v])}
        ]

    @property
    def along_states(self) -> set[str]:
        """Names of the states, of the free variables behind them, and of what is made of them."""
        return {*self.states, *self._behind_states, *(str(v.name) for v in self._of_states)}

    @property
    def default_starts(self) -> list[str]:
        """Names of the coordinates of x(t0) of which nobody said what prior they have."""
        return [
            str(label)
            for part in self._parts
            if part.is_default
            for label in np.ravel(self._labels[part.number][part.where])
        ]

    @property
    def behind_starts(self) -> list[str]:
        """Names of the free variables that x(t0) is made of, where it is no such itself."""
        return [part.name for part in self._parts if part.name not in self.starts]

    @cached_property
    def _behind_states(self) -> dict[str, Any]:
        """The free variables that states are made of, where these are not such themselves."""
        behind: dict[str, Any] = {}
        for name, constraint, x in zip(self.states, self.constraints, self._x, strict=True):
            behind |= free_variable(name, constraint.gp, x, self.model.named_vars)
        return behind

    def _made_of_states(self, u, trajectories) -> dict[str, NDArray[np.float64]]:
        """Return what PyMC, and who looks at the draws, expects beside the states themselves."""
        names, graphs, evaluate = self._computed
        values = evaluate(*u, *trajectories)
        return dict(zip(names, with_draws(values, graphs, len(trajectories[0])), strict=True))

    @cached_property
    def _computed(self) -> tuple[list[str], list, Callable]:
        computed = [*self._of_states, *(self._exact[name] for name in self.behind_starts)]
        names = [*self._behind_states, *(str(v.name) for v in computed)]
        graphs = [*self._behind_states.values(), *self._exact.replace_rvs_by_values(computed)]
        graphs = self._number.with_shared(graphs)
        return names, graphs, compile_for_draws([*self._values, *self._x], graphs)

    def has_other_data(self) -> bool:
        """Tell whether :func:`pymc.set_data` has put others in the place of what is observed."""
        values = [self.model.rvs_to_values[self.model[str(rv.name)]] for rv in self._observed]
        upstream = {variable.name for variable in ancestors(values)}
        return not upstream.isdisjoint(changed_data(self.model))

    def _drawn_data(self) -> list:
        """Return what is observed as random graphs of the values and the states."""
        solved = self._exact
        free = [solved[name] for name in self._free]
        natural = solved.replace_rvs_by_values(free)
        observed = [with_equal_parameters(rv) for rv in self._observed]
        return clone_replace(observed, dict(zip(free, natural, strict=True)))

    def _at_solutions(self, graphs, values, rng) -> dict[str, NDArray]:
        evaluate = compile_for_draws([*self._values, *self._x], graphs, int(rng.integers(2**31)))
        arrays = with_draws(evaluate(*values), graphs, len(values[-1]))
        return {str(rv.name): array for rv, array in zip(self._observed, arrays, strict=True)}

    def initial_points(self, phi: NDArray[np.float64]) -> list[dict[str, Any]]:
        """Return the free variables and x(t0) at points, by name."""
        variables = self.variables(phi)
        names = dict.fromkeys([*self._free[: self._n_others], *self.starts])
        return [{name: variables[name][point] for name in names} for point in range(len(phi))]

    @property
    def _n_others(self) -> int:
        """How many value variables stand before those of x(t0)."""
        return len(self._values) - len(self._parts)

    def of_starts(self, each: Sequence) -> list:
        """Return the entries of arrays ``(..., state)``, one for each constraint's x(t0), flat.

        Of those that are coordinates, in their order.
        """
        return [e for p in self._parts for e in np.ravel(np.asarray(each[p.number])[p.where])]

    @property
    def names(self) -> list[str]:
        """Names of the coordinates."""
        others = zip(self._values[: self._n_others], self._shapes, strict=False)
        names = [name for value, shape in others for name in self.entries(str(value.name), shape)]
        return [*names, *map(str, self.of_starts(self._labels))]

    @property
    def _labels(self) -> list[NDArray]:
        """Labels of the entries of each x(t0)."""
        shapes = [constraint.gp.mean.shape for constraint in self.constraints]
        return [
            np.reshape(self.entries(start, shape), shape)
            for start, shape in zip(self.starts, shapes, strict=True)
        ]

    def _split(self, phi) -> list[NDArray]:
        """Return points as the values u."""
        parts, begin = [], 0
        for shape in self._shapes:
            end = begin + prod(shape)
            parts.append(phi[:, begin:end].reshape(len(phi), *shape))
            begin = end
        return parts

    def _at(self, u) -> tuple[list[NDArray], list[NDArray], list[NDArray]]:
        """Return the parameters of each constraint, its x(t0), and the named variables."""
        with np.errstate(over="ignore"):  # a start that cannot be integrated from
            values = with_draws(self._natural(*u), self._graphs, len(u[0]))
        n = len(self.constraints)
        return values[:n], values[n : 2 * n], values[2 * n :]

    def trajectories(
        self, phi: NDArray[np.float64], times: Sequence[NDArray[np.float64]]
    ) -> list[NDArray[np.float64]]:
        """Return the solutions at points, at other times than the grid's; see :meth:`solve`."""
        return self._solved(self._split(phi), times)

    def _solved(self, u, times=None) -> list[NDArray]:
        theta, starts, _ = self._at(u)
        return self.solve(starts, theta, times)


def _as_bytes(phi: NDArray[np.float64]) -> list[bytes]:
    """Return what tells points apart."""
    rows: list[bytes] = (
        np.ascontiguousarray(phi).view(f"V{phi.itemsize * phi.shape[1]}")[:, 0].tolist()
    )
    return rows
