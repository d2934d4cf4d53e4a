"""Theorem 1 as a PyMC model.

:class:`GradientMatchingODE` is its last factor as a distribution, :func:`build_model`
writes all four for an ODE and data, and :func:`refine` chooses the settings without
smoothing bias, by Gauss-Newton on the same residuals.  Nothing here samples.
"""

from pymc_gradmatch.model.build import (
    build_model,
    drop_zero_observations,
    scales_finder,
    unfitted_model,
)
from pymc_gradmatch.model.constraint import (
    Constraint,
    GradientMatchingODE,
    changed_data,
    constraints,
    equations,
    is_constraint,
    warn_of_changed_data,
)
from pymc_gradmatch.model.given import CheckedExperiment, ScalesFromSolutions
from pymc_gradmatch.model.likelihood import (
    fixed_noise,
    likelihood_formula,
    log_densities_of,
    log_density_of,
    sum_of_entries,
    where_impossible,
)
from pymc_gradmatch.model.presets import Settings
from pymc_gradmatch.model.refinement import DoubtWarning, refine
from pymc_gradmatch.model.start import (
    Known,
    Start,
    known_starts,
    parameters_of_experiment,
    start_priors,
)

__all__ = [
    "CheckedExperiment",
    "Constraint",
    "DoubtWarning",
    "GradientMatchingODE",
    "Known",
    "ScalesFromSolutions",
    "Settings",
    "Start",
    "build_model",
    "changed_data",
    "constraints",
    "drop_zero_observations",
    "equations",
    "fixed_noise",
    "is_constraint",
    "known_starts",
    "likelihood_formula",
    "log_densities_of",
    "log_density_of",
    "parameters_of_experiment",
    "refine",
    "scales_finder",
    "start_priors",
    "sum_of_entries",
    "unfitted_model",
    "warn_of_changed_data",
    "where_impossible",
]
