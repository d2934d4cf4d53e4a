"""Where ``gm.fit`` ends: ``python -m benchmarks.limits``.

Three axes are followed until the seal is gone or the CPU seconds are: the number of unknowns
(parameters, x(t0) and sigma together), stiffness, and noise.  Every data set is fitted in a
process of its own, one file each, so that an interrupted run goes on where it stopped; the
table goes to ``--csv`` and the figure to ``docs/limits.png``.  ``--table`` prints only,
``--quick`` fits the first data set of each axis and keeps nothing.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

import pymc_gradmatch as gm
from benchmarks import RESULTS, RUNS, none_failed, one_call, runner, show
from benchmarks.cases import ACCURACY, BREADTH, Case, named

INDEX = ["axis", "size", "replicate"]
FIGURE = Path(__file__).parents[1] / "docs" / "limits.png"
LABELS = {
    "unknowns": "number of unknowns",
    "stiffness": "$\\mu$ of Van der Pol's equation",
    "noise": "noise / sd of each state",
}
TICKS = {"unknowns": [3, 8, 13, 21, 41, 61], "stiffness": [1, 10, 100], "noise": [0.01, 0.1, 1]}


def with_unknowns(size: int) -> Case:
    """Return Lorenz-96 with so many unknowns; one state alone decays, and two are prey and hunter.

    A ring of n states has 2 n + 1 unknowns: F, the starts and the noise of each.
    """
    if size == 3:
        return named(BREADTH, "decay")
    if size == 8:
        return named(ACCURACY, "LV low")
    ten = named(BREADTH, "Lorenz-96")
    n = (size - 1) // 2
    names = [f"x{i + 1}" for i in range(n)]
    start = np.resize(list(ten.x0.values()), n)
    start[10:] += np.random.default_rng(1).normal(size=len(start[10:]))
    return replace(
        ten, ode=gm.ODE(ten.ode.rhs, names, ["F"]), x0=dict(zip(names, start, strict=True))
    )


def of_stiffness(size: float) -> Case:
    """Return Van der Pol's equation over two of its periods, which grow with mu."""
    case = named(BREADTH, "Van der Pol")
    period = (3 - 2 * np.log(2)) * size + 2 * np.pi / (1 + size)
    times = np.linspace(0, 2 * period, 41)
    prior = {"mu": case.prior["mu"]._replace(arguments=(5 * size,))}
    return replace(case, theta={"mu": float(size)}, t=times, prior=prior)


def of_noise(size: float) -> Case:
    """Return Lotka and Volterra's equations with noise of so many standard deviations."""
    return replace(named(ACCURACY, "LV low"), sigma_of=lambda x: size * x.std(axis=0))


AXES: dict[str, tuple[Callable[..., Case], list[float]]] = {
    "unknowns": (with_unknowns, [3, 8, 9, 13, 21, 31, 41, 61]),
    "stiffness": (of_stiffness, [1, 2, 5, 10, 20, 50, 100]),
    "noise": (of_noise, [0.01, 0.03, 0.1, 0.2, 0.5, 1.0]),
}
KEYS = [
    (axis, size, replicate)
    for replicate in (1, 2, 3)
    for axis, (_, sizes) in AXES.items()
    for size in sizes
]


def fit(key: tuple[str, float, int], keep: Callable[[one_call.Row], None]) -> one_call.Row:
    """Fit a data set; returns its verdict and what it cost."""
    keep({})
    axis, size, replicate = key
    case = AXES[axis][0](size)
    data = case.simulate(replicate)
    found, row = one_call.fitted(
        case.ode, data.t, data.y, priors=case.priors(), random_seed=replicate
    )
    if found is None:
        return row
    theta = found.idata["posterior"].dataset[list(case.theta)].to_array()
    axes = ["chain", "draw"]
    away = (theta.mean(axes) - case.truth) / theta.std(axes)
    return row | {
        "k": found.pareto_k,
        "effective share": found.n_effective / len(found.weights),
        "furthest from the truth": float(np.abs(away).max()),
    }


def given_up(row: one_call.Row, limit: int, exitcode: int | None) -> one_call.Row:
    """Return the row of a fit without an answer."""
    words = f"no answer within {limit} CPU s (exit code {exitcode})"
    return {"is_exact": 0.0, "seconds": float(limit), "verdict": words}


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return medians over data sets, by axis and size; the share of sealed ones."""
    groups = rows.groupby(level=["axis", "size"], sort=False)
    table = groups[["k", "effective share", "furthest from the truth", "seconds"]].median()
    table.insert(0, "sealed", groups["is_exact"].mean())
    return table.rename(columns={"seconds": "CPU s"})


def draw(rows: pd.DataFrame, path: Path):
    """Draw k, effective draws and CPU seconds along each axis; hollow points have no seal."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")
    measures = {"k": "Pareto k", "effective share": "effective draws\n/ draws", "seconds": "CPU s"}
    fig, panels = plt.subplots(3, 3, figsize=(9, 6.4), sharex="col", sharey="row", layout="tight")
    for column, (axis, label) in zip(panels.T, LABELS.items(), strict=True):
        of_axis = rows.loc[axis].reset_index()
        sealed = of_axis["is_exact"] == 1
        for panel, measure in zip(column, measures, strict=True):
            for is_sealed, face in ((True, "C0"), (False, "none")):
                chosen = of_axis[sealed == is_sealed]
                panel.plot(
                    chosen["size"], chosen[measure], "o", mfc=face, mec="C0",
                    label="sealed" if is_sealed else "not sealed",
                )  # fmt: skip
            panel.set_xscale("log")
            panel.set_xticks(TICKS[axis], TICKS[axis])
            panel.minorticks_off()
        column[0].axhline(0.7, color="gray", lw=1, ls="--", label="limit of k")
        column[2].set(yscale="log", xlabel=label)
        column[2].tick_params(axis="y", which="minor", left=True)
    for panel, name in zip(panels[:, 0], measures.values(), strict=True):
        panel.set_ylabel(name)
    panels[0, 0].legend(fontsize="small")
    fig.align_ylabels(panels[:, 0])
    panels[2, 1].get_xticklabels()[-1].set_ha("right")  # not into the neighbour's first number
    panels[2, 2].get_xticklabels()[0].set_ha("left")
    fig.savefig(path, dpi=120)


def main(arguments: list[str] | None = None):
    """Run the study, print its table and draw its figure."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "limits", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "limits.csv", help="all rows")
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a fit")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="the first data set of each axis")
    options = parser.parse_args(arguments)
    keys = KEYS
    if options.quick:
        keys = [(axis, sizes[0], 1) for axis, (_, sizes) in AXES.items()]
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON, known=known)
        if not options.table:
            runner.run(
                keys, fit, saved, workers=runner.in_processes(options.limit, given_up),
                report=lambda key, row: print(
                    *key, f"{row['seconds']:.0f} CPU s", row["verdict"][:90]
                ),
            )  # fmt: skip
        rows = saved.table(keys, partial(runner.table_of, index=INDEX)).sort_index()
    if options.quick:
        none_failed(one_call.unsealed(rows))
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
        draw(rows, FIGURE)
    show(table_of(rows))


if __name__ == "__main__":
    main()
