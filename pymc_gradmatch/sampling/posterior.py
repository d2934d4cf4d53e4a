"""The density of a model, compiled once, its mode, and NUTS in coordinates adapted to it.

Models that differ only in their numbers share the compiled density.
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
    has_start,
    hierarchical_scales,
    log_convergence,
    minus_inf_if_invalid,
    patch_nutpie_idata,
    without_fastmath,
    without_traces,
)
from pymc_gradmatch.arguments import check_counts, check_share
from pymc_gradmatch.exact import broadcast_draws, compare_quickly
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import (
    constraints,
    drop_zero_observations,
    fixed_noise,
    is_constraint,
    known_starts,
    warn_of_changed_data,
    where_impossible,
)
from pymc_gradmatch.numerics import (
    N_STARTS,
    Density,
    Laplace,
    conditional_sd,
    laplace,
    on_one_thread,
    optimise,
    search_mode,
)
from pymc_gradmatch.ode import Solve, explain_failure
from pymc_gradmatch.reporting import reporting
from pymc_gradmatch.sampling.coordinates import (
    BandCoordinates,
    Coordinates,
    Roles,
    band_coordinates,
    curved_coordinates,
    optimise_in_band,
    straight_coordinates,
)
from pymc_gradmatch.sampling.density import (
    COORDINATES,
    Interrupted,
    ModelGraphs,
    NativeDensity,
    compile_graphs,
    cut,
    flat,
    graphs_of,
    pack,
    same_but_for_constants,
)


def fixed_variables(model: pm.Model) -> set:
    """Return the free variables that are fixed in the search for the mode.

    Their joint mode with the variables that they scale is zero: sigma and gamma, which are neither
    states nor parameters of a right-hand side, and the spread of a population, which is bounded and
    moves parameters through their prior alone.  In a model without a constraint, such as one with
    the ODE's solution, only such a spread.
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
LOW_RANK = "%d coordinates: sampled with nutpie's low-rank mass matrix, from the mode."
TARGET_ACCEPT = 0.9  # in dense coordinates; with 0.8 up to ten times as many draws diverge


class AnotherFormulaError(ValueError):
    """A model differs from the compiled one in more than its numbers."""


