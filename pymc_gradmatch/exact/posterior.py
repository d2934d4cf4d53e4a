"""A model's exact posterior: its own graph, with integrated trajectories in place of its states."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor
import xarray as xr
from arviz_base import from_dict
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors, truncated_graph_inputs

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_starts,
    draws_of,
    impossible_outside,
    with_equal_parameters,
    without_starts,
)
from pymc_gradmatch.exact.modes import Around, Local, modes_from
from pymc_gradmatch.exact.solutions import Solutions, compile_for_draws, with_draws
from pymc_gradmatch.gp import behind_states, is_states
from pymc_gradmatch.model import (
    changed_data,
    constraints,
    densities_of,
    is_constraint,
    is_known_start,
    known_starts,
    total_of,
    where_impossible,
)

FACTORS = (1.0, 1e-6, 1e6, -1e-6, -1.0)  # of a start, of which its prior allows those above zero
SMALLEST = 1e-9  # start on a logarithmic coordinate, in standard deviations of the data
MOST_NUMBERS = 4_000_000  # of trajectories that are held at once
N_PRIOR = 1_000  # draws of the prior, that tell how wide it is, or of which some are likely
NOISES = (-3.0, -0.5)  # logarithms to base ten, of standard deviations of a state
UNSEEN = (-1.0, 0.5)  # the same, of a state that is not observed
WAYS = (-3.0, 0.0)  # the same, of the way from a point to a draw of the prior
FAR = 3.0  # from a point, in units of its coordinates or of itself, where a prior has no draws
# What drawing raises from flat priors, from vague ones, and where a prior's own parameters, which
# are drawn, are none that it may have.
NO_DRAWS = (RuntimeError, ArithmeticError, ValueError)


class Integrated(NamedTuple):
    """Points in the coordinates of an :class:`ExactPosterior`, taken apart, and the solutions."""

    values: dict[str, NDArray[np.float64]]
    """Unconstrained, by the names of the value variables, shape ``(point, ...)``."""
    theta: list[NDArray[np.float64]]
    """Parameters of each constraint, shape ``(point, ..., 1, param)``."""
    trajectories: list[NDArray[np.float64]]
    """States of each, in the data's units, shape ``(point, ..., time, state)``."""
    log_volume: NDArray[np.float64]
    """Log of what a unit of the coordinates is of the starts, up to a constant."""


