"""A data set fitted by ``gm.fit``, and what a study keeps of it, an error in words too."""

import warnings
from time import process_time

import pandas as pd

import pymc_gradmatch as gm

__all__ = ["Row", "fitted", "unsealed"]

type Row = dict[str, float | str]


def fitted(ode: gm.ODE, t, y, **arguments) -> tuple[gm.Fit | None, Row]:
    """Return a fit, none where it failed, and the row with its verdict and CPU seconds."""
    start, found = process_time(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gm.fit(ode, t, y, progressbar=False, **arguments)
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"[:300]
    else:
        verdict = found.verdict
    row: Row = {
        "is_exact": float(found is not None and found.is_exact),
        "seconds": process_time() - start,
        "verdict": verdict,
    }
    return found, row


def unsealed(rows: pd.DataFrame) -> pd.Series:
    """Return what is said of fits without a seal, those that failed among them."""
    return rows.loc[rows["is_exact"] != 1, "verdict"]
