"""NUTS in coordinates made for a posterior, which is compiled once: its density, its mode.

Models that are one formula with different numbers share it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Self

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import xarray as xr
from arviz_base import dict_to_dataset
from numpy.typing import NDArray
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from xarray import DataTree

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    NutpieProgressBarManager,
    compile_starts,
    has_own_start,
    hierarchical_scales,
    log_convergence,
    minus_inf_if_invalid,
    patch_nutpie_idata,
    without_fastmath,
    without_traces,
)
from pymc_gradmatch.arguments import check_counts, check_share
from pymc_gradmatch.exact import glance, with_draws
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import (
    constraints,
    fixed_noise,
    is_constraint,
    keep_observations,
    known_starts,
    warn_of_other_data,
    where_impossible,
)
from pymc_gradmatch.numerics import (
    N_STARTS,
    Density,
    Laplace,
    ascend,
    conditional_sd,
    laplace,
    on_one_thread,
    search_mode,
)
from pymc_gradmatch.ode import Solve, explain_failure
from pymc_gradmatch.reporting import reporting
from pymc_gradmatch.sampling.coordinates import (
    Arrow,
    Band,
    Coordinates,
    Split,
    banded,
    climb_in_band,
    climb_in_blocks,
    curve,
    rounded,
    straight,
    upright,
)
from pymc_gradmatch.sampling.density import (
    COORDINATES,
    Interrupted,
    NativeDensity,
    Written,
    compile_written,
    cut,
    flat,
    pack,
    same_but_for_constants,
    write,
)


def has_start(model: pm.Model, rv) -> bool:
    """Return whether a variable was given a start."""
    return has_own_start(rv) or model.rvs_to_initial_values[rv] is not None


def held_variables(model: pm.Model) -> set:
    """Return the free variables of which the joint mode with what varies runs to zero.

    Sigma and gamma, which are neither states nor parameters of a right-hand side, and the spread
    of a population: what has a bound, and moves parameters by their prior alone.  In a model
    without a constraint, as with the ODE's solution, such a spread alone.
    """
    matches = [rv for rv in model.observed_RVs if is_constraint(rv)]
    if not matches:
        return hierarchical_scales(model, [*model.observed_RVs, *model.potentials])
    states = [rv for rv in model.free_RVs if is_states(rv)]
    starts = [known.values for known in known_starts(model)]
    given = [*(rv.owner.inputs[2] for rv in matches), *starts]
    reached = set(ancestors(given))
    of_population = hierarchical_scales(model, given)
    return {
        rv
        for rv in model.free_RVs
        if rv not in states and (rv not in reached or rv in of_population)
    }


_log = logging.getLogger("pymc.gradmatch")  # follows PyMC's level and handlers
NOT_ROUND = "%d coordinates: sampled with nutpie's low-rank mass matrix, from the mode."
ACCEPTED = 0.9  # in bent coordinates; at 0.8 up to ten times as many draws diverge, as dear each


class AnotherFormulaError(ValueError):
    """A model differs from the one that was compiled in more than its numbers."""


@dataclass(frozen=True)
class CompiledPosterior:
    """A posterior in flat, unconstrained coordinates; :func:`compile_posterior` makes it.

    Names and dims come from ``model``.  The density is a function of q, where ``u = location +
    factor @ q`` is the vector of all value variables; its numbers are the location, the factor and
    ``data``, every number that may differ between data sets, in that order. ``draw_start`` maps a
    seed to a start u, parameters drawn from their prior.
    """

    model: pm.Model
    native: NativeDensity
    draw_start: Callable[[int], NDArray[np.float64]]
    split: Split
    shapes: list[tuple[int, ...]]
    written: Written
    data: NDArray[np.float64]

    def for_model(self, model: pm.Model) -> Self:
        """Return the posterior of a model that differs in its numbers only; compiles nothing.

        Of any other model it raises :class:`AnotherFormulaError`.
        """
        other = write(model)
        if not same_but_for_constants(self.written, other):
            msg = "the model differs from the compiled one in more than its data."
            raise AnotherFormulaError(msg)
        data = flat(constant.data for constant in other.constants)
        start = _starts(model)
        return replace(
            self,
            model=model,
            native=self.native.with_numbers(pack(_standard(self.split), data)),
            draw_start=lambda seed: flat(start(seed).values()),
            written=other,
            data=data,
        )

    def density(self, u: NDArray[np.float64]) -> tuple[Any, NDArray[np.float64]]:
        """Return the log density and its gradient at value variables, shape ``(..., n)``."""
        return self.native(u)

    def find_mode(self, rng: np.random.Generator) -> Laplace:
        """Find the most probable u, and a normal approximation there.

        From every start the parameters climb alone, given the states; from
        the best of these points states and parameters climb together.  A
        random sigma or gamma and the spread of a population stay where they
        start: the joint mode of a variance and what varies runs to zero.
        """
        free = ~self.split.is_held
        starts = [self.draw_start(seed) for seed in rng.integers(2**31, size=N_STARTS)]
        if all(np.array_equal(start, starts[0]) for start in starts):
            best: NDArray[np.float64] | None = starts[0]
        else:
            parameters = ~(self.split.is_state | self.split.is_held)
            best = search_mode(
                starts,
                lambda u: self.density(u)[0],
                alone=lambda u: self._climbed(u, parameters),
                together=lambda u: self._climbed(u, free),
            )
        if best is None or not np.isfinite(self.density(best)[0]):
            msg = (
                f"the log density is not finite at any start. {_impossible(self.model)}Check data "
                "and priors, or pass `initval` for the parameters."
            )
            raise ValueError(msg)
        if self.split.is_arrow:
            return climb_in_blocks(self.density, best, self.split)
        mode = self._with_held(best, self._normal(self.along(best, free), best[free], rng))
        return mode if self.split.is_dense else climb_in_band(self.density, mode, self.split)

    def _climbed(self, u, entries) -> NDArray[np.float64]:
        return _with_entries(u, entries, ascend(self.along(u, entries), u[entries]))

    def sample(
        self,
        mode: Laplace,
        rng: np.random.Generator,
        *,
        progressbar: Any = False,
        progress: Callable[[Sequence], None] | None = None,
        **settings,
    ) -> xr.DataTree:
        """Run nutpie's NUTS in coordinates around the mode.

        ``progress``, in the place of a bar, takes the chains as they are.

        Raises
        ------
        Interrupted
            After Ctrl-C, with the draws so far.
        """
        around: Coordinates | Arrow | Band = _upright(mode, self.split)
        with reporting("fitting coordinates to the posterior", enabled=progressbar):
            if isinstance(around, Arrow):
                around = rounded(self.density, around, self.split)
            elif self.split.is_dense:
                around = curve(self.density, mode, self.split, rng)
                settings = {"target_accept": ACCEPTED} | settings
            else:
                around = banded(self.density, mode, self.split) or around
        if isinstance(around, Coordinates) and not self.split.is_dense:
            _log.info(NOT_ROUND, len(self.split.is_state))
            settings["adaptation"] = "low_rank"
        return self._named(self._draw(around, rng, progressbar, settings, progress), around)

    def sample_around(
        self, around: Coordinates | Arrow | Band, rng: np.random.Generator, **settings
    ) -> xr.DataTree:
        """Run nutpie's NUTS in the coordinates given, once."""
        return self._named(self._draw(around, rng, False, settings), around)

    def _draw(
        self, around: Coordinates | Arrow | Band, rng, progressbar, settings, progress=None
    ) -> xr.DataTree:
        native = self.native
        if isinstance(around, Band):  # of which the width is part of the code
            native = compile_written(self.written, self.shapes, self.split, around.reach)
        native = native.with_numbers(pack(around, self.data))
        bars = NutpieProgressBarManager(settings["chains"], settings["draws"], progressbar)
        seed = int(rng.integers(2**31))
        try:
            with bars:
                return native.sample(
                    seed=seed, progress_callback=progress or bars.update, **settings
                )
        except Interrupted as interrupt:
            raise Interrupted(self._named(interrupt.draws, around)) from None

    def _named(self, trace: xr.DataTree, around: Coordinates | Arrow | Band) -> xr.DataTree:
        """Return a run's draws as the model's variables."""
        q = trace["posterior"][COORDINATES]
        posterior = self._dataset(around(q.to_numpy()), q["chain"].to_numpy())
        return trace.assign(posterior=xr.DataTree(posterior))

    def _dataset(self, u: NDArray[np.float64], chain: NDArray) -> xr.Dataset:
        """Return points of shape ``(chain, draw, n)`` as the model's variables."""
        import nutpie  # here: it is large

        coords = {dim: np.array(v) for dim, v in self.model.coords.items() if v is not None}
        named: dict[Any, Any] = coords | {"chain": chain}
        return dict_to_dataset(
            self.variables(u),
            coords=named,
            dims=self.model.named_vars_to_dims,
            inference_library=nutpie,
        )

    def variables(self, u: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return the model's variables by name, from points of shape ``(..., n)``."""
        batch = u.shape[:-1]
        points = [
            pt.tensor(dtype="float64", shape=(None,) * len(batch) + shape) for shape in self.shapes
        ]
        graphs = vectorize_graph(
            self.written.variables, dict(zip(self.written.inputs, points, strict=True))
        )
        evaluate = pytensor.function(points, graphs, mode=EVALUATE_ONCE, on_unused_input="ignore")
        values = with_draws(evaluate(*cut(u, self.shapes)), self.written.variables, *batch)
        return dict(zip(self.written.names, values, strict=True))

    def _normal(self, joint: Density, start, rng) -> Laplace:
        """Climb from a start, and approximate the density there by a normal."""
        if self.split.is_dense:
            return laplace(joint, start)
        top = ascend(joint, start)
        return Laplace(top, conditional_sd(joint, top, rng), joint(top)[0])

    def _with_held(self, start, mode: Laplace) -> Laplace:
        free = ~self.split.is_held
        factor = _identity(self.split)
        factor[np.ix_(free, free) if factor.ndim == 2 else free] = mode.factor
        return Laplace(_with_entries(start, free, mode.location), factor, mode.log_density)

    def along(self, u, entries) -> Density:
        """Return the density as a function of some entries of u, the others fixed."""

        def density(part):
            value, gradient = self.density(_with_entries(u, entries, part))
            return value, gradient[entries]

        return density


def _impossible(model: pm.Model) -> str:
    """Say which solution ends where a model starts, or which observation has density zero."""
    there, values = model.initial_point(), model.rvs_to_values

    def at_start(graphs: Sequence) -> list:
        compiled = model.compile_fn(
            [*graphs], inputs=model.value_vars, mode=EVALUATE_ONCE, on_unused_input="ignore"
        )
        return [*compiled(there)]

    densities = [minus_inf_if_invalid(g) for g in model.logp(vars=model.observed_RVs, sum=False)]
    for node in {
        v.owner for v in ancestors(densities) if v.owner and isinstance(v.owner.op, Solve)
    }:
        ode, t, *_ = node.op.given
        for x0, theta in zip(*at_start(node.inputs), strict=True):
            if where := explain_failure(ode, t, x0, theta):
                return f"Where the model starts, {where} "
    names = [rv.name for rv in model.observed_RVs]
    observed = [values[rv].eval(mode=EVALUATE_ONCE) for rv in model.observed_RVs]
    zero = where_impossible(
        dict(zip(names, at_start(densities), strict=True)), dict(zip(names, observed, strict=True))
    )
    return f"The likelihood is zero at {zero} where the model starts. " if zero else ""


def compile_posterior(model: pm.Model) -> CompiledPosterior:
    """Compile a model's log density, in coordinates and with numbers that can be chosen later.

    Free variables must be continuous, and at least one.
    """
    if not model.free_RVs or model.discrete_value_vars:
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}, of which "
            f"{[v.name for v in model.discrete_value_vars]} are discrete; expected continuous "
            "ones. Use pm.sample, which has samplers for discrete variables."
        )
        raise ValueError(msg)
    warn_of_other_data(model)
    held = held_variables(model)
    start = _starts(model)
    try:
        shapes = [np.shape(value) for value in start(0).values()]
    except NotImplementedError as error:
        msg = (
            f"a parameter cannot be drawn from its prior ({error}), which is where climbs start. "
            "Give it an `initval`, or a proper prior such as pm.HalfNormal."
        )
        raise ValueError(msg) from error
    sizes = [int(np.prod(shape)) for shape in shapes]

    def entries(chosen):
        return np.repeat([chosen(rv) for rv in model.free_RVs], sizes)

    written = write(model)
    data = flat(constant.data for constant in written.constants)
    n_states = sum(rv.type.shape[-1] for rv in model.free_RVs if is_states(rv))
    split = Split(
        entries(is_states), entries(lambda rv: rv in held), n_states, _experiments(model, shapes)
    )
    standard = _standard(split)
    return CompiledPosterior(
        model,
        compile_written(written, shapes, split).with_numbers(pack(standard, data)),
        draw_start=lambda seed: flat(start(seed).values()),
        split=split,
        shapes=shapes,
        written=written,
        data=data,
    )


