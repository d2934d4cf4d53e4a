"""gamma as the paper chooses it: by how well the integrated trajectories fit the data."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import yielding
from pymc_gradmatch.gp import Data, StateGP, levels_of
from pymc_gradmatch.model import Given, Start, build_model, fit_states, preset_of
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import Verdict
from pymc_gradmatch.sampling import reason, sample_side_by_side

GAMMAS = tuple(np.logspace(0, -4, 8).tolist())
CLOSE = 1.01  # times the best fit: no difference that the data could tell
DISAGREE = 1.01  # R-hat


@dataclass(frozen=True, repr=False)
class GammaSelection(Verdict):
    """What :func:`select_gamma` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    gamma : float
        The one whose trajectories fit best.
    verdict : str
        The same in words, with others that fit as well, and what to be wary of.
    table : pandas.DataFrame
        One row per gamma, in the order given: ``gamma``; ``fit``, see
        :func:`select_gamma`; ``theta.alpha``, ... and ``x0.prey``, ..., the
        posterior means; ``r_hat``, the parameters' largest; ``failure``, empty,
        or why there is no fit.
    """

    gamma: float
    verdict: str
    table: pd.DataFrame

    def shown(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict, and the table without what it does not need."""
        table = self.table if self.table["failure"].any() else self.table.drop(columns="failure")
        return self.verdict, [table]


def select_gamma(
    ode: ODE,
    t: ArrayLike,
    y: ArrayLike,
    *,
    priors: Mapping[str, TensorVariable],
    gammas: Sequence[float] = GAMMAS,
    gp: StateGP | None = None,
    draws: int = 1_000,
    tune: int | None = None,
    chains: int = 2,
    n_jobs: int = -1,
    random_seed: int | None = None,
    progressbar: bool = True,
    **settings,
) -> GammaSelection:
    r"""Choose gamma by the observation fit of the integrated trajectories.

    .. math::

        \mathrm{fit}(\gamma)^2 = \frac{1}{N} \sum_{jk}
        \frac{\bigl(y_{jk} - x_k(t_j; \bar\theta_\gamma, \bar x_{0,\gamma})\bigr)^2}{\sigma_k^2}

    over the N observations.  The model is sampled for every gamma, and the ODE
    integrated numerically from the posterior means of theta and of x(t0): the smallest
    ``fit`` wins.  This is the paper's choice [1]_.  A fit near one is as good as sigma allows.
    The Gaussian processes are fitted once and the density is compiled once.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float
        Times, shape ``(time,)``.
    y : array_like of float
        Observations, shape ``(time, state)``.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`.
    gammas : sequence of float
        Variances to try, in (standardised state / time) squared.  The paper's
        eight if not given: from 1 to 1e-4, equally spaced in their logarithm.
    gp : StateGP, optional
        Gaussian processes to use as they are, in place of a fit.
    draws, tune, chains : int
        As for :func:`~pymc_gradmatch.sample`, for every gamma.
    n_jobs : int, default -1
        Gammas that are fitted at the same time; -1 is one per core.
    random_seed : int, optional
        Seed of the fit and of all chains.
    progressbar : bool, default True
        Show how many are done.
    **settings
        Other arguments of :func:`~pymc_gradmatch.build_model`: ``preset``,
        ``cov``, ``shared``, ``grid``, ``amplitude``, ``state_box``, ...

    Returns
    -------
    GammaSelection

    Raises
    ------
    ValueError
        If every gamma fails, with the reasons; or if t and y are unusable.

    Notes
    -----
    Sigma is that of the Gaussian processes, the same for every gamma, so that
    the fits are of one measure even where sigma is sampled.

    The fit is no likelihood of gamma, and says little where all gammas fit
    alike; the widths of the posterior may still depend on gamma.  With a prior,
    gamma can be sampled instead: ``gamma`` of :func:`~pymc_gradmatch.build_model`
    and of the four lines may be random.  But never maximise the joint density
    over gamma, states and theta: states that satisfy the ODE at the times of
    the grid make the mismatch zero, then :math:`-\tfrac12 \log|A + \gamma I|`
    grows as gamma shrinks, and the maximum is at the bound of the search,
    whatever the data.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (9, 1))
    >>> selection = gm.select_gamma(
    ...     decay,
    ...     t,
    ...     y,
    ...     priors={"rate": pm.HalfNormal.dist(2)},
    ...     gammas=[100.0, 0.01],
    ...     draws=500,
    ...     random_seed=1,
    ...     progressbar=False,
    ... )
    >>> selection.gamma
    0.01
    """
    inputs = settings.pop("inputs", None)
    ode = ode if inputs is None else ode.with_inputs(inputs)
    data = Data.of(t, y, states=ode.states, positive=ode.is_positive if ode.positive else False)
    if np.ndim(gammas) != 1 or len(gammas) == 0:
        msg = f"gammas is {gammas!r}; expected a sequence of numbers."
        raise ValueError(msg)
    of_fit, seeds = np.random.SeedSequence(random_seed).spawn(2)
    if gp is None:
        kernels = {name: settings.pop(name, None) for name in ("cov", "shared")}
        preset = preset_of(settings.get("preset", "fgpgm"), kernels)
        given = Given(ode, data, Start.of(ode, settings.get("start"), data.t[0]))
        [gp] = fit_states(preset.fit, [given], [priors], np.random.default_rng(of_fit))

    def builder(gamma):
        return lambda rng: build_model(
            ode,
            t,
            y,
            priors=priors,
            gp=gp,
            gamma=gamma,
            random_seed=rng,
            progressbar=False,
            **settings,
        )

    results = sample_side_by_side(
        [builder(gamma) for gamma in gammas],
        draws=draws,
        tune=tune,
        chains=chains,
        n_jobs=n_jobs,
        random_seed=seeds,
        progressbar=progressbar,
    )
    rows = [
        {"gamma": float(gamma), **judge(ode, result, data, gp.sigma)}
        for gamma, result in zip(gammas, results, strict=True)
    ]
    means = [f"theta.{name}" for name in ode.params] + [f"x0.{name}" for name in ode.states]
    columns = ["gamma", "fit", *means, "r_hat", "failure"]
    table = pd.DataFrame(rows, columns=columns)
    if table["fit"].isna().all():
        msg = "no gamma could be fitted:\n" + "\n".join(
            f"gamma {', '.join(f'{gamma:.3g}' for gamma in group)}: {failure}"
            for failure, group in table.groupby("failure", sort=False)["gamma"]
        )
        raise ValueError(msg)
    best = table.loc[table["fit"].idxmin()]
    return GammaSelection(float(best["gamma"]), _verdict(table, best), table)


