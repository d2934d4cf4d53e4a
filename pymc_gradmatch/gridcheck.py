"""Refine and compare: whether a posterior depends on the grid that its states live on."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.comparison import compare_draws, in_words, judge
from pymc_gradmatch.model import build_model
from pymc_gradmatch.naming import yielding
from pymc_gradmatch.nuts import sample
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.series import as_times
from pymc_gradmatch.tables import printed

__all__ = ["GridCheck", "grid_check"]

TARGET_ACCEPT = 0.9  # standard deviations hang on the tails, which longer steps miss
MORE = 4  # times as many draws, where the first cannot tell


@dataclass(frozen=True, repr=False)
class GridCheck:
    """What :func:`grid_check` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether the grid is fine enough, and what to do if not.
    is_fine_enough : bool or None
        None where the Monte Carlo error leaves it open, also with more draws.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma, if it is random: mean and sd on
        the grid and on the finer one; ``moved``, the difference of the means in
        units of the finer grid's sd, and ``sd_ratio``, finer to coarser, each
        with its Monte Carlo standard error.
    idata, finer : xarray.DataTree
        Draws on the grid and on the finer one, as from :func:`~pymc_gradmatch.sample`.
    """

    verdict: str
    is_fine_enough: bool | None
    moved: pd.DataFrame
    idata: xr.DataTree
    finer: xr.DataTree

    def __repr__(self) -> str:
        return printed(self.verdict, self.moved)


def grid_check(
    ode: ODE,
    t: ArrayLike,
    y: ArrayLike,
    *,
    priors: Mapping[str, TensorVariable],
    preset: str = "refined",
    grid: int | ArrayLike | None = None,
    finer: int | ArrayLike | None = None,
    draws: int = 1_000,
    tune: int | None = None,
    chains: int = 4,
    cores: int | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    **settings,
) -> GridCheck:
    r"""Fit on a grid and on a finer one, and say whether the posterior moved.

    .. math::

        \mathrm{moved} = \frac{\bar\theta_{\mathrm{finer}} - \bar\theta_{\mathrm{grid}}}
        {s_{\mathrm{finer}}}, \qquad
        \mathrm{sd\_ratio} = \frac{s_{\mathrm{finer}}}{s_{\mathrm{grid}}}

    The constraint holds at the times of the grid only.  Where these are too far
    apart, the Gaussian process between them takes part in the answer, and a
    finer grid gives another one.  The grid is fine enough if no mean moves by
    more than 0.3 standard deviations and no standard deviation changes by more
    than a fifth, by two Monte Carlo standard errors (ArviZ's ``mcse``); it is not
    if one does so by as much.  Where the draws can tell neither, both models are
    sampled once more, with four times as many.

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
    preset : str, default "refined"
        As for :func:`~pymc_gradmatch.build_model`.  What a preset derives from
        the grid (kernels and gamma of ``"refined"``) follows each of the two.
        With other presets every further time adds the prior's pull and gamma's
        tolerance once more: the posterior narrows, and need not settle.
    grid : int or array_like of float, optional
        Steps between observations or sorted times, see
        :meth:`StateGP.with_grid`; the preset's if not given.
    finer : int or array_like of float, optional
        The finer one; twice as many steps if not given.
    draws : int, default 1_000
        Draws of each chain, and a quarter of those of the second attempt.
    tune, chains, cores
        As for :func:`~pymc_gradmatch.sample`.
    random_seed : int or numpy.random.Generator, optional
        Seed of both fits; that of the Gaussian processes is the same for both.
    progressbar : bool, default True
        Show PyMC's progress bar.
    **settings
        Other arguments of :func:`~pymc_gradmatch.build_model`.

    Returns
    -------
    GridCheck

    Raises
    ------
    ValueError
        If ``finer`` has no more times than ``grid``; if called inside a model,
        since it builds two of its own; or as
        :func:`~pymc_gradmatch.build_model`.

    Notes
    -----
    A posterior that no longer depends on the grid need not be the exact one:
    what both grids share goes unseen.  :func:`~pymc_gradmatch.integrate_check`
    compares with the exact one.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> priors = {"rate": pm.HalfNormal.dist(2)}
    >>> check = gm.grid_check(
    ...     decay, t, y, priors=priors, draws=2_000, random_seed=1, progressbar=False
    ... )
    >>> check.is_fine_enough
    True
    """
    if pm.Model.get_context(error_if_none=False) is not None:
        msg = "grid_check builds two models of its own; call it outside of a model's block."
        raise ValueError(msg)
    rng = np.random.default_rng(random_seed)
    seed = int(rng.integers(2**31))

    def build(grid) -> pm.Model:
        return build_model(
            ode,
            t,
            y,
            priors=priors,
            preset=preset,
            grid=grid,
            random_seed=seed,
            progressbar=progressbar,
            **settings,
        )

    models = [build(grid)]
    models.append(build(_halved(_times(models[0])) if finer is None else finer))
    sizes = [len(_times(model)) for model in models]
    if sizes[1] <= sizes[0]:
        msg = f"the finer grid has {sizes[1]} times and the grid {sizes[0]}; expected more."
        raise ValueError(msg)

    def compared(draws) -> tuple[list[xr.DataTree], pd.DataFrame, float]:
        fits = [
            sample(
                draws,
                tune=tune,
                chains=chains,
                cores=cores,
                target_accept=TARGET_ACCEPT,
                random_seed=rng,
                progressbar=progressbar,
                model=model,
            )
            for model in models
        ]
        return fits, *compare_draws(*(_rows(idata, ode, as_times(t)[0]) for idata in fits))

    fits, table, r_hat = compared(draws)
    if judge(table) is None:
        fits, table, r_hat = compared(MORE * draws)
    is_fine_enough = judge(table)
    verdict = in_words(table, is_fine_enough, sizes, r_hat, preset)
    return GridCheck(verdict, is_fine_enough, table, *fits)


def _times(model: pm.Model) -> np.ndarray:
    return np.array(model.coords["time"], dtype=float)


def _halved(times: np.ndarray) -> np.ndarray:
    return np.sort(np.append(times, (times[1:] + times[:-1]) / 2))


def _rows(idata: xr.DataTree, ode: ODE, start: float) -> xr.Dataset:
    """Return the draws of theta, x(t0) and sigma, one variable per scalar."""
    posterior = idata["posterior"].dataset
    rows = {name: posterior[name] for name in ode.params}
    x, sigma = (yielding(name, ode.params) for name in ("x", "sigma"))
    x0 = posterior[x].sel(time=start, method="nearest")
    per_state = {yielding("x0", ode.params): x0}
    per_state |= {sigma: posterior[sigma]} if sigma in posterior else {}
    for name, values in per_state.items():
        if "state" not in values.dims:
            rows[name] = values
            continue
        rows |= {f"{name}[{state}]": values.isel(state=k) for k, state in enumerate(ode.states)}
    return xr.Dataset(
        {
            name: values.drop_vars(["time", "state"], errors="ignore")
            for name, values in rows.items()
        }
    )
