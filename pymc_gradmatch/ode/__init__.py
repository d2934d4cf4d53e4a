"""The right-hand side: written once by the user, used as a graph and as a function.

:class:`ODE` knows names, checks and derivatives of a right-hand side, and solves it: numbers for
hundreds of draws at once (:class:`Solver`), tensors as a node of a graph (:class:`Solve`).
Nothing here has heard of data or of a Gaussian process.  :class:`Input` is what is known from
outside, and :func:`check_ode` looks at an ODE before it is fitted.
"""

from pymc_gradmatch.ode.check import ODECheck, check_ode
from pymc_gradmatch.ode.inputs import Input, in_experiments
from pymc_gradmatch.ode.node import Solve
from pymc_gradmatch.ode.rhs import named
from pymc_gradmatch.ode.solve import OUT_OF_STEPS, TOLERANCE, Solution, Solver, in_words
from pymc_gradmatch.ode.system import ODE
from pymc_gradmatch.ode.undefined import cure, ended, undefined_at, without_slope

__all__ = [
    "ODE",
    "OUT_OF_STEPS",
    "TOLERANCE",
    "Input",
    "ODECheck",
    "Solution",
    "Solve",
    "Solver",
    "check_ode",
    "cure",
    "ended",
    "in_experiments",
    "in_words",
    "named",
    "undefined_at",
    "without_slope",
]
