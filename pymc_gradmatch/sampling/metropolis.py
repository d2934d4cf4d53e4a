"""Algorithm 1, step 2 of Wenk et al. (2019): a Metropolis chain over states and parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numba
import numpy as np
import pymc as pm
from numpy.typing import ArrayLike, NDArray
from pymc.model.transform.conditioning import remove_value_transforms
from pymc.pytensorf import join_nonshared_inputs, make_shared_replacements
from pytensor.tensor import TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import (
    ArrayStep,
    StepMethodState,
    numba_code,
    without_fastmath,
    without_starts,
)
from pymc_gradmatch.arguments import as_numbers, check_counts
from pymc_gradmatch.exact import NOT_CHECKED
from pymc_gradmatch.gp import is_states
from pymc_gradmatch.model import drop_zero_observations, fixed_noise

TUNE_INTERVAL = 100  # sweeps, as pymc.Metropolis


@dataclass(kw_only=True)
class CompiledMetropolisState(StepMethodState):
    """The state of a chain, and the initial widths, which do not change."""

    tune: bool
    scaling: NDArray[np.float64]
    accepted_sum: NDArray[np.float64]
    sweeps_until_tune: int
    order: NDArray[np.int64]
    width: NDArray[np.float64] = field(metadata={"frozen": True})


class CompiledMetropolis(ArrayStep):
    r"""Metropolis, one coordinate at a time in random order, with compiled sweeps.

    Every coordinate :math:`i` of the variables is proposed once per sweep,

    .. math::

        q_i' = q_i + \lambda_i w_i z, \qquad z \sim N(0, 1),

    and accepted with probability :math:`\min(1, p(q') / p(q))`.  A proposal is
    rejected where the density is zero or not a number.

    Parameters
    ----------
    vars : sequence of TensorVariable, optional
        Continuous variables of the model; all free variables by default.
    width : float or mapping of str to array_like of float, optional
        Standard deviations :math:`w` of the proposals for the transformed variables,
        not tuned: one for all coordinates, or by name of the variable a number or an
        array of the variable's shape.  Variables without one, or with None, start
        from 1 and are tuned.
    model : pymc.Model, optional
        Taken from the context by default.

    Notes
    -----
    Proposals and tuning (every 100 sweeps, :math:`\lambda_i` by the coordinate's
    acceptance rate) are those of :class:`pymc.Metropolis`, and so is the chain from
    the same seed as long as no proposal has density zero.  It is faster because a
    sweep is one call of machine code, which keeps the density of the current point.

    Statistics per sweep: ``accept``, the mean probability of acceptance;
    ``accepted``, the share of coordinates that moved; ``scaling``, the mean of
    :math:`\lambda`, 1 where widths are fixed.

    Examples
    --------
    >>> import pymc as pm
    >>> from pymc_gradmatch.sampling import CompiledMetropolis
    >>> with pm.Model():
    ...     height = pm.Normal("height", 0, 1)
    ...     slope = pm.Normal("slope", height, 1, shape=2)
    ...     step = CompiledMetropolis(width={"height": 1.5})  # slopes are tuned
    ...     idata = pm.sample(
    ...         500, tune=300, chains=1, step=step, random_seed=1, progressbar=False, quiet=True
    ...     )
    >>> idata["posterior"]["slope"].shape
    (1, 500, 2)
    """

    name = "compiled_metropolis"
    stats_dtypes_shapes: ClassVar[dict] = {
        "accept": (np.float64, []),
        "accepted": (np.float64, []),
        "scaling": (np.float64, []),
    }
    _state_class = CompiledMetropolisState

    def __init__(
        self,
        vars: Sequence[TensorVariable] | None = None,  # noqa: A002  PyMC's name
        *,
        width: float | Mapping[str, ArrayLike | None] | None = None,
        model: pm.Model | None = None,
    ):
        model = pm.modelcontext(model)
        values = model.value_vars if vars is None else _values_of(vars, model)
        point = model.initial_point()
        _check_continuous(values)
        shapes = {model.values_to_rvs[v].name: point[v.name].shape for v in values}
        self.width, self.fixed = _widths(width, shapes)
        shared = make_shared_replacements(point, values, model)
        [logp], joined = join_nonshared_inputs(point, [model.logp()], values, shared)
        with model, without_fastmath():
            self.log_density = pm.compile([joined], logp, mode="NUMBA")
        super().__init__(values, shared)
        self.tune = True
        self.reset_tuning()

    @cached_property
    def sweep(self) -> Callable:
        """The compiled sweep; compiled when first used, also after unpickling."""
        return _compile_sweep(numba_code(self.log_density))

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "sweep"}

    def setup_chain(self, rng, tune: int, draws: int) -> None:
        """Reset all state, so that a chain depends only on its seed."""
        super().setup_chain(rng, tune, draws)
        self.tune = tune > 0
        self.reset_tuning()

    def reset_tuning(self) -> None:
        """Reset the widths to the initial ones."""
        self.scaling = np.ones(self.width.size)
        self.accepted_sum = np.zeros(self.width.size)
        self.sweeps_until_tune = TUNE_INTERVAL
        self.order = np.arange(self.width.size)

    def astep(self, q0):
        """Sweep once over all coordinates."""
        if self.tune and not self.sweeps_until_tune:
            self._tune()
        q = q0.data.copy()
        delta = self.rng.standard_normal(q.size) * self.width * self.scaling
        self.rng.shuffle(self.order)
        log_uniform = np.log(self.rng.uniform(size=q.size))
        # Copied because the sweep would be compiled again for a read-only value or another
        # memory order.
        shared = tuple(
            np.array(variable.get_value(borrow=True), order="C")
            for variable in self.log_density.get_shared()
        )
        probability, accepted = self.sweep(q, delta, self.order, log_uniform, shared)
        self.accepted_sum += accepted
        self.sweeps_until_tune -= 1
        stats = {
            "accept": probability.mean(),
            "accepted": accepted.mean(),
            "scaling": self.scaling.mean(),
        }
        return q0._replace(data=q), [stats]

    def _tune(self) -> None:
        rate = self.accepted_sum / TUNE_INTERVAL
        self.scaling = np.where(self.fixed, 1.0, self.scaling * _tuning_factor(rate))
        self.accepted_sum = np.zeros(self.width.size)
        self.sweeps_until_tune = TUNE_INTERVAL


def _tuning_factor(rate: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the factor by which :class:`pymc.Metropolis` tunes widths, from acceptance rates."""
    ranges = [rate < 0.001, rate < 0.05, rate < 0.2, rate > 0.95, rate > 0.75, rate > 0.5]
    return np.select(ranges, [0.1, 0.5, 0.9, 10.0, 2.0, 1.1], 1.0)


