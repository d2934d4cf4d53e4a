"""Arrays, graphs and densities, whatever they mean.

Nothing here has heard of an ODE or of a kernel.  One matrix per state times one vector
per state is :mod:`~pymc_gradmatch.numerics.products`, normal vectors are written in
independent coordinates of :mod:`~pymc_gradmatch.numerics.bases`, and the mode of a density
is sought by :mod:`~pymc_gradmatch.numerics.optimise`.
"""

from pymc_gradmatch.numerics import bases, products
from pymc_gradmatch.numerics.bases import cholesky
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
from pymc_gradmatch.numerics.threads import on_one_thread, one_at_a_time

__all__ = [
    "N_STARTS",
    "Density",
    "Laplace",
    "ascend",
    "bases",
    "cholesky",
    "conditional_sd",
    "hessian",
    "laplace",
    "on_one_thread",
    "one_at_a_time",
    "products",
    "search_mode",
    "settle",
]
