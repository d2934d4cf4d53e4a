# What the package offers: the lazy door in __init__.py reads it, and so do type checkers.
from . import datasets, petab
from .checks import integrate_check
from .exact import Diagnostics, exact_model, predict
from .gp import Experiment, StateGP, StateGPs, derivatives, fit_gp, kernels
from .model import GradientMatchingODE, build_model, refine
from .ode import ODE, Input, check_ode
from .plots import plot_gp_fit, plot_gradient_match, plot_states, plot_verdict
from .population import add_fits, reweight_fits, tabulate
from .population_plots import plot_fits
from .sampling import Fit, find_MAP, fit, fit_many, sample, sample_fgpgm

__version__: str

__all__ = [
    "ODE",
    "Diagnostics",
    "Experiment",
    "Fit",
    "GradientMatchingODE",
    "Input",
    "StateGP",
    "StateGPs",
    "add_fits",
    "build_model",
    "check_ode",
    "datasets",
    "derivatives",
    "exact_model",
    "find_MAP",
    "fit",
    "fit_gp",
    "fit_many",
    "integrate_check",
    "kernels",
    "petab",
    "plot_fits",
    "plot_gp_fit",
    "plot_gradient_match",
    "plot_states",
    "plot_verdict",
    "predict",
    "refine",
    "reweight_fits",
    "sample",
    "sample_fgpgm",
    "tabulate",
]