def _compile_sweep(log_density: Callable) -> Callable:
    """Compile a sweep that calls a compiled density."""

    @numba.njit
    def sweep(q, delta, order, log_uniform, shared):
        """Move q in place; return each coordinate's acceptance probability and outcome."""
        probability = np.zeros(q.size)
        accepted = np.zeros(q.size)
        current = log_density(q, *shared)[0].item()
        for k, i in enumerate(order):
            before = q[i]
            q[i] = before + delta[i]
            proposed = log_density(q, *shared)[0].item()
            log_ratio = proposed - current
            if np.isfinite(log_ratio):
                probability[i] = np.exp(min(0.0, log_ratio))
            if np.isfinite(log_ratio) and log_uniform[k] < log_ratio:
                accepted[i] = 1.0
                current = proposed
            else:
                q[i] = before
        return probability, accepted

    return sweep


def _values_of(variables: Sequence[TensorVariable], model: pm.Model) -> list[TensorVariable]:
    """Return the value variables of variables of a model."""
    values = [model.rvs_to_values.get(variable, variable) for variable in variables]
    foreign = [value.name for value in values if value not in model.value_vars]
    if foreign:
        msg = f"vars has {foreign}; expected some of {[rv.name for rv in model.free_RVs]}."
        raise ValueError(msg)
    return values


def _check_continuous(values: Sequence[TensorVariable]) -> None:
    discrete = [value.name for value in values if not np.issubdtype(value.dtype, np.inexact)]
    if discrete:
        msg = f"the variables {discrete} are discrete; expected continuous ones only."
        raise ValueError(msg)


