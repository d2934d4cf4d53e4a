"""A model's exact posterior: its own graph, with integrated trajectories in place of its states."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pymc.vartypes import continuous_types
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors, truncated_graph_inputs
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.batched import BatchedSolver
from pymc_gradmatch.derivatives import EVALUATE_ONCE, random_ancestors
from pymc_gradmatch.distribution import Constraint, constraints, is_constraint
from pymc_gradmatch.initial import without_starts
from pymc_gradmatch.states import is_states

__all__ = ["ExactPosterior", "Solutions"]

MOST_NUMBERS = 4_000_000  # of trajectories that are held at once


class Solutions:
    """The solutions of a model's ODEs at draws of its parameters and of x(t0).

    Parameters
    ----------
    model : pymc.Model
        Has a :class:`~pymc_gradmatch.GradientMatchingODE` or several, of states with a name.

    Attributes
    ----------
    model : pymc.Model
        The model.
    constraints : list of Constraint
        What it says of ODEs.
    states, starts : list of str
        Names of the states of each, and of their x(t0): ``"x"`` and ``"x0"``.

    Raises
    ------
    ValueError
        If the model has no ODE, or states that cannot be replaced.
    """

    def __init__(self, model: pm.Model):
        self.model, self.constraints = model, constraints(model)
        if not self.constraints:
            msg = (
                f"the model observes {[rv.name for rv in model.observed_RVs]}; expected a "
                "gm.GradientMatchingODE among these, which says what ODE the states obey."
            )
            raise ValueError(msg)
        self.states = [_name_of_states(model, constraint) for constraint in self.constraints]
        if len(set(self.states)) < len(self.states):
            msg = f"two constraints share the states {self.states}; expected one ODE for each."
            raise ValueError(msg)
        self.starts = [_unused(f"{name}0", model) for name in self.states]
        self._solvers = [BatchedSolver(constraint.ode) for constraint in self.constraints]

    @property
    def observed(self) -> list[str]:
        """Names of what the model observes beside the constraints."""
        matched = [constraint.name for constraint in self.constraints]
        return [rv.name for rv in self.model.observed_RVs if rv.name not in matched]

    def starts_at(self, draws: xr.Dataset) -> list[NDArray[np.float64]]:
        """Return x(t0) of each constraint at draws of it, or of the states."""
        return [
            _stacked(draws[name]) if name in draws else self.at_draws(draws, [graph])[0]
            for name, graph in zip(self.starts, self.start_graphs, strict=True)
        ]

    @property
    def start_graphs(self) -> list[TensorVariable]:
        """x(t0) of each constraint, shape ``(..., state)``, as graphs of the model's variables."""
        return [constraint.x[..., 0, :] for constraint in self.constraints]

    @property
    def theta_graphs(self) -> list[TensorVariable]:
        """The parameters of each constraint's ODE, shape ``(..., 1, param)``."""
        return [constraint.theta for constraint in self.constraints]

    def dims(self, name: str) -> tuple[str | None, ...] | None:
        """Return the dims of a variable, of the states or of x(t0), where the model names them."""
        by_name = self.model.named_vars_to_dims
        if name not in self.starts:
            return by_name.get(name)
        dims = by_name.get(self.states[self.starts.index(name)])
        return dims and (*dims[:-2], dims[-1])

    def labels(self, name: str, shape: tuple[int, ...]) -> list[Sequence]:
        """Return labels along each axis of a variable: coords, names of states, or numbers."""
        dims = self.dims(name) or (None,) * len(shape)
        coords = [self.model.coords.get(dim) for dim in dims]
        labels = [
            range(size) if coord is None else coord
            for size, coord in zip(shape, coords, strict=True)
        ]
        for names in [constraint.ode.states for constraint in self.constraints]:
            if shape and shape[-1] == len(names) and list(labels[-1]) == [*range(len(names))]:
                labels[-1] = names
        return labels

    def entries(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return a name for every scalar of a variable, such as ``x0[prey]``."""
        if not shape:
            return [name]
        return [
            f"{name}[{', '.join(map(str, labels))}]"
            for labels in product(*self.labels(name, shape))
        ]

    def at_draws(
        self, posterior: xr.Dataset, graphs: Sequence[TensorVariable]
    ) -> list[NDArray[np.float64]]:
        """Evaluate graphs of the model's variables at draws of these.

        Parameters
        ----------
        posterior : xarray.Dataset
            With dims ``chain`` and ``draw``.
        graphs : sequence of TensorVariable
            Graphs of random variables of the model.

        Returns
        -------
        list of array
            With ``(draw,)``, all chains in one, in front.

        Raises
        ------
        ValueError
            If the draws lack a variable that is needed, or have it in another shape.
        """
        drawn = [v for name, v in self.model.named_vars.items() if name in posterior]
        inputs = [v for v in truncated_graph_inputs(graphs, drawn) if v in set(drawn)]
        lacking = [rv.name for rv in random_ancestors(graphs, known=inputs)]
        if lacking:
            msg = (
                f"the draws have no {lacking}, only {list(posterior.data_vars)}; expected all that "
                "the states, the ODE's parameters and the likelihood depend on. Take idata and "
                "model from the same run."
            )
            raise ValueError(msg)
        values = [_stacked(posterior[v.name]) for v in inputs]
        for variable, array in zip(inputs, values, strict=True):
            shape = variable.type.shape
            if len(shape) != array.ndim - 1 or not all(map(_may_equal, shape, array.shape[1:])):
                msg = (
                    f"the draws of {variable.name!r} have shape {array.shape[1:]}, the model's "
                    f"variable {shape}; expected the same. Take idata and model from the same run."
                )
                raise ValueError(msg)
        n_draws = posterior.sizes["chain"] * posterior.sizes["draw"]
        return _with_draws(_for_draws(inputs, graphs)(*values), graphs, n_draws)

    def solve(
        self,
        starts: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[NDArray[np.float64]]:
        """Integrate each ODE from every draw.

        Parameters
        ----------
        starts, theta : sequence of array
            Of each constraint, shapes ``(draw, ..., state)`` and ``(draw, ..., 1, param)``.
        times : sequence of array, optional
            Output times of each, the first being that of its start; its grid if not given.

        Returns
        -------
        list of array
            Shapes ``(draw, ..., time, state)``; NaN where an integration failed.
        """
        if times is None:
            times = [constraint.gp.t for constraint in self.constraints]
        solutions = []
        for solver, t, x0, parameters in zip(self._solvers, times, starts, theta, strict=True):
            shape = (*x0.shape[:-1], parameters.shape[-1])
            flat = np.broadcast_to(parameters[..., 0, :], shape).reshape(-1, shape[-1])
            solution = solver(t, x0.reshape(-1, x0.shape[-1]), flat)
            solutions.append(solution.reshape(*x0.shape[:-1], *solution.shape[1:]))
        return solutions


class ExactPosterior(Solutions):
    r"""The posterior that integrates the ODE, in unconstrained coordinates :math:`\phi`.

    .. math::

        p(\phi \mid y) \propto p(u)\; p\bigl(y \mid x(t; \theta, x_0), u\bigr), \qquad
        \phi = \bigl(u, (x_0 - m) / s\bigr)

    with the value variables u of all that the ODE's parameters and the likelihood
    depend on.  The graph is the model's own: the solution of the ODE takes the
    place of the states, their prior and the constraint are left out, and
    everything else that the model observes or weighs stays, with its ``pm.Data`` as
    they are now.  x(t0) has a flat prior; m and s are mean and scale of the data.

    Parameters
    ----------
    model : pymc.Model
        The model.
    posterior : xarray.Dataset
        Its draws, dims ``chain`` and ``draw``.

    Attributes
    ----------
    draws : array of float
        The draws of ``posterior`` as phi, shape ``(draw, coordinate)``.
    likelihood : list of str
        Names of the observed variables and potentials that count.

    Raises
    ------
    ValueError
        If the model cannot be written so, or draws and model do not belong
        together; the message names what stands in the way.
    """

    def __init__(self, model: pm.Model, posterior: xr.Dataset):
        super().__init__(model)
        self._x = [pytensor.shared(np.zeros(c.x.shape.eval())) for c in self.constraints]
        solved = pm.do(without_starts(model), dict(zip(self.states, self._x, strict=True)))
        theta = [constraint.theta for constraint in constraints(solved)]
        self._check_theta(theta)
        left = [solved[name] for name in self._state_variables() if name in solved.named_vars]
        terms = _connected(solved, [*theta, *self._x, *left], self._x)
        self.likelihood = [term.name for term in terms]
        needed = set(ancestors([*theta, *terms]))
        free = [rv for rv in solved.free_RVs if rv in needed]
        self._check_free(free, terms)
        self._check_likelihood(terms)

        self._values = [solved.rvs_to_values[rv] for rv in free]
        known = [v for v in solved.deterministics if _is_made_of(v, free, solved, self._x)]
        self._free, self._named = [rv.name for rv in free], [v.name for v in [*free, *known]]
        upstream = set(ancestors(theta))
        self._parameters = [v.name for v in [*free, *known] if v in upstream]
        self._graphs = solved.replace_rvs_by_values([*theta, *free, *known])
        self._natural = _for_draws(self._values, self._graphs)
        log_density = rewrite_graph(
            solved.logp(vars=[*free, *terms]),
            # A draw outside of the likelihood's domain has density zero, and stops no other.
            include=("canonicalize", "local_check_parameter_to_ninf_switch"),
        )
        self._log_density = _for_draws([*self._values, *self._x], [log_density])
        self.draws = self._coordinates(posterior)

    def __call__(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density at points, shape ``(point, coordinate)``, up to a constant.

        Minus infinity where an integration failed.
        """
        size = sum(x.get_value().size for x in self._x)
        n_chunks = max(1, -(-len(phi) * size // MOST_NUMBERS))
        return np.concatenate([self._evaluate(part) for part in np.array_split(phi, n_chunks)])

    def _evaluate(self, phi) -> NDArray[np.float64]:
        u, starts = self._parts(phi)
        trajectories = self._solved(u, starts)
        log_density = np.full(len(phi), -np.inf)
        finite = [np.isfinite(x).reshape(len(phi), -1).all(axis=1) for x in trajectories]
        solved = np.all(finite, axis=0)
        if solved.any():
            with np.errstate(all="ignore"):
                at_solved = [array[solved] for array in [*u, *trajectories]]
                (log_density[solved],) = self._log_density(*at_solved)
        return np.where(np.isfinite(log_density), log_density, -np.inf)

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

    @property
    def observed_data(self) -> dict[str, NDArray]:
        """What the model observes, by name, as it is now."""
        observed = [rv for rv in self.model.observed_RVs if rv.name in self.likelihood]
        return {rv.name: self.model.rvs_to_values[rv].eval() for rv in observed}

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
        return [name for label, shape in shapes.items() for name in self.entries(label, shape)]

    def _coordinates(self, posterior: xr.Dataset) -> NDArray[np.float64]:
        free = [self.model[name] for name in self._free]
        graphs = [_unconstrained(self.model, rv) for rv in free] + self.start_graphs
        arrays = self.at_draws(posterior, graphs)
        for k, constraint in enumerate(self.constraints, start=len(free)):
            arrays[k] = (arrays[k] - constraint.gp.mean) / constraint.gp.scale
        self._shapes = [array.shape[1:] for array in arrays]
        draws = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
        if len(draws) <= 2 * draws.shape[1] or not (np.ptp(draws, axis=0) > 0).all():
            msg = (
                f"{len(draws)} draws of {draws.shape[1]} coordinates are given; expected more "
                "than two draws per coordinate, and none that is constant."
            )
            raise ValueError(msg)
        return draws

    def _parts(self, phi) -> tuple[list[NDArray], list[NDArray]]:
        """Return the values u and each x(t0) in the data's units."""
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        parts = [
            part.reshape(-1, *shape)
            for part, shape in zip(
                np.split(phi, np.cumsum(sizes)[:-1], axis=1), self._shapes, strict=True
            )
        ]
        n_values = len(self._values)
        starts = [
            constraint.gp.mean + constraint.gp.scale * part
            for constraint, part in zip(self.constraints, parts[n_values:], strict=True)
        ]
        return parts[:n_values], starts

    def _at(self, u, starts) -> list[NDArray]:
        """Return the parameters of each constraint, then the named variables."""
        return _with_draws(self._natural(*u), self._graphs, len(starts[0]))

    def _solved(self, u, starts) -> list[NDArray]:
        """Return the trajectories."""
        return self.solve(starts, self._at(u, starts)[: len(self.constraints)])

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
        discrete = [rv.name for rv in free if rv.dtype not in continuous_types]
        if discrete:
            msg = f"the free variables {discrete} are discrete; expected continuous ones."
            raise ValueError(msg)


def _name_of_states(model: pm.Model, constraint: Constraint) -> str:
    names = [name for name, variable in model.named_vars.items() if variable is constraint.x]
    if not names:
        msg = (
            f"the states of {constraint.name!r} are an expression without a name; expected a "
            'variable of the model, for example x = pm.Deterministic("x", ...).'
        )
        raise ValueError(msg)
    return names[0]


def _unused(name: str, model: pm.Model) -> str:
    while name in model.named_vars:
        name += "_"
    return name


def _connected(model: pm.Model, seeds, x) -> list:
    """Return likelihoods and potentials that share variables with seeds, or with each other."""
    roots = {*model.free_RVs, *x}
    left = [rv for rv in model.observed_RVs if not is_constraint(rv)]
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


def _stacked(draws: xr.DataArray) -> NDArray[np.float64]:
    return draws.stack(sample=("chain", "draw")).transpose("sample", ...).to_numpy()


def _may_equal(static: int | None, size: int) -> bool:
    return static in (None, size)


def _unconstrained(model: pm.Model, rv):
    transform = model.rvs_to_transforms[rv]
    return rv if transform is None else transform.forward(rv, *rv.owner.inputs)


def _for_draws(inputs, outputs) -> Callable:
    """Compile graphs for inputs that have a draw axis in front."""
    batched = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in inputs]
    graphs = vectorize_graph(outputs, dict(zip(inputs, batched, strict=True)))
    return pytensor.function(batched, graphs, mode=EVALUATE_ONCE, on_unused_input="ignore")


def _with_draws(values, graphs, n_draws: int) -> list[NDArray[np.float64]]:
    """Give values of graphs a draw axis where they depend on no draw."""
    return [
        np.broadcast_to(value, (n_draws, *value.shape[value.ndim - graph.ndim :]))
        for value, graph in zip(values, graphs, strict=True)
    ]
