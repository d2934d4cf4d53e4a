"""What reproduces the paper: its systems, and its single Metropolis chain.

Wenk, P. et al. (2019). Fast Gaussian process based gradient matching for parameter
identification in systems of nonlinear ODEs. *AISTATS*.
"""

from pymc_gradmatch.paper import systems
from pymc_gradmatch.paper.metropolis import CompiledMetropolis, sample_fgpgm

__all__ = ["CompiledMetropolis", "sample_fgpgm", "systems"]
