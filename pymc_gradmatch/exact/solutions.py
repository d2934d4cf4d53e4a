"""Solutions of a model's ODEs at draws of its parameters."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from time import monotonic
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, truncated_graph_inputs
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import Derive, as_they_are, in_numpy, random_ancestors, reseed
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import Constraint, constraints, equations, known_starts
from pymc_gradmatch.ode import ODE, Solution, Solver, failures_by_reason

type Array = NDArray[np.float64]
type Wrt = Sequence[tuple[bool, ...]]


class OutOfTimeError(TimeoutError):
    """The time given for a search is over."""


class Solutions:
    """The solutions of a model's ODEs at draws of its parameters and of x(t0).

    ``inputs`` replace inputs and doses, by name; for several experiments all of them, or by
    experiment.  Raises ValueError if the model has no ODE, or states that cannot be replaced.

    ``constraints`` are its ODE constraints; of each, ``odes`` are the right-hand sides, one per
    experiment, ``states`` and ``starts`` the names of the states and of their x(t0), such as
    ``"x"`` and ``"x0"``, and ``known`` the known entries of x(t0), or None.  ``n_solutions`` have
    been computed, of which ``failures`` failed, by reason; after the ``deadline``, by
    :func:`time.monotonic`, solving raises :class:`OutOfTimeError`.
    """

    def __init__(self, model: pm.Model, inputs: Mapping[str, Any] | None = None):
        self.model, self.constraints = model, constraints(model)
        if not self.constraints:
            msg = (
                f"the model observes {[rv.name for rv in model.observed_RVs]}; expected a "
                "gm.GradientMatchingODE among these, for the ODE of the states."
            )
            raise ValueError(msg)
        names = {variable: name for name, variable in model.named_vars.items()}
        for constraint in self.constraints:
            if constraint.x not in names:
                msg = (
                    f"the states of {constraint.name!r} are an expression without a name; expected "
                    'a variable of the model, for example x = pm.Deterministic("x", ...).'
                )
                raise ValueError(msg)
        self.states = [names[constraint.x] for constraint in self.constraints]
        if len(set(self.states)) < len(self.states):
            msg = f"two constraints share the states {self.states}; expected one ODE for each."
            raise ValueError(msg)
        by_states = {known.x: known for known in known_starts(model)}
        self.known = [by_states.get(constraint.x) for constraint in self.constraints]
        self.starts = [unused_name(f"{name}0", model) for name in self.states]
        self.n_solutions, self.failures = 0, Counter[str]()
        self.deadline = np.inf
        self.odes = [equations(constraint.ode, constraint.gp) for constraint in self.constraints]
        if inputs:
            of_each = of_each_experiment(inputs, self.only_constraint("inputs"), "inputs")
            self.odes = [_with_inputs(self.odes[0], of_each)]
        # Of transformed states; experiments with the same ODE share one object.
        self._transformed_odes = []
        for odes in self.odes:
            transformed = {id(ode): ode.transformed for ode in odes}
            self._transformed_odes.append([transformed[id(ode)] for ode in odes])
        self._solvers: dict[tuple, Solver] = {}  # by ODE, times and derivatives

    @property
    def observed(self) -> list[str]:
        """Names of the observed variables other than constraints and known starts."""
        others = [constraint.name for constraint in self.constraints]
        others += [known.name for known in self.known if known is not None]
        return [rv.name for rv in self.model.observed_RVs if rv.name not in others]

    def only_constraint(self, what: str) -> Constraint:
        """Return the only constraint, which an argument is for; raise if there are several."""
        if len(self.constraints) > 1:
            names = [constraint.name for constraint in self.constraints]
            msg = f"{what} is given, and the model has several ODEs, {names}; expected one of them."
            raise ValueError(msg)
        return self.constraints[0]

    @property
    def deterministics_of_states(self) -> list[str]:
        """Names of the deterministics of the states."""
        states = {constraint.x for constraint in self.constraints}
        return [
            v.name
            for v in self.model.deterministics
            if v not in states and states & {*ancestors([v])}
        ]

    def starts_at(self, draws: xr.Dataset) -> list[Array]:
        """Return x(t0) of each constraint, from draws of it or of the states."""
        return [
            _stacked(draws[name]) if name in draws else self.at_draws(draws, [graph])[0]
            for name, graph in zip(self.starts, self.start_graphs, strict=True)
        ]

    @property
    def start_graphs(self) -> list[TensorVariable]:
        """x(t0) of each constraint, shape ``(..., state)``, as graphs of the model's variables."""
        graphs = []
        for constraint, known in zip(self.constraints, self.known, strict=True):
            x0 = constraint.x[..., 0, :]
            graphs.append(pt.set_subtensor(x0[..., known.places], known.values) if known else x0)
        return graphs

    def dims(self, name: str) -> tuple[str | None, ...] | None:
        """Return the dims of a variable, also of x(t0), if the model names them."""
        by_name = self.model.named_vars_to_dims
        if name not in self.starts:
            return by_name.get(name)
        dims = by_name.get(self.states[self.starts.index(name)])
        return dims and (*dims[:-2], dims[-1])

    def labels(self, name: str, shape: tuple[int, ...]) -> list[Sequence]:
        """Return labels along each axis of a variable: coords, names of states, or indices."""
        dims = self.dims(name) or self._dims_of_value(name, shape) or (None,) * len(shape)
        coords = [self.model.coords.get(dim) for dim in dims]
        labels = [
            range(size) if coord is None else coord
            for size, coord in zip(shape, coords, strict=True)
        ]
        of_states = zip(self.starts, self.states, self.constraints, strict=True)
        for start, states, constraint in of_states:
            if name in {start, states} and isinstance(labels[-1], range):
                labels[-1] = constraint.ode.states
        return labels

    def _dims_of_value(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """Return the dims of a value variable's random variable, if that has the same shape."""
        coords, values = self.model.coords, self.model.rvs_to_values
        for rv in [rv for rv, value in values.items() if value.name == name]:
            dims = self.model.named_vars_to_dims.get(str(rv.name), ())
            if tuple(len(coords.get(dim) or ()) for dim in dims) == shape:
                return dims
        return None

    def entries(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """Return a name for every scalar of a variable, such as ``x0[prey]``."""
        if not shape:
            return [name]
        return [
            f"{name}[{', '.join(map(str, labels))}]"
            for labels in product(*self.labels(name, shape))
        ]

    def stale(self, posterior: xr.Dataset) -> set[str]:
        """Return the names of draws that :func:`pymc.do` has replaced, and of functions of these.

        The states are not among them, since they are solved for again.
        """
        named = {v for name, v in self.model.named_vars.items() if name in posterior}
        fixed = {v for v in named if isinstance(v, SharedVariable | Constant)}
        states = {v for c in self.constraints for v in named & {*ancestors([c.x])} if is_states(v)}
        states |= {constraint.x for constraint in self.constraints}
        return {str(v.name) for v in named - states if fixed & {*ancestors([v])}}

    def at_draws(self, posterior: xr.Dataset, graphs: Sequence[TensorVariable]) -> list[Array]:
        """Evaluate graphs of the model's random variables at draws, dims ``chain`` and ``draw``.

        Returns arrays of shape ``(draw, ...)``, all chains in one.  Raises ValueError if the draws
        lack a variable, or have it with another shape.
        """
        drawn = [v for name, v in self.model.named_vars.items() if name in posterior]
        stale = self.stale(posterior)
        drawn = [v for v in drawn if v.name not in stale]
        inputs = [v for v in truncated_graph_inputs(graphs, drawn) if v in set(drawn)]
        lacking = [rv.name for rv in random_ancestors(graphs, known=inputs)]
        if lacking:
            msg = (
                f"the draws have no {lacking}, only {list(posterior.data_vars)}; expected all that "
                "the states, the ODE's parameters and the likelihood depend on. Take idata and "
                "model from the same run."
            )
            if gone := sorted(stale.intersection(lacking)):
                msg = (
                    f"the draws of {gone} are from before pm.do fixed what they depend on; "
                    "expected draws that fit: sample the model that pm.do returns."
                )
            raise ValueError(msg)
        values = [_stacked(posterior[v.name]) for v in inputs]
        for variable, array in zip(inputs, values, strict=True):
            shape = variable.type.shape
            fits = len(shape) == array.ndim - 1 and all(
                static in (None, size) for static, size in zip(shape, array.shape[1:], strict=True)
            )
            if not fits:
                msg = (
                    f"the draws of {variable.name!r} have shape {array.shape[1:]}, the model's "
                    f"variable {shape}; expected the same. Take idata and model from the same run."
                )
                raise ValueError(msg)
        n_draws = posterior.sizes["chain"] * posterior.sizes["draw"]
        return broadcast_draws(compile_for_draws(inputs, graphs)(*values), graphs, n_draws)

    def solve(
        self, starts: Sequence[Array], theta: Sequence[Array], times: Sequence[Array] | None = None
    ) -> list[Array]:
        """Integrate each ODE from every draw; the solution is NaN where that failed.

        Starts and parameters of each have shapes ``(draw, ..., state)`` and ``(draw, ..., 1,
        param)``, solutions ``(draw, ..., time, state)``.  Output times are the grid by default; one
        row per experiment if these differ; none before the first time of the grid, where x(t0) is
        given.
        """
        gps = [constraint.gp for constraint in self.constraints]
        transformed = [gp.transform_states(x0) for gp, x0 in zip(gps, starts, strict=True)]
        solved = self._integrate(transformed, theta, times)
        return [gp.back_transform(x) for gp, (x, _) in zip(gps, solved, strict=True)]

    def solve_with_sensitivities(
        self, transformed: Sequence[Array], theta: Sequence[Array], wrt: Wrt
    ) -> list[tuple[Array, Array]]:
        """Integrate each ODE on its grid, with derivatives by x(t0) and parameters.

        As :meth:`solve`, but for transformed states; ``wrt`` masks the entries of x(t0) and then
        the parameters.  Returns the transformed states of each, and their derivatives, with one
        more axis.
        """
        return self._integrate(transformed, theta, None, wrt)

    def _integrate(
        self,
        transformed: Sequence[Array],
        theta: Sequence[Array],
        times: Sequence[Array] | None,
        wrt: Wrt | None = None,
    ) -> list[tuple[Array, Array]]:
        """Return transformed states and sensitivities (without ``wrt``, to nothing)."""
        solved = []
        for k, (odes, constraint, x0, parameters) in enumerate(
            zip(self._transformed_odes, self.constraints, transformed, theta, strict=True)
        ):
            grid, by = constraint.gp.t, None if wrt is None else wrt[k]
            first, t = np.atleast_2d(grid)[:, 0], np.atleast_2d(grid if times is None else times[k])
            flat = np.broadcast_to(parameters[..., 0, :], (*x0.shape[:-1], parameters.shape[-1]))
            start, flat = (x0, flat) if x0.ndim > 2 else (x0[:, None], flat[:, None])
            x = np.empty((len(x0), *t.shape, x0.shape[-1]))
            sensitivities = np.empty((*x.shape, sum(by or ())))
            for of in _batches(odes, first, t):
                at = t[of[0]]
                whole = at if at[0] == first[of[0]] else np.append(first[of[0]], at)
                found = self._solution(odes[of[0]], whole, start[:, of], flat[:, of], by)
                shape = len(x0), len(of), *x.shape[2:]
                x[:, of] = found.x[:, -len(at) :].reshape(shape)
                if by is not None:
                    sensitivities[:, of] = found.sensitivities.reshape(*shape, sum(by))
            shape = *x0.shape[:-1], *x.shape[-2:]
            solved.append((x.reshape(shape), sensitivities.reshape(*shape, sum(by or ()))))
        return solved

    def _solution(self, ode: ODE, t, x0, theta, wrt: tuple[bool, ...] | None = None) -> Solution:
        if monotonic() > self.deadline:
            msg = f"out of time after {self.n_solutions} solutions"
            raise OutOfTimeError(msg)
        key = id(ode), t.tobytes(), wrt
        if key not in self._solvers:
            self._solvers[key] = Solver(ode.equations(wrt), t)
        solution = self._solvers[key](
            x0.reshape(-1, x0.shape[-1]), theta.reshape(-1, theta.shape[-1])
        )
        self.n_solutions += len(solution.ended)
        self.failures.update(
            {why: len(draws) for why, draws in failures_by_reason(solution.ended).items()}
        )
        return solution


def of_each_experiment(given: Any, constraint: Constraint, what: str) -> list:
    """Return what is given for each experiment: the same for all, or by experiment."""
    gp = constraint.gp
    names = gp.names or (None,)
    if what == "start" and (isinstance(given, str) or callable(given)):
        return [given] * len(names)
    if not isinstance(given, Mapping):
        msg = f"{what} is a {type(given).__name__}; expected a mapping by name."
        raise TypeError(msg)
    if not any(isinstance(value, Mapping | str) for value in given.values()):
        return [given] * len(names)
    unknown = [name for name in given if name not in names]
    if unknown or None in names:
        known = "none of a single data set" if None in names else f"some of {[*names]}"
        msg = f"{what} has the experiments {unknown or [*given]}; expected {known}."
        raise ValueError(msg)
    return [given.get(str(name), {}) for name in names]


def _with_inputs(odes: Sequence[ODE], of_each: Sequence[Mapping]) -> list[ODE]:
    """Return the ODEs with other inputs, one object where ODE and inputs are the same."""
    changed = {
        (id(ode), id(inputs)): ode.with_inputs_changed(inputs) if inputs else ode
        for ode, inputs in zip(odes, of_each, strict=True)
    }
    return [changed[id(ode), id(inputs)] for ode, inputs in zip(odes, of_each, strict=True)]


def _batches(odes: Sequence[ODE], first, times) -> list[list[int]]:
    """Return groups of experiments with the same ODE, first time and times."""
    groups: dict[tuple, list[int]] = {}
    for number, (ode, start, t) in enumerate(zip(odes, first, times, strict=True)):
        groups.setdefault((id(ode), start, t.tobytes()), []).append(number)
    return [*groups.values()]


def unused_name(name: str, model: pm.Model) -> str:
    """Return a name, with underscores added if the model has it already."""
    while name in model.named_vars:
        name += "_"
    return name


def _stacked(draws: xr.DataArray) -> Array:
    values = draws.transpose("chain", "draw", ...).to_numpy()
    return values.reshape(-1, *values.shape[2:])


def compile_for_draws(
    inputs, outputs, random_seed: int | None = None, derive: Derive = as_they_are
) -> Callable:
    """Compile graphs of inputs for arrays with a leading draw axis; random graphs need a seed.

    ``derive``: see :func:`in_numpy`.
    """
    if random_seed is not None:
        reseed(outputs, inputs, random_seed)
    return in_numpy(inputs, outputs, derive=_for_draws(derive))


@cache
def _for_draws(derive: Derive) -> Derive:
    """Return what derives graphs of arrays with a leading draw axis."""

    def derived(inputs, outputs):
        graphs = derive(inputs, outputs)[1]
        batched = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in inputs]
        return batched, vectorize_graph([*graphs], dict(zip(inputs, batched, strict=True)))

    return derived


def broadcast_draws(values, graphs, *batch: int) -> list[Array]:
    """Broadcast values of graphs that do not depend on the draw."""
    return [
        np.broadcast_to(value, (*batch, *value.shape[value.ndim - graph.ndim :]))
        for value, graph in zip(values, graphs, strict=True)
    ]