def judge(
    ode: ODE,
    result: xr.Dataset | Exception,
    data: Data,
    sigma: NDArray[np.float64],
) -> dict:
    """Return one row of the table, without gamma."""
    if isinstance(result, Exception):
        return {"failure": reason(result)}
    every = ["chain", "draw"]
    theta = ode.by_entry({name: result[name].mean(every).to_numpy() for name in ode.lengths})
    states = result[yielding("x", ode.params)]
    start = states.sel(time=data.t[0], method="nearest").mean(every).to_numpy()
    row: dict = {f"theta.{name}": float(mean) for name, mean in theta.items()}
    row |= {f"x0.{name}": mean for name, mean in zip(ode.states, start, strict=True)}
    row["r_hat"] = max(float(az.rhat(result[name]).max()) for name in ode.lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the row has it
        trajectory = ode.solve(data.t, start, theta)
    if not np.isfinite(trajectory).all():
        return row | {"failure": "the ODE cannot be integrated from the posterior means"}
    levels = levels_of(trajectory, data.positive)
    fit = np.sqrt(np.nanmean(np.square((data.levels - levels) / sigma)))
    return row | {"fit": fit, "failure": ""}


def _verdict(table: pd.DataFrame, best: pd.Series) -> str:
    gamma, fit = best["gamma"], best["fit"]
    words = [f"gamma = {gamma:.3g} fits best: the integrated trajectories miss the data by"]
    words += [f"{fit:.3g} sigma (root mean square)."]
    alike = table[(table["fit"] <= CLOSE * fit) & (table["gamma"] != gamma)]["gamma"]
    if len(alike):
        percent = round(100 * (CLOSE - 1))
        words += [f"Within {percent} %: {', '.join(f'{other:.3g}' for other in alike)}."]
    tried = table["gamma"]
    if len(tried) > 1 and gamma in (tried.min(), tried.max()):
        end, further = ("smallest", "smaller") if gamma == tried.min() else ("largest", "larger")
        words += [f"It is the {end} tried; {further} ones may fit better."]
    if best["r_hat"] > DISAGREE:
        words += [f"Its chains disagree (R-hat {best['r_hat']:.2f}): sample more, see gm.sample."]
    return " ".join(words)
