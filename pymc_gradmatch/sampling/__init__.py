"""Draws from a model: of one, or of many that are one formula.

A model's density is compiled once (``density``), climbed to its mode, and written in
coordinates in which it is nearly a standard normal (``coordinates``), where NUTS is fast.
:func:`sample` does so for one model.  The search for an exact posterior (``engine``) climbs to its
modes and draws around them.
One call does all of it, :func:`fit` (``one_call``), and :func:`fit_many` does for a stack of data
sets, whose draws are side by side in memory or in a file (``stack``), fitted by joblib
(``parallel``).  The paper's single Metropolis chain is :func:`sample_fgpgm` (``metropolis``).
"""

from pymc_gradmatch.sampling.engine import TRY, Exact, check_n_draws
from pymc_gradmatch.sampling.many import fit_many
from pymc_gradmatch.sampling.metropolis import CompiledMetropolis, sample_fgpgm
from pymc_gradmatch.sampling.one_call import Fit, fit
from pymc_gradmatch.sampling.parallel import in_parallel
from pymc_gradmatch.sampling.posterior import find_MAP, sample

__all__ = [
    "TRY",
    "CompiledMetropolis",
    "Exact",
    "Fit",
    "check_n_draws",
    "find_MAP",
    "fit",
    "fit_many",
    "in_parallel",
    "sample",
    "sample_fgpgm",
]