def _experiments(model: pm.Model, shapes) -> NDArray[np.int64]:
    """Return which experiment the entries of u belong to; -1 of what all share, or of one."""
    dims = {rv: model.named_vars_to_dims.get(rv.name) or (None,) for rv in model.free_RVs}
    several = [rv for rv in model.free_RVs if is_states(rv) and rv.type.ndim == 3]
    owners = []
    for rv, shape in zip(model.free_RVs, shapes, strict=True):
        owner = np.full(shape, -1)
        if len(several) == 1 and dims[rv][0] == dims[several[0]][0]:
            n = several[0].type.shape[0]
            if shape[:1] == (n,):  # and no transform took an entry away
                owner = np.arange(n).reshape(-1, *[1] * (len(shape) - 1)) + np.zeros(shape, int)
        owners.append(owner.ravel())
    return np.concatenate(owners)


def _starts(model: pm.Model) -> Callable:
    """Return a function of a seed that draws the parameters to which nobody gave a start.

    Where there are solutions of an ODE, what they depend on; noise starts at its prior's center.
    """
    held = held_variables(model)
    terms = ancestors([*model.observed_RVs, *model.potentials])
    solved = [v.owner for v in terms if v.owner and isinstance(v.owner.op, Solve)]
    behind = {*ancestors([given for node in solved for given in node.inputs])}
    drawn = [
        rv.name
        for rv in model.free_RVs
        if not (is_states(rv) or rv in held or has_start(model, rv))
        and (rv in behind or not solved)
    ]
    with without_fastmath():
        return compile_starts(model, drawn)


