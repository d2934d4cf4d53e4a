"""The study of the paper's experiments: resumable, spread over processes, failures on record."""

import os
import signal
from pathlib import Path

import distributed
import numpy as np
import pytest
import scipy.stats
import xarray as xr

from benchmarks.paper import methods, results, study, tables
from benchmarks.paper.cases import CASES, case_named
from benchmarks.paper.markdown import markdown_tables
from benchmarks.paper.methods import QUICK, Draws
from benchmarks.paper.summary import summarise
from benchmarks.saving import finished

N_SETS = 6


def tasks(method="exact", replicates=N_SETS):
    return study.tasks_of(["LV low"], [method], replicates)


def saved(out):
    results.combine(out)
    return results.load(out)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    out = tmp_path_factory.mktemp("serial")
    study.run(tasks(), out, QUICK)
    return saved(out)


@pytest.fixture
def instant(monkeypatch):
    """Enter a method that takes no time: draws around the truth; it counts its calls."""
    calls = []

    def around_truth(case, data, seed, effort):
        calls.append(seed)
        rng = np.random.default_rng(seed)
        theta = rng.normal(case.truth, 0.01, size=(2, 100, len(case.truth)))
        return Draws(theta, rng.normal(data.x, 0.01, size=(2, 100, *data.x.shape)), 0.0)

    monkeypatch.setitem(methods.METHODS, "instant", around_truth)
    return calls


def test_a_study_survives_the_death_of_a_worker(serial, tmp_path, monkeypatch):
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        with distributed.Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))
        save, killed = study._save, []

        def save_and_kill(result, path):
            save(result, path)
            if len(list(path.parent.glob("*.nc"))) == 2:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

        monkeypatch.setattr(study, "_save", save_and_kill)
        study.run(tasks(), tmp_path, QUICK, scheduler=cluster.scheduler_address)
    assert killed
    spread = saved(tmp_path)
    assert (spread["failure"] == "").all()
    assert spread.sizes == serial.sizes
    for name in ("mean", "sd", "rmse", "x"):
        # One BLAS may sum in another order than the next; the optimum is known to 1e-8.
        xr.testing.assert_allclose(spread[name], serial[name], rtol=1e-4, atol=1e-6)


def test_fits_are_close_to_the_truth_and_seeds_on_record(serial):
    fits = serial.sel({"method": "exact", "case": "LV low"})
    assert (fits["rmse_overall"] < 0.15).all()
    assert fits["data_seed"].to_numpy().tolist() == list(range(N_SETS))
    assert fits["method_seed"].to_numpy().tolist() == [task.seed for task in tasks()]


def test_seeds_differ_between_cases_methods_and_replicates():
    every = study.tasks_of([case.name for case in CASES], list(methods.METHODS), 10)
    assert len({task.seed for task in every}) == len(every) == len(set(every))


def test_an_interrupted_study_resumes_without_fitting_again(instant, tmp_path, monkeypatch):
    save = study._save

    def interrupted(result, path):
        save(result, path)
        if path == study.path_of(tasks("instant")[2], tmp_path):
            raise KeyboardInterrupt

    monkeypatch.setattr(study, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run(tasks("instant"), tmp_path, QUICK)
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "fits").glob("*.nc")}
    assert len(there) == 3
    monkeypatch.setattr(study, "_save", save)
    instant.clear()
    study.run(tasks("instant"), tmp_path, QUICK)
    assert instant == [task.seed for task in tasks("instant")[3:]]
    assert all(path.stat().st_mtime_ns == time for path, time in there.items())


