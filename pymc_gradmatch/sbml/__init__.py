"""SBML: a model of systems biology as names, numbers and formulas, and these as graphs.

:func:`read_sbml` takes the equations out of a file (python-libsbml and sbmlmath, sympy);
:class:`Scope` writes formulas with PyTensor.  Nothing here has heard of an ODE that is solved, or
of data.  Needs ``pip install 'pymc_gradmatch[petab]'``.
"""

try:
    from pymc_gradmatch.sbml.formulas import TIME, Scope, number_of
    from pymc_gradmatch.sbml.model import Model, RightHandSide, equations_of, read_sbml, usable
except ModuleNotFoundError as error:
    msg = (
        f"SBML and PEtab need the package {error.name}, which is not installed; expected "
        "pip install 'pymc_gradmatch[petab]'."
    )
    raise ModuleNotFoundError(msg, name=error.name) from error

__all__ = [
    "TIME",
    "Model",
    "RightHandSide",
    "Scope",
    "equations_of",
    "number_of",
    "read_sbml",
    "usable",
]
