"""Draws from posteriors.

:func:`sample` runs NUTS on a model (``posterior``): its density as machine code (``density``), in
coordinates in which it is nearly a standard normal (``coordinates``).  :func:`fit` (``one_call``)
draws from an exact posterior, by optimisation to its modes and importance sampling or NUTS around
them (``engine``).  :func:`fit_many` (``many``) fits a stack of data sets, in batches
(``batched_fits``), by joblib (``parallel``), into memory or a file (``stack``).
:func:`sample_fgpgm` is the paper's Metropolis chain (``metropolis``).
"""

from pymc_gradmatch.sampling.engine import TRY, ExactSearch, check_n_draws
from pymc_gradmatch.sampling.many import fit_many
from pymc_gradmatch.sampling.metropolis import CompiledMetropolis, sample_fgpgm
from pymc_gradmatch.sampling.one_call import Fit, fit
from pymc_gradmatch.sampling.parallel import in_parallel
from pymc_gradmatch.sampling.posterior import find_MAP, sample

__all__ = [
    "TRY",
    "CompiledMetropolis",
    "ExactSearch",
    "Fit",
    "check_n_draws",
    "find_MAP",
    "fit",
    "fit_many",
    "in_parallel",
    "sample",
    "sample_fgpgm",
]
