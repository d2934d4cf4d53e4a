"""The parameters of an ODE as one unconstrained vector, with the density of their prior."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    GraphTemplate,
    at_initial_values,
    at_support_points,
    compile_starts,
    gradient,
    in_numpy,
    random_ancestors,
    random_parents,
    without_fastmath,
)
from pymc_gradmatch.arguments import is_distribution, is_registered, join, registered
from pymc_gradmatch.numerics import one_at_a_time
from pymc_gradmatch.ode import ODE


@dataclass(frozen=True)
class Parameters:
    """Independent scalar parameters in PyMC's unconstrained coordinates u, shape ``(param,)``.

    ``log_prior`` maps u to the log density of u, its gradient and the diagonal of its Hessian,
    ``natural`` to the parameters and their derivatives by their own u, and ``draw`` a seed to a
    draw of u from the prior.
    """

    names: Sequence[str]
    log_prior: Callable[[NDArray], tuple[NDArray, NDArray, NDArray]]
    natural: Callable[[NDArray], tuple[NDArray, NDArray]]
    draw: Callable[[int], NDArray]

    def by_name(self, u: NDArray) -> dict[str, float]:
        """Return the parameters themselves."""
        return dict(zip(self.names, self.natural(u)[0].tolist(), strict=True))


def parameters_of(priors: Mapping[str, TensorVariable], names: Sequence[str]) -> Parameters:
    """Compile :class:`Parameters` from scalar priors by name, or raise if these cannot be used.

    A variable of the user's model has its prior given the initial values of its parents.
    """
    outer = pm.Model.get_context(error_if_none=False)
    model = pm.Model(model=None)
    with model:
        for name in names:
            if not is_distribution(priors[name]):
                msg = (
                    f"the prior of {name!r} is a {type(priors[name]).__name__}, not drawn; "
                    "expected a distribution, such as pm.HalfNormal.dist(5): re-centring starts "
                    "from draws of it. Compute in the right-hand side, or write the four lines, "
                    "for gm.fit(model=model)."
                )
                raise TypeError(msg)
            if not np.issubdtype(priors[name].dtype, np.inexact):
                msg = (
                    f"the prior of {name!r} is discrete; expected a continuous one: re-centring "
                    "needs gradients. Use preset 'fgpgm' and pm.sample for discrete parameters."
                )
                raise TypeError(msg)
            if random_parents(priors[name], outer.basic_RVs if outer else ()):
                msg = (
                    f"the prior of {name!r} depends on random variables that are not in the model, "
                    "such as pm.HalfNormal.dist(1); expected named ones, made in a "
                    'with pm.Model() block: pm.HalfNormal("width", 1).'
                )
                raise ValueError(msg)
            join(model, name, conditional_prior(priors[name], outer))
    variables = [model[name] for name in names]
    each = zip(
        [model.rvs_to_values[variable] for variable in variables],
        model.logp(vars=variables, sum=False),
        model.replace_rvs_by_values(variables),
        strict=True,
    )
    patterns = [GraphTemplate([value], [log_prior, theta]) for value, log_prior, theta in each]

    with without_fastmath():
        start = compile_starts(model, drawn=names)
    try:
        start(0)
    except NotImplementedError as error:
        msg = (
            f"a prior cannot be drawn from ({error}): re-centring starts from draws of it. "
            "Expected proper distributions, for example pm.HalfNormal.dist(5)."
        )
        raise ValueError(msg) from error
    densities, transforms = zip(*map(_compiled, patterns), strict=True)

    def at(functions, u) -> NDArray[np.float64]:
        rows = zip(functions, u, patterns, strict=True)
        return np.array([function(value, *pattern.values) for function, value, pattern in rows]).T

    def log_prior(u):
        log_densities, gradient, curvature = at(densities, u)
        return log_densities.sum(), gradient, curvature

    def natural(u):
        theta, by_u = at(transforms, u)
        return theta, by_u

    return Parameters(
        names,
        log_prior,
        natural,
        lambda seed: np.array([float(value) for value in start(seed).values()]),
    )


@lru_cache(maxsize=64)
def _compiled(pattern: GraphTemplate) -> tuple[Callable, Callable]:
    """Compile the log density of a prior with two derivatives, and the parameter with one."""
    [u], [log_prior, theta] = pattern.inputs, pattern.outputs
    slope = gradient(log_prior, u)
    inputs = [u, *pattern.numbers]
    density = in_numpy(inputs, [log_prior, slope, gradient(slope, u)])
    transform = in_numpy(inputs, [theta, gradient(theta, u)])
    return one_at_a_time(density), one_at_a_time(transform)  # threads share them


def call_priors(priors: Callable, ode: ODE) -> dict[str, TensorVariable]:
    """Call a function of priors; expressions become variables of the model on the stack.

    Entries of vectors of parameters remain expressions.
    """
    made, model = priors(), pm.modelcontext(None)
    if not hasattr(made, "keys"):
        msg = (
            f"the function of priors returns a {type(made).__name__}; expected a mapping from each "
            "parameter to its variable: return {'k': k, 'm': m}."
        )
        raise TypeError(msg)
    named = {
        name: pm.Deterministic(name, prior)
        if isinstance(prior, TensorVariable)
        and not (is_distribution(prior) or is_registered(prior, model))
        else prior
        for name, prior in made.items()
    }
    vectors = [name for name in named if ode.param_lengths.get(name) is not None]
    return dict(
        ode.by_entry(named | {name: variable_of(model, name, named[name]) for name in vectors})
    )


def variable_of(model: pm.Model, name: str, prior: TensorVariable, dims=None) -> TensorVariable:
    """Return the model's variable of a prior; an expression is returned as it is."""
    return registered(model, name, prior, dims) if is_distribution(prior) else prior


