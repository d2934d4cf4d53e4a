"""Checks of a posterior that is there: against the exact one, on a finer grid, with other gammas.

:func:`integrate_check` turns matched draws into exact ones, or says that it cannot,
:func:`grid_check` asks whether a finer grid moves the posterior, :func:`select_gamma` which
gamma fits best.  All return a verdict in words with its table.
"""

from pymc_gradmatch.checks.gamma import GammaSelection, select_gamma
from pymc_gradmatch.checks.grid import GridCheck, grid_check
from pymc_gradmatch.checks.integrate import IntegrateCheck, integrate_check

__all__ = [
    "GammaSelection",
    "GridCheck",
    "IntegrateCheck",
    "grid_check",
    "integrate_check",
    "select_gamma",
]
