"""Theorem 1 as a PyMC model.

:class:`GradientMatchingODE` is its last factor as a distribution, :func:`build_model`
writes all four for an ODE and data, and :func:`refine` chooses the settings without
smoothing bias, by Gauss-Newton on the same residuals.  Nothing here samples.
"""

from pymc_gradmatch.model.build import (
    build_model,
    keep_observations,
    scales_of,
    unfitted_model,
)
from pymc_gradmatch.model.constraint import (
    Constraint,
    GradientMatchingODE,
    changed_data,
    constraints,
    equations,
    is_constraint,
    residuals,
    warn_of_other_data,
)
from pymc_gradmatch.model.gauss_newton import Squares
from pymc_gradmatch.model.given import Given, Scales, fit_states
from pymc_gradmatch.model.likelihood import (
    NoDerivativeError,
    densities_of,
    density_of,
    fixed_noise,
    formula_of,
    total_of,
    where_impossible,
)
from pymc_gradmatch.model.presets import Settings, preset_of
from pymc_gradmatch.model.refinement import (
    DoubtWarning,
    of_model,
    refine,
)
from pymc_gradmatch.model.start import (
    Known,
    Start,
    is_known_start,
    known_starts,
    of_experiment,
    start_in,
    start_priors,
)

__all__ = [
    "Constraint",
    "DoubtWarning",
    "Given",
    "GradientMatchingODE",
    "Known",
    "NoDerivativeError",
    "Scales",
    "Settings",
    "Squares",
    "Start",
    "build_model",
    "changed_data",
    "constraints",
    "densities_of",
    "density_of",
    "equations",
    "fit_states",
    "fixed_noise",
    "formula_of",
    "is_constraint",
    "is_known_start",
    "keep_observations",
    "known_starts",
    "of_experiment",
    "of_model",
    "preset_of",
    "refine",
    "residuals",
    "scales_of",
    "start_in",
    "start_priors",
    "total_of",
    "unfitted_model",
    "warn_of_other_data",
    "where_impossible",
]