def _with_entries(u, entries, part):
    result = u.copy()
    result[entries] = part
    return result


def _standard(split: Split) -> Coordinates | Arrow:
    return _upright(Laplace(np.zeros(len(split.is_state)), _identity(split), 0.0), split)


def _upright(mode: Laplace, split: Split) -> Coordinates | Arrow:
    return upright(mode, split) if split.is_arrow else straight(mode, split)


def _identity(split: Split) -> NDArray[np.float64]:
    n = len(split.is_state)
    return np.eye(n) if split.is_dense else np.ones(n)


_BUILDING = Lock()  # graphs are written in Python, one at a time
_COMPILED: list[CompiledPosterior] = []
MOST_FORMULAS = 8  # that a process keeps


@on_one_thread
def sampled(
    build: Callable[[np.random.Generator], pm.Model], rng: np.random.Generator, **settings
) -> xr.Dataset:
    """Build a model and sample it by NUTS; each process compiles every formula once.

    Settings are ``draws``, ``tune`` and ``chains``.  Returns the posterior with ``diverging``.
    """
    with _BUILDING, without_traces:
        posterior = compiled_for(build(rng), _COMPILED)
        del _COMPILED[:-MOST_FORMULAS]
    idata = posterior.sample(posterior.find_mode(rng), rng, cores=1, **settings)
    return idata["posterior"].dataset.assign(diverging=idata["sample_stats"]["diverging"])