def priors_by_entry(ode: ODE, priors: Mapping | Callable) -> Mapping | Callable:
    """Return priors as a function that makes them, if some are vectors."""
    if not isinstance(priors, Mapping):
        return priors
    has_vectors = any(ode.param_lengths.get(name) is not None for name in priors)
    return partial(dict, priors) if has_vectors else priors


def conditional_prior(prior: TensorVariable, outer: pm.Model | None) -> TensorVariable:
    """Return a distribution given the initial values of its parents in a model."""
    upstream = set(ancestors(prior.owner.inputs))
    parents = [] if outer is None else [rv for rv in outer.free_RVs if rv in upstream]
    if outer is None or not parents:
        return prior
    inputs = at_initial_values(prior.owner.inputs, parents, outer.rvs_to_initial_values)
    return prior.owner.clone_with_new_inputs(inputs).outputs[prior.owner.outputs.index(prior)]


N_WIDTH_DRAWS = 1_000  # from which the width of a prior is estimated
SAME_PRIOR = 0.3  # widths, up to which priors of experiments differ by the chance of their draws
NORMAL_IQR = 1.349  # interquartile range of a standard normal


def _can_be_drawn(prior: TensorVariable) -> bool:
    flat = type(pm.Flat.rv_op), type(pm.HalfFlat.rv_op)
    return not any(isinstance(rv.owner.op, flat) for rv in random_ancestors([prior]))