def _widths(
    width: float | Mapping[str, ArrayLike | None] | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the initial width of every coordinate, and whether it is fixed."""
    by_name = width if isinstance(width, Mapping) else dict.fromkeys(shapes, width)
    unknown = [name for name in by_name if name not in shapes]
    if unknown:
        msg = f"width has entries for {unknown}; expected some of {list(shapes)}."
        raise ValueError(msg)
    given = {name: value for name, value in by_name.items() if value is not None}
    for name, value in given.items():
        if not np.all(np.asarray(value) > 0):
            msg = f"the width of {name!r} is {value!r}; expected positive numbers."
            raise ValueError(msg)
    widths = [np.broadcast_to(given.get(name, 1.0), shape) for name, shape in shapes.items()]
    fixed = [np.full(shape, name in given) for name, shape in shapes.items()]
    return (
        np.concatenate([np.ravel(array) for array in widths]).astype(float),
        np.concatenate([np.ravel(array) for array in fixed]),
    )


def sample_fgpgm(
    model: pm.Model,
    draws: int = 100_000,
    *,
    burn_in: int = 1_000,
    state_step: float | None = None,
    param_step: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> DataTree:
    r"""Sample states and parameters in the paper's single Metropolis chain.

    Step 2 of Algorithm 1 of Wenk et al. (2019): Metropolis, one coordinate at a
    time in random order (:class:`~pymc_gradmatch.sampling.CompiledMetropolis`).
    Parameters are not transformed; proposals outside a prior's support are
    rejected.  The chain starts at the states' initial point, the posterior mean of
    the Gaussian process, and at the most probable parameters given these states.

    Parameters
    ----------
    model : pymc.Model
        A model whose states are ``"centered"``, as made by
        :func:`~pymc_gradmatch.build_model`.
    draws : int, default 100_000
        Sweeps kept.  The paper uses 100 000 for Lotka-Volterra, 300 000 otherwise.
        All are kept in memory: 0.3 GB for 300 000 of protein transduction.
    burn_in : int, default 1_000
        Sweeps discarded before.
    state_step : float, optional
        Standard deviation of the proposals for the standardised states.
        None: tuned during burn-in by PyMC's rule.
    param_step : float, optional
        Standard deviation of the proposals for all other variables, in their
        own units.  None: tuned during burn-in by PyMC's rule.
    random_seed : int or numpy.random.Generator, optional
        Seed of the chain.
    progressbar : bool, default True
        Show PyMC's progress bar and messages.

    Returns
    -------
    xarray.DataTree
        One chain, as from :func:`pymc.sample`.

    Raises
    ------
    ValueError
        If the model has no free states or a step is not positive.

    Notes
    -----
    This function reproduces the paper; :func:`~pymc_gradmatch.sample` (NUTS) is
    better on the same model.  The posterior of a noisy system can need far more
    sweeps than the paper's: check ``az.ess``.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors, shared=True, gamma=0.3, sigma="fixed")
        idata = gm.sample_fgpgm(model, state_step=0.075, param_step=0.09, random_seed=1)
        az.plot_trace(idata, var_names=list(ode.params))
    """
    check_counts(draws=draws, burn_in=burn_in)
    for name, step in {"state_step": state_step, "param_step": param_step}.items():
        if step is not None and not as_numbers(step, name, "a positive number") > 0:
            msg = f"{name} is {step}; expected a positive number, or None to let PyMC tune it."
            raise ValueError(msg)
    if not any(is_states(rv) for rv in model.free_RVs):
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}; expected "
            'states among them. Build them with gp.prior("x", parameterization="centered").'
        )
        raise ValueError(msg)
    start = _start(model)
    plain = _with_plain_parameters(model)
    width = {rv.name: state_step if is_states(rv) else param_step for rv in plain.free_RVs}
    with plain:
        idata = pm.sample(
            draws,
            tune=burn_in,
            chains=1,
            cores=1,
            step=CompiledMetropolis(width=width),
            initvals=start,
            # Without the transformed states, a second copy.
            var_names=[rv.name for rv in plain.unobserved_RVs],
            random_seed=random_seed,
            progressbar=progressbar,
            quiet=not progressbar,
            compute_convergence_checks=False,
        )
    drop_zero_observations(idata, model)
    idata["posterior"].attrs["exactness"] = NOT_CHECKED + fixed_noise(model)
    return idata


def _start(model: pm.Model) -> dict[str, np.ndarray]:
    """Return the states' initial point and the most probable other variables given it."""
    parameters = [rv for rv in model.free_RVs if not is_states(rv)]
    if not parameters:
        return {}
    with model:
        most_probable = pm.find_MAP(
            vars=parameters, progressbar=False, return_inferencedata=True, jitter=False
        )
    point = most_probable["posterior"].isel(chain=0, draw=0)
    return {rv.name: point[rv.name].to_numpy() for rv in model.free_RVs}


def _with_plain_parameters(model: pm.Model) -> pm.Model:
    """Return a copy of the model without transforms of parameters and without initial values."""
    parameters = [rv for rv in model.free_RVs if not is_states(rv)]
    return remove_value_transforms(without_starts(model), parameters)
