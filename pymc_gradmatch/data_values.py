"""Values of a data set in graphs: constants, or shared variables that can be set to others."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytensor
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.scalar import Pow
from pytensor.tensor import TensorConstant, as_tensor
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_gradmatch._pymc import is_generator, parameters_of

type Computed = Callable[[Any], NDArray[np.float64]]
"""Computes a value from a data set."""


class DataSet(NamedTuple):
    """The data that values are computed from, and the constants in its likelihood's graphs."""

    data: Any
    constants: Sequence[NDArray] = ()


def _constant(k: int, one: DataSet) -> NDArray:
    return one.constants[k]


class Slot(NamedTuple):
    """Place of a constant in graphs: an input of a node, or one of the graphs."""

    node: Apply | None
    position: int


class Formula(NamedTuple):
    """The structure of graphs, and the constants in them.

    Graphs that differ only in constants have equal structures and the same order of slots.
    """

    structure: Hashable
    slots: list[Slot]
    constants: list[NDArray]

    @classmethod
    def of(cls, graphs: Sequence[Variable], arguments: Sequence[Variable]) -> "Formula":
        """Read graphs down to some arguments; shapes, indices and exponents are structure."""
        kinds = {id(one): k for k, one in enumerate(arguments)}
        variables = [*ancestors(graphs, blockers=arguments)]
        order = {id(one): k for k, one in enumerate(variables)}
        tokens: list[Hashable] = []
        slots = [Slot(None, k) for k, v in enumerate(graphs) if isinstance(v, TensorConstant)]
        read: set[int] = set()
        for one in variables:
            node = one.owner
            if id(one) in kinds:
                tokens.append(kinds[id(one)])
            elif node is not None:
                own = [k for k in range(len(node.inputs)) if _is_value(node, k)]
                inputs = tuple(
                    variable.type if k in own else _token(variable, order)
                    for k, variable in enumerate(node.inputs)
                )
                tokens.append((node.op, inputs, node.outputs.index(one)))
                slots += [] if id(node) in read else [Slot(node, k) for k in own]
                read.add(id(node))
            elif not isinstance(one, Constant) and not is_generator(one):
                tokens.append(one)
        outputs = tuple(v.type if isinstance(v, TensorConstant) else order[id(v)] for v in graphs)
        found: list[Any] = [(graphs if node is None else node.inputs)[k] for node, k in slots]
        return cls((outputs, tuple(tokens)), slots, [np.array(one.data) for one in found])


def _token(variable: Variable, order: dict[int, int]) -> Hashable:
    """Return what represents an input of a node in the structure."""
    if is_generator(variable):
        return "generator"
    if isinstance(variable, Constant):
        return variable.type, np.asarray(variable.data).tobytes()
    return order[id(variable)]


def _is_value(node: Apply, index: int) -> bool:
    """Return whether an input of a node is a constant that does not belong to the structure."""
    op, variable = node.op, node.inputs[index]
    if not isinstance(variable, TensorConstant):
        return False
    if isinstance(op, Elemwise):
        return not (isinstance(op.scalar_op, Pow) and index == 1)
    return isinstance(op, DimShuffle) or any(variable is one for one in parameters_of(node))


class DataValues:
    """Embeds values of a data set in graphs as constants."""

    def __call__(self, computed: Computed, data: Any) -> Any:
        """Return a value, computed from data, for a graph."""
        return computed(data)

    def in_transform(self, computed: Computed, data: Any) -> Any:
        """Return a value for a transform, where PyMC expects only a distribution's variables."""
        return computed(data)

    def in_likelihood(
        self, graphs: Sequence[Variable], arguments: Sequence[Variable]
    ) -> Sequence[Variable]:
        """Return the graphs of a likelihood with its values embedded."""
        return graphs

    def set_mask(self, name: str, computed: Computed, data: Any):
        """Declare which entries of a variable are observed: ones and zeros computed from data."""

    def masked(self, densities: Mapping[str, Any]) -> dict[str, Any]:
        """Return log densities by variable, entry by entry, zero where not observed."""
        return {**densities}

    def with_shared(self, graphs: Sequence) -> list:
        """Return graphs with all values that can be set as shared variables."""
        return [*graphs]


