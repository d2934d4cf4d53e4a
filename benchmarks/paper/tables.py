"""The tables: what every method achieved, beside the paper and its reference code."""

from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

from benchmarks.paper.reference import against_reference

__all__ = [
    "agreement",
    "costs",
    "every_fit",
    "failures",
    "reductions",
    "summary",
    "write_tables",
]

PAPER_REDUCTION = {
    ("LV low", "agm"): 0.35,
    ("LV high", "agm"): 0.62,
    ("PT low", "agm"): 0.50,
    ("PT high", "agm"): 0.43,
    ("LV low", "mvgm"): 0.13,
    ("LV high", "mvgm"): 0.31,
}
"""Table 1 of Wenk et al. (2019)."""
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
    row = {"sets": fits.sizes["replicate"], "failures": int((fits["failure"] != "").sum())}
    for start in ("true", "inferred"):
        errors = fits["rmse_overall"].sel(start=start)
        row |= {
            f"rmse {start} x0": _median(errors),
            f"q25 {start}": _quantile(errors, 0.25),
            f"q75 {start}": _quantile(errors, 0.75),
        }
    return row | {
        "coverage": float(_covered(fits).mean()),
        "ess": _median(fits["ess"].min("param")),
        "rhat": _median(fits["rhat"].max("param")),
        "CPU s": _median(fits["cpu_seconds"]),
        "CPU h total": float(fits["cpu_seconds"].sum()) / 3600,
    }


def _covered(fits: xr.Dataset) -> xr.DataArray:
    """Tell which true parameters lie in their central 95 % intervals."""
    truth = fits["true_theta"]
    low, high = (fits["quantiles"].sel(quantile=edge, drop=True) for edge in (0.025, 0.975))
    return ((low <= truth) & (truth <= high)).where(truth.notnull() & low.notnull())


def _median(values: xr.DataArray) -> float:
    known = _known(values)
    return float(np.median(known)) if known.size else np.nan


def _known(values: xr.DataArray) -> np.ndarray:
    return values.to_numpy()[values.notnull().to_numpy()]


def _quantile(values: xr.DataArray, probability: float) -> float:
    known = _known(values)
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
                "paired": _median(paired),
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
            "median z": _median(z),
            "largest z": _quantile(farthest, 1.0),
            "largest distance (sd)": _quantile(apart.where(converged), 1.0),
            "the same, not converged": _quantile(apart.where(~converged), 1.0),
            "median Metropolis ess": _median(chain["ess"].min("param")),
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
    """Return one row per fit: its seed, errors, coverage, mixing, CPU seconds and estimates."""
    means = study["mean"]
    columns = {
        "method_seed": study["method_seed"],
        "rmse_true_x0": study["rmse_overall"].sel(start="true", drop=True),
        "rmse_inferred_x0": study["rmse_overall"].sel(start="inferred", drop=True),
        "covered": _covered(study).mean("param"),
        "ess": study["ess"].min("param"),
        "rhat": study["rhat"].max("param"),
        "cpu_seconds": study["cpu_seconds"],
        "note": study["note"],
        "failure": study["failure"],
    }
    columns |= {f"mean {name}": means.sel(param=name, drop=True) for name in study["param"].values}
    table = xr.Dataset(columns).to_dataframe(dim_order=["case", "method", "replicate"])
    table = table[study["fitted"].to_series().reorder_levels(table.index.names)[table.index] == 1]
    return table.astype({"method_seed": "int64"})


def write_tables(study: xr.Dataset, out: Path) -> None:
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
        path = out / f"{name}.csv"
        path.unlink(missing_ok=True)
        if len(table):
            print(f"\n{title}\n{table.to_string(float_format='{:.3g}'.format)}")
            table.to_csv(path, float_format="%.5g")
