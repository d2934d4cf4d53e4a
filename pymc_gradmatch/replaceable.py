"""Numbers that come from a data set, in graphs that are written once for many data sets."""

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

type Made = Callable[[Any], NDArray[np.float64]]
"""Makes numbers of a data set."""


class DataSet(NamedTuple):
    """What numbers of a data set are made of, and those in the lines of its likelihood."""

    data: Any
    numbers: Sequence[NDArray] = ()


def _number_of(place: int, one: DataSet) -> NDArray:
    return one.numbers[place]


class Slot(NamedTuple):
    """Where a number is in graphs: an input of a node, or, of none, one of the graphs."""

    node: Apply | None
    place: int


class Formula(NamedTuple):
    """What graphs compute, and the numbers in them.

    The form is the same for graphs that differ in these numbers alone; slots say where numbers
    are, in an order that is the same for all of one form.
    """

    form: Hashable
    slots: list[Slot]
    numbers: list[NDArray]

    @classmethod
    def of(cls, graphs: Sequence[Variable], arguments: Sequence[Variable]) -> "Formula":
        """Read graphs, as far as some arguments of theirs.

        What computes shapes and places, and exponents, belongs to the form.
        """
        kinds = {id(one): place for place, one in enumerate(arguments)}
        variables = [*ancestors(graphs, blockers=arguments)]
        places = {id(one): place for place, one in enumerate(variables)}
        tokens: list[Hashable] = []
        slots = [Slot(None, k) for k, v in enumerate(graphs) if isinstance(v, TensorConstant)]
        read: set[int] = set()
        for one in variables:
            node = one.owner
            if id(one) in kinds:
                tokens.append(kinds[id(one)])
            elif node is not None:
                slots_here = [k for k in range(len(node.inputs)) if _is_number(node, k)]
                of = tuple(
                    node.inputs[k].type if k in slots_here else _token(node.inputs[k], places)
                    for k in range(len(node.inputs))
                )
                tokens.append((node.op, of, node.outputs.index(one)))
                slots += [] if id(node) in read else [Slot(node, k) for k in slots_here]
                read.add(id(node))
            elif not isinstance(one, Constant) and not is_generator(one):
                tokens.append(one)
        ends = tuple(v.type if isinstance(v, TensorConstant) else places[id(v)] for v in graphs)
        constants: list[Any] = [(graphs if node is None else node.inputs)[k] for node, k in slots]
        numbers = [np.array(constant.data) for constant in constants]
        return cls((ends, tuple(tokens)), slots, numbers)


def _token(variable: Variable, places: dict[int, int]) -> Hashable:
    """Return what stands for an input of a node."""
    if is_generator(variable):
        return "generator"
    if isinstance(variable, Constant):
        return variable.type, np.asarray(variable.data).tobytes()
    return places[id(variable)]


def _is_number(node: Apply, place: int) -> bool:
    """Tell whether an input of a node is a constant that is merely computed with."""
    op, variable = node.op, node.inputs[place]
    if not isinstance(variable, TensorConstant):
        return False
    if isinstance(op, Elemwise):
        return not (isinstance(op.scalar_op, Pow) and place == 1)
    return isinstance(op, DimShuffle) or any(variable is one for one in parameters_of(node))


class Numbers:
    """Writes numbers of a data set into graphs, as constants."""

    def __call__(self, made: Made, data: Any) -> Any:
        """Write what a function makes of a data set."""
        return made(data)

    def in_transform(self, made: Made, data: Any) -> Any:
        """Write it into a transform, where PyMC finds no variables but those of a distribution."""
        return made(data)

    def in_lines(
        self, graphs: Sequence[Variable], arguments: Sequence[Variable]
    ) -> Sequence[Variable]:
        """Return lines of a likelihood, which have been written, with numbers of a data set."""
        return graphs

    def mask(self, name: str, made: Made, data: Any):
        """Say which entries of a variable each data set has: ones and zeros, made of it."""

    def masked(self, densities: Mapping[str, Any]) -> dict[str, Any]:
        """Return log densities by variable, entry by entry, of what a data set has."""
        return {**densities}

    def opened(self, graphs: Sequence) -> list:
        """Return graphs that hold all that can be replaced as shared variables."""
        return [*graphs]


