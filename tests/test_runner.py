"""The runner of the long studies: files that are whole, runs that go on, jobs that are cut off."""

from functools import partial

import numpy as np
import pytest

from benchmarks import RESULTS, exact, runner
from benchmarks.breadth.__main__ import PROBLEMS, REPLICATES
from benchmarks.jax_rival import Fit
from benchmarks.many import ON_PAPER, on_paper
from benchmarks.paper import study

INDEX = ["case", "method", "replicate"]
KEYS = [("LV low", "refined", 0), ("LV low", "refined", 1), ("PT low", "refined", 0)]


def write_and_fail(path):
    with runner.finished(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "row.json"
    with pytest.raises(KeyboardInterrupt):
        write_and_fail(path)
    assert not path.exists()
    with runner.finished(path) as unfinished:
        unfinished.write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["row.json"]
    assert path.read_text() == "whole"


@pytest.fixture
def calls():
    return []


@pytest.fixture
def work(calls):
    def to_row(key):
        calls.append(key)
        return {"name": key[0]}

    return to_row


def test_an_interrupted_run_goes_on_where_it_stopped(calls, work, tmp_path):
    def interrupted(key, result):
        if key == KEYS[1]:
            raise KeyboardInterrupt

    saved = runner.Saved(tmp_path, runner.JSON)
    with pytest.raises(KeyboardInterrupt):
        runner.run(KEYS, work, saved, report=interrupted)
    assert calls == KEYS[:2]
    runner.run(KEYS, work, saved)
    assert calls == KEYS
    assert dict(saved.items(KEYS)) == {key: {"name": key[0]} for key in KEYS}


def made_up_draws(key):
    rng = np.random.default_rng(key[-1])
    return Fit(
        rng.normal(size=(2, 50, 3)), rng.normal(size=(2, 50, 1)), np.ones((2, 50, 1)), 0, 1, 2.0
    )


@pytest.mark.parametrize("kept", [0, 10], ids=["empty", "truncated"])
@pytest.mark.parametrize("form", [runner.JSON, exact.NPZ], ids=["json", "npz"])
def test_a_damaged_file_is_refused_by_name_and_made_again(form, kept, work, tmp_path, capsys):
    saved = runner.Saved(tmp_path, form)
    work = work if form is runner.JSON else made_up_draws
    runner.run(KEYS, work, saved)
    damaged = saved.path(KEYS[1])
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:kept])
    with pytest.raises(ValueError, match=rf"{damaged.name} cannot be read.*again"):
        dict(saved.items(KEYS))
    runner.run(KEYS, work, saved)
    assert f"{damaged.name} is broken" in capsys.readouterr().out
    assert len(damaged.read_bytes()) == len(whole)


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no results in {tmp_path}"):
        list(runner.Saved(tmp_path, runner.JSON).items(KEYS))


def test_what_a_saved_table_knows_is_not_done_again_unless_its_file_is_broken(
    calls, work, tmp_path
):
    known = runner.table_of([(key, {"name": "known"}) for key in KEYS[:2]], INDEX)
    saved = runner.Saved(tmp_path, runner.JSON, known=known)
    saved.save(KEYS[0], {})
    saved.path(KEYS[0]).write_text("{")
    runner.run(KEYS, work, saved)
    assert calls == [KEYS[0], KEYS[2]]
    names = saved.table(KEYS, partial(runner.table_of, index=INDEX))["name"]
    assert names.loc[KEYS].tolist() == ["LV low", "known", "PT low"]


def test_what_another_package_made_is_left_aside_and_made_again(
    calls, work, tmp_path, monkeypatch, capsys
):
    saved = runner.Saved(tmp_path, runner.JSON)
    runner.run(KEYS[:2], work, saved)
    monkeypatch.setattr(runner, "code", lambda: "another")
    with pytest.raises(FileNotFoundError, match=r"no results in .*another"):
        list(saved.items(KEYS))
    runner.run(KEYS, work, saved)
    assert calls == [*KEYS[:2], *KEYS]
    assert "2 results of another state of the package are left aside" in capsys.readouterr().out


