"""Questions that are answered by fitting several times.

:func:`grid_check` asks whether a finer grid moves the posterior, :func:`select_gamma` which
gamma fits best.  Both return a verdict in words with its table.
"""

from pymc_gradmatch.checks.gamma import GammaSelection, select_gamma
from pymc_gradmatch.checks.grid import GridCheck, grid_check

__all__ = ["GammaSelection", "GridCheck", "grid_check", "select_gamma"]