@dataclass(frozen=True)
class CompiledPosterior:
    """A compiled posterior of u, the vector of all value variables of a model.

    The density is a function of q, from which coordinates give u; its numbers are those of the
    coordinates and ``data``, all numbers that may differ between data sets.  ``draw_start`` maps a
    seed to a start u, with parameters drawn from their prior, and None to the model's initial
    point.
    """

    model: pm.Model
    native: NativeDensity
    draw_start: Callable[[int | None], NDArray[np.float64]]
    roles: Roles
    shapes: list[tuple[int, ...]]
    graphs: ModelGraphs
    data: NDArray[np.float64]

    def for_model(self, model: pm.Model) -> Self:
        """Return the posterior of a model that differs only in its numbers; compiles nothing.

        Raises :class:`AnotherFormulaError` for any other model.
        """
        other = graphs_of(model)
        if not same_but_for_constants(self.graphs, other):
            msg = "the model differs from the compiled one in more than its data."
            raise AnotherFormulaError(msg)
        data = flat(constant.data for constant in other.constants)
        start = _starts(model)
        return replace(
            self,
            model=model,
            native=self.native.with_numbers(pack(_standard(self.roles), data)),
            draw_start=lambda seed: flat(start(seed).values()),
            graphs=other,
            data=data,
        )

    def density(self, u: NDArray[np.float64]) -> tuple[Any, NDArray[np.float64]]:
        """Return the log density and its gradient at u, shape ``(..., n)``."""
        return self.native(u)

    def find_mode(self, rng: np.random.Generator) -> Laplace:
        """Find the most probable u, and a normal approximation there.

        Starts are the model's initial point, and draws of the parameters from their prior.  From
        every start the parameters are optimised given the states; from the best of these points
        states and parameters are optimised jointly.  A random sigma or gamma and the spread of a
        population are fixed at their start.
        """
        free = ~self.roles.is_fixed
        seeds = rng.integers(2**31, size=N_STARTS - 1)
        starts = [self.draw_start(seed) for seed in [None, *seeds]]
        if all(np.array_equal(start, starts[0]) for start in starts):
            best: NDArray[np.float64] | None = starts[0]
        else:
            parameters = ~(self.roles.is_state | self.roles.is_fixed)
            best = search_mode(
                starts,
                lambda u: self.density(u)[0],
                parameters=lambda u: self._optimised(u, parameters),
                jointly=lambda u: self._optimised(u, free),
            )
        if best is None or not np.isfinite(self.density(best)[0]):
            msg = (
                f"the log density is not finite at any start. {_impossible(self.model)}Check data "
                "and priors, or pass `initval` for the parameters."
            )
            raise ValueError(msg)
        joint = self.along(best, free)
        if self.roles.is_dense:
            return self._with_fixed(best, laplace(joint, best[free]))
        top = optimise(joint, best[free])
        widths = conditional_sd(joint, top, rng)
        mode = self._with_fixed(best, Laplace(top, widths, joint(top)[0]))
        return optimise_in_band(self.density, mode, self.roles)

    def _optimised(self, u, entries) -> NDArray[np.float64]:
        """Return u with some entries optimised, the others fixed."""
        return _with_entries(u, entries, optimise(self.along(u, entries), u[entries]))

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

        ``progress`` is called with the state of the chains, instead of a progress bar.

        Raises
        ------
        Interrupted
            After Ctrl-C, with the draws so far.
        """
        around: Coordinates | BandCoordinates
        with reporting("fitting coordinates to the posterior", enabled=progressbar):
            if self.roles.is_dense:
                around = curved_coordinates(self.density, mode, self.roles, rng)
                settings = {"target_accept": TARGET_ACCEPT} | settings
            elif (band := band_coordinates(self.density, mode, self.roles)) is not None:
                around = band
            else:
                around = straight_coordinates(mode, self.roles)
                _log.info(LOW_RANK, len(self.roles.is_state))
                settings["adaptation"] = "low_rank"
        return self.sample_around(
            around, rng, progressbar=progressbar, progress=progress, **settings
        )

    def sample_around(
        self,
        around: Coordinates | BandCoordinates,
        rng: np.random.Generator,
        *,
        progressbar: Any = False,
        progress: Callable[[Sequence], None] | None = None,
        **settings,
    ) -> xr.DataTree:
        """Run nutpie's NUTS in given coordinates, see :meth:`sample`."""
        native = self.native
        if isinstance(around, BandCoordinates):  # the code depends on the width
            native = compile_graphs(self.graphs, self.shapes, self.roles, around.width)
        native = native.with_numbers(pack(around, self.data))
        bars = NutpieProgressBarManager(settings["chains"], settings["draws"], progressbar)
        seed = int(rng.integers(2**31))
        try:
            with bars:
                trace = native.sample(
                    seed=seed, progress_callback=progress or bars.update, **settings
                )
        except Interrupted as interrupt:
            raise Interrupted(self._named(interrupt.draws, around)) from None
        return self._named(trace, around)

    def _named(self, trace: xr.DataTree, around: Coordinates | BandCoordinates) -> xr.DataTree:
        """Return a trace with draws of the model's variables in place of coordinates."""
        import nutpie  # here: it is large

        q = trace["posterior"][COORDINATES]
        coords = {dim: np.array(v) for dim, v in self.model.coords.items() if v is not None}
        named: dict[Any, Any] = coords | {"chain": q["chain"].to_numpy()}
        posterior = dict_to_dataset(
            self.variables(around(q.to_numpy())),
            coords=named,
            dims=self.model.named_vars_to_dims,
            inference_library=nutpie,
        )
        return trace.assign(posterior=xr.DataTree(posterior))

    def variables(self, u: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return the model's variables by name, from points of shape ``(..., n)``."""
        batch = u.shape[:-1]
        points = [
            pt.tensor(dtype="float64", shape=(None,) * len(batch) + shape) for shape in self.shapes
        ]
        values_of = vectorize_graph(
            self.graphs.variables, dict(zip(self.graphs.inputs, points, strict=True))
        )
        evaluate = pytensor.function(
            points, values_of, mode=EVALUATE_ONCE, on_unused_input="ignore"
        )
        values = broadcast_draws(evaluate(*cut(u, self.shapes)), self.graphs.variables, *batch)
        return dict(zip(self.graphs.names, values, strict=True))

    def _with_fixed(self, start, mode: Laplace) -> Laplace:
        """Return a normal approximation of free entries with the fixed ones at their start."""
        free = ~self.roles.is_fixed
        factor = _identity(self.roles)
        factor[np.ix_(free, free) if factor.ndim == 2 else free] = mode.factor
        return Laplace(_with_entries(start, free, mode.location), factor, mode.log_density)

    def along(self, u, entries) -> Density:
        """Return the density as a function of some entries of u, the others fixed."""

        def density(part):
            value, gradient = self.density(_with_entries(u, entries, part))
            return value, gradient[entries]

        return density


def _impossible(model: pm.Model) -> str:
    """Return which solution fails at a model's start, or which observation has density zero."""
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
    """Compile a model's log density; coordinates and numbers are set later.

    There must be free variables, and all must be continuous.
    """
    if not model.free_RVs or model.discrete_value_vars:
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}, of which "
            f"{[v.name for v in model.discrete_value_vars]} are discrete; expected continuous "
            "ones. Use pm.sample, which has samplers for discrete variables."
        )
        raise ValueError(msg)
    warn_of_changed_data(model)
    fixed = fixed_variables(model)
    start = _starts(model)
    try:
        shapes = [np.shape(value) for value in start(0).values()]
    except NotImplementedError as error:
        msg = (
            f"a parameter cannot be drawn from its prior ({error}), which is where optimisation "
            "starts. Give it an `initval`, or a proper prior such as pm.HalfNormal."
        )
        raise ValueError(msg) from error
    sizes = [int(np.prod(shape)) for shape in shapes]

    def entries(chosen):
        return np.repeat([chosen(rv) for rv in model.free_RVs], sizes)

    graphs = graphs_of(model)
    data = flat(constant.data for constant in graphs.constants)
    n_states = sum(rv.type.shape[-1] for rv in model.free_RVs if is_states(rv))
    roles = Roles(
        entries(is_states), entries(lambda rv: rv in fixed), n_states, _experiments(model, shapes)
    )
    standard = _standard(roles)
    return CompiledPosterior(
        model,
        compile_graphs(graphs, shapes, roles).with_numbers(pack(standard, data)),
        draw_start=lambda seed: flat(start(seed).values()),
        roles=roles,
        shapes=shapes,
        graphs=graphs,
        data=data,
    )


