"""The exact posterior: the user's own model, with the ODE integrated.

:class:`Solutions` puts the numerical solution in the place of a model's states;
:func:`predict` draws data around it, and :class:`ExactPosterior` is the density.  Climbs lead to
its modes, searches draw around these, and :class:`Diagnostics` says whether to trust the draws.
"""

from pymc_gradmatch.exact.batch import Batch, side_by_side
from pymc_gradmatch.exact.climb import (
    FIRST_CLIMBS,
    MOST_CLIMBS,
    Found,
    NoSlopesError,
    climb,
    climbs,
    further_climbs,
)
from pymc_gradmatch.exact.comparison import (
    UNCHECKED,
    UNCOMPARED,
    glance,
)
from pymc_gradmatch.exact.diagnostics import (
    Diagnostics,
    diagnosed,
    residuals,
    several,
)
from pymc_gradmatch.exact.horizon import (
    grown,
)
from pymc_gradmatch.exact.importance import (
    ImpossibleError,
    Mixture,
    Weighted,
    fit_mixture,
)
from pymc_gradmatch.exact.model import (
    exact_model,
)
from pymc_gradmatch.exact.modes import (
    Local,
    look_around,
    rescaled,
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
    EFFECTIVE,
    Coverage,
    cover,
    sampled,
    searched,
    weighed_once,
)
from pymc_gradmatch.exact.solutions import (
    OutOfTimeError,
    Solutions,
    with_draws,
)

__all__ = [
    "EFFECTIVE",
    "FIRST_CLIMBS",
    "MOST_CLIMBS",
    "NO_DRAWS",
    "N_PRIOR",
    "UNCHECKED",
    "UNCOMPARED",
    "Batch",
    "Coverage",
    "Diagnostics",
    "ExactPosterior",
    "Found",
    "ImpossibleError",
    "Local",
    "Mixture",
    "NoSlopesError",
    "OutOfTimeError",
    "Solutions",
    "Weighted",
    "climb",
    "climbs",
    "cover",
    "diagnosed",
    "exact_model",
    "fit_mixture",
    "further_climbs",
    "glance",
    "grown",
    "look_around",
    "predict",
    "rescaled",
    "residuals",
    "sampled",
    "searched",
    "several",
    "side_by_side",
    "weighed_once",
    "with_draws",
]
