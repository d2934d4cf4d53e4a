"""The exact posterior: the user's own model, with the ODE integrated.

:class:`Solutions` puts the numerical solution in the place of a model's states;
:func:`predict` draws data around it, :class:`ExactPosterior` is the density, and
:func:`integrate_check` turns matched draws into exact ones, or says that it cannot.
"""

from pymc_gradmatch.exact.climb import (
    climb,
    climbs,
)
from pymc_gradmatch.exact.diagnostics import (
    Chained,
    Climbing,
    Diagnostics,
    diagnosed,
    residuals,
    several,
)
from pymc_gradmatch.exact.experiments import (
    Separate,
    cover_experiments,
    exact_posterior,
    leading_to,
)
from pymc_gradmatch.exact.importance import (
    ImpossibleError,
    Mixture,
    Weighted,
    fit_mixture,
    gather,
    repeated,
)
from pymc_gradmatch.exact.model import (
    exact_model,
)
from pymc_gradmatch.exact.modes import (
    Local,
)
from pymc_gradmatch.exact.posterior import (
    N_PRIOR,
    NO_DRAWS,
    ExactPosterior,
)
from pymc_gradmatch.exact.prediction import (
    predict,
)
from pymc_gradmatch.exact.search import (
    cover,
    weighed_once,
)
from pymc_gradmatch.exact.solutions import (
    OutOfTimeError,
    Solutions,
    with_draws,
)
from pymc_gradmatch.exact.verdict import (
    N_HANDED_ON,
    TRY,
    UNCHECKED,
    UNCOMPARED,
    IntegrateCheck,
    check_n_draws,
    glance,
    integrate_check,
    searched,
)

__all__ = [
    "NO_DRAWS",
    "N_HANDED_ON",
    "N_PRIOR",
    "TRY",
    "UNCHECKED",
    "UNCOMPARED",
    "Chained",
    "Climbing",
    "Diagnostics",
    "ExactPosterior",
    "ImpossibleError",
    "IntegrateCheck",
    "Local",
    "Mixture",
    "OutOfTimeError",
    "Separate",
    "Solutions",
    "Weighted",
    "check_n_draws",
    "climb",
    "climbs",
    "cover",
    "cover_experiments",
    "diagnosed",
    "exact_model",
    "exact_posterior",
    "fit_mixture",
    "gather",
    "glance",
    "integrate_check",
    "leading_to",
    "predict",
    "repeated",
    "residuals",
    "searched",
    "several",
    "weighed_once",
    "with_draws",
]
