"""Does ``gm.sample`` mix in the matched posterior?  ``python -m benchmarks.mixing``.

Four problems on which NUTS alone does not, or not always: FitzHugh-Nagumo with much noise, with
41 points (Cho et al., AAAI 2026) and with 10 points, and protein transduction with much noise.
R-hat and effective draws of theta, of four chains of 1 000 draws, CPU seconds from the data on,
and of how many sets the draws follow the ODE because chains of NUTS had not mixed.

One file per data set, so that an interrupted run goes on where it stopped; ``--table`` prints
only, ``--quick`` fits one data set of the cheapest and keeps nothing.
"""

import argparse
import warnings
from functools import partial
from pathlib import Path
from time import process_time

import arviz as az
import pandas as pd
import xarray as xr

import pymc_gradmatch as gm
from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.accuracy.fit import refined
from benchmarks.cases import ACCURACY, PAPER, named

NAMES = ["FHN SNR 10", "FHN MAGI", "FHN SNR 100, 10 points", "PT high"]
INDEX = ["case", "replicate"]
RHAT, EFFECTIVE = 1.01, 400


def mixing(draws: xr.Dataset) -> dict[str, float]:
    """Return the worst R-hat and number of effective draws."""
    return {
        "rhat": float(az.rhat(draws).to_array().max()),
        "ess": float(az.ess(draws).to_array().min()),
    }


def fit(key: tuple[str, int]) -> dict[str, float | str]:
    """Sample a data set's refined model."""
    name, replicate = key
    case = named([*ACCURACY, *PAPER], name)
    data = case.simulate(replicate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = process_time()
        model = refined(case, data)
        built = process_time()
        idata = gm.sample(model=model, random_seed=replicate, cores=1, progressbar=False)
        sampled = process_time()
    posterior = idata["posterior"].dataset
    return {
        **mixing(posterior[list(case.theta)]),
        "follows": float("sampler" in posterior.attrs),
        "coordinates": float(posterior["x"].isel(chain=0, draw=0).size),
        "build_seconds": built - start,
        "sample_seconds": sampled - built,
        "sampler": posterior.attrs.get("sampler", "NUTS"),
    }


def mixes(rows: pd.DataFrame) -> pd.Series:
    """Tell which sets' chains mix."""
    return (rows["rhat"] < RHAT) & (rows["ess"] >= EFFECTIVE)


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the share of sets that mix, and medians, by case."""
    groups = rows.groupby(level="case", sort=False)
    table = groups[["rhat", "ess", "coordinates"]].median()
    share = mixes(rows).groupby(level="case").mean()
    table.insert(0, f"R-hat < {RHAT}, {EFFECTIVE} effective draws", share)
    table["follows the ODE"] = groups["follows"].mean()
    table["CPU s"] = (rows["build_seconds"] + rows["sample_seconds"]).groupby(level="case").median()
    table.insert(0, "sets", groups.size())
    return table


def main(arguments: list[str] | None = None):
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "mixing", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "mixing.csv", help="all rows")
    parser.add_argument("--replicates", type=int, default=20, help="data sets of each case")
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="one data set of one case")
    options = parser.parse_args(arguments)
    if options.quick:
        options.cases, options.replicates = ["PT high"], 1
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    keys = runner.keys_of(options.cases, replicates=range(options.replicates), ends=(5, 20))
    every = runner.keys_of(NAMES, replicates=range(1_000), ends=())
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON, known=known)
        if not options.table:
            runner.run(keys, fit, saved, report=lambda key, row: print(*key, row))
        rows = saved.table(every, partial(runner.table_of, index=INDEX)).sort_index()
    if options.quick:
        none_failed(rows[~mixes(rows)])
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(table_of(rows))


if __name__ == "__main__":
    main()
