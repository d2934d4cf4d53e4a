"""Simulation-based calibration of ``gm.fit``: ``python -m benchmarks.calibration``.

Truths are drawn from the prior and data from the truths; then the share of the posterior
below each truth is uniform if the posterior is exact (Talts, S. et al., 2018, Validating
Bayesian inference algorithms with simulation-based calibration).  Its distribution function
is held to the simultaneous band of ArviZ, among the fits that are sealed; those that are not
are counted by what they say.

One file per data set, so that an interrupted run goes on where it stopped; ``--table`` prints
only, ``--quick`` fits three data sets of one system and keeps nothing.
"""

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from arviz_stats.ecdf_utils import ecdf_pit
from scipy.stats import kstest

from benchmarks import RESULTS, RUNS, none_failed, one_call, runner, show
from benchmarks.cases import CALIBRATION, named

NAMES = [generator.name for generator in CALIBRATION]
INDEX = ["system", "replicate"]
MOST = 10_000  # data sets of a system
SIMULATIONS = 1_000  # of ArviZ, for the band
BAND = 0.95


def fit(key: tuple[str, int]) -> one_call.Row:
    """Fit a data set; returns the share of its posterior below each truth, and its verdict."""
    name, replicate = key
    generator = named(CALIBRATION, name)
    drawn = generator.draw(replicate)
    # Not a seed of any data: the stream that drew the truth would also draw what looks for it.
    found, row = one_call.fitted(
        generator.ode, generator.t, drawn.y, random_seed=MOST + replicate, **generator.arguments()
    )
    if found is None:
        return row
    posterior = found.idata["posterior"].dataset
    below = {}
    for label, value in drawn.truth.items():
        name, _, state = label.rstrip("]").partition("[")
        draws = posterior[name].sel(state=state) if state else posterior[name]
        below[f"below {label}"] = float((draws < value).mean())
    return below | row | {"k": found.pareto_k, "n_effective": found.n_effective}


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return how far the shares of sealed fits are from uniform, by system and unknown."""
    summaries = {}
    for name, fits in rows.groupby(level="system", sort=False):
        sealed = fits[fits["is_exact"] == 1]
        shared = {
            "sets": len(fits),
            "sealed": len(sealed) / len(fits),
            "CPU s": fits["seconds"].median(),
        }
        columns = [column for column in fits if column.startswith("below ")]
        for column in [c for c in columns if sealed[c].notna().any()]:
            values = sealed[column].to_numpy()
            _, ecdf, lower, upper = ecdf_pit(
                values, BAND, SIMULATIONS, rng=np.random.default_rng(0)
            )
            outside = np.maximum(lower - ecdf, ecdf - upper).max()
            summaries[name, column.removeprefix("below ")] = shared | {
                "inside the band": outside <= 0,
                "beyond it": max(outside, 0.0),
                "p (Kolmogorov-Smirnov)": kstest(values, "uniform").pvalue,
                "95 % intervals hold the truth": (np.abs(values - 0.5) < 0.475).mean(),
            }
    return pd.DataFrame(summaries).T.rename_axis(["system", "unknown"])


def reasons(rows: pd.DataFrame) -> pd.Series:
    """Count what fits without a seal say, up to the first number."""
    said = one_call.unsealed(rows).str.extract(r"^([^\d]*)", expand=False)
    return said.str.strip().groupby(level="system").value_counts()


def main(arguments: list[str] | None = None):
    """Run the study and print its tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "calibration", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "calibration.csv", help="all rows")
    parser.add_argument("--replicates", type=int, default=500, help="data sets of each system")
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--table", action="store_true", help="the tables only")
    parser.add_argument("--quick", action="store_true", help="three data sets of one system")
    options = parser.parse_args(arguments)
    if options.quick:
        options.systems, options.replicates = ["Michaelis-Menten"], 3
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    keys = runner.keys_of(options.systems, replicates=range(options.replicates), ends=(20, 100))
    every = runner.keys_of(NAMES, replicates=range(MOST), ends=())
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON, known=known)
        if not options.table:
            runner.run(keys, fit, saved, report=lambda key, row: print(*key, row["verdict"][:90]))
        rows = saved.table(every, partial(runner.table_of, index=INDEX)).sort_index()
    if options.quick:
        none_failed(one_call.unsealed(rows))
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(table_of(rows))
    print(reasons(rows).to_string())


if __name__ == "__main__":
    main()
