"""Whether draws that are there are those of the exact posterior.

:func:`integrate_check` turns gradient-matching draws into exact ones by importance sampling, or
says that it cannot.
"""

from pymc_gradmatch.checks.integrate import IntegrateCheck, integrate_check

__all__ = ["IntegrateCheck", "integrate_check"]