def _experiments(model: pm.Model, shapes) -> NDArray[np.int64]:
    """Return the experiment of each entry of u; -1 if it is shared or there is one experiment."""
    dims = {rv: model.named_vars_to_dims.get(rv.name) or (None,) for rv in model.free_RVs}
    several = [rv for rv in model.free_RVs if is_states(rv) and rv.type.ndim == 3]
    owners = []
    for rv, shape in zip(model.free_RVs, shapes, strict=True):
        owner = np.full(shape, -1)
        if len(several) == 1 and dims[rv][0] == dims[several[0]][0]:
            n = several[0].type.shape[0]
            if shape[:1] == (n,):  # and no transform removed an entry
                owner = np.arange(n).reshape(-1, *[1] * (len(shape) - 1)) + np.zeros(shape, int)
        owners.append(owner.ravel())
    return np.concatenate(owners)


def _starts(model: pm.Model) -> Callable:
    """Return a function of a seed that draws parameters that do not start at one value alone.

    Given None it returns the initial point.  In a model with solutions of an ODE only what these
    depend on is drawn; noise starts at the center of its prior.
    """
    fixed = fixed_variables(model)
    terms = ancestors([*model.observed_RVs, *model.potentials])
    solved = [v.owner for v in terms if v.owner and isinstance(v.owner.op, Solve)]
    behind = {*ancestors([given for node in solved for given in node.inputs])}
    drawn = [
        rv.name
        for rv in model.free_RVs
        if not (is_states(rv) or rv in fixed or has_start(model, rv))
        and (rv in behind or not solved)
    ]
    with without_fastmath():
        draw, initial = compile_starts(model, drawn), compile_starts(model, [])
    return lambda seed: initial(0) if seed is None else draw(seed)


def _with_entries(u, entries, part):
    result = u.copy()
    result[entries] = part
    return result


def _standard(roles: Roles) -> Coordinates:
    return straight_coordinates(
        Laplace(np.zeros(len(roles.is_state)), _identity(roles), 0.0), roles
    )


def _identity(roles: Roles) -> NDArray[np.float64]:
    n = len(roles.is_state)
    return np.eye(n) if roles.is_dense else np.ones(n)


_BUILDING = Lock()  # models are built by one thread at a time
_COMPILED: list[CompiledPosterior] = []
MAX_COMPILED = 8  # posteriors that a process keeps


@on_one_thread
def build_and_sample(
    build: Callable[[np.random.Generator], pm.Model], rng: np.random.Generator, **settings
) -> xr.Dataset:
    """Build a model and sample it by NUTS; models that differ only in numbers compile once.

    Settings are ``draws``, ``tune`` and ``chains``.  Returns the posterior with ``diverging``.
    """
    with _BUILDING, without_traces:
        posterior = compiled_for(build(rng), _COMPILED)
        del _COMPILED[:-MAX_COMPILED]
    idata = posterior.sample(posterior.find_mode(rng), rng, cores=1, **settings)
    return idata["posterior"].dataset.assign(diverging=idata["sample_stats"]["diverging"])


