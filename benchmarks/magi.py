"""Lorenz-63 in the set-up of a published study of MAGI: ``python -m benchmarks.magi``.

Wu, S., Yang, S., Kou, S. C. (2025). Are statistical methods obsolete in the era of deep learning?
arXiv 2505.21723.  Of its set-up are sigma = 10, beta = 8 / 3, rho = 28 (chaos) and 23 (transient
chaos), x(0) = (5, 5, 5), ten times in a unit of time, T = 8, and noise of 5 and 15 % of the
range, largest less smallest value, of each state over time.  T = 12 is added.  Noise and x(0) are
unknown here; the parameters have log-normal priors with a median of 8, 20 and 2, each of them
1 wide, which are ours.

The table has the share of 95 % intervals that hold the truth, of each parameter and of all, among
the fits that ended; the share of passed verdicts; and CPU seconds.  MAGI's own intervals hold
sigma in as few as 0.17 of the sets.

One file per data set, so that an interrupted run goes on where it stopped; rows of ``--csv``
that were not asked for stay.  ``--table`` prints only, ``--quick`` fits the first four units of
time of one data set and keeps nothing.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import RESULTS, RUNS, none_failed, one_call, runner, show
from benchmarks.cases import BREADTH, Case, Prior, named

INDEX = ["rho", "noise", "T", "set"]
THETA = {"sigma": 10.0, "rho": 28.0, "beta": 8 / 3}
MEDIANS = {"sigma": 8.0, "rho": 20.0, "beta": 2.0}
START = {"x": 5.0, "y": 5.0, "z": 5.0}
PER_UNIT = 10
INTERVAL = [0.025, 0.975]
AWAY = 1_000  # from the seeds of data to those of fits
LIMIT = 300


def case_of(rho: float, noise: float, end: float) -> Case:
    """Return the case of a setting."""
    return Case(
        f"Lorenz-63, rho {rho:g}, {noise:.0%} of the range, T {end:g}",
        "Wu, Yang and Kou (2025), arXiv 2505.21723.",
        named(BREADTH, "Lorenz-63").ode,
        x0=START,
        theta=THETA | {"rho": rho},
        t=np.linspace(0, end, round(PER_UNIT * end) + 1),
        sigma_of=lambda x: noise * np.ptp(x, axis=0),
        prior={
            name: Prior("LogNormal", (float(np.log(median)), 1.0))
            for name, median in MEDIANS.items()
        },
    )


def fit(key: tuple[float, float, float, int], keep: Callable[[one_call.Row], None]) -> one_call.Row:
    """Fit a data set; nothing is known of the row before its end."""
    keep({})
    *setting, number = key
    case = case_of(*setting)
    given = case.arguments(case.simulate(number))
    found, row = one_call.fitted(
        given.pop("ode"), given.pop("t"), given.pop("y"), random_seed=AWAY + number, **given
    )
    if found is None:
        return row
    posterior = found.idata["posterior"].dataset
    for name, truth in case.theta.items():
        low, high = posterior[name].quantile(INTERVAL).to_numpy()
        row |= {f"{name} low": low, f"{name} high": high, f"{name} held": float(low < truth < high)}
    return row | {
        "k": found.pareto_k,
        "n_effective": found.n_effective,
        "solutions / 4 000": found.n_solutions / 4_000,
    }


def given_up(known: one_call.Row, seconds: int, exit_code: int | None) -> one_call.Row:
    """Return the row of a fit that ended without an answer."""
    verdict = f"no answer within {seconds} CPU s (exit code {exit_code})"
    return known | {"is_exact": 0.0, "seconds": float(seconds), "verdict": verdict}


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return coverage, the share of passed verdicts and costs, by setting."""
    held = [f"{name} held" for name in THETA]
    rows = rows.reindex(columns=[*rows.columns, *(c for c in held if c not in rows)])
    by_setting = rows.groupby(level=INDEX[:-1])
    table = by_setting[held].mean().rename(columns=lambda name: name.removesuffix(" held"))
    table["all"] = table.mean(axis=1)
    passed = rows[rows["is_exact"] == 1].groupby(level=INDEX[:-1])[held].mean()
    table["all, of passed"] = passed.mean(axis=1)
    return table.assign(
        sets=by_setting.size(),
        ended=by_setting[held[0]].count(),
        passed=by_setting["is_exact"].mean(),
        **{"CPU s": by_setting["seconds"].median()},
    )


def main(arguments: list[str] | None = None):
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "magi", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "magi.csv", help="all rows")
    parser.add_argument("--rho", type=float, nargs="+", default=[28.0, 23.0])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.05, 0.15])
    parser.add_argument("--end", type=float, nargs="+", default=[8.0, 12.0], help="T")
    parser.add_argument("--sets", type=int, default=20, help="data sets of each setting")
    parser.add_argument("--limit", type=int, default=LIMIT, help="CPU seconds of a fit")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="a short data set")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rho, options.noise, options.end, options.sets = [28.0], [0.05], [4.0], 1
    keys = runner.keys_of(
        options.rho, options.noise, options.end, replicates=range(options.sets), ends=(1, 5)
    )
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    with runner.kept_in(options.out, quick=options.quick) as out:
        # What the table knows is no reason not to fit: a run is of one state of the package.
        saved = runner.Saved(out, runner.JSON)
        if not options.table:
            runner.run(
                keys,
                fit,
                saved,
                workers=runner.in_processes(options.limit, given_up),
                report=lambda key, row: print(*key, row["verdict"][:90], flush=True),
            )
        rows = replace(saved, known=known).table(keys, partial(runner.table_of, index=INDEX))
        rows = rows.sort_index()
    if options.quick:
        none_failed(rows.loc[rows["seconds"] >= options.limit, "verdict"])
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(table_of(rows))


if __name__ == "__main__":
    main()
