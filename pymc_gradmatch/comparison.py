"""Two posteriors of one model on two grids: how far they are apart, and whether that matters."""

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr

from pymc_gradmatch.tables import furthest

__all__ = ["compare_draws", "in_words", "judge"]

FAR = 0.3  # standard deviations
WIDER = 0.2  # of a standard deviation
ERRORS = 2  # Monte Carlo standard errors that a verdict allows for
DISAGREE = 1.01  # R-hat


def compare_draws(coarse: xr.Dataset, fine: xr.Dataset) -> tuple[pd.DataFrame, float]:
    """Return the table, and the largest R-hat of all."""
    one, other = (_moments(draws) for draws in (coarse, fine))
    ratio = other["sd"] / one["sd"]
    table = pd.DataFrame(
        {
            "mean": one["mean"],
            "sd": one["sd"],
            "finer_mean": other["mean"],
            "finer_sd": other["sd"],
            "moved": (other["mean"] - one["mean"]) / other["sd"],
            "moved_error": np.hypot(one["mean_error"], other["mean_error"]) / other["sd"],
            "sd_ratio": ratio,
            "ratio_error": ratio
            * np.hypot(one["sd_error"] / one["sd"], other["sd_error"] / other["sd"]),
        }
    )
    return table, float(max(one["r_hat"].max(), other["r_hat"].max()))


def _moments(draws: xr.Dataset) -> pd.DataFrame:
    columns = {
        "mean": draws.mean(),
        "sd": draws.std(ddof=1),
        "mean_error": az.mcse(draws, method="mean"),
        "sd_error": az.mcse(draws, method="sd"),
        "r_hat": az.rhat(draws),
    }
    return pd.DataFrame({name: column.to_pandas() for name, column in columns.items()})


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
