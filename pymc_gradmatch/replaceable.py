"""Numbers that come from a data set, in graphs that are written once for many data sets."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorConstant, as_tensor

type Made = Callable[[Any], NDArray[np.float64]]
"""Makes numbers of a data set."""


class Numbers:
    """Writes numbers of a data set into graphs, as constants."""

    def __call__(self, made: Made, data: Any) -> Any:
        """Write what a function makes of a data set."""
        return made(data)

    def in_transform(self, made: Made, data: Any) -> Any:
        """Write it into a transform, where PyMC finds no variables but those of a distribution."""
        return made(data)

    def opened(self, graphs: Sequence) -> list:
        """Return graphs that hold all that can be replaced as shared variables."""
        return [*graphs]


CONSTANT = Numbers()


class Replaceable(Numbers):
    """Writes them as shared variables, which :meth:`put` gives the values of another data set.

    So what is compiled of the graphs serves for all data sets of one pattern.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Made, Any]] = []
        self._closed: list[tuple[NDArray[np.float64], Any]] = []

    def __call__(self, made: Made, data: Any) -> Any:
        """Write what a function makes of a data set as a shared variable."""
        array = np.array(made(data), dtype=float)
        self._written.append((made, pytensor.shared(array, shape=array.shape)))
        return self._written[-1][1]

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

    def of_each(self, data_sets: Sequence) -> list[NDArray[np.float64]]:
        """Return the numbers of several data sets, one row for each, in their order."""
        return [np.stack([made(data) for data in data_sets]) for made, _ in self._written]

    def put(self, data: Any):
        """Put the numbers of another data set in their place."""
        for made, variable in self._written:
            variable.set_value(np.array(made(data), dtype=float))
