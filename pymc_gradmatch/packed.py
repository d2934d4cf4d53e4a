"""All numbers of a density in one vector: coordinates first, then the data of its model."""

from typing import cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.replace import graph_replace
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.curved import Coordinates, Split
from pymc_gradmatch.native import NativeDensity, compile_density
from pymc_gradmatch.written import Written

__all__ = ["compile_written", "cut", "flat", "pack"]


def compile_written(written: Written, shapes, split: Split) -> NativeDensity:
    """Compile a model's log density as a function of q and of what :func:`pack` returns."""
    n = sum(int(np.prod(shape)) for shape in shapes)
    slots = [constant.data.shape for constant in written.constants]
    u = pt.tensor("u", dtype="float64", shape=(n,))
    data = pt.tensor("data", dtype="float64", shape=(sum(int(np.prod(shape)) for shape in slots),))
    parts = [*zip(written.inputs, cut(u, shapes), strict=True)]
    parts += zip(written.constants, cut(data, slots), strict=True)
    log_density = cast(
        "TensorVariable", graph_replace(written.log_density, dict(parts), strict=False)
    )
    return compile_density(log_density, u, data, split)


def pack(around: Coordinates, data) -> NDArray[np.float64]:
    """Return coordinates and data as one vector; matrices twice, by rows and by columns.

    A matrix times a vector is a sum of its columns, a loop that is fast in the order written.
    """
    linear, bent = around.linear, around.bent
    return flat([bent.any(), around.location, linear.T, linear, bent.T, bent, data])


def flat(arrays) -> NDArray[np.float64]:
    """Return arrays, one after the other, as one vector."""
    return np.concatenate([np.ravel(array) for array in arrays]).astype(float)


def cut(vector, shapes) -> list:
    """Cut vectors ``(..., n)`` into arrays of shapes; the inverse of :func:`flat`."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        vector[..., end - int(np.prod(shape)) : end].reshape((*vector.shape[:-1], *shape))
        for end, shape in zip(ends, shapes, strict=True)
    ]