def scalar_priors(
    priors: Mapping[str, TensorVariable], names: Sequence[str], n_experiments: int, rng
) -> list[dict[str, TensorVariable]]:
    """Return scalar priors for each of several experiments, for the search for starting points.

    A scalar distribution of no model is returned.  Any other, such as that of a local parameter
    of a hierarchy, is replaced by a normal or log-normal with the median and quartiles of its
    draws, truncated at the outermost draw where the support ends.  Experiments with the same
    priors share one mapping.  A prior that cannot be drawn from becomes flat, which
    :func:`parameters_of` refuses if draws are needed.
    """
    outer = pm.Model.get_context(error_if_none=False)
    plain = {n for n in names if is_distribution(priors[n]) and not is_registered(priors[n], outer)}
    others = [n for n in names if priors[n].ndim or n not in plain]
    flat = [n for n in others if not _can_be_drawn(priors[n])]
    others = [n for n in others if n not in flat]
    drawn = pm.draw([priors[n] for n in others], N_WIDTH_DRAWS, random_seed=rng) if others else []
    shape = N_WIDTH_DRAWS, n_experiments
    families, settings = {}, {}
    for name, values in zip(others, drawn, strict=True):
        draws = np.broadcast_to(values if values.ndim == 2 else values[:, None], shape)
        lowest, highest = np.broadcast_to(
            _support_ends(priors[name], values, outer).T, (n_experiments, 2)
        ).T
        families[name] = pm.LogNormal if (draws > 0).all() else pm.Normal
        draws = np.log(draws) if families[name] is pm.LogNormal else draws
        low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        width = np.maximum(high - low, 1e-6) / NORMAL_IQR
        if np.ptp(middle) < SAME_PRIOR * width.mean() and np.ptp(width) < SAME_PRIOR * width.mean():
            common = middle.mean(), width.mean(), lowest.max(), highest.min()
            middle, width, lowest, highest = np.full((n_experiments, 4), common).T
        settings[name] = np.array([middle, width, lowest, highest]).T.tolist()
    chosen: list[dict[str, TensorVariable]] = []
    before: list | None = None
    for number in range(n_experiments):
        numbers = [settings[n][number] for n in others]
        if numbers == before:
            chosen.append(chosen[-1])
            continue
        before = numbers
        made = {
            n: _truncated(families[n].dist(middle, width), lowest, highest)
            for n, (middle, width, lowest, highest) in zip(others, numbers, strict=True)
        }
        made |= {n: pm.Flat.dist() for n in flat}
        chosen.append({n: made.get(n, priors[n]) for n in names})
    return chosen


def _support_ends(
    prior: TensorVariable, draws: NDArray[np.float64], outer: pm.Model | None
) -> NDArray[np.float64]:
    """Return the outermost draws, where a prior is zero beyond, else infinity, ``(2, ...)``.

    Given the initial values of its parents.
    """
    low, high = draws.min(axis=0), draws.max(axis=0)
    no_ends = np.stack([np.full_like(low, -np.inf), np.full_like(high, np.inf)])
    if not (is_distribution(prior) and np.issubdtype(prior.dtype, np.inexact)):
        return no_ends
    span = high - low
    beyond = (
        (low / N_WIDTH_DRAWS, high * N_WIDTH_DRAWS)
        if (low > 0).all()
        else (low - span, high + span)
    )
    density = pm.logp(conditional_prior(prior, outer), np.stack([*beyond, *draws]), warn_rvs=False)
    [log_density] = at_support_points([density])
    is_possible = np.isfinite(log_density.eval(mode=EVALUATE_ONCE))
    if (
        is_possible.shape != (N_WIDTH_DRAWS + 2, *low.shape)
        or not is_possible[2:].any(axis=0).all()
    ):
        return no_ends
    inside = np.where(is_possible[2:], draws, np.nan)
    ends = np.stack([np.nanmin(inside, axis=0), np.nanmax(inside, axis=0)])
    return np.where(is_possible[:2], no_ends, ends)


def _truncated(prior: TensorVariable, lowest: float, highest: float) -> TensorVariable:
    """Truncate a normal or log-normal at finite ends."""
    if np.isinf([lowest, highest]).all():
        return prior
    is_positive = isinstance(prior.owner.op, type(pm.LogNormal.rv_op))
    least = 0.0 if is_positive else None  # PyMC would allow values below zero otherwise
    return pm.Truncated.dist(
        prior,
        lower=least if np.isinf(lowest) else lowest,
        upper=None if np.isinf(highest) else highest,
    )
