"""Adaptive gradient matching (Dondelinger et al. 2013): hyperparameters in the posterior."""

import inspect

import numpy as np
import pymc as pm
from pytensor.tensor import TensorConstant

import pymc_gradmatch as gm
from benchmarks.cases import Case
from benchmarks.paper import systems
from pymc_gradmatch.gp.kernels import NAMED, build_kernel

__all__ = ["adaptive_model"]

GAMMAS = (1e-4, 1.0)
SPREAD = np.log(2)


def adaptive_model(case: Case, data: systems.Simulation, fitted: gm.StateGP) -> pm.Model:
    """Write the four lines with the paper's kernels and random hyperparameters and gamma.

    Hyperpriors are log-normal, a factor of two (one standard deviation) around
    the estimates that FGPGM fixes; gamma is log-uniform where the paper searches.
    Sigma is FGPGM's estimate: if it is random, then states that do not move,
    with all data noise, are the most probable ones of noisy data sets, since
    nothing in the density counts against the ease with which flat states obey
    an ODE.

    Parameters
    ----------
    case : Case
        The system, with the kernel and the boxes of the paper.
    data : Simulation
        The observations.
    fitted : StateGP
        Kernels and sigma as FGPGM has them.
    """
    settings, ode = case.paper, case.ode
    owners = ode.states[:1] if settings.shared else ode.states
    with pm.Model(coords={"state": ode.states}) as model:
        theta = {name: pm.Uniform(name, *settings.theta_box) for name in ode.params}
        covs = [_kernel(case, fitted.covs[k], owner) for k, owner in enumerate(owners)]
        low, high = np.log(GAMMAS)
        log_gamma = pm.Uniform("log tolerance", low, high, initval=(low + high) / 2)
        gp = gm.StateGP(data.t, data.y, covs * (len(ode.states) // len(covs)), sigma=fitted.sigma)
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=data.y, dims=("time", "state"))
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=pm.math.exp(log_gamma))
    return model


def _kernel(case: Case, fitted: pm.gp.cov.Prod, owner: str):
    build = NAMED[case.paper.cov]
    estimates = zip(inspect.signature(build).parameters, _estimates(fitted), strict=True)
    random = {
        name: pm.LogNormal(f"{name} of {owner}", np.log(estimate), SPREAD)
        for name, estimate in estimates
    }
    return build_kernel(build, random)


def _estimates(cov: pm.gp.cov.Prod) -> list[float]:
    """Return the numbers of a variance times a kernel, in the order of ``NAMED``."""
    kernel, variance = cov._factor_list
    inner = [value for value in vars(kernel).values() if isinstance(value, TensorConstant)]
    return [float(value.data) for value in (variance, *inner)]