def test_a_job_that_is_done_again_keeps_no_row_of_the_known_one(tmp_path):
    def long(rows):
        table = {(*key, name): {"mean": mean} for key, row in rows for name, mean in row.items()}
        return runner.table_of(table.items(), [*INDEX, "variable"])

    known = long((key, {"alpha": 1.0, "set": 2.0}) for key in KEYS[:2])
    saved = runner.Saved(tmp_path, runner.JSON, known=known)
    saved.save(KEYS[0], {"set": 3.0})
    means = saved.table(KEYS, long)["mean"]
    assert means.loc[KEYS[0]].to_dict() == {"set": 3.0}
    assert means.loc[KEYS[1]].to_dict() == {"alpha": 1.0, "set": 2.0}


def test_a_quick_run_has_a_new_folder_and_leaves_nothing(tmp_path):
    with runner.kept_in(tmp_path, quick=False) as out:
        assert out == tmp_path
    with runner.kept_in(tmp_path, quick=True) as out:
        (out / "row.json").write_text("{}")
    assert not out.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_saved_tables_of_the_long_studies_have_all_that_these_ask_for(tmp_path):
    for name, reference in exact.REFERENCES.items():
        csv = RESULTS / name / "exact.csv"
        known = runner.known_from(csv, reference.index)
        names = [case.name for case in reference.cases]
        keys = runner.keys_of(names, replicates=reference.replicates, ends=reference.ends)
        assert runner.Saved(tmp_path, exact.NPZ, known=known).missing(keys) == []


def without_end(key, keep):
    keep({"stage": "begun"})
    while key == ("endless",):
        pass
    return {"stage": "done"}


@pytest.mark.slow
def test_a_job_without_an_answer_in_time_has_what_it_kept(tmp_path):
    def given_up(row, seconds, exitcode):
        return row | {"seconds": seconds, "killed": exitcode < 0}

    workers = runner.in_processes(1, given_up)
    saved = runner.Saved(tmp_path, runner.JSON)
    keys = [("endless",), ("quick",)]
    runner.run(keys, without_end, saved, workers=workers)
    assert [row for _, row in saved.items(keys)] == [
        {"stage": "begun", "seconds": 1, "killed": True},
        {"stage": "done"},
    ]


def test_a_study_is_whole_at_the_end_of_every_block():
    keys = runner.keys_of("ab", "xy", replicates=range(1, 6), ends=[2, 9])
    assert keys[:5] == [("a", "x", 1), ("a", "x", 2), ("a", "y", 1), ("a", "y", 2), ("b", "x", 1)]
    assert {key[-1] for key in keys[:8]} == {1, 2}
    assert len(keys) == len(set(keys)) == 20


def test_files_keep_the_names_under_which_long_studies_saved_them(tmp_path):
    rows, draws = runner.Saved(tmp_path, runner.JSON), runner.Saved(tmp_path, exact.NPZ)
    assert rows.path((PROBLEMS[0], REPLICATES[0])).name == "decay-1.json"
    assert rows.path(("FHN SNR 100", "refined", 3)).name == "FHN-SNR-100-refined-3.json"
    assert draws.path(("oral dose", 2)).name == "oral-dose-2.npz"
    task = study.Task("FHN SNR 10, 20 points", "nuts", 7)
    assert study.saved_in(tmp_path).path(task).name == "FHN-SNR-10-20-points_nuts_007.nc"


def test_on_paper_one_worker_does_all_and_many_wait_for_the_one_that_writes():
    table = on_paper(fit_s=3.0, share_s=0.1, start_s=10.0, size=1e6)
    assert table.loc[1, "wall_h"] == pytest.approx((10 + 3 * ON_PAPER) / 3_600)
    assert table["wall_h"].is_monotonic_decreasing
    assert table["wall_h"].iloc[-1] >= 0.1 * ON_PAPER / 3_600
    assert (table[["busy", "scheduler_share"]] <= 1).all().all()
    assert (table["written_GB"] == ON_PAPER / 1_000).all()
