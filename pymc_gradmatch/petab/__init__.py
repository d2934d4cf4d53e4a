"""PEtab: published estimation problems of systems biology, read from their files and solved.

:func:`load` reads a problem (SBML model, conditions, observables, measurements, parameters) into
a :class:`Problem`: an ODE with experiments, likelihoods and priors, as :func:`gm.fit
<pymc_gradmatch.fit>` takes them.  Needs ``pip install 'pymc_gradmatch[petab]'``.
"""

from pymc_gradmatch.petab.problem import Problem, load

__all__ = ["Problem", "load"]
