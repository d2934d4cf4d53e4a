"""Where gradient matching leads to: a start for climbs in the exact posterior."""

from functools import partial
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors
from scipy.optimize import minimize

from pymc_gradmatch._pymc import EVALUATE_ONCE, in_numpy, starts_by_itself
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.gp import StateGPs, is_states, start_of
from pymc_gradmatch.model import (
    Constraint,
    NoDerivativeError,
    equations,
    of_model,
    refine,
    start_in,
)
from pymc_gradmatch.ode import in_experiments

ROUGHLY = 0.03  # of a solution's slopes, to which parameters are first fitted


def matched_start(target: ExactPosterior, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return where to climb from: where the model starts, or where gradient matching leads to.

    A Gaussian process with a slope of its own has been there already.

    Raises
    ------
    ValueError
        If the exact density is zero there.
    """
    values: dict[str, Any] = {}
    starts, model = [], target.model
    for constraint in target.constraints:
        ode, gp = constraint.ode, constraint.gp
        if isinstance(gp, StateGPs):
            values |= leading_to(model, constraint)
            starts.append(gp.states_of(start_of(gp))[:, 0])
            continue
        named = {name: model.named_vars.get(name) for name in ode.params}
        is_plain = all(rv in model.free_RVs for rv in named.values())
        if is_plain and not np.any(gp.prior_slope):
            grid = gp.t if len(gp.t) > len(gp.t_observed) else None
            matched = partial(
                refine, ode, gp, priors=named, grid=grid, random_seed=rng, progressbar=False,
                start=start_in(model, ode, constraint.x),
            )  # fmt: skip
            with model:
                try:
                    gp, _, theta, _ = matched(likelihood=model)
                except NoDerivativeError:  # the data that the Gaussian processes have lead there
                    gp, _, theta, _ = matched()
            values |= theta
        elif is_plain and _others_without_start(model, constraint):
            there = target.parameters_at_start([*named.values()])
            told, _ = of_model(model, ode, gp)
            values |= told.around(there, gp.prior_mean).estimates()
        starts.append(gp.states_of(gp.prior_mean)[0])
    there = target.starting_at(values, starts)
    _check_start(target, there)
    return there


def _others_without_start(model: pm.Model, constraint: Constraint) -> bool:
    """Tell whether the likelihood has random variables of its own, which start anywhere."""
    others = [rv for rv in model.free_RVs if not is_states(rv)]
    return any(rv.name not in constraint.ode.params and not starts_by_itself(rv) for rv in others)


def _check_start(target: ExactPosterior, start):
    if np.isfinite(target(start[None])[0]):
        return
    at = {label: float(f"{v[0]:.3g}") for label, v in target.scalars(start[None]).items()}
    why = target.impossible(start)
    where = f" {why}" if why else ""
    msg = (
        f"the exact density is zero where gradient matching leads to, {at}: the ODE cannot be "
        f"integrated from there, or prior or likelihood exclude it.{where} Check the priors, or "
        "give the model other starts (initval)."
    )
    raise ValueError(msg)


def leading_to(model: pm.Model, constraint: Constraint) -> dict[str, NDArray[np.float64]]:
    """Return the most probable free variables behind parameters, for the prior mean's slopes.

    Around solutions of the ODE these slopes tell the parameters, and these what they are made
    from, such as the mean and spread of a population.  Nothing, where the prior mean is constant.
    Variables that the prior of others depends on wait for these: together they would be most
    probable where a population has no spread.
    """
    ode, gp = constraint.ode, constraint.gp
    upstream = set(ancestors([constraint.theta]))
    free = [rv for rv in model.free_RVs if rv in upstream]
    if not (np.any(gp.prior_slope) and free):
        return {}
    theta = [constraint.theta[..., k] for k in range(len(ode.params))]
    slopes = in_experiments(equations(ode, gp)).of_levels(gp.t, gp.prior_mean, theta)
    size = np.sqrt(np.mean(np.square(gp.prior_slope), axis=(0, 1)))
    misfit = pt.square((slopes - gp.prior_slope) / (ROUGHLY * size)).mean(axis=(0, 1)).sum()
    values = [model.rvs_to_values[rv] for rv in free]
    there = model.initial_point()
    starts = [np.asarray(there[value.name]) for value in values]
    n_experiments, n_times, _ = gp.prior_mean.shape
    [misfit] = model.replace_rvs_by_values([misfit])
    objective = 0.5 * n_experiments * n_times * misfit - model.logp(vars=free)
    gradients: Any = pytensor.grad(objective, values, disconnected_inputs="ignore")
    height = in_numpy(values, [objective, *gradients])
    ends = np.cumsum([start.size for start in starts])[:-1]

    def parts(flat):
        pairs = zip(np.split(flat, ends), starts, strict=True)
        return [part.reshape(start.shape) for part, start in pairs]

    def value(flat, moving):
        with np.errstate(all="ignore"):
            here, *by = height(*parts(flat))
        gradient = np.concatenate([np.ravel(one) for one in by]) * moving
        finite = np.isfinite(here) and np.isfinite(gradient).all()
        return (float(here), gradient) if finite else (np.inf, np.zeros_like(flat))

    behind = [{*ancestors([rv])} - {rv} for rv in free]
    waiting = np.concatenate(
        [
            np.full(start.size, any(rv in of for of in behind))
            for rv, start in zip(free, starts, strict=True)
        ]
    )
    found = np.concatenate([start.ravel() for start in starts])
    for moving in (~waiting, waiting):
        if moving.any():
            settings = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": 300}}
            found = minimize(value, found, args=(moving,), **settings).x
    natural = pytensor.function(
        values, model.replace_rvs_by_values(free), mode=EVALUATE_ONCE, on_unused_input="ignore"
    )(*parts(found))
    return {str(rv.name): array for rv, array in zip(free, natural, strict=True)}
