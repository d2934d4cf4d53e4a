"""The tables: what every method achieved, beside the paper and its reference code."""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

__all__ = ["agreement", "every_fit", "print_tables", "reductions", "summary"]

PAPER_REDUCTION = {
    ("LV low", "agm"): 0.35,
    ("LV high", "agm"): 0.62,
    ("PT low", "agm"): 0.50,
    ("PT high", "agm"): 0.43,
    ("LV low", "mvgm"): 0.13,
    ("LV high", "mvgm"): 0.31,
}
"""Table 1 of Wenk et al. (2019)."""
REFERENCE_RMSE = {
    "LV low": 0.062,
    "LV high": 0.296,
    "PT low": 0.0101,
    "PT high": 0.0213,
    "FHN SNR 10, 20 points": 0.43,
    "FHN SNR 100, 25 points": 0.062,
}
"""Medians of the reference code at full length, from the true x0."""
REFERENCE_SETS = 8
"""About how many data sets each of these is of: 6 to 12."""
ENOUGH = 100  # effective draws, below which a Metropolis chain has not converged
AGREE = 3.5  # Monte Carlo standard errors; the most of a few parameters in many data sets
MIXED = 1.01  # R-hat of the NUTS chains


def summary(study: xr.Dataset) -> pd.DataFrame:
    """Summarise every case and method: errors, coverage, mixing, CPU seconds.

    RMSE is over times and states, of the trajectory integrated from the
    posterior mean of theta, from the true and from the inferred x0.
    """
    rows = {}
    for case in study["case"].to_numpy():
        for method in study["method"].to_numpy():
            fits = study.sel({"case": case, "method": method})
            fits = fits.isel(replicate=fits["fitted"].to_numpy().astype(bool))
            if fits.sizes["replicate"]:
                rows[case, method] = _summary(fits)
    return _table(rows, "case", "method")


def _table(rows: dict, *index: str) -> pd.DataFrame:
    table = pd.DataFrame(rows).T
    return table.rename_axis(list(index)) if rows else table


def _summary(fits: xr.Dataset) -> dict[str, float]:
    truth = fits["true_theta"]
    low, high = (fits["quantiles"].sel(quantile=edge) for edge in (0.025, 0.975))
    inside = ((low <= truth) & (truth <= high)).where(truth.notnull() & low.notnull())
    row = {"sets": fits.sizes["replicate"], "failures": int((fits["failure"] != "").sum())}
    for start in ("true", "inferred"):
        errors = fits["rmse_overall"].sel(start=start)
        row |= {
            f"rmse {start} x0": _quantile(errors, 0.5),
            f"q25 {start}": _quantile(errors, 0.25),
            f"q75 {start}": _quantile(errors, 0.75),
        }
    return row | {
        "coverage": float(inside.mean()),
        "ess": _quantile(fits["ess"].min("param"), 0.5),
        "rhat": _quantile(fits["rhat"].max("param"), 0.5),
        "CPU s": _quantile(fits["cpu_seconds"], 0.5),
        "CPU s sampling": _quantile(fits["sampling_seconds"], 0.5),
        "CPU h total": float(fits["cpu_seconds"].sum()) / 3600,
    }


def _quantile(values: xr.DataArray, probability: float) -> float:
    known = values.to_numpy()[values.notnull().to_numpy()]
    # An order statistic: interpolation would turn an infinite error into NaN.
    return float(np.quantile(known, probability, method="nearest")) if known.size else np.nan


def reductions(study: xr.Dataset) -> pd.DataFrame:
    """Return by how much FGPGM lowers the state RMSE against each rival.

    From the true x0.  ``of medians``: for every state one minus the ratio of
    the two medians over data sets, then the mean over states, which is our
    reading of the paper's Table 1.  ``paired``: the median over data sets and
    states of one minus the ratio on the same data.
    """
    rows = {}
    for case in study["case"].to_numpy():
        for rival in study["method"].to_numpy():
            both = _both(study, case, "fgpgm", rival)
            if rival == "fgpgm" or both is None:
                continue
            ours, theirs = (
                both["rmse"].sel({"start": "true", "method": m}) for m in ("fgpgm", rival)
            )
            with np.errstate(invalid="ignore"):
                paired = 1 - ours / theirs
                medians = 1 - _medians(ours) / _medians(theirs)
            rows[case, rival] = {
                "sets": both.sizes["replicate"],
                "of medians": float(medians.mean()),
                "paired": _quantile(paired, 0.5),
                "paper": PAPER_REDUCTION.get((case, rival), np.nan),
            }
    return _table(rows, "case", "FGPGM against")


def _medians(errors: xr.DataArray) -> xr.DataArray:
    return errors.dropna("state", how="all").median("replicate")


def _both(study: xr.Dataset, case: str, one: str, other: str) -> xr.Dataset | None:
    """Return the data sets of a case that two methods have fitted."""
    if not {one, other} <= set(study["method"].to_numpy()):
        return None
    fits = study.sel(case=case)
    known = fits["fitted"].astype(bool) & (fits["failure"] == "")
    shared = (known.sel({"method": one}) & known.sel({"method": other})).to_numpy()
    return fits.isel(replicate=shared) if shared.any() else None


