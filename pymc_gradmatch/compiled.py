"""A posterior compiled once: its density, its mode, and NUTS in coordinates made for it."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np
import nutpie
import pymc as pm
import pytensor
from numpy.typing import NDArray
from pymc.initial_point import make_initial_point_expression, make_initial_point_fn
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant
from xarray import DataTree

from pymc_gradmatch.derivatives import EVALUATE_ONCE
from pymc_gradmatch.distribution import GradientMatchingODERV
from pymc_gradmatch.laplace import Laplace, laplace, maximise
from pymc_gradmatch.states import StatePriorRV

__all__ = ["CompiledPosterior", "compile_posterior"]

COORDINATES = "coordinates"
NUMBERS = "numbers"  # name of the one shared variable
N_STARTS = 8
N_CLIMBED = 3  # the best of the starts, from which states and parameters climb together


class Written(NamedTuple):
    """A model's log density and its variables as graphs of the value variables."""

    inputs: list[Variable]
    outputs: list[Variable]
    constants: list[Any]


@dataclass(frozen=True)
class CompiledPosterior:
    """A posterior in flat, unconstrained coordinates; :func:`compile_posterior` makes it.

    Attributes
    ----------
    compiled : nutpie.CompiledModel
        The density as a function of q, where ``u = location + factor @ q`` is
        the vector of all value variables.
    draw_start : callable
        Maps a seed to a start u, parameters drawn from their prior.
    is_state, is_held : array of bool
        Which entries of u are states; which make up the variance of the
        mismatch, gamma first of all.
    shapes : list of tuple
        Shapes of the value variables.
    written : Written
        The graphs that were compiled.
    data : array of float
        Every number that may differ between data sets, in one vector.
    """

    compiled: Any
    draw_start: Callable[[int], NDArray[np.float64]]
    is_state: NDArray[np.bool_]
    is_held: NDArray[np.bool_]
    shapes: list[tuple[int, ...]]
    written: Written
    data: NDArray[np.float64]

    def for_model(self, model: pm.Model) -> Self:
        """Return the posterior of a model that differs in its numbers only; compiles nothing.

        Raises
        ------
        ValueError
            If the model differs in more than its numbers.
        """
        other = _write(model)
        if not _same_but_for_constants(self.written, other):
            msg = "the model differs from the compiled one in more than its data."
            raise ValueError(msg)
        data = _flat(constant.data for constant in other.constants)
        n = len(self.is_state)
        numbers = _flat([np.zeros(n), np.eye(n), data])
        states = _states_start(model)
        return replace(
            self,
            compiled=self.compiled.with_data(**{NUMBERS: numbers}),
            draw_start=lambda seed: _with_entries(self.draw_start(seed), self.is_state, states),
            data=data,
        )

    def density(self, u: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return the log density and its gradient; minus infinity where it cannot be evaluated."""
        pointer = ctypes.POINTER(ctypes.c_double)
        point, gradient, value = np.ascontiguousarray(u), np.empty(len(u)), np.empty(())
        arrays = (array.ctypes.data_as(pointer) for array in (point, gradient, value))
        code = self.compiled.compiled_logp_func.ctypes(
            len(u), *arrays, self.compiled.user_data.ctypes.data
        )
        return (float(value), gradient) if code == 0 else (-np.inf, np.zeros(len(u)))

    def find_mode(self, rng: np.random.Generator) -> Laplace:
        """Find the mode and a normal approximation there.

        From every start the parameters climb alone, given the states; from
        the best of these points states and parameters climb together.  What
        makes up the variance of the mismatch stays where it starts: its joint
        mode with the states runs to zero.
        """
        starts = [self.draw_start(seed) for seed in rng.integers(2**31, size=N_STARTS)]
        parameters = ~(self.is_state | self.is_held)
        climbed = [
            _with_entries(u, parameters, maximise(self._along(u, parameters), [u[parameters]]))
            for u in starts
            if np.isfinite(self.density(u)[0])
        ]
        climbed.sort(key=lambda u: -self.density(u)[0])
        free = ~self.is_held
        joint = self._along(starts[0], free)
        mode = laplace(joint, maximise(joint, [u[free] for u in climbed[:N_CLIMBED]]))
        factor = np.eye(len(free))
        factor[np.ix_(free, free)] = mode.factor
        return Laplace(_with_entries(starts[0], free, mode.location), factor, mode.log_density)

    def sample(self, around: Laplace, **settings) -> DataTree:
        """Run nutpie's NUTS in the coordinates of a normal approximation."""
        numbers = _flat([around.location, around.factor.T, self.data])
        trace = nutpie.sample(self.compiled.with_data(**{NUMBERS: numbers}), **settings)
        trace["posterior"] = trace["posterior"].dataset.drop_dims(f"{COORDINATES}_dim_0")
        return trace

    def by_variable(self, u: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Cut u into the value variables."""
        return _cut(u, self.shapes)

    def _along(self, u, entries):
        """Return the density as a function of some entries of u, the others fixed."""

        def density(part):
            value, gradient = self.density(_with_entries(u, entries, part))
            return value, gradient[entries]

        return density


def compile_posterior(model: pm.Model) -> CompiledPosterior:
    """Compile a model's log density, in coordinates and with numbers that can be chosen later.

    Parameters
    ----------
    model : pymc.Model
        Free variables must be continuous.

    Raises
    ------
    ValueError
        If the model has discrete free variables, or none.
    """
    if not model.free_RVs or model.discrete_value_vars:
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}, of which "
            f"{[v.name for v in model.discrete_value_vars]} are discrete; expected continuous "
            "ones. Use pm.sample, which has samplers for discrete variables."
        )
        raise ValueError(msg)
    held = _makes_up_mismatch_variance(model)
    parameters = [rv for rv in model.free_RVs if not _is_states(rv) and rv not in held]
    strategies = {rv.name: "prior" for rv in parameters if model.rvs_to_initial_values[rv] is None}
    start = make_initial_point_fn(model=model, overrides=strategies, return_transformed=True)
    shapes = [np.shape(value) for value in start(0).values()]
    sizes = [int(np.prod(shape)) for shape in shapes]

    def entries(chosen):
        return np.repeat([chosen(rv) for rv in model.free_RVs], sizes)

    written = _write(model)
    return CompiledPosterior(
        nutpie.compile_pymc_model(_in_flat_coordinates(model, written, shapes)),
        draw_start=lambda seed: _flat(start(seed).values()),
        is_state=entries(_is_states),
        is_held=entries(lambda rv: rv in held),
        shapes=shapes,
        written=written,
        data=_flat(constant.data for constant in written.constants),
    )


def _write(model: pm.Model) -> Written:
    graphs = [model.logp(), *model.replace_rvs_by_values(_named(model))]
    outputs = cast("list[Variable]", rewrite_graph(graphs, include=("canonicalize", "stabilize")))
    constants = [variable for variable in ancestors(outputs) if _is_data(variable)]
    return Written([model.rvs_to_values[rv] for rv in model.free_RVs], outputs, constants)


def _named(model: pm.Model) -> list[Variable]:
    return [*model.free_RVs, *model.deterministics]


def _is_data(variable) -> bool:
    # Factors such as 0.5 belong to the formula.
    return (
        isinstance(variable, TensorConstant)
        and variable.dtype == "float64"
        and not (variable.ndim == 0 and float(4 * variable.data).is_integer())
    )


def _same_but_for_constants(one: Written, other: Written) -> bool:
    if [c.type for c in one.constants] != [c.type for c in other.constants]:
        return False
    slots = [constant.type() for constant in one.constants]
    first, second = (
        graph_replace(written.outputs, dict(zip(written.constants, slots, strict=True)))
        for written in (one, other)
    )
    return equal_computations([*first], [*second], in_xs=one.inputs, in_ys=other.inputs)


def _in_flat_coordinates(model: pm.Model, written: Written, shapes) -> pm.Model:
    """Write the model for one vector q, its variables as deterministics.

    All numbers are one shared variable: compiled code is then the same for
    all data of a shape, and nutpie takes its time over every shared variable.
    """
    n = sum(int(np.prod(shape)) for shape in shapes)
    arrays = [np.zeros(n), np.eye(n), *(constant.data for constant in written.constants)]
    numbers = pytensor.shared(_flat(arrays), name=NUMBERS, shape=(sum(a.size for a in arrays),))
    location, factor_rows, *slots = _cut(numbers, [array.shape for array in arrays])
    with pm.Model(coords=model.coords) as flat:
        q = pm.Flat(COORDINATES, shape=n)
        # A sum over rows, unlike one along a row, is vectorised.
        u = location + (factor_rows * q[:, None]).sum(axis=0)
        parts = [*zip(written.inputs, _cut(u, shapes), strict=True)]
        parts += zip(written.constants, slots, strict=True)
        logp, *graphs = graph_replace(written.outputs, dict(parts))
        pm.Potential("log_density", logp)
        for variable, graph in zip(_named(model), graphs, strict=True):
            pm.Deterministic(variable.name, graph, dims=model.named_vars_to_dims.get(variable.name))
    return flat


def _flat(arrays) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(array) for array in arrays]).astype(float)


def _cut(vector, shapes) -> list:
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        vector[end - int(np.prod(shape)) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


def _is_states(rv) -> bool:
    return isinstance(rv.owner.op, StatePriorRV)


def _states_start(model: pm.Model) -> NDArray[np.float64]:
    graphs = make_initial_point_expression(
        free_rvs=[rv for rv in model.free_RVs if _is_states(rv)],
        rvs_to_transforms=model.rvs_to_transforms,
        initval_strategies={},
        return_transformed=True,
    )
    return _flat(pytensor.function([], graphs, mode=EVALUATE_ONCE)())


def _makes_up_mismatch_variance(model: pm.Model) -> set:
    nodes = [
        rv.owner for rv in model.observed_RVs if isinstance(rv.owner.op, GradientMatchingODERV)
    ]
    bases = [parameter for node in nodes for parameter in node.op.dist_params(node)[1:]]
    return set(model.free_RVs) & set(ancestors(bases))


def _with_entries(u, entries, part):
    result = u.copy()
    result[entries] = part
    return result
