"""Gradient matching for PyMC: parameters of ODEs without an ODE solver in the loop.

Put a Gaussian process on every state of the system.  Its derivative is then
Gaussian too, and the ODE enters as a constraint on it: Theorem 1 of Wenk et
al., "Fast Gaussian process based gradient matching for parameter
identification in systems of nonlinear ODEs", AISTATS 2019.

A subpackage is imported when one of its names is first used: importing the package
imports little else.
"""

import lazy_loader

__version__ = "0.1.0"

_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_GONE = {
    "find_map": "use gm.find_MAP, the name as in PyMC",
    "recentre": "gm.refine makes a solution of the ODE the prior mean, with all that needs",
    "grid_check": "gm.fit draws from the posterior of the ODE's solution, which has no grid",
    "select_gamma": "gm.fit and preset='refined' need no gamma; others take gamma= of "
    "gm.build_model, which may be random",
    "systems": "the paper's three are in benchmarks/paper/systems.py of the repository",
    "ODECheck": "gm.check_ode returns one",
    "IntegrateCheck": "gm.integrate_check returns one",
}
_GONE |= {"GridCheck": _GONE["grid_check"], "GammaSelection": _GONE["select_gamma"]}


def __getattr__(name: str):
    if name in _GONE:
        msg = f"gm.{name} is gone: {_GONE[name]}."
        raise AttributeError(msg)
    return _find(name)
