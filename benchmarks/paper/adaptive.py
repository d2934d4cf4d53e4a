"""Adaptive gradient matching (Dondelinger et al. 2013): every hyperparameter in the posterior."""

import inspect

import numpy as np
import pymc as pm
from pytensor.tensor.variable import TensorConstant

import pymc_gradmatch as gm
from benchmarks.paper.cases import PaperCase
from pymc_gradmatch.families import NAMED, build_kernel, default_bounds
from pymc_gradmatch.systems import Simulation

__all__ = ["adaptive_model"]


def adaptive_model(case: PaperCase, data: Simulation, fitted: gm.StateGP) -> pm.Model:
    """Write the four lines with the paper's kernels and random hyperparameters, sigma and gamma.

    Hyperpriors are log-normal, with 95 % of their mass where ``fit_gp`` searches;
    sigma is half-normal, as wide as the data vary; gamma half-normal, as wide as
    the slopes vary.  Chains start at the estimates that FGPGM fixes.

    Parameters
    ----------
    case : PaperCase
        The system, with the kernel and the boxes of the paper.
    data : Simulation
        The observations.
    fitted : StateGP
        Kernels with their estimates, where chains start.
    """
    settings, ode = case.system.paper, case.system.ode
    owners = ode.states[:1] if settings.shared else ode.states
    with pm.Model(coords={"state": ode.states}) as model:
        theta = {name: pm.Uniform(name, *settings.theta_box) for name in ode.params}
        covs = [_kernel(case, fitted, k, owner) for k, owner in enumerate(owners)]
        sigma = pm.HalfNormal("sigma", fitted.scale, initval=fitted.sigma, dims="state")
        slopes = float(np.median(fitted.slope_variance()))
        gamma = pm.HalfNormal("tolerance", slopes, initval=min(settings.gamma, slopes))
        gp = gm.StateGP(data.t, data.y, covs * (len(ode.states) // len(covs)), sigma=sigma)
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=data.y, dims=("time", "state"))
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
    return model


def _kernel(case: PaperCase, fitted: gm.StateGP, k: int, owner: str):
    build, bounds = NAMED[case.system.paper.cov], default_bounds(fitted.t)
    names = [*inspect.signature(build).parameters]
    random = {}
    for name, estimate in zip(names, _estimates(fitted.covs[k]), strict=True):
        low, high = np.log(bounds[name])
        random[name] = pm.LogNormal(
            f"{name} of {owner}", (low + high) / 2, (high - low) / 4, initval=estimate
        )
    return build_kernel(build, random)


def _estimates(cov: pm.gp.cov.Prod) -> list[float]:
    """Return the numbers of a variance times a kernel, in the order of ``NAMED``."""
    kernel, variance = cov._factor_list
    inner = [value for value in vars(kernel).values() if isinstance(value, TensorConstant)]
    return [float(value.data) for value in (variance, *inner)]
