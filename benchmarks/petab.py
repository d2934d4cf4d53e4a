"""Published problems in PEtab format: ``python -m benchmarks.petab FOLDER``.

FOLDER is a copy of the collection's ``Benchmark-Models`` (github:Benchmarking-Initiative/\
Benchmark-Models-PEtab), ``--suite`` a copy of the PEtab test suite's ``cases/v1.0.0/sbml``
(github:PEtab-dev/petab_test_suite); neither is part of this repository.

The table of the collection says of each problem whether it loads, or why not; the log likelihood
at its nominal parameters beside the collection's, how far its solutions are from the simulations
that come with it, and CPU seconds, compilation included.
That of the fits has the highest log likelihood that one call, ``problem.fit()``, found (that of
``fit.mode``, or of a draw), how many climbs ended at the highest mode, the verdict, and what
scipy's ``least_squares`` found from uniform draws between the same bounds in as many CPU seconds.
Both are stopped after ``--limit`` CPU seconds; no fit is told the nominal parameters.

One file per problem, so that an interrupted run goes on where it stopped.  ``--table`` prints the
saved tables only, ``--quick`` reads the problem of the tests.
"""

import argparse
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import pandas as pd
import pytensor.tensor as pt
import yaml
from numpy.typing import NDArray
from petab.v1.calculate import calculate_llh
from scipy.optimize import least_squares

import pymc_gradmatch as gm
from benchmarks import RESULTS, RUNS, none_failed, runner, show
from pymc_gradmatch._pymc import in_numpy
from pymc_gradmatch.petab import Problem

QUICK = Path(__file__).parents[1] / "tests" / "petab" / "conversion" / "problem.yaml"
BEST = {  # the highest known, where the nominal parameters are not it
    "Perelson_Science1996": -222.28,
    "Okuonghae_ChaosSolitonsFractals2020": -374.53,
    "Zhao_QuantBiol2020": -501.3,
}
KNOWN = {  # the log likelihood at nominal parameters, as the tests of AMICI have it
    "Bachmann_MSB2011": 418.405733, "Beer_MolBioSystems2014": 58622.914563,
    "Boehm_JProteomeRes2014": -138.221997, "Borghans_BiophysChem1997": 83.323719,
    "Brannmark_JBC2010": -141.889114, "Bruno_JExpBot2016": 46.688177,
    "Chen_MSB2009": -115700.119263, "Crauste_CellSystems2017": -190.965219,
    "Elowitz_Nature2000": 63.202800, "Fiedler_BMCSystBiol2016": 58.583902,
    "Fujita_SciSignal2010": 53.083777, "Isensee_JCB2018": -3949.375967,
    "Lucarelli_CellSystems2018": -1681.605988, "Schwen_PONE2014": -943.999299,
    "Sneyd_PNAS2002": 319.791778, "Smith_BMCSystBiol2013": -888198.436541,
    "Weber_BMC2015": -296.201792, "Zheng_PNAS2012": 278.333533,
}  # fmt: skip
SMALL = 25  # estimated parameters of the problems that are fitted
CHI2 = 1.92  # half the 95 % quantile of chi squared
NEAR = 0.1  # log likelihood, within which climbs of scipy end at the same optimum
LOWEST = 50.0  # minus the log of noise, which none is as small as
SCALES = {"lin": lambda y: y, "log": pt.log, "log10": pt.log10}  # of residuals
SEED = 1

type Row = dict[str, float | str]


def yaml_of(folder: Path) -> Path:
    """Return the file that names the others of a problem."""
    named = folder / f"{folder.name}.yaml"
    return named if named.exists() else sorted(folder.glob("*.yaml"))[0]


def loaded(folder: Path, key: tuple[str], keep) -> Row:
    """Read a problem and compare it with the simulations that come with it."""
    keep({})
    [name], start = key, process_time()
    here = folder / name
    try:
        problem = gm.petab.load(yaml_of(here))
    except NotImplementedError as error:
        return {"refused": str(error).replace(f"{here}/", "")[:200]}
    row: Row = {
        "states": len(problem.ode.states),
        "parameters": len(problem.ode.params),
        "experiments": len(problem.experiments),
        "data": len(problem.source.measurement_df),
    }
    keep(row)
    row |= {"nominal": problem.log_likelihood(problem.nominal), "known": KNOWN.get(name, np.nan)}
    row |= {"seconds": process_time() - start}
    keep(row)
    ours, theirs = compared(problem, here)
    return row | {"from their simulations": theirs, "differ by": ours}


