"""The exact posterior: the user's own model, with the ODE integrated.

:class:`Solutions` integrates a model's ODEs at draws, :func:`predict` draws data around these, and
:class:`ExactPosterior` is the density.  :func:`find_modes` finds its modes, :func:`run_searches`
draws from it, and :class:`Diagnostics` are the verdict on the draws.
"""

from pymc_gradmatch.exact.batch import BatchPosterior, run_batched
from pymc_gradmatch.exact.comparison import NOT_CHECKED, NOT_COMPARED, compare_quickly
from pymc_gradmatch.exact.diagnostics import Diagnostics, describe_modes, diagnose, residuals
from pymc_gradmatch.exact.horizon import grow_horizon
from pymc_gradmatch.exact.importance import (
    Mixture,
    WeightedDraws,
    ZeroDensityError,
    fit_mixture,
    pareto_smooth,
)
from pymc_gradmatch.exact.in_jax import JaxBatchPosterior
from pymc_gradmatch.exact.model import exact_model, solved_model
from pymc_gradmatch.exact.multistart import (
    FIRST_STARTS,
    MAX_STARTS,
    LocalApproximation,
    ModeSearch,
    NoGradientError,
    find_modes,
    further_starts,
    optimise_locally,
)
from pymc_gradmatch.exact.posterior import N_PRIOR, PRIOR_ERRORS, ExactPosterior
from pymc_gradmatch.exact.prediction import predict
from pymc_gradmatch.exact.ridges import approximate
from pymc_gradmatch.exact.search import (
    MIN_EFFECTIVE,
    SearchResult,
    result_of_chains,
    run_searches,
    searches_dataset,
    weight_normal_approximations,
)
from pymc_gradmatch.exact.solutions import OutOfTimeError, Solutions, broadcast_draws

__all__ = [
    "FIRST_STARTS",
    "MAX_STARTS",
    "MIN_EFFECTIVE",
    "NOT_CHECKED",
    "NOT_COMPARED",
    "N_PRIOR",
    "PRIOR_ERRORS",
    "BatchPosterior",
    "Diagnostics",
    "ExactPosterior",
    "JaxBatchPosterior",
    "LocalApproximation",
    "Mixture",
    "ModeSearch",
    "NoGradientError",
    "OutOfTimeError",
    "SearchResult",
    "Solutions",
    "WeightedDraws",
    "ZeroDensityError",
    "approximate",
    "broadcast_draws",
    "compare_quickly",
    "describe_modes",
    "diagnose",
    "exact_model",
    "find_modes",
    "fit_mixture",
    "further_starts",
    "grow_horizon",
    "optimise_locally",
    "pareto_smooth",
    "predict",
    "residuals",
    "result_of_chains",
    "run_batched",
    "run_searches",
    "searches_dataset",
    "solved_model",
    "weight_normal_approximations",
]
