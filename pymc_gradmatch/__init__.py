"""Gradient matching for PyMC: parameters of ODEs without an ODE solver in the loop.

Put a Gaussian process on every state of the system.  Its derivative is then
Gaussian too, and the ODE enters as a constraint on it: Theorem 1 of Wenk et
al., "Fast Gaussian process based gradient matching for parameter
identification in systems of nonlinear ODEs", AISTATS 2019.
"""

from pymc_gradmatch import datasets
from pymc_gradmatch.checks import GammaSelection, GridCheck, grid_check, select_gamma
from pymc_gradmatch.exact import Fit, IntegrateCheck, fit, integrate_check, predict
from pymc_gradmatch.gp import StateGP, derivatives, fit_gp, kernels
from pymc_gradmatch.model import GradientMatchingODE, build_model, recentre, refine
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.paper import sample_fgpgm, systems
from pymc_gradmatch.plots import plot_states
from pymc_gradmatch.sampling import find_map, fit_many, sample

__all__ = [
    "ODE",
    "Fit",
    "GammaSelection",
    "GradientMatchingODE",
    "GridCheck",
    "Input",
    "IntegrateCheck",
    "StateGP",
    "build_model",
    "datasets",
    "derivatives",
    "find_map",
    "fit",
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


def __dir__() -> list[str]:
    return sorted(__all__)
