"""PEtab: parameter estimation problems of systems biology, read from files.

:func:`load` reads a problem (SBML model, conditions, observables, measurements, parameters) into
a :class:`Problem`: an ODE with experiments, likelihoods and priors, the arguments of :func:`gm.fit
<pymc_gradmatch.fit>`.  Needs ``pip install 'pymc_gradmatch[petab]'``.
"""

from pymc_gradmatch.petab.problem import Problem, load

__all__ = ["Problem", "load"]
