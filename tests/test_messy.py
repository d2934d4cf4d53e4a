"""The messy study: its cases, the two roads to one posterior, and its figures."""

import os
from functools import partial

import numpy as np
import pandas as pd
import pytest

import pymc_gradmatch as gm
from benchmarks import runner
from benchmarks.cases import MESSY, named
from benchmarks.messy import __main__ as study
from benchmarks.messy.__main__ import NAMES, ROADS, SETS, keys_of
from benchmarks.messy.figures import costs, published, references, starts, table_of
from benchmarks.messy.rows import free_starts, long_table
from pymc_gradmatch.exact import ExactPosterior

LV = named(MESSY, "LV, own times")
CASES = pytest.mark.parametrize("case", MESSY, ids=NAMES)


@CASES
def test_a_data_set_is_its_seed_and_its_solution_is_finite(case):
    assert np.isfinite(case.x).all()
    one, same, other = (case.simulate(seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other, equal_nan=True)
    assert one.shape == (len(case.t), len(case.instrument.columns))


def test_what_is_never_seen_and_what_is_lost_is_what_the_names_of_the_cases_say():
    lost = {case.name: np.isnan(case.simulate(0)).sum(axis=0) for case in MESSY}
    assert lost["LV, 40 % missing"].sum() == 16
    assert lost["lynx and hare, 30 % deleted"].sum() == 13
    assert list(lost["LV, own times"]) == [20, 20]
    hidden = {case.name: set(case.ode.states) - set(case.instrument.columns) for case in MESSY}
    assert hidden["Hes1, H hidden"] == {"H"}
    assert hidden["PT, S and RS hidden"] == {"S", "RS"}
    assert hidden["LV, predators hidden"] == {"predator"}


def points_near(case, rng, n=3):
    """Return theta, x(t0) and sigma near the truth."""
    noise = case.instrument.noise(case.instrument.spread(case.simulate(0)))
    free = [case.ode.states.index(name[3:-1]) for name in free_starts(case)]
    for _ in range(n):
        x0 = np.array(list(case.x0.values()))
        x0[free] *= np.exp(0.01 * rng.normal(size=len(free)))
        sigma = np.exp(0.3 * rng.normal(size=noise.size) - 2) if noise else np.zeros(0)
        yield case.truth * np.exp(0.01 * rng.normal(size=len(case.theta))), x0, sigma


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the most probable states")  # of the start, which is not used
@pytest.mark.jax("diffrax", "numpyro")
@CASES
def test_our_exact_log_density_is_the_rivals_up_to_a_constant(case):
    from benchmarks.messy.exact import data_of, target_of

    data = data_of(case, 0)
    settings = {"preset": "refined", "random_seed": 1, "progressbar": False}
    target = ExactPosterior(gm.build_model(case.ode, case.t, **case.arguments(data[0]), **settings))
    rival = target_of(case)
    ours, theirs = [], []
    for theta, x0, sigma in points_near(case, np.random.default_rng(1)):
        values = dict(zip(case.theta, theta, strict=True))
        if sigma.size:
            values["sigma"] = sigma.reshape(target.model["sigma"].shape.eval())
        ours.append(target(target.start_point(values, [x0])[None])[0])
        theirs.append(float(rival.log_density(rival.at(theta, x0, sigma), data)))
    assert np.ptp(theirs) > 0.1
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-3, atol=2e-3)


def row(case, shift=0.0, error=0.1, **whole):
    """Return a result with standard deviations of a tenth."""
    variables = {
        name: {"mean": true + shift, "sd": 0.1, "2.5 %": true + shift - 0.2, "97.5 %": true + 0.2}
        for name, true in case.theta.items()
    }
    rmse = dict.fromkeys(case.ode.states, error)
    return {"variables": variables, "rmse": rmse, **whole}


FIT = {"k": 0.5, "is_exact": 1.0, "n_effective": 2000.0, "cpu_seconds": 10.0}
EXACT = {"rhat": 1.0, "n_effective": 500.0, "cpu_seconds": 3.0, "compile_seconds": 7.0}


@pytest.fixture
def exact():
    rows = [((LV.name, replicate), row(LV, **EXACT)) for replicate in range(2)]
    return long_table(rows, ROADS["exact"])


def fits_of(*rows):
    return long_table(rows, ROADS["fit"])


def test_a_fit_that_is_the_exact_posterior_meets_every_aim(exact):
    fits = fits_of(*(((LV.name, r, 0), row(LV, **FIT)) for r in range(2)))
    figures = table_of(fits, exact)[LV.name]
    assert figures["RMSE / exact"] == pytest.approx(1)
    assert (figures[["coverage", "k < 0.7", "sealed", "theta within 0.3 sd"]] == 1).all()
    assert figures["moved (most)"] == pytest.approx(0, abs=1e-12)


