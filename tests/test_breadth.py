"""The breadth study: what it fits, and when it calls an answer wrong."""

import logging
import warnings

import numpy as np
import pandas as pd
import pytest

import pymc_gradmatch as gm
from benchmarks.breadth import fit
from benchmarks.breadth.__main__ import FOLDER, INDEX, REPLICATES
from benchmarks.breadth.fit import _stage, fit_in_one_call, given_up
from benchmarks.breadth.outcomes import judged
from benchmarks.cases import BREADTH, named
from benchmarks.jax_rival import import_jax, right_hand_side

DECAY = named(BREADTH, "decay")
EXACT_MEAN, EXACT_SD = 0.5, 0.01


@pytest.fixture
def exact():
    def normal(mean, sd):
        return {"mean": mean, "sd": sd, "2.5 %": mean - 2 * sd, "97.5 %": mean + 2 * sd, "rhat": 1}

    return pd.DataFrame.from_dict(
        {"rate": normal(EXACT_MEAN, EXACT_SD), "x0[mass]": normal(2.0, 0.02)}, orient="index"
    )


def moments(moved=0.0, width=1.0):
    """Return a posterior so many exact sds away, so many times as wide."""
    mean, half = EXACT_MEAN + moved * EXACT_SD, 2 * width * EXACT_SD
    interval = {"mean": mean, "sd": half / 2, "2.5 %": mean - half, "97.5 %": mean + half}
    return {"rmse": 0.1, "theta": {"rate": interval}}


def fitted(matched, checked, *, sealed, said=()):
    return {
        "said": {"build": [], "sample": list(said), "check": []},
        "cpu_seconds": {"build": 1.0, "sample": 2.0, "check": 3.0},
        "stage": "check",
        "rhat": 1.0,
        "ess": 1e3,
        "divergences": 0,
        "matched": matched,
        "checked": checked,
        "is_exact": sealed,
        "verdict": "in words",
    }


def outcome(row, exact):
    return judged(row, exact, DECAY, 1)["outcome"]


def test_fifteen_problems_and_more_have_five_data_sets_and_an_exact_posterior_each():
    assert len(BREADTH) >= 15
    assert len(REPLICATES) == 5
    table = pd.read_csv(FOLDER / "exact.csv", index_col=[*INDEX, "variable"])
    for case in BREADTH:
        for replicate in REPLICATES:
            for name in case.theta:
                assert table.loc[(case.name, replicate, name), "sd"] > 0


@pytest.mark.slow
def test_data_have_the_promised_noise_and_come_from_their_number_alone():
    case = named(BREADTH, "tumour")
    data = case.simulate(5)
    noise = np.random.default_rng(5).normal(size=data.x.shape) * 0.03 * data.x.std(axis=0)
    np.testing.assert_allclose(data.y, data.x + noise, rtol=1e-13)
    np.testing.assert_array_equal(data.y, case.simulate(5).y)


@pytest.mark.parametrize("checked", [moments(moved=2.1), moments(moved=-2.1), moments(width=0.6)])
def test_a_seal_on_a_wrong_interval_is_a_confident_wrong_answer(checked, exact):
    row = fitted(moments(), checked, sealed=True, said=["a warning does not excuse it"])
    assert outcome(row, exact) == "sealed, wrong"


@pytest.mark.parametrize("matched", [moments(moved=2.1), moments(width=0.6)])
def test_a_wrong_interval_of_the_sampled_model_needs_a_word(matched, exact):
    silent = fitted(matched, moments(), sealed=True)
    warned = fitted(matched, moments(), sealed=True, said=["intervals are off"])
    assert outcome(silent, exact) == "silent, wrong"
    assert outcome(warned, exact) == "confirmed"


def test_without_a_seal_a_wrong_check_is_honest(exact):
    row = fitted(moments(), moments(moved=50.0), sealed=False)
    assert outcome(row, exact) == "honest"


def test_an_interval_that_is_no_number_is_wrong(exact):
    row = fitted(moments(), moments(moved=np.nan), sealed=True)
    assert outcome(row, exact) == "sealed, wrong"


@pytest.mark.parametrize(
    ("call", "seconds", "expected"),
    [
        (lambda: DECAY.ode.solve([1, 0], [1.0], [1.0]), 1.0, "failed in words"),
        (lambda: DECAY.ode.solve([1, 0], [1.0], [1.0]), 100.0, "failed"),
        (lambda: np.zeros(2) @ np.zeros(3), 1.0, "failed"),
        (lambda: np.linalg.cholesky(-np.eye(2)), 1.0, "failed"),
    ],
    ids=["ours and soon", "ours and late", "a ValueError of numpy's", "an error of another kind"],
)
def test_a_failure_is_in_words_if_it_is_ours_and_soon(call, seconds, expected, exact, monkeypatch):
    monkeypatch.setattr(gm, "fit", lambda *_, **__: call())
    row = fit_in_one_call((DECAY.name, 1), lambda row: None)
    assert outcome(row | {"cpu_seconds": {"fit": seconds}}, exact) == expected


def test_what_a_stage_says_is_heard_once_with_its_warnings_and_its_cost(monkeypatch):
    row, kept = {"said": {}, "cpu_seconds": {}}, []
    monkeypatch.setattr(fit, "process_time", iter([10.0, 13.5]).__next__)
    with pytest.raises(ValueError, match="invalid literal"):  # noqa: PT012, SIM117
        with _stage("sample", row, lambda row: kept.append(dict(row))):
            for _ in range(2):
                logging.getLogger("pymc.stats").warning("R-hat is large")
                warnings.warn("the noise is at its bound", UserWarning, stacklevel=1)
            int("in words")
    assert row["said"]["sample"] == ["R-hat is large", "the noise is at its bound"]
    assert row["cpu_seconds"] == {"sample": 3.5}
    assert kept[0]["stage"] == "sample"


def test_a_fit_without_an_answer_is_a_row_that_says_so(exact):
    kept = {"said": {"build": []}, "cpu_seconds": {"build": 1.0}, "stage": "sample"}
    row = given_up(kept, 7, -24)
    assert row["failure"] == "no answer within 7 CPU s (exit code -24)"
    assert row["cpu_seconds"] == {"build": 1.0, "sample": 7.0}
    assert outcome(row, exact) == "failed"


@pytest.mark.jax("diffrax", "numpyro")
@pytest.mark.parametrize("case", BREADTH, ids=[case.name for case in BREADTH])
def test_the_reference_integrates_the_users_own_right_hand_side(case):
    _, jax, _ = import_jax()
    x0, theta = (np.array(list(values.values())) for values in (case.x0, case.theta))
    ours = case.ode(case.t[:1], x0[None], list(theta))[0].eval()
    theirs = jax.jit(right_hand_side(case.ode))(case.t[0], x0, theta)
    np.testing.assert_allclose(theirs, ours, rtol=1e-12, atol=1e-12)
