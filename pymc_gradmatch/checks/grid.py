"""Whether a posterior depends on the grid that its states live on: refine and compare."""

from collections.abc import Mapping
from dataclasses import dataclass

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.tensor import TensorVariable

from pymc_gradmatch.arguments import yielding
from pymc_gradmatch.model import build_model, fixed_noise
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.reporting import Verdict, furthest
from pymc_gradmatch.sampling import sample

FAR = 0.3  # standard deviations
WIDER = 0.2  # of a standard deviation
ERRORS = 2  # Monte Carlo standard errors that a verdict allows for
DISAGREE = 1.01  # R-hat


def compare_draws(coarse: xr.Dataset, fine: xr.Dataset) -> tuple[pd.DataFrame, float]:
    """Return the table, and the largest R-hat of all."""
    one, other = (az.summary(draws, kind="all", round_to="none") for draws in (coarse, fine))
    ratio = other["sd"] / one["sd"]
    table = pd.DataFrame(
        {
            "mean": one["mean"],
            "sd": one["sd"],
            "finer_mean": other["mean"],
            "finer_sd": other["sd"],
            "moved": (other["mean"] - one["mean"]) / other["sd"],
            "moved_error": np.hypot(one["mcse_mean"], other["mcse_mean"]) / other["sd"],
            "sd_ratio": ratio,
            "ratio_error": ratio
            * np.hypot(one["mcse_sd"] / one["sd"], other["mcse_sd"] / other["sd"]),
        }
    )
    return table, float(max(one["r_hat"].max(), other["r_hat"].max()))


def judge(table: pd.DataFrame) -> bool | None:
    """Tell whether changes are within the limits, beyond them, or (None) neither for sure."""
    changes = [
        (table["moved"].abs(), table["moved_error"], FAR),
        ((table["sd_ratio"] - 1).abs(), table["ratio_error"], WIDER),
    ]
    if any((size - ERRORS * error > limit).any() for size, error, limit in changes):
        return False
    if all((size + ERRORS * error <= limit).all() for size, error, limit in changes):
        return True
    return None


def in_words(
    table: pd.DataFrame,
    is_fine_enough: bool | None,
    sizes: list[int],
    r_hat: float,
    preset: str,
) -> str:
    """Return the verdict with its figures, and what to do."""
    changed = table["sd_ratio"] - 1
    widest = changed.abs().idxmax()
    figures = (
        f"from {sizes[0]} times to {sizes[1]} the means move most in "
        f"{furthest(table['moved'], decimals=2)} (standard deviations on the finer grid; Monte "
        f"Carlo error at most {table['moved_error'].max():.2f}), the standard deviations most in "
        f"{widest} by {100 * changed[widest]:+.0f} % (at most "
        f"{100 * table['ratio_error'].max():.0f} %)"
    )
    disagree = f" The chains disagree (R-hat {r_hat:.2f})." if r_hat > DISAGREE else ""
    if is_fine_enough:
        return f"The grid is fine enough: {figures}.{disagree}"
    if is_fine_enough is None:
        return (
            f"The draws cannot tell whether the grid is fine enough: {figures}.{disagree} The "
            f"limits are {FAR} and {100 * WIDER:.0f} %, give or take {ERRORS} errors: sample more "
            "draws."
        )
    advice = (
        "Take the finer grid (its draws are .finer), and check that one against a finer one still."
        if preset == "refined"
        else f"With preset={preset!r} the posterior need not settle on finer grids: every further "
        "time adds the prior's pull and gamma's tolerance once more. Take preset='refined'."
    )
    return f"The grid is not fine enough: {figures}.{disagree} {advice}"


TARGET_ACCEPT = 0.9  # standard deviations hang on the tails, which longer steps miss
MORE = 4  # times as many draws, where the first cannot tell


@dataclass(frozen=True, repr=False)
class GridCheck(Verdict):
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

    def shown(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict and its table."""
        return self.verdict, [self.moved]


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
    start = _times(models[0])[0]
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
        return fits, *compare_draws(*(_rows(idata, ode, start) for idata in fits))

    fits, table, r_hat = compared(draws)
    if judge(table) is None:
        fits, table, r_hat = compared(MORE * draws)
    is_fine_enough = judge(table)
    verdict = in_words(table, is_fine_enough, sizes, r_hat, preset) + fixed_noise(models[0])
    return GridCheck(verdict, is_fine_enough, table, *fits)


def _times(model: pm.Model) -> np.ndarray:
    return np.array(model.coords["time"], dtype=float)


def _halved(times: np.ndarray) -> np.ndarray:
    return np.sort(np.append(times, (times[1:] + times[:-1]) / 2))


def _rows(idata: xr.DataTree, ode: ODE, start: float) -> xr.Dataset:
    """Return the draws of theta, x(t0) and sigma, one variable per scalar."""
    posterior = idata["posterior"].dataset
    rows = {name: posterior[name] for name in ode.lengths}
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
