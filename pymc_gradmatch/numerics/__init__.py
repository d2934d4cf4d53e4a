"""Matrices and densities, whatever they mean.

Nothing here depends on an ODE or a kernel.  One matrix per state times one vector
per state, and normal vectors in independent coordinates, are in ``matrices``; the mode of
a density, sought from several starts, and what the density is like there, in ``optimise``.
"""

from pymc_gradmatch.numerics.matrices import (
    Basis,
    Compressed,
    Innovations,
    Spectrum,
    basis_of,
    basis_signature,
    best_size,
    draw_normal,
    matvec,
    normal_log_density,
    of_recursion,
    on_one_thread,
    one_at_a_time,
    per_state,
    product,
    smallest_reliable,
    spectrum,
)
from pymc_gradmatch.numerics.optimise import (
    N_STARTS,
    Density,
    Laplace,
    ascend,
    conditional_sd,
    hessian,
    laplace,
    search_mode,
    settle,
)

__all__ = [
    "N_STARTS",
    "Basis",
    "Compressed",
    "Density",
    "Innovations",
    "Laplace",
    "Spectrum",
    "ascend",
    "basis_of",
    "basis_signature",
    "best_size",
    "conditional_sd",
    "draw_normal",
    "hessian",
    "laplace",
    "matvec",
    "normal_log_density",
    "of_recursion",
    "on_one_thread",
    "one_at_a_time",
    "per_state",
    "product",
    "search_mode",
    "settle",
    "smallest_reliable",
    "spectrum",
]
