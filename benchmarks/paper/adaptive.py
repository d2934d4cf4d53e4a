"""Adaptive gradient matching (Dondelinger et al. 2013): hyperparameters in the posterior."""

import inspect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pytensor.graph.replace import graph_replace
from pytensor.tensor import TensorConstant, TensorVariable

import pymc_gradmatch as gm
from benchmarks.cases import Case
from benchmarks.paper import systems
from pymc_gradmatch.gp.kernels import NAMED
from pymc_gradmatch.sampling.posterior import CompiledPosterior

__all__ = ["adaptive_model", "with_roles"]

GAMMAS = (1e-4, 1.0)
SPREAD = np.log(2)
STATES = "standardised states"


def adaptive_model(case: Case, data: systems.Simulation, fitted: gm.StateGP) -> pm.Model:
    """Write the four factors with the paper's kernels and random hyperparameters and gamma.

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
    settings, ode, nugget = case.paper, case.ode, fitted.nugget[:, None, None]
    owners = ode.states[:1] if settings.shared else ode.states
    identity = np.eye(len(data.t))
    with pm.Model(coords={"time": data.t, "state": ode.states}) as model:
        theta = {name: pm.Uniform(name, *settings.theta_box) for name in ode.params}
        covs = [_kernel(case, fitted.covs[k], owner) for k, owner in enumerate(owners)]
        low, high = np.log(GAMMAS)
        log_gamma = pm.Uniform("log tolerance", low, high, initval=(low + high) / 2)
        each = [_blocks(cov, data.t) for cov in covs] * (len(ode.states) // len(covs))
        k, _, dk_dt2, d2k = (pt.stack(matrices) for matrices in zip(*each, strict=True))
        C = k + nugget * identity
        start = ((fitted.posterior_mean() - fitted.mean) / fitted.scale).T
        z = pm.Flat(STATES, shape=start.shape, initval=start)
        pm.Potential("prior of the states", _log_normal(z, C))
        x = pm.Deterministic("x", fitted.mean + fitted.scale * z.T, dims=("time", "state"))
        pm.Normal("y", x, fitted.sigma, observed=data.y, dims=("time", "state"))
        back = pt.linalg.solve(C, dk_dt2, assume_a="pos", b_ndim=2)
        mismatch = (ode(data.t, x, theta) / fitted.scale).T - (back.mT * z[:, None]).sum(axis=-1)
        tolerant = d2k - dk_dt2.mT @ back + pt.exp(log_gamma) * identity
        pm.Potential("gradient_match", _log_normal(mismatch, tolerant))
    return model


def with_roles(posterior: CompiledPosterior, params: Sequence[str]) -> CompiledPosterior:
    """Return a posterior that knows which entries are states, and that hyperparameters are fixed.

    Their joint mode with the states runs to zero; NUTS moves them like all others.
    """
    names = [rv.name for rv in posterior.model.free_RVs]
    sizes = [int(np.prod(shape)) for shape in posterior.shapes]
    is_state, is_fixed = (
        np.repeat(one, sizes)
        for one in (
            [name == STATES for name in names],
            [name not in (STATES, *params) for name in names],
        )
    )
    return replace(posterior, roles=posterior.roles._replace(is_state=is_state, is_fixed=is_fixed))


def _log_normal(residuals: TensorVariable, covariances: TensorVariable) -> TensorVariable:
    """Return the log density of one normal vector per state."""
    factors = pt.linalg.cholesky(covariances)
    white = pt.linalg.solve_triangular(factors, residuals, lower=True, b_ndim=1)
    scales = pt.diagonal(factors, axis1=-2, axis2=-1)
    return -(0.5 * white**2 + pt.log(scales) + 0.5 * np.log(2 * np.pi)).sum()


def _blocks(cov: pm.gp.cov.BaseCovariance, t: np.ndarray) -> list[TensorVariable]:
    """Return a kernel at times and its derivatives by these as graphs."""
    times = pt.vector("t1"), pt.vector("t2")
    blocks = gm.derivatives.covariance_blocks(cov, *times)
    return graph_replace([*blocks], dict.fromkeys(times, pt.constant(t)))


def _kernel(case: Case, fitted: pm.gp.cov.Prod, owner: str):
    build = NAMED[case.paper.cov]
    estimates = zip(inspect.signature(build).parameters, _estimates(fitted), strict=True)
    random = {
        name: pm.LogNormal(f"{name} of {owner}", np.log(estimate), SPREAD, initval=estimate)
        for name, estimate in estimates
    }
    return build(**random)


def _estimates(cov: pm.gp.cov.Prod) -> list[float]:
    """Return the numbers of a variance times a kernel, in the order of ``NAMED``."""
    kernel, variance = cov._factor_list
    inner = [value for value in vars(kernel).values() if isinstance(value, TensorConstant)]
    return [float(value.data) for value in (variance, *inner)]
