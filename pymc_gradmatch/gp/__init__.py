"""Data, and a Gaussian process on every state: Algorithm 1, step 1.

:class:`StateGP` holds the data, the kernels on a grid with C, D and A, and the noise;
:func:`fit_gp` makes it by maximum marginal likelihood, and :class:`StatePrior` is its
prior of the states as a distribution.  Nothing here has heard of an ODE.
"""

from pymc_gradmatch.gp import derivatives, kernels
from pymc_gradmatch.gp.data import as_observations, as_positive, as_times, fits_states, state_names
from pymc_gradmatch.gp.fit import fit_gp
from pymc_gradmatch.gp.kernels import CovFunction
from pymc_gradmatch.gp.prior import (
    Parameterization,
    StatePrior,
    add_coords,
    basis_inputs,
    check_coords,
    check_states_fit,
    is_states,
    start_of,
)
from pymc_gradmatch.gp.state_gp import StateGP

__all__ = [
    "CovFunction",
    "Parameterization",
    "StateGP",
    "StatePrior",
    "add_coords",
    "as_observations",
    "as_positive",
    "as_times",
    "basis_inputs",
    "check_coords",
    "check_states_fit",
    "derivatives",
    "fit_gp",
    "fits_states",
    "is_states",
    "kernels",
    "start_of",
    "state_names",
]
