"""ODEs: the right-hand side as a graph and as machine code, and its solution.

:class:`ODE` has the names, checks and derivatives of a right-hand side, and solves it: numbers for
many draws at once (:class:`Solver`), tensors as an operation in a graph (:class:`Solve`).
:class:`Input` is a known input, and :func:`check_ode` checks an ODE before it is fitted.  Nothing
here depends on data or Gaussian processes.
"""

from pymc_gradmatch.ode.check import ODECheck, check_ode
from pymc_gradmatch.ode.in_jax import packages
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.ode.names import as_namedtuple
from pymc_gradmatch.ode.node import Solve
from pymc_gradmatch.ode.nonfinite import (
    explain_failure,
    explain_nonfinite,
    explain_nonfinite_slope,
    nonfinite_advice,
)
from pymc_gradmatch.ode.solve import (
    DEFAULT_RTOL,
    OUT_OF_STEPS,
    SOLVED,
    Solution,
    Solver,
    failures_by_reason,
)
from pymc_gradmatch.ode.system import ODE, stack_experiments

__all__ = [
    "DEFAULT_RTOL",
    "ODE",
    "OUT_OF_STEPS",
    "SOLVED",
    "Input",
    "ODECheck",
    "Solution",
    "Solve",
    "Solver",
    "as_namedtuple",
    "check_ode",
    "explain_failure",
    "explain_nonfinite",
    "explain_nonfinite_slope",
    "failures_by_reason",
    "nonfinite_advice",
    "packages",
    "stack_experiments",
]
