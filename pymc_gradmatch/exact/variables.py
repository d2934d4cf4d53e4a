"""The exact model's variables and log density terms as functions of unconstrained coordinates."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import xarray as xr
from arviz_base import from_dict
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_initial_values,
    minus_inf_if_invalid,
    with_equal_parameters,
)
from pymc_gradmatch.data_values import DataValues
from pymc_gradmatch.exact.model import with_solutions
from pymc_gradmatch.exact.solutions import Array, Solutions, broadcast_draws, compile_for_draws
from pymc_gradmatch.gp import free_variable
from pymc_gradmatch.model import Constraint, changed_data, log_densities_of


class ModelVariables(Solutions):
    """What points in unconstrained coordinates determine: variables by name, and data.

    Coordinates are the values of the exact model's free variables, flat, those of x(t0) last;
    solutions are given to its graphs as data.  ``likelihood`` are the names of the observed
    variables and potentials that count.
    """

    def __init__(self, model: pm.Model, has_volume: bool, number: DataValues):
        super().__init__(model)
        self._number = number
        solved, theta, starts, self._parts = with_solutions(self, _shared_states, number)
        self._exact, self._x = solved, [solved[name] for name in self.states]
        terms = _connected(solved, [*theta, *starts, *self._x], self._x)
        self.likelihood = [term.name for term in terms]
        self._observed = [term for term in terms if term in solved.observed_RVs]
        needed = set(ancestors([*theta, *starts, *terms]))
        self._theta, self._theta_and_starts = theta, [*theta, *starts]
        self._free_rvs = free = [rv for rv in solved.free_RVs if rv in needed]
        if discrete := [rv.name for rv in free if not np.issubdtype(rv.dtype, np.inexact)]:
            msg = f"the free variables {discrete} are discrete; expected continuous ones."
            raise ValueError(msg)
        self._free = [rv.name for rv in free]
        self._values = [solved.rvs_to_values[rv] for rv in free]
        of_starts = {*self.starts, *(part.name for part in self._parts)}
        others = [v for v in solved.deterministics if _is_function_of(v, free, solved, self._x)]
        named = [v for v in [*free, *others] if v.name not in of_starts]
        self._named = [v.name for v in named]
        upstream = set(ancestors([*theta, *starts]))
        self._parameters = [v.name for v in named if v in upstream]
        self._graphs = number.with_shared(solved.replace_rvs_by_values([*theta, *starts, *named]))
        self._evaluate_graphs = compile_for_draws(self._values, self._graphs)
        densities = number.with_shared(log_densities_of(solved, [*free, *terms], has_volume))
        names = [rv.name for rv in [*free, *terms]]
        self._checked_terms = number.masked(dict(zip(names, densities, strict=True)))
        there = self._start_values({}, None)
        self._shapes = [value.shape for value in there]
        self._start = np.concatenate([value.ravel() for value in there])
        self._evaluated: deque[tuple[NDArray, list[NDArray]]] = deque()  # points, trajectories

    @cached_property
    def single_terms(self) -> dict[str, Any]:
        """The terms of the log density, entry by entry, by name."""
        _, graphs = single_terms([], [*self._checked_terms.values()])
        return dict(zip(self._checked_terms, graphs, strict=True))

    @property
    def names(self) -> list[str]:
        """Names of the coordinates."""
        others = zip(self._values[: self._n_others], self._shapes, strict=False)
        names = [name for value, shape in others for name in self.entries(str(value.name), shape)]
        return [*names, *map(str, self._start_entries(self._start_labels))]

    @cached_property
    def is_parameter(self) -> NDArray[np.bool_]:
        """Which coordinates the parameters of the ODE depend on."""
        behind = {*ancestors(self._theta)}
        sizes = [prod(shape) for shape in self._shapes]
        return np.repeat([rv in behind for rv in self._free_rvs], sizes)

    @property
    def _n_others(self) -> int:
        """How many value variables come before those of x(t0)."""
        return len(self._values) - len(self._parts)

    @property
    def _start_labels(self) -> list[NDArray]:
        """Labels of the entries of each x(t0)."""
        shapes = [constraint.gp.mean.shape for constraint in self.constraints]
        return [
            np.reshape(self.entries(start, shape), shape)
            for start, shape in zip(self.starts, shapes, strict=True)
        ]

    def _start_entries(self, arrays: Sequence) -> list:
        """Return entries of arrays ``(..., state)``, one for each x(t0), in coordinate order."""
        return [e for p in self._parts for e in np.ravel(np.asarray(arrays[p.number])[p.where])]

    @property
    def default_starts(self) -> list[str]:
        """Names of the coordinates of x(t0) with the default prior."""
        return [
            str(label)
            for part in self._parts
            if part.is_default
            for label in np.ravel(self._start_labels[part.number][part.where])
        ]

    @property
    def start_variables(self) -> list[str]:
        """Names of the free variables that x(t0) is computed from, where it is not free itself."""
        return [part.name for part in self._parts if part.name not in self.starts]

    @property
    def state_dependent(self) -> set[str]:
        """Names of the states, of the free variables behind them, and of functions of them."""
        return {*self.states, *self._behind_states, *(str(v.name) for v in self._of_states)}

    @cached_property
    def _of_states(self) -> list:
        """Deterministics of the states that all other named variables determine."""
        others = {*self._exact.basic_RVs} - {*self._free_rvs}
        known = {*self._named, *self.starts}
        return [
            v
            for v in self._exact.deterministics
            if v.name not in known and not others & {*ancestors([v])}
        ]

    @cached_property
    def _behind_states(self) -> dict[str, Any]:
        """The free variables that states are computed from, where these are not free themselves."""
        behind: dict[str, Any] = {}
        for name, constraint, x in zip(self.states, self.constraints, self._x, strict=True):
            behind |= free_variable(name, constraint.gp, x, self.model.named_vars)
        return behind

    def _split(self, phi) -> list[NDArray]:
        """Return points as the values of the free variables."""
        ends = np.cumsum([prod(shape) for shape in self._shapes])
        parts = np.split(phi, ends[:-1], axis=1)
        return [
            part.reshape(len(phi), *shape) for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _at(self, u) -> tuple[list[NDArray], list[NDArray], list[NDArray]]:
        """Return the parameters of each constraint, its x(t0), and the named variables."""
        with np.errstate(over="ignore"):  # a start that cannot be integrated from
            values = broadcast_draws(self._evaluate_graphs(*u), self._graphs, len(u[0]))
        n = len(self.constraints)
        return values[:n], values[n : 2 * n], values[2 * n :]

    def _solved(self, u, times=None) -> list[NDArray]:
        theta, starts, _ = self._at(u)
        return self.solve(starts, theta, times)

    def trajectories(self, phi: Array, times: Sequence[Array]) -> list[Array]:
        """Return the solutions at points, at other times than the grid's; see :meth:`solve`."""
        return self._solved(self._split(phi), times)

    def unconstrained(self, phi: Array) -> dict[str, Array]:
        """Return points as unconstrained values, by the names of the free variables."""
        return dict(zip(self._free, self._split(phi), strict=True))

    def constrained(self, phi: Array) -> dict[str, Array]:
        """Return the free variables of the exact model at one point, by name."""
        free = self._exact.replace_rvs_by_values(self._free_rvs)
        values = compile_for_draws(self._values, free)(*self._split(phi[None]))
        arrays = broadcast_draws(values, free, 1)
        return {name: array[0] for name, array in zip(self._free, arrays, strict=True)}

    def variables(self, phi: Array) -> dict[str, Array]:
        """Return parameters, x(t0), all other variables and the states at points, by name."""
        u = self._split(phi)
        return self._without_states(u) | dict(zip(self.states, self._solved(u), strict=True))

    def _without_states(self, u) -> dict[str, Array]:
        _, starts, values = self._at(u)
        named = dict(zip([*self._named, *self.starts], [*values, *starts], strict=True))
        ordered = dict.fromkeys([*self._parameters, *self.starts, *named])
        return {name: named[name] for name in ordered}

    def scalars(self, phi: Array) -> dict[str, Array]:
        """Return every scalar at points by a label such as ``x0[prey]``, without solving."""
        return {
            label: column
            for name, values in self._without_states(self._split(phi)).items()
            for label, column in zip(
                self.entries(name, values.shape[1:]), values.reshape(len(phi), -1).T, strict=True
            )
        }

    def initial_points(self, phi: Array) -> list[dict[str, Any]]:
        """Return the free variables and x(t0) at points, by name."""
        variables = self.variables(phi)
        names = dict.fromkeys([*self._free[: self._n_others], *self.starts])
        return [{name: variables[name][point] for name in names} for point in range(len(phi))]

    def idata(self, phi: Array, rng: np.random.Generator) -> xr.DataTree:
        """Return points as the draws of one chain, with ArviZ's groups of a fit.

        ``posterior``, ``posterior_predictive``, ``log_likelihood`` and ``observed_data``; no
        ``posterior_predictive`` where a likelihood cannot be drawn from.
        """
        variables, values = self._at_points(phi)
        observed = self._observed_data()

        def evaluated(graphs, **how) -> dict[str, NDArray]:
            evaluate = compile_for_draws([*self._values, *self._x], graphs, **how)
            arrays = broadcast_draws(evaluate(*values), graphs, len(phi))
            return dict(zip(observed, (array[None] for array in arrays), strict=True))

        groups = {"posterior": {name: array[None] for name, array in variables.items()}}
        with suppress(NotImplementedError):
            seed = int(rng.integers(2**31))
            groups["posterior_predictive"] = evaluated(self._random_data(), random_seed=seed)
        terms = [self._checked_terms[name] for name in observed]
        groups["log_likelihood"] = evaluated(terms, derive=single_terms)
        groups |= {"observed_data": observed} if observed else {}
        of_draws = ((name, array[0]) for name, array in variables.items())
        dims, coords = self._dims_and_coords([*of_draws, *observed.items()])
        return from_dict(groups, coords=coords, dims=dims)

    def posterior(self, phi: Array) -> xr.Dataset:
        """Return points as the draws of one chain: the group ``posterior`` of :meth:`idata`."""
        variables, _ = self._at_points(phi)
        dims, coords = self._dims_and_coords((name, v[0]) for name, v in variables.items())
        coords |= {"chain": [0], "draw": [*range(len(phi))]}
        return xr.Dataset(
            {n: (("chain", "draw", *dims[n]), array[None]) for n, array in variables.items()},
            coords,
        )

    def _at_points(self, phi: Array) -> tuple[dict[str, NDArray], list]:
        """Return all that points determine, by name, and the values and trajectories there."""
        u = self._split(phi)
        trajectories = self._cached_or_solved(phi)
        variables = self._without_states(u) | dict(zip(self.states, trajectories, strict=True))
        names, graphs, evaluate = self._functions_of_states
        arrays = broadcast_draws(evaluate(*u, *trajectories), graphs, len(phi))
        return variables | dict(zip(names, arrays, strict=True)), [*u, *trajectories]

    def _cached_or_solved(self, phi: Array) -> list[Array]:
        """Return the trajectories of points, most of which were evaluated before, or repeat."""
        rows = _as_bytes(phi)
        wanted = {row: place for place, row in enumerate(rows)}
        found: dict[bytes, tuple[NDArray, ...]] = {}
        for points, trajectories in self._evaluated:
            at = {row: k for k, row in enumerate(_as_bytes(points)) if row in wanted}
            some = zip(*(x[[*at.values()]] for x in trajectories), strict=True)
            found |= zip(at, some, strict=True)
        left = [place for row, place in wanted.items() if row not in found]
        if left:
            solved = zip(*self._solved(self._split(phi[left])), strict=True)
            found |= zip((rows[place] for place in left), solved, strict=True)
        return [np.stack(x) for x in zip(*(found[row] for row in rows), strict=True)]

    @cached_property
    def _functions_of_states(self) -> tuple[list[str], list, Callable]:
        """Names and graphs of other variables that draws have, and what evaluates them."""
        others = [*self._of_states, *(self._exact[name] for name in self.start_variables)]
        names = [*self._behind_states, *(str(v.name) for v in others)]
        graphs = [*self._behind_states.values(), *self._exact.replace_rvs_by_values(others)]
        graphs = self._number.with_shared(graphs)
        return names, graphs, compile_for_draws([*self._values, *self._x], graphs)

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

    def _observed_data(self) -> dict[str, NDArray]:
        values = {
            str(rv.name): self.model.rvs_to_values[self.model[str(rv.name)]]
            for rv in self._observed
        }
        return {name: value.eval(mode=EVALUATE_ONCE) for name, value in values.items()}

    def _random_data(self) -> list:
        """Return observed variables as random graphs of the values and the states."""
        values = self._exact.replace_rvs_by_values(self._free_rvs)
        observed = [with_equal_parameters(rv) for rv in self._observed]
        return clone_replace(observed, dict(zip(self._free_rvs, values, strict=True)))

    def has_other_data(self) -> bool:
        """Return whether :func:`pymc.set_data` has replaced observations."""
        values = [self.model.rvs_to_values[self.model[str(rv.name)]] for rv in self._observed]
        upstream = {variable.name for variable in ancestors(values)}
        return not upstream.isdisjoint(changed_data(self.model))

    def start_point(
        self, values: Mapping[str, ArrayLike] | None = None, starts: Sequence | None = None
    ) -> Array:
        """Return the model's initial point, shape ``(coordinate,)``.

        Optionally with other initial values of free variables, and other x(t0) of each constraint.
        """
        return np.concatenate([v.ravel() for v in self._start_values(values or {}, starts)])

    def _start_values(self, values, starts) -> list[Array]:
        given = self.start_graphs if starts is None else [*map(pt.as_tensor, starts)]
        graphs = self._coordinate_graphs(given)
        reached = set(ancestors(graphs))
        initial = self.model.rvs_to_initial_values | {
            self.model[name]: np.asarray(value) for name, value in values.items()
        }
        free = [rv for rv in self.model.free_RVs if rv in reached]
        with np.errstate(all="ignore"):
            found = pytensor.function(
                [], at_initial_values(graphs, free, initial), mode=EVALUATE_ONCE
            )()
        if all(np.isfinite(value).all() for value in found):
            return found
        # A prior excludes the point where the states start: its own initial value then.
        own = at_initial_values(self._unconstrained_graphs(), self._free_rvs, {})
        instead = pytensor.function([], own, mode=EVALUATE_ONCE)()
        return [np.where(np.isfinite(v), v, one) for v, one in zip(found, instead, strict=True)]

    def _unconstrained_graphs(self) -> list:
        """Return the coordinates as graphs of the exact model's free variables."""
        transforms = [self._exact.rvs_to_transforms[rv] for rv in self._free_rvs]
        return [
            rv if transform is None else transform.forward(rv, *rv.owner.inputs)
            for rv, transform in zip(self._free_rvs, transforms, strict=True)
        ]

    def _coordinate_graphs(self, starts: Sequence) -> list:
        """Return the coordinates as graphs of the model's variables, and of each x(t0)."""
        replaced = {self._exact[name]: self.model[name] for name in self._free[: self._n_others]}
        replaced |= {self._exact[p.name]: starts[p.number][p.where] for p in self._parts}
        return graph_replace(self._unconstrained_graphs(), replaced, strict=False)

    def coordinates(self, posterior: xr.Dataset) -> Array:
        """Return draws, dims ``chain`` and ``draw``, as points, shape ``(draw, coordinate)``."""
        arrays = self.at_draws(posterior, self._coordinate_graphs(self.start_graphs))
        draws = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
        if len(draws) <= 2 * draws.shape[1] or not (np.ptp(draws, axis=0) > 0).all():
            msg = (
                f"{len(draws)} draws of {draws.shape[1]} coordinates are given; expected more "
                "than two draws per coordinate, and none that is constant."
            )
            raise ValueError(msg)
        return draws