def compared(problem: Problem, folder: Path) -> tuple[float, float]:
    """Return by how much of their range simulations differ, and the likelihood of theirs."""
    files = sorted(folder.glob("simulatedData*.tsv"))
    if len(files) != 1:
        return np.nan, np.nan
    theirs = pd.read_csv(files[0], sep="\t")
    ours = problem.simulate(problem.nominal)
    if len(theirs) != len(ours) or "simulation" not in theirs:
        return np.nan, np.nan
    keys = [k for k in ("observableId", "simulationConditionId", "time") if k in theirs]
    if not (theirs[keys].to_numpy() == ours[keys].to_numpy()).all():
        return np.nan, np.nan
    away = np.abs(ours["simulation"].to_numpy() - theirs["simulation"].to_numpy())
    sizes = theirs["simulation"].abs().groupby(theirs["observableId"]).transform("max").to_numpy()
    with np.errstate(invalid="ignore"):
        differ = np.nanmax(away / sizes)
    tables = (problem.source.observable_df, problem.source.parameter_df)
    try:
        of_theirs = calculate_llh(problem.source.measurement_df, theirs, *tables)
    except (IndexError, KeyError, ValueError):  # it reads no empty noise parameters
        of_theirs = np.nan
    return float(differ), float(of_theirs)


def fitted(folder: Path, key: tuple[str], keep, *, limit: int) -> Row:
    """Fit a problem by one call and by scipy, within as many CPU seconds each."""
    keep({})
    problem = gm.petab.load(yaml_of(folder / key[0]))
    best = max(problem.log_likelihood(problem.nominal), BEST.get(key[0], -np.inf))
    row: Row = {"parameters": len(problem.ode.params), "best known": best}
    keep(row)
    start = process_time()
    try:
        with warnings.catch_warnings(), interrupted(limit):
            warnings.simplefilter("ignore")
            fit = problem.fit(random_seed=SEED, progressbar=False)
        row |= best_of(problem, fit, limit)
    except KeyboardInterrupt:
        row |= {"verdict": f"nothing to climb from in {limit} CPU s", "is_exact": 0.0}
    except Exception as error:
        row |= {"verdict": f"{type(error).__name__}: {error}"[:300], "is_exact": 0.0}
    seconds = process_time() - start
    row |= {"seconds": seconds}
    keep(row)
    return row | multistart(problem, min(seconds, limit))


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Press Ctrl-C after some CPU seconds, of all threads together."""

    def press(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, press)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def best_of(problem: Problem, fit: gm.Fit, limit: float) -> Row:
    """Return what a fit found: its mode, or the best of what it was climbed to from."""
    modes = [problem.log_likelihood(problem.natural(one)) for _, one in fit.modes.iterrows()]
    at_mode = -np.inf
    with suppress(KeyboardInterrupt), interrupted(limit / 4):  # climbs to it may be long
        at_mode = problem.log_likelihood(problem.natural(fit.mode))
    said = fit.diagnostics
    return {
        "gm.fit": max(at_mode, best_draw(fit), *modes),
        "climbs": said.n_climbs,
        "at the best": int(said.modes["reached"].iloc[int(np.argmax(modes))]),
        "is_exact": float(fit.is_exact),
        "k": fit.pareto_k,
        "r_hat": said.r_hat,
        "unidentified": " ".join(fit.unidentified.index.intersection(problem.ode.params)),
        "verdict": fit.verdict.split(". ")[0],
    }


def best_draw(found: gm.Fit) -> float:
    """Return the highest log likelihood of a fit's draws."""
    every = found.idata["log_likelihood"].dataset
    of_draws = sum(
        values.sum([dim for dim in values.dims if dim not in ("chain", "draw")])
        for values in every.values()
    )
    return float(of_draws.max())


def multistart(problem: Problem, seconds: float) -> Row:
    """Climb by least squares from uniform draws between the bounds, for some CPU seconds.

    Jacobians are differences, as scipy makes them.
    """
    rng, end = np.random.default_rng(SEED), process_time() + seconds
    low, high = np.transpose([one.bounds for one in problem.definition.parameters.values()])
    residuals = residuals_of(problem)
    point, least, ends = (low + high) / 2, np.inf, []

    def timed(scaled):
        nonlocal point, least
        if process_time() > end:
            raise TimeoutError
        with np.errstate(all="ignore"):
            found = residuals(scaled)
            cost = np.square(found).sum() / 2
        if cost < least:
            point, least = scaled.copy(), cost
        return found

    while process_time() < end:
        try:
            ends.append(least_squares(timed, rng.uniform(low, high), bounds=(low, high)).cost)
        except TimeoutError:
            break
        except (ValueError, np.linalg.LinAlgError):  # solutions end, or have no derivatives
            ends.append(np.inf)
    at_best = dict(zip(problem.ode.params, point, strict=True))
    return {
        "scipy": problem.log_likelihood(problem.natural(at_best)),
        "scipy starts": len(ends),
        "scipy at the best": int(sum(cost < least + NEAR for cost in ends)),
    }