class OtherFormulaError(ValueError):
    """The lines of a likelihood are not those that numbers were to be replaced in."""


CONSTANT = Numbers()


class Replaceable(Numbers):
    """Writes them as shared variables, which :meth:`put` gives the values of another data set.

    So what is compiled of the graphs, with the ``lines`` of a likelihood if there is one, serves
    for all data sets of one pattern.
    """

    def __init__(self, lines: Formula | None = None) -> None:
        self._written: list[tuple[Made, Any]] = []
        self._closed: list[tuple[NDArray, Any]] = []
        self._masks: dict[str, Any] = {}
        self._lines = lines
        self._of_lines: list[Any] = []
        for place, array in enumerate([] if lines is None else lines.numbers):
            self._of_lines.append(pytensor.shared(array.copy(), shape=array.shape))
            self._written.append((partial(_number_of, place), self._of_lines[-1]))

    def __call__(self, made: Made, data: Any) -> Any:
        """Write what a function makes of a data set as a shared variable."""
        array = np.array(made(data), dtype=float)
        variable = pytensor.shared(array, shape=array.shape)
        self._written.append((lambda of: made(of.data), variable))
        return variable

    def in_lines(
        self, graphs: Sequence[Variable], arguments: Sequence[Variable]
    ) -> Sequence[Variable]:
        """Put shared variables into lines of a likelihood, in the place of their numbers.

        Raises
        ------
        OtherFormulaError
            If the lines are not those that numbers were to be replaced in.
        """
        found, graphs = Formula.of(graphs, arguments), [*graphs]
        if self._lines is None or found.form != self._lines.form:
            msg = "the lines of the likelihood are another formula."
            raise OtherFormulaError(msg)
        for (node, place), variable in zip(found.slots, self._of_lines, strict=True):
            (graphs if node is None else node.inputs)[place] = variable
        return graphs

    def mask(self, name: str, made: Made, data: Any):
        """Say which entries of a variable each data set has: ones and zeros, made of it."""
        self._masks[name] = self(made, data)

    def masked(self, densities: Mapping[str, Any]) -> dict[str, Any]:
        """Return log densities by variable, entry by entry, zero where a data set has none."""
        masked = {name: densities[name] * mask for name, mask in self._masks.items()}
        return {**densities, **masked}

    def in_transform(self, made: Made, data: Any) -> Any:
        """Write it as a constant, in whose place :meth:`opened` puts a shared variable."""
        variable = self(made, data)
        constant: Any = as_tensor(np.array(variable.get_value()))
        self._closed.append((constant.data, variable))
        return constant

    def opened(self, graphs: Sequence) -> list:
        """Return graphs that hold all that can be replaced as shared variables."""
        constants = [v for v in ancestors(graphs) if isinstance(v, TensorConstant)]
        replaced: dict[Any, Any] = {
            constant: variable
            for constant in constants
            for array, variable in self._closed
            if constant.data is array
        }
        return graph_replace([*graphs], replaced, strict=False) if replaced else [*graphs]

    def within(self, graphs: Sequence) -> dict[Any, int]:
        """Return the shared variables that graphs hold, with the places of their numbers.

        PyMC copies them, but not what holds their values.
        """
        held = [variable.container for _, variable in self._written]
        shared = [v for v in ancestors(graphs) if isinstance(v, SharedVariable)]
        return {v: held.index(v.container) for v in shared if v.container in held}

    def of_each(self, data_sets: Sequence[DataSet]) -> list[NDArray]:
        """Return the numbers of several data sets, one row for each, in their order."""
        return [
            np.stack([np.asarray(made(one), dtype=variable.type.dtype) for one in data_sets])
            for made, variable in self._written
        ]

    def put(self, one: DataSet):
        """Put the numbers of another data set in their place."""
        self.put_row(self.of_each([one]), 0)

    def put_row(self, tables: Sequence[NDArray], row: int):
        """Put in their place the numbers of one of those of which :meth:`of_each` made tables."""
        for (_, variable), table in zip(self._written, tables, strict=True):
            variable.set_value(np.asarray(table[row], dtype=variable.type.dtype), borrow=True)
