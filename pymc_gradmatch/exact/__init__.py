"""The exact posterior: the user's own model, with the ODE integrated.

:class:`Solutions` puts the numerical solution in the place of a model's states;
:func:`predict` draws data around it, :class:`ExactPosterior` is the density, and
:func:`integrate_check` turns matched draws into exact ones, or says that it cannot.
"""

from pymc_gradmatch.exact.diagnostics import Diagnostics
from pymc_gradmatch.exact.importance import Mixture, Weighted, fit_mixture, gather, repeated
from pymc_gradmatch.exact.model import exact_model
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.solutions import Solutions, predict, with_draws
from pymc_gradmatch.exact.verdict import (
    UNCHECKED,
    UNCOMPARED,
    IntegrateCheck,
    check_n_draws,
    glance,
    integrate_check,
)

__all__ = [
    "UNCHECKED",
    "UNCOMPARED",
    "Diagnostics",
    "ExactPosterior",
    "IntegrateCheck",
    "Mixture",
    "Solutions",
    "Weighted",
    "check_n_draws",
    "exact_model",
    "fit_mixture",
    "gather",
    "glance",
    "integrate_check",
    "predict",
    "repeated",
    "with_draws",
]