def residuals_of(problem: Problem) -> Callable[[NDArray], NDArray]:
    """Return residuals: half of their squares is minus the log likelihood, but for a constant.

    Those of the data, over their standard deviation s, and roots of 2 log(s) + a constant.
    """
    theta = [pt.scalar(name, dtype="float64") for name in problem.ode.params]
    parts = []
    for one in problem.simulations:
        _, given = problem.ode.by_name(pt.zeros((1, len(problem.ode.states))), theta)
        x0 = [*one.starts(given).values()]
        x = problem.ode.solve(one.t, x0, theta, inputs=one.inputs or None)
        states, _ = problem.ode.by_name(x, theta)
        for rows, mean, noise in one.predictions(states, given):
            said = problem.definition.observables[rows["observableId"].iloc[0]]
            if said["distribution"] != "normal":
                msg = f"the noise is {said['distribution']}; expected a normal one."
                raise NotImplementedError(msg)
            scale = SCALES[said["transformation"]]
            away = (scale(rows["measurement"].to_numpy(float)) - scale(mean)) / noise
            parts += [away, pt.sqrt(2 * (pt.log(noise) + LOWEST))]
    evaluate = in_numpy(theta, [pt.concatenate(parts)])
    return lambda scaled: evaluate(*scaled)[0]


def suite(folder: Path) -> pd.DataFrame:
    """Return the log likelihood and the simulations of each case of the test suite, and theirs."""
    rows = {}
    for case in sorted(path for path in folder.iterdir() if path.is_dir()):
        problem = gm.petab.load(case / f"_{case.name}.yaml")
        told = yaml.safe_load((case / f"_{case.name}_solution.yaml").read_text("utf-8"))
        theirs = pd.read_csv(case / "_simulations.tsv", sep="\t")["simulation"].to_numpy()
        ours = problem.simulate(problem.nominal)["simulation"].to_numpy()
        row = {
            "log likelihood": problem.log_likelihood(problem.nominal),
            "theirs": told["llh"],
            "simulations differ by": np.abs(ours - theirs).max(),
        }
        is_right = (
            abs(row["log likelihood"] - row["theirs"]) < told["tol_llh"]
            and row["simulations differ by"] < told["tol_simulations"]
        )
        rows[case.name] = row | {"is_right": is_right}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("case")


def not_read(known: Row, seconds: int, exit_code: int | None) -> Row:
    """Return the row of a problem that was not read in time."""
    return {"refused": f"no log likelihood in {seconds} CPU s ({exit_code})", **known}


def given_up(known: Row, seconds: int, exit_code: int | None) -> Row:
    """Return the row of a fit that ended without an answer."""
    return {"is_exact": 0.0, "verdict": f"no answer in {seconds} CPU s ({exit_code})", **known}


def main(arguments: list[str] | None = None):
    """Read, compare, fit, and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get("PETAB_COLLECTION"))
    parser.add_argument("--suite", type=Path, help="check the test suite in this folder")
    parser.add_argument("--problems", nargs="+", help="those to read and fit, if not all small")
    parser.add_argument("--largest", type=int, default=SMALL, help="parameters of what is fitted")
    parser.add_argument("--limit", type=int, default=120, help="CPU s of a fit, of scipy's")
    parser.add_argument("--reading", type=int, default=600, help="CPU s of reading a problem")
    parser.add_argument("--no-fits", action="store_true", help="read and compare only")
    parser.add_argument("--no-reading", action="store_true", help="fit only")
    parser.add_argument("--out", type=Path, default=RUNS / "petab", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "petab", help="folder of the tables")
    parser.add_argument("--table", action="store_true", help="the saved tables only")
    parser.add_argument("--quick", action="store_true", help="the problem of the tests only")
    options = parser.parse_args(arguments)
    if options.quick:
        problem = gm.petab.load(QUICK)
        fit = problem.fit(n_draws=1_000, random_seed=SEED, progressbar=False)
        show(fit.table)
        none_failed(fit.table[[not fit.is_exact] * len(fit.table)])
        return
    if options.table:
        for name in ("collection", "fits"):
            show(pd.read_csv(options.csv / f"{name}.csv", index_col="problem"))
        return
    if options.suite:
        cases = suite(options.suite)
        show(cases)
        none_failed(cases[~cases["is_right"].astype(bool)])
        if options.folder is None:
            return
    folder = Path(options.folder or parser.error("expected the folder of the collection"))
    names = options.problems or sorted(one.name for one in folder.iterdir() if one.is_dir())
    if not options.no_reading:
        keys = [(name,) for name in names]
        saved = runner.Saved(options.out / "read", runner.JSON)
        runner.run(
            keys,
            partial(loaded, folder),
            saved,
            workers=runner.in_processes(options.reading, not_read),
            report=lambda key, row: print(*key, row.get("nominal"), flush=True),
        )
        table = saved.table(keys, partial(runner.table_of, index=["problem"]))
        show(table, options.csv / "collection.csv", "%.8g")
    if options.no_fits:
        return
    read = pd.read_csv(options.csv / "collection.csv", index_col="problem")
    small = read[read["parameters"] <= options.largest].sort_values("parameters").index
    keys = [(name,) for name in options.problems or small]
    saved = runner.Saved(options.out / "fits", runner.JSON)
    runner.run(
        keys,
        partial(fitted, folder, limit=options.limit),
        saved,
        workers=runner.in_processes(4 * options.limit, given_up),
        report=lambda key, row: print(*key, row.get("gm.fit"), row["verdict"][:80], flush=True),
    )
    show(
        saved.table(keys, partial(runner.table_of, index=["problem"])),
        options.csv / "fits.csv",
        "%.6g",
    )


if __name__ == "__main__":
    main()
