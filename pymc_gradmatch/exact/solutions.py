"""The solutions of a model's ODEs at draws of its parameters."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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

from pymc_gradmatch._pymc import in_numpy, random_ancestors
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import Constraint, constraints, equations, known_starts
from pymc_gradmatch.ode import ODE, Solution, Solver, failures_by_reason

type Wrt = Sequence[tuple[bool, ...]]


class OutOfTimeError(TimeoutError):
    """A search has had the time that it was given."""


class Solutions:
    """The solutions of a model's ODEs at draws of its parameters and of x(t0).

    Parameters
    ----------
    model : pymc.Model
        Has a :class:`~pymc_gradmatch.GradientMatchingODE` or several, of states with a name.
    inputs : mapping of str to Input or callable, optional
        Inputs and doses in the place of those of the same names; of several experiments a mapping
        for all, or one for each of some by their names.

    Attributes
    ----------
    model : pymc.Model
        The model.
    constraints : list of Constraint
        What it says of ODEs.
    odes : list of list of ODE
        The right-hand side of each, one for each of several experiments, with its inputs.
    known : list of Known or None
        What it knows exactly of the x(t0) of each.
    states, starts : list of str
        Names of the states of each, and of their x(t0): ``"x"`` and ``"x0"``.
    n_solutions : int
        How many draws have been solved from so far.
    failures : Counter
        How many of them have no solution, by what happened.
    deadline : float
        By :func:`time.monotonic`, after which solving raises :class:`OutOfTimeError`.

    Raises
    ------
    ValueError
        If the model has no ODE, or states that cannot be replaced.
    """

    def __init__(self, model: pm.Model, inputs: Mapping[str, Any] | None = None):
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
        by_states = {known.x: known for known in known_starts(model)}
        self.known = [by_states.get(constraint.x) for constraint in self.constraints]
        self.starts = [unused_name(f"{name}0", model) for name in self.states]
        self.n_solutions, self.failures = 0, Counter[str]()
        self.deadline = np.inf
        self.odes = [equations(constraint.ode, constraint.gp) for constraint in self.constraints]
        if inputs:
            of_each = of_each_experiment(inputs, self.only("inputs"), "inputs")
            self.odes = [_with_inputs(self.odes[0], of_each)]
        self._levels = [_levels_of_each(odes) for odes in self.odes]
        self._solvers: dict[tuple, Solver] = {}  # by ODE, times and derivatives

    @property
    def observed(self) -> list[str]:
        """Names of what the model observes beside the constraints."""
        matched = [constraint.name for constraint in self.constraints]
        matched += [known.name for known in self.known if known is not None]
        return [rv.name for rv in self.model.observed_RVs if rv.name not in matched]

    def only(self, what: str) -> Constraint:
        """Return the only constraint, to which something is given."""
        if len(self.constraints) > 1:
            names = [constraint.name for constraint in self.constraints]
            msg = f"{what} is given, and the model has several ODEs, {names}; expected one of them."
            raise ValueError(msg)
        return self.constraints[0]

    @property
    def made_of_states(self) -> list[str]:
        """Names of what the model computes from the states, and names."""
        states = {constraint.x for constraint in self.constraints}
        return [
            v.name
            for v in self.model.deterministics
            if v not in states and states & {*ancestors([v])}
        ]

    def starts_at(self, draws: xr.Dataset) -> list[NDArray[np.float64]]:
        """Return x(t0) of each constraint at draws of it, or of the states."""
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
        dims = self.dims(name) or self._dims_behind(name, shape) or (None,) * len(shape)
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

    def _dims_behind(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
        """Return the dims of the variable behind a value, unless that has another shape."""
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
        """Return the names of draws that :func:`pymc.do` has overruled, and of what came of them.

        States stay, which are solved for anew.
        """
        named = {v for name, v in self.model.named_vars.items() if name in posterior}
        fixed = {v for v in named if isinstance(v, SharedVariable | Constant)}
        states = {v for c in self.constraints for v in named & {*ancestors([c.x])} if is_states(v)}
        states |= {constraint.x for constraint in self.constraints}
        return {str(v.name) for v in named - states if fixed & {*ancestors([v])}}

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
            if len(shape) != array.ndim - 1 or not all(map(_may_equal, shape, array.shape[1:])):
                msg = (
                    f"the draws of {variable.name!r} have shape {array.shape[1:]}, the model's "
                    f"variable {shape}; expected the same. Take idata and model from the same run."
                )
                raise ValueError(msg)
        n_draws = posterior.sizes["chain"] * posterior.sizes["draw"]
        return with_draws(compile_for_draws(inputs, graphs)(*values), graphs, n_draws)

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
            Output times of each, none before its grid, at whose first time its start holds; the
            grid if not given.  Where experiments have times of their own, one row for each.

        Returns
        -------
        list of array
            Shapes ``(draw, ..., time, state)``; NaN where an integration failed.
        """
        if times is None:
            times = [constraint.gp.t for constraint in self.constraints]
        solutions = []
        for odes, constraint, t, x0, parameters in zip(
            self._levels, self.constraints, times, starts, theta, strict=True
        ):
            gp = constraint.gp
            first, t = np.atleast_2d(gp.t)[:, 0], np.atleast_2d(t)
            levels, flat = _by_experiment(gp.levels_of(x0), parameters)
            solution = np.empty((len(x0), *t.shape, x0.shape[-1]))
            for of in _alike(odes, first, t):
                own = odes[of[0]], first[of[0]], t[of[0]]
                solution[:, of] = self._solved_by(*own, levels[:, of], flat[:, of])
            solutions.append(gp.states_of(solution.reshape(*x0.shape[:-1], *solution.shape[-2:])))
        return solutions

    def linearised(
        self,
        levels: Sequence[NDArray[np.float64]],
        theta: Sequence[NDArray[np.float64]],
        wrt: Wrt,
        times: Sequence[NDArray[np.float64]] | None = None,
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Integrate each ODE with its derivatives by x(t0) and parameters.

        Parameters
        ----------
        levels, theta : sequence of array
            As for :meth:`solve`, but levels of x(t0).
        wrt : sequence of tuple of bool
            Of each ODE: by which levels of x(t0), then by which parameters.
        times : sequence of array, optional
            The first times of each grid, if not all.

        Returns
        -------
        list of (array, array)
            Levels of each, ``(draw, ..., time, state)``, and their derivatives, with one more axis
            for those that were asked for; NaN where an integration failed.
        """
        if times is None:
            times = [constraint.gp.t for constraint in self.constraints]
        solved = []
        for odes, t, x0, parameters, by in zip(
            self._levels, times, levels, theta, wrt, strict=True
        ):
            t = np.atleast_2d(t)
            own, flat = _by_experiment(x0, parameters)
            shape = len(x0), *t.shape, x0.shape[-1]
            x, sensitivities = np.empty(shape), np.empty((*shape, sum(by)))
            for of in _alike(odes, t[:, 0], t):
                one = self._solution(odes[of[0]], t[of[0]], own[:, of], flat[:, of], by)
                x[:, of] = one.x.reshape(len(x0), len(of), *one.x.shape[1:])
                sensitivities[:, of] = one.sensitivities.reshape(*x[:, of].shape, sum(by))
            whole = *x0.shape[:-1], *shape[-2:]
            solved.append((x.reshape(whole), sensitivities.reshape(*whole, sum(by))))
        return solved

    def _solved_by(self, ode: ODE, first: float, t, x0, theta) -> NDArray[np.float64]:
        """Return solutions at some times, of starts at a first one that need not be among them."""
        whole = t if t[0] == first else np.append(first, t)
        solution = self._solution(ode, whole, x0, theta)
        return solution.x[:, -len(t) :].reshape(*x0.shape[:-1], len(t), x0.shape[-1])

    def _solution(self, ode: ODE, t, x0, theta, wrt: tuple[bool, ...] | None = None) -> Solution:
        if monotonic() > self.deadline:
            msg = f"out of time after {self.n_solutions} solutions"
            raise OutOfTimeError(msg)
        of = id(ode), t.tobytes(), wrt
        if of not in self._solvers:
            self._solvers[of] = Solver(ode.equations(wrt), t)
        solution = self._solvers[of](
            x0.reshape(-1, x0.shape[-1]), theta.reshape(-1, theta.shape[-1])
        )
        self.n_solutions += len(solution.ended)
        self.failures.update(
            {why: len(draws) for why, draws in failures_by_reason(solution.ended).items()}
        )
        return solution


def of_each_experiment(given: Any, constraint: Constraint, what: str) -> list:
    """Return what is given of each experiment: the same of all, or by the names of some."""
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
    """Return the ODEs with other inputs, the same object where they are the same."""
    changed = {
        (id(ode), id(inputs)): ode.with_inputs_changed(inputs) if inputs else ode
        for ode, inputs in zip(odes, of_each, strict=True)
    }
    return [changed[id(ode), id(inputs)] for ode, inputs in zip(odes, of_each, strict=True)]


def _levels_of_each(odes: Sequence[ODE]) -> list[ODE]:
    """Return the equations of the levels of each, the same object where they are the same."""
    levels = {id(ode): ode.transformed for ode in odes}
    return [levels[id(ode)] for ode in odes]


def _by_experiment(x0, theta) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return starts and parameters of each experiment, ``(draw, experiment, ...)``."""
    flat = np.broadcast_to(theta[..., 0, :], (*x0.shape[:-1], theta.shape[-1]))
    return (x0, flat) if x0.ndim > 2 else (x0[:, None], flat[:, None])


def _alike(odes: Sequence[ODE], first, times) -> list[list[int]]:
    """Return experiments in groups that are solved at once: of one ODE, first time and times."""
    groups: dict[tuple, list[int]] = {}
    for number, (ode, start, t) in enumerate(zip(odes, first, times, strict=True)):
        groups.setdefault((id(ode), start, t.tobytes()), []).append(number)
    return [*groups.values()]


def _name_of_states(model: pm.Model, constraint: Constraint) -> str:
    names = [name for name, variable in model.named_vars.items() if variable is constraint.x]
    if not names:
        msg = (
            f"the states of {constraint.name!r} are an expression without a name; expected a "
            'variable of the model, for example x = pm.Deterministic("x", ...).'
        )
        raise ValueError(msg)
    return names[0]


def unused_name(name: str, model: pm.Model) -> str:
    """Return a name, or one like it where the model has that already."""
    while name in model.named_vars:
        name += "_"
    return name


def _stacked(draws: xr.DataArray) -> NDArray[np.float64]:
    values = draws.transpose("chain", "draw", ...).to_numpy()
    return values.reshape(-1, *values.shape[2:])


def _may_equal(static: int | None, size: int) -> bool:
    return static in (None, size)


def compile_for_draws(inputs, outputs, random_seed: int | None = None) -> Callable:
    """Compile graphs for inputs that have a draw axis in front; random ones take a seed."""
    batched = [pt.tensor(dtype=v.dtype, shape=(None, *v.type.shape)) for v in inputs]
    graphs = vectorize_graph(outputs, dict(zip(inputs, batched, strict=True)))
    if random_seed is None:
        return in_numpy(batched, graphs)
    return pm.compile(
        batched, graphs, random_seed=random_seed, mode="FAST_COMPILE", on_unused_input="ignore"
    )


def with_draws(values, graphs, *batch: int) -> list[NDArray[np.float64]]:
    """Give values of graphs axes for draws where they depend on no draw."""
    return [
        np.broadcast_to(value, (*batch, *value.shape[value.ndim - graph.ndim :]))
        for value, graph in zip(values, graphs, strict=True)
    ]
