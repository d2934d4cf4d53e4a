"""All numbers of a density in one vector: coordinates first, then the data of its model."""

from typing import cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.replace import graph_replace
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.curved import Coordinates, Split, monomials
from pymc_gradmatch.native import NativeDensity, compile_density
from pymc_gradmatch.written import Written

__all__ = ["compile_written", "cut", "flat", "pack"]


def compile_written(written: Written, shapes, split: Split) -> NativeDensity:
    """Compile a model's log density as a function of q and of what :func:`pack` returns."""
    n = sum(int(np.prod(shape)) for shape in shapes)
    slots = [
        (n,),
        (n, n),
        (split.n_monomials, n),
        *(constant.data.shape for constant in written.constants),
    ]
    n_numbers = sum(int(np.prod(shape)) for shape in slots)
    q = pt.tensor("q", dtype="float64", shape=(n,))
    numbers = pt.tensor("numbers", dtype="float64", shape=(n_numbers,))
    location, linear, bent, *constants = cut(numbers, slots)
    # A sum over rows, unlike one along a row, is vectorised.
    u = location + (linear * q[:, None]).sum(axis=0)
    if split.n_monomials:
        u += (bent * pt.concatenate(monomials(q, split.n_curved))[:, None]).sum(axis=0)
    parts = [*zip(written.inputs, cut(u, shapes), strict=True)]
    parts += zip(written.constants, constants, strict=True)
    log_density = cast(
        "TensorVariable", graph_replace(written.log_density, dict(parts), strict=False)
    )
    return compile_density(log_density, q, numbers)


def pack(around: Coordinates, data) -> NDArray[np.float64]:
    """Return coordinates and data as one vector."""
    return flat([around.location, around.linear.T, around.bent.T, data])


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
