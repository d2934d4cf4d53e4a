"""Theorem 1 as a PyMC model.

:class:`GradientMatchingODE` is its last factor as a distribution, :func:`build_model`
writes all four for an ODE and data, and :func:`refine` chooses the settings without
smoothing bias, by Gauss-Newton on the same residuals.  Nothing here samples.
"""

from pymc_gradmatch.model.build import Settings, build_model, preset_of
from pymc_gradmatch.model.constraint import (
    Constraint,
    GradientMatchingODE,
    constraints,
    is_constraint,
    keep_observations,
    warn_of_other_data,
)
from pymc_gradmatch.model.likelihood import NoDerivativeError, where_impossible
from pymc_gradmatch.model.refinement import of_model, recentre, refine

__all__ = [
    "Constraint",
    "GradientMatchingODE",
    "NoDerivativeError",
    "Settings",
    "build_model",
    "constraints",
    "is_constraint",
    "keep_observations",
    "of_model",
    "preset_of",
    "recentre",
    "refine",
    "warn_of_other_data",
    "where_impossible",
]
