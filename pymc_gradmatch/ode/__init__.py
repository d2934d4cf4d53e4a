"""The right-hand side: written once by the user, used as a graph and as a function.

:class:`ODE` knows names, checks and derivatives of a right-hand side; it solves for one
draw after the other, what :func:`batched_solver` makes for hundreds at once.  Nothing here has
heard of data or of a Gaussian process.
"""

from pymc_gradmatch.ode.solve import BatchedSolver
from pymc_gradmatch.ode.system import ODE, batched_solver

__all__ = ["ODE", "BatchedSolver", "batched_solver"]