class ExactPosterior(Solutions):
    r"""The posterior that integrates the ODE, in unconstrained coordinates :math:`\phi`.

    .. math::

        p(\phi \mid y) \propto p(u)\; p\bigl(y \mid x(t; \theta, x_0), u\bigr), \qquad
        \phi = \bigl(u, (x_0 - m) / s\bigr)

    with the value variables u of all that the ODE's parameters and the likelihood
    depend on.  The graph is the model's own: the solution of the ODE takes the
    place of the states, their prior and the constraint are left out, and
    everything else that the model observes or weighs stays, with its ``pm.Data`` as
    they are now.  x(t0) has a flat prior; m and s are mean and scale of the data.  Of
    positive states x(t0), m and s are those of the logarithm.  Starts that
    are known are what they are known to be, and no coordinates.  Where a potential of the
    starts alone, such as a log-normal prior, excludes those below zero, the coordinate is
    the logarithm.

    Parameters
    ----------
    model : pymc.Model
        The model.

    Attributes
    ----------
    likelihood : list of str
        Names of the observed variables and potentials that count.
    single_terms : dict of str to TensorVariable
        What the log density adds up, entry by entry, by the name of the variable.

    Raises
    ------
    ValueError
        If the model cannot be written so; the message names what stands in the way.
    """

    def __init__(self, model: pm.Model):
        super().__init__(model)
        self._x = [pytensor.shared(np.zeros(c.gp.prior_mean.shape)) for c in self.constraints]
        solved = pm.do(without_starts(model), dict(zip(self.states, self._x, strict=True)))
        theta = [constraint.theta for constraint in constraints(solved)]
        self._check_theta(theta)
        known_values = {known.name: known.values for known in known_starts(solved)}
        starting = [known_values[known.name] for known in self.known if known]
        left = [solved[name] for name in self._state_variables() if name in solved.named_vars]
        terms = _connected(solved, [*theta, *starting, *self._x, *left], self._x)
        self.likelihood = [term.name for term in terms]
        needed = set(ancestors([*theta, *starting, *terms]))
        # pm.do changes the order; a result's is that of the model.
        in_order = [solved[rv.name] for rv in model.free_RVs if rv.name in solved.named_vars]
        free = [rv for rv in in_order if rv in needed and rv in solved.free_RVs]
        self._check_free(free, terms)
        self._check_likelihood(terms)

        self._values = [solved.rvs_to_values[rv] for rv in free]
        known = [v for v in solved.deterministics if _is_made_of(v, free, solved, self._x)]
        self._free, self._named = [rv.name for rv in free], [v.name for v in [*free, *known]]
        upstream = set(ancestors([*theta, *starting]))
        self._parameters = [v.name for v in [*free, *known] if v in upstream]
        self._graphs = solved.replace_rvs_by_values([*theta, *free, *known])
        self._natural = compile_for_draws(self._values, self._graphs)
        self._known_graphs = solved.replace_rvs_by_values(starting)
        self._known = compile_for_draws([*self._values, *self._x], self._known_graphs)
        # A draw outside of the likelihood's domain has density zero, and stops no other.
        weighed = [*free, *terms]
        densities = impossible_outside(densities_of(solved, weighed))
        self.single_terms = dict(zip([rv.name for rv in weighed], densities, strict=True))
        self._log_density = compile_for_draws(
            [*self._values, *self._x], [total_of([*self.single_terms.values()])]
        )
        self._observed = [term for term in terms if term in solved.observed_RVs]
        self._at_states = solved
        self._positive = [np.zeros(len(c.ode.states), dtype=bool) for c in self.constraints]
        parts = self._start_parts({}, None)
        self._shapes = [part.shape for part in parts]
        telling = [p for p in solved.potentials if not set(solved.free_RVs) & set(ancestors([p]))]
        if telling:
            _, starts = self._parts(np.concatenate([part.ravel() for part in parts])[None])
            self._positive = [self._above_zero(telling, k, x0[0]) for k, x0 in enumerate(starts)]

    def _above_zero(self, potentials, k: int, x0) -> NDArray[np.bool_]:
        """Tell which starts of a constraint are kept above zero by potentials of starts alone."""
        gp, x = self.constraints[k].gp, self._x[k]
        found = np.zeros(len(gp.states), dtype=bool)
        size = np.maximum(np.abs(x0), gp.scale)
        others = {*self._x} - {x}
        for potential in potentials:
            upstream = set(ancestors([potential]))
            if x0.ndim > 1 or x not in upstream or others & upstream:
                continue
            graph = impossible_outside(potential).sum()
            evaluate = pytensor.function([], graph, mode=EVALUATE_ONCE)
            for state in np.flatnonzero(~gp.data.positive):
                allowed = []
                for factor in FACTORS:
                    states = np.full(x.get_value().shape, np.nan)  # so that later ones would tell
                    states[0] = np.where(np.arange(len(size)) == state, factor, 1) * size
                    x.set_value(states)
                    with np.errstate(all="ignore"):
                        allowed.append(bool(np.isfinite(evaluate())))
                found[state] |= allowed == [factor > 0 for factor in FACTORS]
        return found

    def __call__(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density at points, shape ``(point, coordinate)``, up to a constant.

        Minus infinity where an integration failed.
        """
        size = sum(x.get_value().size for x in self._x)
        n_chunks = max(1, -(-len(phi) * size // MOST_NUMBERS))
        return np.concatenate([self._evaluate(part) for part in np.array_split(phi, n_chunks)])

    def _evaluate(self, phi) -> NDArray[np.float64]:
        u, starts = self._parts(phi)
        return self._heights(phi, u, self._solved(u, starts))

    def _heights(self, phi, u, trajectories) -> NDArray[np.float64]:
        """Return log densities at points, the values u and trajectories of which are known."""
        n_points = len(trajectories[0])
        log_density = np.full(n_points, -np.inf)
        finite = [np.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in trajectories]
        solved = np.all(finite, axis=0)
        if solved.any():
            with np.errstate(all="ignore"):
                at_solved = [array[solved] for array in [*u, *trajectories]]
                (log_density[solved],) = self._log_density(*at_solved)
        log_density += self._log_volume(phi)
        return np.where(np.isfinite(log_density), log_density, -np.inf)

    def _log_volume(self, phi) -> NDArray[np.float64]:
        """Return the log of what a unit of the coordinates is of the starts, up to a constant."""
        *_, starts = self._split(phi)
        return sum(
            (
                part[..., positive[free]].sum(axis=tuple(range(1, part.ndim)))
                for part, positive, free in zip(starts, self._positive, self._unknown, strict=True)
            ),
            np.zeros(len(phi)),
        )

    def around(self, points: NDArray[np.float64], moves: NDArray[np.float64]) -> Around:
        r"""Evaluate the log density at points and around them, solving for single moves alone.

        The trajectory after two moves is taken to be
        :math:`x_{i+j} \approx x_i + x_j - x`, without the mixed second derivatives of the
        solution, as in a Gauss-Newton Hessian; everything else is the density's own.
        """
        size = sum(x.get_value().size for x in self._x) * moves.shape[1]
        n_chunks = min(max(1, -(-len(points) * size // MOST_NUMBERS)), len(points))
        parts = [
            self._around(*both)
            for both in zip(
                np.array_split(points, n_chunks), np.array_split(moves, n_chunks), strict=True
            )
        ]
        return Around(*map(np.concatenate, zip(*parts, strict=True)))

    def _around(self, points, moves) -> Around:
        n_points, n_moves, n = moves.shape
        steps = np.concatenate([np.zeros((n_points, 1, n)), moves, -moves], axis=1)
        single = (points[:, None] + steps).reshape(-1, n)
        u, starts = self._parts(single)
        solved = self._solved(u, starts)
        center, ahead, behind = np.split(
            self._heights(single, u, solved).reshape(n_points, -1), [1, 1 + n_moves], axis=1
        )
        levels = [
            constraint.gp.levels_of(x).reshape(n_points, -1, *x.shape[1:])
            for constraint, x in zip(self.constraints, solved, strict=True)
        ]

        def after_two(sign: int, rows, columns) -> NDArray[np.float64]:
            moved = points[:, None] + sign * (moves[:, rows] + moves[:, columns])
            moved, first = moved.reshape(-1, n), 1 if sign > 0 else 1 + n_moves
            u, _ = self._parts(moved)
            trajectories = []
            for constraint, x in zip(self.constraints, levels, strict=True):
                added = x[:, first + rows] + x[:, first + columns] - x[:, :1]
                trajectories.append(constraint.gp.states_of(added.reshape(-1, *x.shape[2:])))
            return self._heights(moved, u, trajectories).reshape(n_points, -1)

        pairs = np.array(np.triu_indices(n_moves, 1))
        size = n_points * sum(x[0, 0].size for x in levels)
        chunks = np.array_split(pairs, max(1, -(-pairs.shape[1] * size // MOST_NUMBERS)), axis=1)
        both = [
            np.concatenate([after_two(sign, *chunk) for chunk in chunks], axis=1)
            for sign in (1, -1)
        ]
        return Around(center[:, 0], ahead, behind, *both)

    def integrated(self, phi: NDArray[np.float64]) -> Integrated:
        """Return what the points are, and the solutions from there."""
        u, starts = self._parts(phi)
        theta = self._at(u, starts)[: len(self.constraints)]
        return Integrated(
            dict(zip(self.value_names, u, strict=True)),
            theta,
            self.solve(starts, theta),
            self._log_volume(phi) + np.zeros(len(phi)),
        )

    @property
    def value_names(self) -> list[str]:
        """Names of the value variables that it is a density of."""
        return [value.name for value in self._values]

    def variables(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return what points determine, by name: parameters, x(t0), all else, the trajectories."""
        u, starts = self._parts(phi)
        solutions = self._solved(u, starts)
        return self._before_solving(u, starts) | dict(zip(self.states, solutions, strict=True))

    def _before_solving(self, u, starts) -> dict[str, NDArray[np.float64]]:
        n_constraints = len(self.constraints)
        natural = self._at(u, starts)[n_constraints:]
        named = dict(zip(self._named, natural, strict=True))
        named |= dict(zip(self.starts, starts, strict=True))
        ordered = dict.fromkeys([*self._parameters, *self.starts, *named])
        return {name: named[name] for name in ordered}

    def scalars(self, phi: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return every scalar at points by a label such as ``x0[prey]``, without solving."""
        variables = self._before_solving(*self._parts(phi))
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
        u, starts = self._parts(phi)
        trajectories = self._solved(u, starts)
        values = self._before_solving(u, starts)
        values |= dict(zip(self.states, trajectories, strict=True))
        values |= self._made_of_states(u, trajectories)
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
        dims: dict[str, list] = {}
        coords: dict[str, list] = {}
        for name, array in [*((n, v[0]) for n, v in values.items()), *observed.items()]:
            named = self.dims(name) or (None,) * array.ndim
            labels = self.labels(name, array.shape)
            dims[name] = [dim or f"{name}_dim_{k}" for k, dim in enumerate(named)]
            coords |= dict(zip(dims[name], map(list, labels), strict=True))
        in_chains = {
            group: {name: array[None] for name, array in arrays.items()}
            for group, arrays in groups.items()
        }
        return from_dict(in_chains | {"observed_data": observed}, coords=coords, dims=dims)

    @cached_property
    def _of_states(self) -> list:
        """What the model computes from the states, and names."""
        free = {self._at_states[name] for name in self._free}
        strangers = {*self._at_states.basic_RVs} - free
        return [
            v
            for v in self._at_states.deterministics
            if v.name not in self._named and not strangers & {*ancestors([v])}
        ]

    @property
    def along_states(self) -> set[str]:
        """Names of the states, of the free variables behind them, and of what is made of them."""
        return {*self.states, *self._behind_states, *(str(v.name) for v in self._of_states)}

    @cached_property
    def _behind_states(self) -> dict[str, Any]:
        """The free variables that states are made of, where these are not such themselves."""
        behind: dict[str, Any] = {}
        for name, constraint, x in zip(self.states, self.constraints, self._x, strict=True):
            behind |= behind_states(name, constraint.gp, x, self.model.named_vars)
        return behind

    def _made_of_states(self, u, trajectories) -> dict[str, NDArray[np.float64]]:
        """Return what PyMC, and who looks at the draws, expects beside the states themselves."""
        graphs = self._at_states.replace_rvs_by_values(self._of_states)
        names = [*self._behind_states, *(str(v.name) for v in self._of_states)]
        graphs = [*self._behind_states.values(), *graphs]
        values = compile_for_draws([*self._values, *self._x], graphs)(*u, *trajectories)
        return dict(zip(names, with_draws(values, graphs, len(trajectories[0])), strict=True))

    def has_other_data(self) -> bool:
        """Tell whether :func:`pymc.set_data` has put others in the place of what is observed."""
        values = [self.model.rvs_to_values[self.model[str(rv.name)]] for rv in self._observed]
        upstream = {variable.name for variable in ancestors(values)}
        return not upstream.isdisjoint(changed_data(self.model))

    def _drawn_data(self) -> list:
        """Return what is observed as random graphs of the values and the states."""
        solved = self._at_states
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
        names = [*self._free, *self.starts]
        return [{name: variables[name][point] for name in names} for point in range(len(phi))]

    @property
    def names(self) -> list[str]:
        """Names of the coordinates."""
        values = [value.name for value in self._values]
        shapes = dict(zip([*values, *self.starts], self._shapes, strict=True))
        names = {label: self.entries(label, shape) for label, shape in shapes.items()}
        for label, free, constraint in zip(
            self.starts, self._unknown, self.constraints, strict=True
        ):
            n_states = len(constraint.ode.states)
            every = np.array(self.entries(label, (*shapes[label][:-1], n_states)))
            names[label] = every.reshape(-1, n_states)[:, free].ravel().tolist()
        return [name for entries in names.values() for name in entries]

    @property
    def _is_unseen(self) -> NDArray[np.bool_]:
        """Of which x(t0) among the coordinates the state has hardly an observation, or none."""
        shapes = self._shapes[len(self._values) :]
        of_each = zip(self.constraints, self._unknown, shapes, strict=True)
        return np.concatenate(
            [np.broadcast_to(c.gp.data.is_sparse[free], s).ravel() for c, free, s in of_each]
        )

    @property
    def _unknown(self) -> list[list[int]]:
        """Places of the states of each constraint whose start is not known."""
        return [
            [k for k in range(len(c.ode.states)) if not known or k not in known.places]
            for c, known in zip(self.constraints, self.known, strict=True)
        ]

    def starting_at(
        self, values: Mapping[str, ArrayLike] | None = None, starts: Sequence | None = None
    ) -> NDArray[np.float64]:
        """Return where the model starts, as phi, shape ``(coordinate,)``.

        Parameters
        ----------
        values : mapping of str to array_like, optional
            Free variables that start elsewhere than the model says.
        starts : sequence of array, optional
            x(t0) of each constraint, where the states start elsewhere.
        """
        return np.concatenate([part.ravel() for part in self._start_parts(values or {}, starts)])

    def _start_parts(self, values, starts) -> list[NDArray[np.float64]]:
        graphs = self._coordinate_graphs
        reached = set(ancestors(graphs))
        initial = self.model.rvs_to_initial_values | {
            self.model[name]: np.asarray(value) for name, value in values.items()
        }
        free = [rv for rv in self.model.free_RVs if rv in reached]
        parts = pytensor.function([], at_starts(graphs, free, initial), mode=EVALUATE_ONCE)()
        n_values = len(self._values)
        there = parts[n_values:] if starts is None else starts
        return [*parts[:n_values], *self._standardised(there)]

    def from_prior(self, phi: NDArray[np.float64], n: int, rng) -> tuple[NDArray, NDArray]:
        """Return points with all but x(t0) drawn from their priors, and such on the way from phi.

        x(t0) is near that of phi.  How near, and how far on the way, is drawn as well, evenly
        on the logarithmic scale.
        """
        n_values = len(self._values)
        there, starts = np.split(phi, [sum(int(np.prod(s)) for s in self._shapes[:n_values])])
        try:
            graphs = self._coordinate_graphs[:n_values]
            drawn = draws_of(graphs, n, rng)
            values = np.concatenate([np.reshape(part, (n, -1)) for part in drawn], axis=1)
            possible = np.isfinite(values).all(axis=1)  # nor have all numbers a logarithm
        except NO_DRAWS:
            values, possible = np.empty((n, len(there))), np.zeros(n, dtype=bool)
        scatter = FAR * (1 + np.abs(there))
        n_impossible = n - possible.sum()
        values[~possible] = there + scatter * rng.normal(size=(n_impossible, len(there)))
        nearest, farthest = np.where(self._is_unseen[:, None], UNSEEN, NOISES).T
        noise = 10 ** (nearest + (farthest - nearest) * rng.random((n, 1)))
        starts = starts + noise * rng.normal(size=(n, len(starts)))
        on_the_way = there + 10 ** rng.uniform(*WAYS, (n, 1)) * (values - there)
        return np.hstack([values, starts]), np.hstack([on_the_way, starts])

    def modes_from_prior(self, mode: Local, rng) -> Local:
        """Climb from the likeliest draws of the prior to all modes that they lead to."""
        return modes_from(self, mode, lambda: self.from_prior(mode.point[0], N_PRIOR, rng)[0])

    def parameters_at_start(self, variables: Sequence) -> NDArray[np.float64]:
        """Return scalar free variables of the model where it starts."""
        upstream = set(ancestors(variables))
        free = [rv for rv in self.model.free_RVs if rv in upstream]
        there = at_starts(variables, free, self.model.rvs_to_initial_values)
        return np.array(pytensor.function([], there, mode=EVALUATE_ONCE)())

    def impossible(self, phi: NDArray[np.float64]) -> str:
        """Say which observation has density zero at a point, if its ODE can be integrated."""
        u, starts = self._parts(phi[None])
        trajectories = self._solved(u, starts)
        if not all(np.isfinite(x).all() for x in trajectories):
            return ""
        with np.errstate(all="ignore"):
            densities = self._at_solutions(
                [self.single_terms[str(rv.name)] for rv in self._observed],
                [*u, *trajectories],
                np.random.default_rng(0),
            )
        values = self.model.rvs_to_values
        observed = {name: values[self.model[name]].eval(mode=EVALUATE_ONCE) for name in densities}
        return where_impossible({name: v[0] for name, v in densities.items()}, observed)

    @property
    def _coordinate_graphs(self) -> list:
        free = [self.model[name] for name in self._free]
        return [_unconstrained(self.model, rv) for rv in free] + self.start_graphs

    def _standardised(self, starts) -> list[NDArray[np.float64]]:
        parts = []
        for constraint, x0, free, positive in zip(
            self.constraints, starts, self._unknown, self._positive, strict=True
        ):
            gp = constraint.gp
            part = (gp.levels_of(x0) - gp.mean) / gp.scale
            in_scale = x0[..., positive] / gp.scale[..., positive]
            part[..., positive] = np.log(np.maximum(in_scale, SMALLEST))
            parts.append(part[..., free])
        return parts

    def coordinates(self, posterior: xr.Dataset) -> NDArray[np.float64]:
        """Return draws, dims ``chain`` and ``draw``, as phi, shape ``(draw, coordinate)``.

        Raises
        ------
        ValueError
            If draws and model do not belong together, or if they are too few.
        """
        arrays = self.at_draws(posterior, self._coordinate_graphs)
        n_values = len(self._values)
        arrays[n_values:] = self._standardised(arrays[n_values:])
        draws = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
        if len(draws) <= 2 * draws.shape[1] or not (np.ptp(draws, axis=0) > 0).all():
            msg = (
                f"{len(draws)} draws of {draws.shape[1]} coordinates are given; expected more "
                "than two draws per coordinate, and none that is constant."
            )
            raise ValueError(msg)
        return draws

    def _split(self, phi) -> tuple[list[NDArray], list[NDArray]]:
        """Return the values u, and the coordinates of each x(t0)."""
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        parts = [
            part.reshape(len(phi), *shape)
            for part, shape in zip(
                np.split(phi, np.cumsum(sizes)[:-1], axis=1), self._shapes, strict=True
            )
        ]
        n_values = len(self._values)
        return parts[:n_values], parts[n_values:]

    def _parts(self, phi) -> tuple[list[NDArray], list[NDArray]]:
        """Return the values u and each x(t0) in the data's units."""
        values, parts = self._split(phi)
        starts = []
        for constraint, free, positive, part in zip(
            self.constraints, self._unknown, self._positive, parts, strict=True
        ):
            gp, mean, scale = constraint.gp, constraint.gp.mean, constraint.gp.scale
            deviation = np.zeros((*part.shape[:-1], mean.shape[-1]))
            deviation[..., free] = part
            x0 = gp.states_of(mean + scale * deviation)
            with np.errstate(over="ignore"):  # a start that cannot be integrated from
                x0[..., positive] = scale[..., positive] * np.exp(deviation[..., positive])
            starts.append(x0)
        return values, self._with_known(values, starts)

    def _with_known(self, u, starts) -> list[NDArray]:
        """Put what is known of x(t0) in its place."""
        if not self._known_graphs:
            return starts
        at_start = [
            np.broadcast_to(x0[..., None, :], (len(x0), *x.get_value().shape))
            for x0, x in zip(starts, self._x, strict=True)
        ]
        values = with_draws(self._known(*u, *at_start), self._known_graphs, len(starts[0]))
        for x0, known in zip(starts, self.known, strict=True):
            if known:
                x0[..., known.places] = values.pop(0)
        return starts

    def _at(self, u, starts) -> list[NDArray]:
        """Return the parameters of each constraint, then the named variables."""
        return with_draws(self._natural(*u), self._graphs, len(starts[0]))

    def trajectories(
        self, phi: NDArray[np.float64], times: Sequence[NDArray[np.float64]]
    ) -> list[NDArray[np.float64]]:
        """Return the solutions at points, at other times than the grid's; see :meth:`solve`."""
        return self._solved(*self._parts(phi), times)

    def _solved(self, u, starts, times=None) -> list[NDArray]:
        return self.solve(starts, self._at(u, starts)[: len(self.constraints)], times)

    def _check_theta(self, theta):
        for constraint, graph in zip(self.constraints, theta, strict=True):
            if set(self._x) & set(ancestors([graph])):
                msg = (
                    f"the parameters of {constraint.name!r} depend on the states; expected "
                    "parameters with which the ODE can be integrated."
                )
                raise ValueError(msg)
            if graph.type.shape[-2] != 1:
                msg = (
                    f"the parameters of {constraint.name!r} have one value per time; expected "
                    "numbers. What changes with time belongs into the right-hand side."
                )
                raise ValueError(msg)

    def _check_likelihood(self, terms):
        seen = set(ancestors(terms))
        blind = [n for n, x in zip(self.states, self._x, strict=True) if x not in seen]
        if blind:
            msg = (
                f"no likelihood depends on the states {blind}, only "
                f"{[term.name for term in terms]} were found; expected observations of the "
                "variable that gm.GradientMatchingODE is given."
            )
            raise ValueError(msg)

    def _state_variables(self) -> set[str]:
        """Return the names of the free variables that the states are made of."""
        free = set(self.model.free_RVs)
        reached = truncated_graph_inputs([c.x for c in self.constraints], self.model.free_RVs)
        return {str(rv.name) for rv in free if is_states(rv) or rv in set(reached)}

    def _check_free(self, free, terms):
        """Raise if states are left, or discrete variables."""
        states = self._state_variables()
        left = [rv for rv in free if rv.name in states]
        if left:
            seeing = [term.name for term in terms if set(left) & set(ancestors([term]))]
            msg = (
                f"{seeing} depend on {[rv.name for rv in left]} and not only on the states "
                f"{self.states} of the ODE, whose place its solution takes. Write them as "
                "functions of the variable that gm.GradientMatchingODE is given."
            )
            raise ValueError(msg)
        discrete = [rv.name for rv in free if not np.issubdtype(rv.dtype, np.inexact)]
        if discrete:
            msg = f"the free variables {discrete} are discrete; expected continuous ones."
            raise ValueError(msg)


def _connected(model: pm.Model, seeds, x) -> list:
    """Return likelihoods and potentials that share variables with seeds, or with each other."""
    roots = {*model.free_RVs, *x}
    left = [rv for rv in model.observed_RVs if not (is_constraint(rv) or is_known_start(rv))]
    left += model.potentials
    chosen: list = []
    reached = roots & set(ancestors(seeds))
    while found := [term for term in left if reached & set(ancestors([term]))]:
        chosen += found
        left = [term for term in left if term not in found]
        reached |= roots & set(ancestors(found))
    return chosen


def _is_made_of(variable, free, model: pm.Model, x) -> bool:
    roots = {*model.free_RVs, *x} & set(ancestors([variable]))
    return bool(roots) and roots <= set(free)


def _unconstrained(model: pm.Model, rv):
    transform = model.rvs_to_transforms[rv]
    return rv if transform is None else transform.forward(rv, *rv.owner.inputs)
