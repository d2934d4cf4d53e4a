"""FGPGM beside the measured figures of its reference code."""

import numpy as np
import pandas as pd
import xarray as xr

__all__ = ["against_reference"]

REFERENCE_RMSE = {
    ("LV low", "true"): (0.062, 0.054),
    ("LV low", "inferred"): (0.062, 0.042),
    ("LV high", "true"): (0.296, 0.192),
    ("LV high", "inferred"): (0.224, 0.164),
    ("PT low", "true"): (0.0101, 0.0005),
    ("PT low", "inferred"): (0.0101, 0.0004),
    ("PT high", "true"): (0.0213, 0.0034),
    ("PT high", "inferred"): (0.0204, 0.0037),
    ("FHN SNR 10, 20 points", "true"): (0.43, 0.16),
    ("FHN SNR 10, 20 points", "inferred"): (0.51, 0.13),
    ("FHN SNR 100, 25 points", "true"): (0.062, 0.037),
    ("FHN SNR 100, 25 points", "inferred"): (0.084, 0.032),
}
"""Medians of the reference code at full length, and of numerical integration on its data sets."""
REFERENCE_SETS = 8
"""About how many data sets each of these is of: 6 to 12."""


def against_reference(study: xr.Dataset) -> pd.DataFrame:
    """Return the medians of FGPGM beside those of its reference code.

    ``error`` is the standard error of our median, by the bootstrap over data
    sets.  NUTS on the same density stands beside it, for chains that mix badly.
    ``chance`` is for the error of the reference's median: the share of medians
    of 8 data sets, drawn from ours, that are at least as far from our median.
    Numerical integration is the control: it has neither kernel nor gamma to
    differ in, so that its ratio shows how far the data sets themselves differ.
    """
    ours = [method for method in ("fgpgm", "nuts", "exact") if method in study["method"]]
    rows = []
    for (case, start), (theirs, exact) in REFERENCE_RMSE.items():
        if case not in study["case"]:
            continue
        row = {"case": case, "x0": start, "reference": theirs, "reference exact": exact}
        errors = study["rmse_overall"].sel({"case": case, "start": start})
        for method in ours:
            known = errors.sel({"method": method}).dropna("replicate").to_numpy()
            if known.size:
                row |= _beside(method, known, exact if method == "exact" else theirs)
        rows.append(row)
    return pd.DataFrame(rows).set_index(["case", "x0"]) if rows else pd.DataFrame()


def _beside(method: str, errors: np.ndarray, theirs: float) -> dict[str, float]:
    median = np.median(errors)
    few = _bootstrap_medians(errors, REFERENCE_SETS)
    as_far = abs(np.log(few / median)) >= abs(np.log(theirs / median))
    return {
        f"{method} sets": errors.size,
        method: median,
        f"{method} error": _spread(_bootstrap_medians(errors, errors.size)),
        f"{method} ratio": median / theirs,
        f"{method} chance": as_far.mean(),
    }


def _bootstrap_medians(values: np.ndarray, n_sets: int) -> np.ndarray:
    drawn = np.random.default_rng(1).choice(values, (10_000, n_sets))
    return np.median(drawn, axis=1)


def _spread(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # of errors that are infinite
        return float(values.std())