def compiled_for(model: pm.Model, compiled: list[CompiledPosterior]) -> CompiledPosterior:
    """Return one of the compiled posteriors with this model's numbers, or one more if none fits."""
    for posterior in compiled:
        with suppress(AnotherFormulaError):
            return posterior.for_model(model)
    compiled.append(compile_posterior(model))
    return compiled[-1]


@on_one_thread
def sample(
    draws: int = 1_000,
    *,
    tune: int | None = None,
    chains: int = 4,
    cores: int | None = None,
    target_accept: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    model: pm.Model | None = None,
    **others: object,
) -> DataTree:
    r"""Sample the model on the stack by NUTS, from a good start and in coordinates made for it.

    A model of gradient matching; or one whose states are the ODE's solution, from
    :func:`~pymc_gradmatch.exact_model` or written with
    :meth:`ODE.solve <pymc_gradmatch.ODE.solve>`.

    .. math:: u = \hat u + W q + Q\, p(q_1, \dots, q_d)

    where u are all free variables, unconstrained, in one vector,
    :math:`\hat u` is their most probable value, W comes from the Hessian there,
    and the monomials p of degree two and three in the parameters and the softest
    directions of the states follow the curve along which states and parameters
    depend on each other.  In q the posterior is nearly a standard normal, in
    which NUTS needs a handful of steps; the map preserves volume.  The posterior is
    the same as that of :func:`pymc.sample`, and so are names, dims and groups of the
    result.

    Parameters
    ----------
    draws : int, default 1_000
        Draws of each chain.
    tune : int, optional
        Draws of each chain before these, discarded; None is nutpie's choice.
    chains : int, default 4
        Number of chains.
    cores : int, optional
        Chains that run at the same time; None is all cores.
    target_accept : float, optional
        Mean acceptance that the step width is tuned for; None is 0.9 in coordinates that
        can bend, and nutpie's own in all others.
    random_seed : int or numpy.random.Generator, optional
        Seed of starts and chains.  It fixes the draws on one machine with the same
        versions; elsewhere they are others of the same posterior (docs/speed.md).
    progressbar : bool, default True
        Show what is being done, then PyMC's progress bar.  PyMC's convergence
        warnings are logged anyway.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.

    Returns
    -------
    xarray.DataTree
        As from :func:`pymc.sample`.  After Ctrl-C the draws so far.

    Raises
    ------
    ValueError
        If the model has discrete free variables, or if its log density is not
        finite at any start.
    RuntimeError
        If the sampler makes no progress: a twentieth of all draws at most in the first hundred
        thousand steps, and more than 500 of these for each.
    TypeError
        If arguments are given that only :func:`pymc.sample` has.

    Notes
    -----
    The posterior of a model with a constraint is that of gradient matching.  After sampling it
    is compared with a normal
    approximation of the exact posterior, at its mode: where it lies elsewhere, or is
    much narrower or wider, or could not be compared, the log says so, and
    ``idata["posterior"].attrs["exactness"]`` what was seen.  The verdict is
    :func:`~pymc_gradmatch.integrate_check`'s.

    Where chains disagree PyMC's warnings say so; :func:`~pymc_gradmatch.fit` then has the exact
    posterior by another way.

    The start is the best mode found from eight draws of the parameters from
    their prior, see :func:`find_map`.  What is neither a state nor a parameter of
    an ODE (a random sigma or gamma), and the spread of a population, keeps its own
    coordinate.

    W has one row per coordinate.  Of several experiments with more than 400 coordinates
    it has a block for each and a border for what they share, and nothing is bent: the
    cost grows in proportion to the number of experiments.  Of one with more than 1 000
    it is made of the Hessian's Cholesky factor, a band with a border, since states of
    a Matern process depend on those of times nearby alone: the cost grows in proportion
    to the number of times.  With other kernels, or many states, W is a diagonal, and
    nutpie learns the rest with its low-rank mass matrix, as the log says; that is not
    enough for the refined model: take fewer observations there.

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors)
        idata = gm.sample(model=model, random_seed=1)

        exact = gm.sample(model=gm.exact_model(model), random_seed=1)
    """
    check_counts(draws=draws, tune=tune, chains=chains, cores=cores)
    check_share(target_accept=target_accept)
    if others:
        msg = (
            f"gm.sample has no argument {' or '.join(map(repr, others))}: it finds its own start, "
            "and its sampler is nutpie's NUTS. Call pm.sample, which has all of them, on the same "
            "model; gm.find_map returns what is good as its initvals."
        )
        raise TypeError(msg)
    model = pm.modelcontext(model)
    rng = np.random.default_rng(random_seed)
    posterior, mode = _mode(model, rng, progressbar)
    options: dict[str, Any] = {} if target_accept is None else {"target_accept": target_accept}
    start = time.perf_counter()
    try:
        idata = posterior.sample(
            mode,
            rng,
            draws=draws,
            tune=tune,
            chains=chains,
            cores=cores,
            progressbar=progressbar,
            **options,
        )
    except Interrupted as interrupt:
        idata = interrupt.draws
    patch_nutpie_idata(idata, model, sampling_time=time.perf_counter() - start)
    keep_observations(idata, model)
    if constraints(model):
        _look_at(idata, model)
    with suppress(KeyboardInterrupt):  # the draws are there
        log_convergence(idata, model)
    return idata