def write_and_fail(path):
    with finished(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "row.json"
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(path)
    assert not path.exists()
    with finished(path) as unfinished:
        unfinished.write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["row.json"]
    assert path.read_text() == "whole"


def test_a_failing_fit_is_a_row_with_its_reason(instant, tmp_path, monkeypatch):
    def failing(case, data, seed, effort):
        msg = "no start was found."
        raise ValueError(msg)

    monkeypatch.setitem(methods.METHODS, "failing", failing)
    study.run(tasks("failing", 2) + tasks("instant", 2), tmp_path, QUICK)
    fits = saved(tmp_path)
    failed = fits.sel({"method": "failing", "case": "LV low"})
    assert failed["failure"].to_numpy().tolist() == ["ValueError: no start was found."] * 2
    assert failed["mean"].isnull().all()
    assert failed["fitted"].all()
    table = tables.summary(fits)
    assert table.loc[("LV low", "failing"), "failures"] == 2
    assert table.loc[("LV low", "instant"), "failures"] == 0
    assert tables.failures(fits).to_numpy().tolist() == [2]


def test_tasks_run_through_small_studies_first_and_keep_compilations_together():
    order = study.tasks_of(["LV low", "PT low"], ["nuts", "exact"], 12)
    assert [task.replicate for task in order[:4]] == [0] * 4
    assert [task[1:] for task in order[4:8]] == [("nuts", r) for r in range(1, 5)]
    assert max(task.replicate for task in order) == 11
    assert len(order) == 48


def test_a_trajectory_that_cannot_be_integrated_is_infinitely_wrong():
    case = case_named("LV low")
    data = case.simulate(0)
    theta = np.broadcast_to([90.0, -90.0, -90.0, 90.0], (2, 10, 4))
    draws = Draws(theta, np.broadcast_to(data.x, (2, 10, *data.x.shape)), 0.0, is_chain=False)
    result = summarise(case, data, draws)
    assert np.isinf(result["rmse_overall"]).all()
    assert np.isnan(result["trajectory"].sel(start="true")).any()


def made_up(method, errors, shift=0.0):
    """Return fits of Lotka-Volterra at low noise whose errors are given."""
    case = case_named("LV low")
    data = case.simulate(0)
    fits = []
    for replicate, error in enumerate(errors):
        rng = np.random.default_rng(replicate)
        theta = rng.normal(case.truth + shift, 0.1, size=(4, 250, 4))
        x = np.broadcast_to(data.x, (4, 250, *data.x.shape))
        fit = summarise(case, data, Draws(theta, x, 1.0))
        fit["rmse"][:] = error
        fit["rmse_overall"][:] = error
        fit = fit.assign(cpu_seconds=3.0, method_seed=replicate)
        fits.append(fit.assign_attrs(case="LV low", method=method, replicate=replicate))
    return fits


def test_tables_of_made_up_results():
    fits = [
        *made_up("fgpgm", [0.1, 0.2, 0.3]),
        *made_up("nuts", [0.1, 0.2, 0.3]),
        *made_up("agm", [0.4, 0.4, np.inf]),
    ]
    both = results.stacked(fits)
    table = tables.summary(both)
    assert table.loc[("LV low", "fgpgm"), "rmse true x0"] == pytest.approx(0.2)
    assert table.loc[("LV low", "agm"), "rmse true x0"] == pytest.approx(0.4)
    assert table.loc[("LV low", "agm"), "q75 true"] == np.inf
    assert table.loc[("LV low", "fgpgm"), "coverage"] == 1
    reduced = tables.reductions(both).loc[("LV low", "agm")]
    assert reduced["of medians"] == pytest.approx(0.5)
    assert reduced["paired"] == pytest.approx(0.75)
    assert reduced["paper"] == 0.35
    costs = tables.costs(both).loc["agm"]
    assert costs.tolist() == pytest.approx([3, 1, 9 / 3600, 300 / 3600])
    rows = tables.every_fit(both)
    assert len(rows) == 9
    assert rows.loc[("LV low", "fgpgm", 2), "rmse_true_x0"] == pytest.approx(0.3)
    reference = tables.against_reference(both)
    assert reference.loc["LV low", "fgpgm ratio"] == pytest.approx(0.2 / 0.062)
    assert reference.loc["LV low", "nuts sets"] == 3


def test_few_data_sets_are_seldom_as_far_away_as_a_median_outside_their_range(monkeypatch):
    made = results.stacked(made_up("nuts", [0.1, 0.2, 0.3, 0.4, 0.5]))
    monkeypatch.setattr(tables, "REFERENCE_SETS", 9)
    chances = {}
    for reference in (0.3, 0.5, 0.6):
        monkeypatch.setitem(tables.REFERENCE_RMSE, "LV low", reference)
        chances[reference] = tables.against_reference(made).loc["LV low", "nuts chance"]
    assert chances[0.3] == 1
    # By ratio 0.1 is farther away than 0.5; each is the median where 5 of 9 draws are it.
    at_an_end = scipy.stats.binom(9, 0.2).sf(4)
    assert chances[0.5] == pytest.approx(2 * at_an_end, abs=0.008)
    assert chances[0.6] == pytest.approx(at_an_end, abs=0.006)


def test_the_tables_of_the_docs_are_those_of_the_saved_results():
    root = Path(__file__).parents[1]
    text = (root / "docs" / "paper.md").read_text("utf-8")
    written = markdown_tables(root / "benchmarks" / "paper-results")
    assert set(written) == {"summary", "reference", "table1", "agreement", "costs"}
    missing = [name for name, table in written.items() if table not in text]
    assert not missing


def test_tables_of_one_method_have_dashes_for_the_others(tmp_path):
    tables.print_tables(results.stacked(made_up("fgpgm", [0.1, 0.2])), tmp_path)
    written = markdown_tables(tmp_path)
    assert set(written) == {"summary", "reference", "costs"}
    assert written["reference"].endswith("| - | - | - |")


def test_agreement_is_in_monte_carlo_errors():
    same = results.stacked(made_up("fgpgm", [0.1, 0.2]) + made_up("nuts", [0.1, 0.2]))
    assert tables.agreement(same).loc["LV low", "agree"] == 1
    apart = results.stacked(made_up("fgpgm", [0.1, 0.2]) + made_up("nuts", [0.1, 0.2], shift=0.05))
    row = tables.agreement(apart).loc["LV low"]
    assert row["agree"] == 0
    assert row["largest distance (sd)"] == pytest.approx(0.5, rel=0.1)


def test_names_that_two_systems_share_stay_apart():
    fits = []
    for name in ("PT low", "FHN SNR 10, 20 points"):
        case = case_named(name)
        data = case.simulate(0)
        theta = np.broadcast_to(case.truth, (1, 5, len(case.truth)))
        draws = Draws(theta, data.x[None, None], 0.0, is_chain=False)
        fit = summarise(case, data, draws)
        fits.append(fit.assign_attrs(case=name, method="exact", replicate=0))
    both = results.stacked(fits).sel({"method": "exact", "replicate": 0})
    assert both["mean"].sel(case="PT low", param="V") == 0.017
    assert np.isnan(both["mean"].sel(case="FHN SNR 10, 20 points", param="V"))
    assert both["x"].sel(case="FHN SNR 10, 20 points", state="V").notnull().sum() == 20
    assert both["x"].sel(case="PT low", state="V").isnull().all()
