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
    warn_of_other_data,
)
from pymc_gradmatch.model.given import Given, Scales
from pymc_gradmatch.model.likelihood import (
    densities_of,
    density_of,
    fixed_noise,
    formula_of,
    total_of,
    where_impossible,
)
from pymc_gradmatch.model.presets import Settings
from pymc_gradmatch.model.refinement import (
    DoubtWarning,
    of_model,
    refine,
)
from pymc_gradmatch.model.start import (
    Known,
    Start,
    known_starts,
    of_experiment,
    start_priors,
)

__all__ = [
    "Constraint",
    "DoubtWarning",
    "Given",
    "GradientMatchingODE",
    "Known",
    "Scales",
    "Settings",
    "Start",
    "build_model",
    "changed_data",
    "constraints",
    "densities_of",
    "density_of",
    "equations",
    "fixed_noise",
    "formula_of",
    "is_constraint",
    "keep_observations",
    "known_starts",
    "of_experiment",
    "of_model",
    "refine",
    "scales_of",
    "start_priors",
    "total_of",
    "unfitted_model",
    "warn_of_other_data",
    "where_impossible",
]
