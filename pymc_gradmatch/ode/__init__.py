"""The right-hand side: written once by the user, used as a graph and as a function.

:class:`ODE` knows names, checks and derivatives of a right-hand side, and solves it for one
draw after the other; :func:`batched_solver` solves it for hundreds at once.  Nothing here has
heard of data or of a Gaussian process.  :class:`Input` is what is known from outside, and
:func:`check_ode` looks at an ODE before it is fitted.
"""

from pymc_gradmatch.ode.check import ODECheck, check_ode
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.ode.solve import RHS, BatchedSolver
from pymc_gradmatch.ode.system import ODE, batched_solver, in_experiments, named

__all__ = [
    "ODE",
    "RHS",
    "BatchedSolver",
    "Input",
    "ODECheck",
    "batched_solver",
    "check_ode",
    "in_experiments",
    "named",
]
