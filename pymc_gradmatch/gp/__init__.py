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
    back_transform,
    breaks_within,
    fits_states,
    of_label,
    piecewise_mean,
    poorly_fitted,
    transform_states,
)
from pymc_gradmatch.gp.experiments import Experiment, StateGPs, as_experiments
from pymc_gradmatch.gp.fit import fit_data, fit_gp, unfitted, unfitted_with
from pymc_gradmatch.gp.kernels import CovFunction
from pymc_gradmatch.gp.processes import (
    AnyStateGP,
    Parameterization,
    StatePrior,
    add_coords,
    check_coords,
    check_new_states,
    free_variable,
    is_states,
    sampling_start,
    transformed_name,
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
    "back_transform",
    "breaks_within",
    "check_coords",
    "check_new_states",
    "derivatives",
    "fit_data",
    "fit_gp",
    "fits_states",
    "free_variable",
    "is_states",
    "kernels",
    "of_label",
    "piecewise_mean",
    "poorly_fitted",
    "sampling_start",
    "transform_states",
    "transformed_name",
    "unfitted",
    "unfitted_with",
    "whitened_name",
]
