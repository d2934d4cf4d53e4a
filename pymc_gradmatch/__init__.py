"""Gradient matching for PyMC: parameters of ODEs without an ODE solver in the loop."""
from pymc_gradmatch import kernels, systems
from pymc_gradmatch.distribution import GradientMatchingODE
from pymc_gradmatch.fit import fit_gp
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.model import build_model
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.sampling import sample_fgpgm
