"""The parameters of an ODE as one unconstrained vector, with the density of their prior."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import pymc as pm
import pytensor
from numpy.typing import NDArray
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    Pattern,
    as_written,
    at_starts,
    compile_starts,
    in_numpy,
    random_ancestors,
    random_parents,
)
from pymc_gradmatch.arguments import is_distribution, is_registered, join
from pymc_gradmatch.numerics import one_at_a_time


@dataclass(frozen=True)
class Parameters:
    """Independent scalar parameters in PyMC's unconstrained coordinates u, shape ``(param,)``.

    Attributes
    ----------
    names : sequence of str
        In the order of u.
    log_prior : callable
        Maps u to the log density of u, its gradient and the diagonal of its Hessian.
    natural : callable
        Maps u to the parameters and their derivatives by their own u.
    draw : callable
        Maps a seed to a draw of u from the prior.
    """

    names: Sequence[str]
    log_prior: Callable[[NDArray], tuple[NDArray, NDArray, NDArray]]
    natural: Callable[[NDArray], tuple[NDArray, NDArray]]
    draw: Callable[[int], NDArray]

    def by_name(self, u: NDArray) -> dict[str, float]:
        """Return the parameters themselves."""
        return dict(zip(self.names, self.natural(u)[0].tolist(), strict=True))


def parameters_of(priors: Mapping[str, TensorVariable], names: Sequence[str]) -> Parameters:
    """Compile what :class:`Parameters` holds, from scalar priors by name.

    A variable of the user's model has its prior given the initial values of
    the variables that it depends on.

    Raises
    ------
    TypeError
        If a prior is no distribution, such as a deterministic, or discrete.
    ValueError
        If a prior cannot be drawn from, such as a flat one.
    """
    outer = pm.Model.get_context(error_if_none=False)
    model = pm.Model(model=None)
    with model:
        for name in names:
            if not is_distribution(priors[name]):
                msg = (
                    f"the prior of {name!r} is a {type(priors[name]).__name__}, not drawn; "
                    "expected a distribution, such as pm.HalfNormal.dist(5): re-centring starts "
                    "from draws of it. What is computed goes into the right-hand side, or into the "
                    "four lines, for gm.fit(model=model)."
                )
                raise TypeError(msg)
            if not np.issubdtype(priors[name].dtype, np.inexact):
                msg = (
                    f"the prior of {name!r} is discrete; expected a continuous one: re-centring "
                    "climbs by gradients. Use preset 'fgpgm' and pm.sample for discrete parameters."
                )
                raise TypeError(msg)
            if random_parents(priors[name], outer.basic_RVs if outer else ()):
                msg = (
                    f"the prior of {name!r} depends on random variables that are not in the model, "
                    "such as pm.HalfNormal.dist(1); expected named ones, made in a "
                    'with pm.Model() block: pm.HalfNormal("width", 1).'
                )
                raise ValueError(msg)
            join(model, name, given_parents(priors[name], outer))
    variables = [model[name] for name in names]
    each = zip(
        [model.rvs_to_values[variable] for variable in variables],
        model.logp(vars=variables, sum=False),
        model.replace_rvs_by_values(variables),
        strict=True,
    )
    patterns = [Pattern([value], [log_prior, theta]) for value, log_prior, theta in each]

    with as_written():
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
def _compiled(pattern: Pattern) -> tuple[Callable, Callable]:
    """Compile the log density of a prior with two derivatives, and the parameter with one."""
    [u], [log_prior, theta] = pattern.inputs, pattern.outputs
    gradient = _gradient(log_prior, u)
    inputs = [u, *pattern.numbers]
    density = in_numpy(inputs, [log_prior, gradient, _gradient(gradient, u)])
    transform = in_numpy(inputs, [theta, _gradient(theta, u)])
    return one_at_a_time(density), one_at_a_time(transform)  # threads share them


def given_parents(prior: TensorVariable, outer: pm.Model | None) -> TensorVariable:
    """Return a distribution given the initial values of a model's variables that it depends on."""
    upstream = set(ancestors(prior.owner.inputs))
    parents = [] if outer is None else [rv for rv in outer.free_RVs if rv in upstream]
    if outer is None or not parents:
        return prior
    inputs = at_starts(prior.owner.inputs, parents, outer.rvs_to_initial_values)
    return prior.owner.clone_with_new_inputs(inputs).outputs[prior.owner.outputs.index(prior)]


def _gradient(scalar, u) -> TensorVariable:
    return cast("TensorVariable", pytensor.grad(scalar, u, disconnected_inputs="ignore"))


N_DRAWN = 1_000  # draws that tell how wide a prior is
ALIKE = 0.3  # of a width, up to which priors differ by the chance of their draws
NORMAL_IQR = 1.349  # of a normal of unit standard deviation


def _can_be_drawn(prior: TensorVariable) -> bool:
    flat = type(pm.Flat.rv_op), type(pm.HalfFlat.rv_op)
    return not any(isinstance(rv.owner.op, flat) for rv in random_ancestors([prior]))


def climbing_priors(
    priors: Mapping[str, TensorVariable], names: Sequence[str], n_experiments: int, rng
) -> list[dict[str, TensorVariable]]:
    """Return scalar priors for each of several experiments, for climbs that look for a start.

    A scalar of no model is its own; in the place of any other, such as a local parameter of a
    hierarchy, stands a normal or log-normal with the median and quartiles of its draws.
    Experiments whose parameters are alike share one mapping.  What cannot be drawn is flat,
    which :func:`parameters_of` refuses in words where draws are needed.
    """
    outer = pm.Model.get_context(error_if_none=False)
    plain = {n for n in names if is_distribution(priors[n]) and not is_registered(priors[n], outer)}
    others = [n for n in names if priors[n].ndim or n not in plain]
    flat = [n for n in others if not _can_be_drawn(priors[n])]
    others = [n for n in others if n not in flat]
    drawn = pm.draw([priors[n] for n in others], N_DRAWN, random_seed=rng) if others else []
    shape = N_DRAWN, n_experiments
    families, middles, widths = {}, {}, {}
    for name, values in zip(others, drawn, strict=True):
        draws = np.broadcast_to(values if values.ndim == 2 else values[:, None], shape)
        families[name] = pm.LogNormal if (draws > 0).all() else pm.Normal
        draws = np.log(draws) if families[name] is pm.LogNormal else draws
        low, middle, high = np.quantile(draws, [0.25, 0.5, 0.75], axis=0)
        width = np.maximum(high - low, 1e-6) / NORMAL_IQR
        if np.ptp(middle) < ALIKE * width.mean() and np.ptp(width) < ALIKE * width.mean():
            middle, width = (np.full(n_experiments, one.mean()) for one in (middle, width))
        middles[name], widths[name] = middle, width
    chosen: list[dict[str, TensorVariable]] = []
    before: list | None = None
    for number in range(n_experiments):
        numbers = [(middles[n][number], widths[n][number]) for n in others]
        if numbers == before:
            chosen.append(chosen[-1])
            continue
        before = numbers
        made = {n: families[n].dist(*pair) for n, pair in zip(others, numbers, strict=True)}
        made |= {n: pm.Flat.dist() for n in flat}
        chosen.append({n: made.get(n, priors[n]) for n in names})
    return chosen
