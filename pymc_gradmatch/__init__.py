"""Gradient matching for PyMC: parameters of ODEs without an ODE solver in the loop.

Put a Gaussian process on every state of the system.  Its derivative is then
Gaussian too, and the ODE enters as a constraint on it: Theorem 1 of Wenk et
al., "Fast Gaussian process based gradient matching for parameter
identification in systems of nonlinear ODEs", AISTATS 2019.
"""

from pymc_gradmatch import datasets, derivatives, kernels, systems
from pymc_gradmatch.distribution import GradientMatchingODE
from pymc_gradmatch.exactness import integrate_check
from pymc_gradmatch.fit import fit_gp
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.gridcheck import GridCheck, grid_check
from pymc_gradmatch.many import fit_many
from pymc_gradmatch.model import build_model
from pymc_gradmatch.nuts import find_map, sample
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.plots import plot_states
from pymc_gradmatch.predictive import predict
from pymc_gradmatch.recentring import recentre
from pymc_gradmatch.refined import refine
from pymc_gradmatch.sampling import sample_fgpgm
from pymc_gradmatch.selection import GammaSelection, select_gamma
from pymc_gradmatch.verdict import IntegrateCheck

__all__ = [
    "ODE",
    "GammaSelection",
    "GradientMatchingODE",
    "GridCheck",
    "IntegrateCheck",
    "StateGP",
    "build_model",
    "datasets",
    "derivatives",
    "find_map",
    "fit_gp",
    "fit_many",
    "grid_check",
    "integrate_check",
    "kernels",
    "plot_states",
    "predict",
    "recentre",
    "refine",
    "sample",
    "sample_fgpgm",
    "select_gamma",
    "systems",
]
