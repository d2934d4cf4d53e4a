"""The tables of the paper's study, of made-up results."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from benchmarks import RESULTS
from benchmarks.cases import PAPER, named
from benchmarks.paper import reference, results, tables
from benchmarks.paper.markdown import markdown_tables
from benchmarks.paper.methods import Draws
from benchmarks.paper.summary import summarise

SUMMARY = Path(__file__).parents[1] / "docs" / "paper.md"
DOCS = SUMMARY.parent / "history" / "paper.md"


def made_up(method, errors, shift=0.0):
    """Return fits of Lotka-Volterra at low noise whose errors, one per state, are given.

    Overall the error from the true start is the first state's, from the
    inferred one twice as large.
    """
    case = named(PAPER, "LV low")
    data = case.simulate(0)
    fits = []
    for replicate, error in enumerate(errors):
        rng = np.random.default_rng(replicate)
        theta = rng.normal(case.truth + shift, 0.1, size=(4, 250, 4))
        x = np.broadcast_to(data.x, (4, 250, *data.x.shape))
        fit = summarise(case, data, Draws(theta, x))
        fit["rmse"][:] = np.array([[1], [2]]) * np.broadcast_to(error, 2)
        fit["rmse_overall"][:] = fit["rmse"][:, 0]
        fit = fit.assign(cpu_seconds=3.0, method_seed=replicate)
        fits.append(fit.assign_attrs(case="LV low", method=method, replicate=replicate))
    return fits


@pytest.fixture(scope="module")
def three_methods():
    only_delta = [0, 0, 0, 1.0]
    return results.stacked(
        [
            *made_up("fgpgm", [(0.1, 0.6), (0.2, 0.2), (0.3, 0.1)]),
            *made_up("nuts", [0.1, 0.2, 0.3, 0.4], shift=only_delta),
            *made_up("agm", [(0.4, 0.8), (0.4, 0.8), (np.inf, np.inf)]),
        ]
    )


def test_medians_over_data_sets_count_infinite_errors(three_methods):
    rows = tables.summary(three_methods).loc["LV low"]
    assert rows["rmse true x0"].to_dict() == pytest.approx({"fgpgm": 0.2, "agm": 0.4, "nuts": 0.25})
    assert rows.loc["fgpgm", "rmse inferred x0"] == pytest.approx(0.4)
    assert rows.loc["agm", "q75 true"] == np.inf


def test_coverage_is_the_share_of_parameters_inside(three_methods):
    rows = tables.summary(three_methods).loc["LV low"]
    assert rows.loc["fgpgm", "coverage"] == 1
    assert rows.loc["nuts", "coverage"] == 0.75


def test_errors_fall_by_the_mean_over_states_of_medians_over_data_sets(three_methods):
    reduced = tables.reductions(three_methods).loc[("LV low", "agm")]
    assert reduced["of medians"] == pytest.approx((0.5 + 0.75) / 2)
    assert reduced["paired"] == pytest.approx(0.75)
    assert reduced["paper"] == 0.35


def test_costs_and_rows_of_every_fit(three_methods):
    costs = tables.costs(three_methods).loc["agm"]
    assert costs.tolist() == pytest.approx([3, 1, 9 / 3600, 300 / 3600])
    rows = tables.every_fit(three_methods)
    assert len(rows) == 10
    assert rows.loc[("LV low", "fgpgm", 2), "rmse_true_x0"] == pytest.approx(0.3)
    assert rows.loc[("LV low", "fgpgm", 2), "rmse_inferred_x0"] == pytest.approx(0.6)


def test_ratios_are_to_the_reference_code_and_of_integration_to_integration():
    made = results.stacked(made_up("fgpgm", [0.1, 0.2, 0.3]) + made_up("exact", [0.1, 0.1]))
    beside = reference.against_reference(made).loc["LV low"]
    assert beside.loc["true", "fgpgm ratio"] == pytest.approx(0.2 / 0.062)
    assert beside.loc["inferred", "exact ratio"] == pytest.approx(0.2 / 0.042)
    assert beside["fgpgm sets"].tolist() == [3, 3]


def test_few_data_sets_are_seldom_as_far_away_as_a_median_outside_their_range(monkeypatch):
    made = results.stacked(made_up("nuts", [0.1, 0.2, 0.3, 0.4, 0.5]))
    monkeypatch.setattr(reference, "REFERENCE_SETS", 9)
    row = ("LV low", "true")
    chances = {}
    for theirs in (0.3, 0.5, 0.6):
        monkeypatch.setitem(reference.REFERENCE_RMSE, row, (theirs, 1.0))
        chances[theirs] = reference.against_reference(made).loc[row, "nuts chance"]
    assert chances[0.3] == 1
    # By ratio 0.1 is farther away than 0.5; each is the median where 5 of 9 draws are it.
    at_an_end = scipy.stats.binom(9, 0.2).sf(4)
    assert chances[0.5] == pytest.approx(2 * at_an_end, abs=0.008)
    assert chances[0.6] == pytest.approx(at_an_end, abs=0.006)


def test_the_tables_of_the_docs_are_those_of_the_saved_results():
    text, written = DOCS.read_text("utf-8"), markdown_tables(RESULTS / "paper")
    assert set(written) == {"summary", "reference", "table1", "agreement", "costs"}
    missing = [name for name, table in written.items() if table not in text]
    assert not missing


def test_the_rows_of_the_summary_page_are_those_of_the_full_tables():
    rows = [line for line in SUMMARY.read_text("utf-8").splitlines() if line.startswith("|")]
    rows = [row for row in rows if any(one.isdigit() for one in row)]
    full = DOCS.read_text("utf-8").splitlines()
    assert len(rows) > 40
    assert [row for row in rows if row not in full] == []


def test_the_docs_say_whether_fits_failed():
    n_failures = pd.read_csv(RESULTS / "paper" / "summary.csv")["failures"].sum()
    assert ("No fit failed" in DOCS.read_text("utf-8")) == (n_failures == 0)


def test_tables_of_one_method_have_dashes_for_the_others(tmp_path):
    tables.write_tables(results.stacked(made_up("fgpgm", [0.1, 0.2])), tmp_path)
    written = markdown_tables(tmp_path)
    assert set(written) == {"summary", "reference", "costs"}
    assert written["reference"].endswith("| - | - | - | - |")


def test_agreement_is_in_monte_carlo_errors():
    same = results.stacked(made_up("fgpgm", [0.1, 0.2]) + made_up("nuts", [0.1, 0.2]))
    assert tables.agreement(same).loc["LV low", "agree"] == 1
    apart = results.stacked(made_up("fgpgm", [0.1, 0.2]) + made_up("nuts", [0.1, 0.2], shift=0.05))
    row = tables.agreement(apart).loc["LV low"]
    assert row["agree"] == 0
    assert row["largest distance (sd)"] == pytest.approx(0.5, rel=0.1)