def test_a_fit_that_is_off_or_fails_counts_against_the_shares(exact):
    failed = {"failure": "ValueError: no", "cpu_seconds": 1.0}
    off = row(LV, shift=0.25, error=0.2, **(FIT | {"k": 0.9}))
    figures = table_of(fits_of(((LV.name, 0, 0), off), ((LV.name, 1, 0), failed)), exact)[LV.name]
    assert figures["failures"] == 1
    assert figures["k < 0.7"] == 0
    assert figures["theta within 0.3 sd"] == 0
    assert figures["same mode"] == 0
    assert figures["coverage"] == 0
    assert figures["RMSE / exact"] == pytest.approx(2)
    assert figures["sealed and beyond"] == 1


def test_chains_that_disagree_are_no_reference(exact):
    apart = long_table([((LV.name, 2), row(LV, **(EXACT | {"rhat": 1.02})))], ROADS["exact"])
    pd.testing.assert_frame_equal(references(pd.concat([exact, apart])), exact)


def test_errors_of_hes1_stand_beside_the_exact_ones():
    case = named(MESSY, "Hes1, H hidden")
    ours = fits_of(*(((case.name, r, 0), row(case, error=0.1 * (r + 1), **FIT)) for r in range(2)))
    theirs = long_table([((case.name, r), row(case, **EXACT)) for r in range(2)], ROADS["exact"])
    table = published(ours, theirs)
    np.testing.assert_allclose(table["gm.fit"], 0.15)
    np.testing.assert_allclose(table["ratio"], 1.5)


def test_seeds_of_one_set_are_compared_with_its_exact_mode(exact):
    near, far = row(LV, shift=0.05, **FIT), row(LV, shift=5.0, **FIT)
    fits = fits_of(
        ((LV.name, 0, 0), near), ((LV.name, 0, 1), far), ((LV.name, 1, 0), far)
    )  # fmt: skip
    figures = starts(fits, exact)[LV.name]
    assert (figures["sets"], figures["fits"], figures["same mode"]) == (1, 2, 0.5)


def test_costs_are_those_of_a_thousand_effective_draws(exact):
    fits = fits_of(((LV.name, 0, 0), row(LV, **(FIT | {"n_effective": 250.0}))))
    figures = costs(fits, exact)[LV.name]
    assert figures["gm.fit"] == pytest.approx(40)
    assert figures["NumPyro + diffrax"] == pytest.approx(7 + 6)


def test_a_saved_table_is_as_good_as_its_files(tmp_path, exact):
    path = tmp_path / "exact.csv"
    exact.to_csv(path)
    index = [*ROADS["exact"], "variable"]
    known = runner.known_from(path, index)
    saved = runner.Saved(tmp_path / "runs", runner.JSON, known=known)
    assert saved.missing([(LV.name, 0), (LV.name, 2)]) == [(LV.name, 2)]
    table = saved.table([(LV.name, 0)], partial(long_table, index=ROADS["exact"]))
    pd.testing.assert_frame_equal(table, exact, check_dtype=False, check_names=False)


def test_a_quick_run_ends_with_what_is_not_sealed_and_a_table_is_only_printed(
    tmp_path, monkeypatch, capsys
):
    def by_case(**whole):
        return lambda key, *_: row(named(MESSY, key[0]), **whole)

    monkeypatch.setattr(study, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "in_processes", lambda *_: runner.in_turn)
    monkeypatch.setattr(study, "exact", by_case(**EXACT))
    monkeypatch.setattr(study, "fit", by_case(**FIT, verdict="sealed"))
    study.main(["--quick", "--out", str(tmp_path)])
    study.main(["--cases", LV.name, "--sets", "1", "--out", str(tmp_path)])
    tables = list(tmp_path.glob("*.csv"))
    assert len(tables) == 2
    monkeypatch.setattr(study, "fit", by_case(**(FIT | {"is_exact": 0.0}), verdict="k is large"))
    with pytest.raises(SystemExit, match="k is large"):
        study.main(["--quick", "--out", str(tmp_path)])
    capsys.readouterr()
    for path in tables:
        os.utime(path, (0, 0))
    study.main(["--table", "--out", str(tmp_path / "empty")])
    assert "of which compilation" in capsys.readouterr().out
    assert [path.stat().st_mtime for path in tables] == [0, 0]


def test_the_first_blocks_hold_every_case_and_all_sets_come_once_by_each_road():
    blocks = list(keys_of(NAMES, len(SETS)))
    assert {key[0] for key in blocks[0][1]} == set(NAMES)
    for road, seed in (("exact", ()), ("fit", (0,))):
        keys = {key for r, block in blocks if r == road for key in block}
        for case in MESSY:
            n_sets = 5 if case.name.startswith("lynx") else 20
            assert {(case.name, r, *seed) for r in range(n_sets)} <= keys