def against_reference(study: xr.Dataset) -> pd.DataFrame:
    """Return the medians of FGPGM beside those of its reference code.

    ``error`` is the standard error of our median, by the bootstrap over data
    sets.  NUTS on the same density stands beside it, for chains that mix badly.
    ``chance`` is for the error of the reference's median: the share of medians
    of 8 data sets, drawn from ours, that are at least as far from our median.
    """
    errors = study["rmse_overall"].sel(start="true")
    rows = {}
    for case in [case for case in REFERENCE_RMSE if case in study["case"]]:
        rows[case] = {"reference": REFERENCE_RMSE[case]}
        for method in [method for method in ("fgpgm", "nuts") if method in study["method"]]:
            known = errors.sel({"case": case, "method": method}).dropna("replicate").to_numpy()
            if known.size:
                median = np.median(known)
                away = abs(np.log(REFERENCE_RMSE[case] / median))
                few = _bootstrap_medians(known, REFERENCE_SETS)
                rows[case] |= {
                    f"{method} sets": known.size,
                    method: median,
                    f"{method} error": _spread(_bootstrap_medians(known, known.size)),
                    f"{method} ratio": median / REFERENCE_RMSE[case],
                    f"{method} chance": (abs(np.log(few / median)) >= away).mean(),
                }
    return _table(rows, "case")


def _bootstrap_medians(values: np.ndarray, n_sets: int) -> np.ndarray:
    drawn = np.random.default_rng(1).choice(values, (10_000, n_sets))
    return np.median(drawn, axis=1)


def _spread(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # of errors that are infinite
        return float(values.std())


def agreement(study: xr.Dataset) -> pd.DataFrame:
    """Compare posterior means of Metropolis and NUTS on the same data and density.

    Distances are in Monte Carlo standard errors of both.  They mean something
    where both have converged: at least 100 effective draws of every parameter
    by Metropolis, R-hat below 1.01 by NUTS.
    """
    rows = {}
    for case in study["case"].to_numpy():
        both = _both(study, case, "fgpgm", "nuts")
        if both is None:
            continue
        chain, nuts = (both.sel({"method": method}) for method in ("fgpgm", "nuts"))
        converged = (chain["ess"].min("param") >= ENOUGH) & (nuts["rhat"].max("param") < MIXED)
        distance = abs(chain["mean"] - nuts["mean"])
        z = (distance / np.hypot(chain["mcse"], nuts["mcse"])).where(converged)
        farthest = z.max("param").dropna("replicate")
        apart = (distance / nuts["sd"]).max("param")
        rows[case] = {
            "sets": both.sizes["replicate"],
            "converged": int(converged.sum()),
            "agree": float((farthest < AGREE).mean()) if farthest.size else np.nan,
            "median z": _quantile(z, 0.5),
            "largest z": _quantile(farthest, 1.0),
            "largest distance (sd)": _quantile(apart.where(converged), 1.0),
            "the same, not converged": _quantile(apart.where(~converged), 1.0),
            "median Metropolis ess": _quantile(chain["ess"].min("param"), 0.5),
        }
    return _table(rows, "case")


def costs(study: xr.Dataset) -> pd.DataFrame:
    """Return the CPU hours of every method, and what 100 data sets of each of its cases take."""
    seconds = study["cpu_seconds"]
    cases = seconds.mean("replicate")
    columns = {
        "fits": seconds.count(["case", "replicate"]),
        "cases": cases.count("case"),
        "CPU h": seconds.sum(["case", "replicate"]) / 3600,
        "CPU h, 100 sets of each case": 100 * cases.sum("case") / 3600,
    }
    return pd.DataFrame({name: column.to_series() for name, column in columns.items()})


def failures(study: xr.Dataset) -> pd.Series:
    """Return the reasons of fits that failed, and how often each occurred."""
    reasons = study["failure"].to_series()
    counted = reasons[reasons != ""].groupby(["case", "method"]).value_counts()
    return counted.rename("fits")


def every_fit(study: xr.Dataset) -> pd.DataFrame:
    """Return one row per fit: its seed, errors, least effective draws and CPU seconds."""
    columns = {
        "method_seed": study["method_seed"],
        "rmse_true_x0": study["rmse_overall"].sel(start="true", drop=True),
        "rmse_inferred_x0": study["rmse_overall"].sel(start="inferred", drop=True),
        "ess": study["ess"].min("param"),
        "rhat": study["rhat"].max("param"),
        "cpu_seconds": study["cpu_seconds"],
        "note": study["note"],
        "failure": study["failure"],
    }
    table = xr.Dataset(columns).to_dataframe(dim_order=["case", "method", "replicate"])
    table = table[study["fitted"].to_series().reorder_levels(table.index.names)[table.index] == 1]
    return table.astype({"method_seed": "int64"})


def print_tables(study: xr.Dataset, out: Path) -> None:
    """Print all tables and save each as CSV, with one of all fits."""
    every_fit(study).to_csv(out / "fits.csv", float_format="%.5g")
    tables = {
        "summary": ("Every case and method", summary(study)),
        "table1": ("Reduction of the state RMSE by FGPGM (the paper's Table 1)", reductions(study)),
        "reference": ("FGPGM beside its reference code", against_reference(study)),
        "agreement": ("Metropolis and NUTS on the same density", agreement(study)),
        "costs": ("CPU time of every method", costs(study)),
        "failures": ("Fits that failed", failures(study).to_frame()),
    }
    for name, (title, table) in tables.items():
        if len(table):
            print(f"\n{title}\n{table.to_string(float_format='{:.3g}'.format)}")
            table.to_csv(out / f"{name}.csv", float_format="%.5g")
