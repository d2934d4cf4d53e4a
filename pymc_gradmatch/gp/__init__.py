"""Data, and a Gaussian process on every state: Algorithm 1, step 1.

:class:`StateGP` holds the data, the kernels on a grid with C, D and A, and the noise;
:func:`fit_gp` makes it by maximum marginal likelihood, and :class:`StatePrior` is its
prior of the states as a distribution.  Nothing here depends on an ODE.
"""

from pymc_gradmatch.gp import derivatives, kernels
from pymc_gradmatch.gp.data import (
    Data,
    Residuals,
    as_noise,
    breaks_within,
    fits_states,
    levels_of,
    of_label,
    staircase,
    states_of,
    unexplained,
)
from pymc_gradmatch.gp.experiments import Experiment, StateGPs, as_experiments
from pymc_gradmatch.gp.fit import fit_data, fit_gp, refilled, unfitted
from pymc_gradmatch.gp.kernels import CovFunction
from pymc_gradmatch.gp.processes import (
    AnyStateGP,
    Parameterization,
    StatePrior,
    add_coords,
    behind_states,
    check_coords,
    check_states_fit,
    is_states,
    levels_name,
    start_of,
    whitened_name,
)
from pymc_gradmatch.gp.state_gp import StateGP

__all__ = [
    "AnyStateGP",
    "CovFunction",
    "Data",
    "Experiment",
    "Parameterization",
    "Residuals",
    "StateGP",
    "StateGPs",
    "StatePrior",
    "add_coords",
    "as_experiments",
    "as_noise",
    "behind_states",
    "breaks_within",
    "check_coords",
    "check_states_fit",
    "derivatives",
    "fit_data",
    "fit_gp",
    "fits_states",
    "is_states",
    "kernels",
    "levels_name",
    "levels_of",
    "of_label",
    "refilled",
    "staircase",
    "start_of",
    "states_of",
    "unexplained",
    "unfitted",
    "whitened_name",
]