def _look_at(idata: DataTree, model: pm.Model):
    """Say whether the draws can be the exact posterior's, and at what the noise is fixed."""
    seen = glance(model, idata["posterior"].dataset)
    fixed = fixed_noise(model)
    words = idata["posterior"].attrs["exactness"] = seen.text + fixed
    if seen.is_suspicious:
        _log.warning(words)
    elif fixed or not seen.is_compared:
        _log.info(words)


@on_one_thread
def find_map(
    *,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    model: pm.Model | None = None,
) -> dict[str, NDArray]:
    """Find the most probable states and parameters, from several starts.

    The mode of the density of the unconstrained variables.
    Parameters start from eight draws of their prior and climb given the
    states' start, the posterior mean of their Gaussian process; the best three
    then climb together with the states.  This keeps clear of the wrong modes
    that a climb from one prior draw ends in.

    Parameters
    ----------
    random_seed : int or numpy.random.Generator, optional
        Seed of the prior draws.
    progressbar : bool, default True
        Show what is being done.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.

    Returns
    -------
    dict of str to array
        Free variables and deterministics by name; good as ``initvals`` of
        :func:`pymc.sample`.

    Raises
    ------
    ValueError
        As :func:`sample`.

    Notes
    -----
    What is neither a state nor a parameter of an ODE, such as a random sigma or
    gamma, and the spread of a population stay at their start: the joint mode of a
    variance and what varies runs to zero.

    Examples
    --------
    .. code-block:: python

        with model:
            start = gm.find_map(random_seed=1)
            idata = pm.sample(initvals={name: start[name] for name in ode.params})
    """
    model = pm.modelcontext(model)
    posterior, mode = _mode(model, np.random.default_rng(random_seed), progressbar)
    return posterior.variables(mode.location)


def _mode(model: pm.Model, rng, progressbar) -> tuple[CompiledPosterior, Laplace]:
    with reporting("compiling the model", enabled=progressbar) as say:
        posterior = compile_posterior(model)
        say("finding the mode")
        return posterior, posterior.find_mode(rng)