def compiled_for(model: pm.Model, compiled: list[CompiledPosterior]) -> CompiledPosterior:
    """Return a model's posterior, compiled only if none of the compiled ones has its formula."""
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
    r"""Sample the model on the stack by NUTS, from its mode and in coordinates adapted to it.

    The model is one of gradient matching, or one whose states are the ODE's solution, from
    :func:`~pymc_gradmatch.exact_model` or written with
    :meth:`ODE.solve <pymc_gradmatch.ODE.solve>`.

    .. math:: u = \hat u + W q + Q\, p(q_1, \dots, q_d)

    u is the vector of all free variables, unconstrained, :math:`\hat u` its mode, W comes from the
    Hessian there, and the monomials p of degree two and three in the parameters and the widest
    directions of the states follow the curved ridge along which states and parameters are
    dependent.  In q the posterior is nearly a standard normal, which NUTS samples with few steps a
    draw; the map preserves volume.  The posterior is that of :func:`pymc.sample`, and so are names,
    dims and groups of the result.

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
        Mean acceptance for which the step size is tuned; None is 0.9 with up to 1 000
        coordinates (400 with several experiments), and nutpie's default with more.
    random_seed : int or numpy.random.Generator, optional
        Seed of starts and chains.  It determines the draws on one machine with the same
        versions; on others they differ (docs/speed.md).
    progressbar : bool, default True
        Show what is being done, then PyMC's progress bar.  PyMC's convergence
        warnings are always logged.
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
        If the sampler makes no progress: at most a twentieth of all draws in the first hundred
        thousand steps, with more than 500 steps for each.
    TypeError
        If arguments are given that only :func:`pymc.sample` has.

    Notes
    -----
    The posterior of a model with a constraint is that of gradient matching.  After sampling it
    is compared with a normal approximation of the exact posterior at its mode.  If it has another
    location or a much smaller or larger width, or cannot be compared, the log reports it;
    ``idata["posterior"].attrs["exactness"]`` has the result, and
    :func:`~pymc_gradmatch.integrate_check` a verdict.  Where chains disagree PyMC's warnings are
    logged; :func:`~pymc_gradmatch.fit` draws from the exact posterior by other algorithms.

    The start is the best mode found from eight prior draws of the parameters, see
    :func:`find_MAP`.  A random sigma or gamma and the spread of a population keep coordinates of
    their own.

    W is a dense matrix up to 1 000 coordinates, or 400 with several experiments.  With more
    nothing is curved, and W is made of Cholesky factors of the Hessian, a band with a border: of
    several experiments one block each; of a long series the band of a Matern process, whose states
    depend on those of times nearby alone.  The cost grows in proportion to the number of
    experiments or times.  For long series with other kernels, or many states, W is a diagonal, and
    nutpie adapts its low-rank mass matrix, as the log reports; that is not enough for the refined
    model: use fewer observations there.

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
            "and its sampler is nutpie's NUTS. Call pm.sample, which has these arguments, on the "
            "same model; gm.find_MAP returns initvals for it."
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
    drop_zero_observations(idata, model)
    if constraints(model):
        _report_exactness(idata, model)
    with suppress(KeyboardInterrupt):  # the draws are returned
        log_convergence(idata, model)
    return idata


def _report_exactness(idata: DataTree, model: pm.Model):
    """Log whether the draws can be the exact posterior's, and where the noise is fixed."""
    seen = compare_quickly(model, idata["posterior"].dataset)
    fixed = fixed_noise(model)
    words = idata["posterior"].attrs["exactness"] = seen.text + fixed
    if seen.is_suspicious:
        _log.warning(words)
    elif fixed or not seen.is_compared:
        _log.info(words)


@on_one_thread
def find_MAP(  # noqa: N802  PyMC's name
    *,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    model: pm.Model | None = None,
) -> dict[str, NDArray]:
    """Find the most probable states and parameters, from several starts.

    The mode of the density of the unconstrained variables.  Parameters start from the model's
    initial point and seven prior draws and are optimised given the states' start, the posterior
    mean of their Gaussian process; the best three are then optimised jointly with the states.
    Optimisation from one start would often end in a minor mode.

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
        Free variables and deterministics by name, for ``initvals`` of :func:`pymc.sample`.

    Raises
    ------
    ValueError
        As :func:`sample`.

    Notes
    -----
    A random sigma or gamma and the spread of a population are fixed at their start, since their
    joint mode with the variables that they scale is zero.

    Examples
    --------
    .. code-block:: python

        with model:
            start = gm.find_MAP(random_seed=1)
            idata = pm.sample(initvals={name: start[name] for name in ode.params})
    """
    model = pm.modelcontext(model)
    posterior, mode = _mode(model, np.random.default_rng(random_seed), progressbar)
    return posterior.variables(mode.location)


def _mode(model: pm.Model, rng, progressbar) -> tuple[CompiledPosterior, Laplace]:
    """Compile a model's posterior, and find its mode."""
    with reporting("compiling the model", enabled=progressbar) as report:
        posterior = compile_posterior(model)
        report("finding the mode")
        return posterior, posterior.find_mode(rng)
