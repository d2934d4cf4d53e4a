"""The studies' commands: what they write, what ends a quick one, and when their clocks run."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from pymc.model.transform.conditioning import remove_value_transforms

import pymc_gradmatch as gm
from benchmarks import (
    RESULTS,
    calibration,
    exact_cost,
    limits,
    many,
    none_failed,
    one_call,
    population,
    runner,
    show,
    speed,
)
from benchmarks.accuracy import __main__ as accuracy
from benchmarks.breadth import __main__ as breadth
from benchmarks.cases import ACCURACY, named
from benchmarks.gradients import in_jax, microseconds
from benchmarks.node import __main__ as node
from benchmarks.node import parts

FAILED = {
    "said": {}, "cpu_seconds": {"fit": 1.0}, "stage": "fit", "failure": "ValueError: no start",
    "in_words": True,
}  # fmt: skip
TABLES = {
    accuracy: "accuracy/fits.csv",
    breadth: "breadth/one-call.csv",
    limits: "limits.csv",
    population: "population.csv",
}


@pytest.fixture
def asked(monkeypatch):
    """Let every fit of the breadth study fail at once; return the keys that were asked for."""
    keys = []

    def workers(work, missing):
        keys.extend(missing)
        for key in missing:
            yield key, FAILED

    monkeypatch.setattr(runner, "in_processes", lambda *_: workers)
    return keys


@pytest.fixture
def fits(tmp_path):
    """Return a copy of the table of the breadth study, and arguments that name it."""
    csv = tmp_path / "one-call.csv"
    shutil.copy(RESULTS / "breadth" / csv.name, csv)
    return csv, ["--one-call", "--csv", str(csv), "--out", str(tmp_path / "runs")]


@pytest.mark.parametrize("study", TABLES, ids=lambda study: study.__name__.split(".")[1])
def test_a_table_that_is_only_printed_is_not_written(study, tmp_path):
    csv = tmp_path / "rows.csv"
    shutil.copy(RESULTS / TABLES[study], csv)
    os.utime(csv, (0, 0))
    study.main(["--table", "--csv", str(csv), "--out", str(tmp_path / "runs")])
    assert csv.stat().st_mtime == 0


def test_the_study_of_the_node_prints_its_saved_tables_and_writes_nothing(tmp_path, capsys):
    shutil.copytree(RESULTS / "node", tmp_path / "node")
    for csv in (tmp_path / "node").iterdir():
        os.utime(csv, (0, 0))
    node.main(["--table", "--csv", str(tmp_path / "node"), "--out", str(tmp_path / "runs")])
    assert {csv.stat().st_mtime for csv in (tmp_path / "node").iterdir()} == {0}
    said = capsys.readouterr().out
    assert all(f"\n{name}\n" in said for name in parts.PARTS)


def test_a_row_of_the_node_that_fails_says_why(monkeypatch):
    def failing(*_):
        msg = "no mode"
        raise ValueError(msg)

    monkeypatch.setitem(parts.PARTS, "nuts", parts.PARTS["nuts"]._replace(work=failing))
    assert parts.measured("nuts", ("chain", "gm.sample")) == {"failure": "ValueError: no mode"}


def test_a_partial_run_leaves_the_rows_of_other_problems(asked, fits):
    csv, arguments = fits
    before = pd.read_csv(csv, index_col=breadth.INDEX)
    breadth.main([*arguments, "--problems", "decay"])
    after = pd.read_csv(csv, index_col=breadth.INDEX)
    assert after.index.equals(before.index)
    assert set(after.loc["decay", "outcome"]) == {"failed in words"}
    others = before.index.get_level_values("problem") != "decay"
    pd.testing.assert_frame_equal(after[others][before.columns], before[others], check_dtype=False)


def test_the_breadth_study_fits_anew_what_its_table_knows(asked, fits, monkeypatch):
    monkeypatch.setattr(runner.Saved, "save", lambda *_: None)
    breadth.main(fits[1])
    assert len(asked) == 90


def test_a_quick_run_ends_with_what_failed_and_does_it_all_again(asked, fits):
    csv, arguments = fits
    before = csv.read_bytes()
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"failed:(.|\n)*ValueError: no start"):
            breadth.main([*arguments, "--quick"])
    assert asked == 2 * [("decay", 1), ("logistic", 1)]
    assert csv.read_bytes() == before
    assert [path.name for path in csv.parent.iterdir()] == [csv.name]


def test_what_failed_is_said_in_full():
    said = "These are not draws from the exact posterior: " + "searches disagree, " * 20
    rows = pd.DataFrame({"is_exact": [1.0, 0.0], "verdict": ["good", said]})
    with pytest.raises(SystemExit, match=said):
        none_failed(one_call.unsealed(rows))
    none_failed(one_call.unsealed(rows[:1]))


def test_a_folder_that_is_not_there_is_made_before_the_work(tmp_path, monkeypatch):
    show(pd.DataFrame({"a": [1]}), tmp_path / "new" / "table.csv")
    assert (tmp_path / "new" / "table.csv").exists()

    def interrupted(n):
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "data_sets", interrupted)
    with pytest.raises(KeyboardInterrupt):
        many.main(["--out", str(tmp_path / "costs")])
    assert (tmp_path / "costs").is_dir()


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_fit_that_failed_is_not_sealed():
    rows = pd.read_csv(RESULTS / "accuracy" / "fits.csv", index_col=accuracy.INDEX)
    rows = rows.loc[[("LV low", "gm.fit", replicate) for replicate in range(4)]]
    rows.iloc[0] = np.nan
    exact = pd.read_csv(RESULTS / "accuracy" / "exact.csv", index_col=["case", "replicate"])
    assert accuracy.table_of(rows, exact).loc[("LV low", "gm.fit"), "sealed"] == 0.75


def test_a_fit_of_the_calibration_has_the_seed_of_no_data(monkeypatch):
    seeds = []

    def fitted(*_, random_seed, **__):
        seeds.append(random_seed)
        return None, {}

    monkeypatch.setattr(one_call, "fitted", fitted)
    for replicate in (0, 1):
        calibration.fit(("Michaelis-Menten", replicate))
    assert min(seeds) >= calibration.MOST
    assert len(set(seeds)) == 2


def test_the_rival_is_imported_before_its_clock_starts(monkeypatch):
    done = []

    def noted(name, result=None):
        return lambda *_, **__: done.append(name) or result

    monkeypatch.setattr(exact_cost, "import_jax", noted("import"))
    monkeypatch.setattr(exact_cost, "process_time", noted("clock", 0.0))
    monkeypatch.setattr(exact_cost, "sample", noted("draws", SimpleNamespace(ess=lambda: 1.0)))
    exact_cost.rival(None, 0)
    assert done == ["import", "clock", "draws", "clock"]


def test_caches_that_are_to_be_empty_are_numbas_too(tmp_path):
    script = "import os; print(float(os.environ['NUMBA_CACHE_DIR'].startswith('{folder}')))"
    assert speed.run(script.replace("{folder}", str(tmp_path)), 0, str(tmp_path)) == 1


def test_microseconds_are_those_of_a_call_in_the_fastest_loop():
    now, costs = [0.0], iter([9e-6] * 8 + [3e-6, 2e-6, 3e-6, 3e-6, 3e-6])

    def loop(n_calls):
        now[0] += n_calls * next(costs)

    assert microseconds(loop, lambda: now[0], seconds=1e-3) == pytest.approx(2)


@pytest.mark.jax("jax")
def test_a_loop_in_jax_calls_the_density_at_points_that_move():
    import jax

    loop = in_jax(jax.value_and_grad(lambda z: 0.5 * (z["a"] ** 2).sum()), {"a": np.ones(2)})
    point, total = loop(3)
    assert float(total) == pytest.approx(3, rel=1e-5)
    assert point["a"].shape == (2,)


@pytest.mark.slow
def test_the_plain_model_of_a_case_has_the_density_of_the_exact_model():
    case = named(ACCURACY, "LV low")
    data = case.simulate(0)
    matched = gm.build_model(
        **case.arguments(data), preset="refined", random_seed=1, progressbar=False
    )
    point = case.theta | {"x0": np.array([*case.x0.values()]), "sigma": np.array([0.1, 0.2])}
    plain, exact = (
        remove_value_transforms(model).compile_logp(mode="FAST_COMPILE")(point)
        for model in (case.plain(data), gm.exact_model(matched))
    )
    np.testing.assert_allclose(plain, exact, rtol=1e-9)