def _as_bytes(points: Array) -> list[bytes]:
    """Return each row as a key."""
    rows = np.ascontiguousarray(points)
    return rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist()


def single_terms(inputs, densities) -> tuple[Any, list]:
    """Derive terms that are minus infinity where parameters are outside their domain.

    A draw there has density zero; it must not stop the others.
    """
    return inputs, minus_inf_if_invalid([*densities])


def _shared_states(constraint: Constraint, *_) -> TensorVariable:
    """Return a shared variable of the states' shape, which solutions replace."""
    shape = constraint.gp.prior_mean.shape
    return pytensor.shared(np.zeros(shape), shape=shape)


def _connected(model: pm.Model, seeds, x) -> list:
    """Return likelihoods and potentials that share variables with seeds, or with each other."""
    roots = {*model.free_RVs, *x}
    left = [*model.observed_RVs, *model.potentials]
    chosen: list = []
    reached = roots & set(ancestors(seeds))
    while found := [term for term in left if reached & set(ancestors([term]))]:
        chosen += found
        left = [term for term in left if term not in found]
        reached |= roots & set(ancestors(found))
    return chosen


def _is_function_of(variable, free, model: pm.Model, x) -> bool:
    roots = {*model.free_RVs, *x} & set(ancestors([variable]))
    return bool(roots) and roots <= set(free)