class OtherFormulaError(ValueError):
    """The graphs of a likelihood have another structure than expected."""


CONSTANT = DataValues()


class SharedValues(DataValues):
    """Embeds values as shared variables, so that compiled graphs serve many data sets.

    ``likelihood`` is the formula of the likelihood's graphs, if there is one.
    """

    def __init__(self, likelihood: Formula | None = None) -> None:
        self._written: list[tuple[Callable[[DataSet], Any], Any]] = []
        self._in_transforms: list[tuple[NDArray, Any]] = []
        self._masks: dict[str, Any] = {}
        self._likelihood = likelihood
        self._constants: list[Any] = [] if likelihood is None else [
            self._shared(constant, partial(_constant, k))
            for k, constant in enumerate(likelihood.constants)
        ]  # fmt: skip

    def _shared(self, value: NDArray, computed: Callable[[DataSet], Any]) -> Any:
        variable = pytensor.shared(np.array(value), shape=np.shape(value))
        self._written.append((computed, variable))
        return variable

    def __call__(self, computed: Computed, data: Any) -> Any:
        """Return a value, computed from data, as a shared variable."""
        return self._shared(np.array(computed(data), dtype=float), lambda of: computed(of.data))

    def in_likelihood(
        self, graphs: Sequence[Variable], arguments: Sequence[Variable]
    ) -> Sequence[Variable]:
        """Replace the constants of a likelihood by shared variables, in place.

        Raises
        ------
        OtherFormulaError
            If its graphs have another structure.
        """
        found, graphs = Formula.of(graphs, arguments), [*graphs]
        if self._likelihood is None or found.structure != self._likelihood.structure:
            msg = "the graphs of the likelihood have another structure."
            raise OtherFormulaError(msg)
        for (node, position), variable in zip(found.slots, self._constants, strict=True):
            (graphs if node is None else node.inputs)[position] = variable
        return graphs

    def set_mask(self, name: str, computed: Computed, data: Any):
        """Declare which entries of a variable are observed: ones and zeros computed from data."""
        self._masks[name] = self(computed, data)

    def masked(self, densities: Mapping[str, Any]) -> dict[str, Any]:
        """Return log densities by variable, entry by entry, zero where not observed."""
        masked = {name: densities[name] * mask for name, mask in self._masks.items()}
        return {**densities, **masked}

    def in_transform(self, computed: Computed, data: Any) -> Any:
        """Return a constant that :meth:`with_shared` replaces by a shared variable."""
        variable = self(computed, data)
        constant: Any = as_tensor(np.array(variable.get_value()))
        self._in_transforms.append((constant.data, variable))
        return constant

    def with_shared(self, graphs: Sequence) -> list:
        """Return graphs with all values that can be set as shared variables."""
        replaced: dict[Any, Any] = {
            constant: variable
            for constant in ancestors(graphs)
            if isinstance(constant, TensorConstant)
            for array, variable in self._in_transforms
            if constant.data is array
        }
        return graph_replace([*graphs], replaced, strict=False) if replaced else [*graphs]

    def shared_in(self, graphs: Sequence) -> dict[Any, int]:
        """Return the shared variables in graphs, with the indices of their values.

        PyMC copies shared variables, but not the containers of their values.
        """
        containers = [variable.container for _, variable in self._written]
        shared = [v for v in ancestors(graphs) if isinstance(v, SharedVariable)]
        return {v: containers.index(v.container) for v in shared if v.container in containers}

    def tables(self, data_sets: Sequence[DataSet]) -> list[NDArray]:
        """Return each value of several data sets, one row for each data set."""
        return [
            np.stack([np.asarray(computed(one), dtype=variable.type.dtype) for one in data_sets])
            for computed, variable in self._written
        ]

    def set_values(self, one: DataSet):
        """Set all values to those of a data set."""
        self.set_row(self.tables([one]), 0)

    def set_row(self, tables: Sequence[NDArray], row: int):
        """Set all values to a row of :meth:`tables`."""
        for (_, variable), table in zip(self._written, tables, strict=True):
            variable.set_value(np.asarray(table[row], dtype=variable.type.dtype), borrow=True)
