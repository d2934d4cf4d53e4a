"""Published data sets: two ways to one density, where the numbers come from, what is judged."""

import numpy as np
import pandas as pd
import pytest

from benchmarks import RESULTS
from benchmarks.public import PROBLEMS
from benchmarks.public.judge import judged
from benchmarks.public.problem import DATA

REFERENCES = pd.read_csv(RESULTS / "public/references.csv", index_col=["problem", "unknown"])


def test_every_file_of_numbers_has_its_source():
    rows = (DATA / "README.md").read_text("utf-8").splitlines()
    listed: list[str] = []
    for row in rows:
        if row.startswith("| ") and not row.startswith("| file"):
            listed += row.split("|")[1].replace(",", " ").split()
    assert sorted(listed) == sorted(path.stem for path in DATA.glob("*.csv"))


def test_thirty_data_sets_at_least_have_a_reference_of_which_two_runs_agree():
    agree = REFERENCES.groupby(level="problem")["scores agree"].all()
    assert set(agree.index) <= set(PROBLEMS)
    assert agree.sum() >= 30


@pytest.mark.parametrize("name", ["plague in Eyam", "theophylline by mouth", "cholera"])
def test_scipy_says_the_same_of_a_density(name):
    problem = PROBLEMS[name]
    means = REFERENCES.loc[name, "mean"].to_numpy()
    ours = problem.log_likelihood(means[None])[0]
    assert problem.by_scipy(means) == pytest.approx(ours, abs=1e-4)


def test_a_published_posterior_is_met():
    """posteriordb, hudson_lynx_hare-lotka_volterra: 10 000 draws of Stan's."""
    published = pd.DataFrame(
        {
            "mean": [0.5469, 0.02775, 0.8001, 0.02409, 34.04, 5.936, 0.2481, 0.2510],
            "sd": [0.0631, 0.00415, 0.0894, 0.00353, 2.917, 0.5305, 0.0433, 0.0436],
        },
        ["alpha", "beta", "gamma", "delta", "x0[hare]", "x0[lynx]", "hares_noise", "lynxes_noise"],
    )
    ours = REFERENCES.loc["lynx and hare"].loc[published.index]
    assert ((ours["mean"] - published["mean"]) / published["sd"]).abs().max() < 0.1
    np.testing.assert_allclose(ours["sd"], published["sd"], rtol=0.08)


def test_outcomes_are_told_apart():
    known = pd.DataFrame(
        {"mean": [1.0], "sd": [0.1], "kurtosis": [3.0], "score mean": [0.0], "score sd": [1.0],
         "agree": [True], "scores agree": [True]},
        ["k"],
    )  # fmt: skip
    right = {"mean": 1.02, "sd": 0.11, "kurtosis": 3.0, "score mean": 0.0, "score sd": 1.0}

    def outcome(passed, draws):
        return judged({"is_exact": passed, "draws": draws}, known)["outcome"]

    assert outcome(1.0, {"k": right}) == "right, passed"
    assert outcome(0.0, {"k": right}) == "right, withheld"
    assert outcome(1.0, {"k": right | {"mean": 1.04}}) == "wrong without a word"
    assert outcome(1.0, {"k": right | {"sd": 0.07}}) == "wrong without a word"
    assert outcome(0.0, {"k": right | {"sd": 0.13}}) == "wrong, withheld"
    assert outcome(0.0, {}) == "no answer"
    known["scores agree"] = False
    assert outcome(1.0, {"k": right}) == "no reference, passed"


def test_a_heavy_tail_is_judged_by_scores():
    known = pd.DataFrame(
        {"mean": [1.0], "sd": [0.1], "kurtosis": [50.0], "score mean": [0.0], "score sd": [1.0],
         "agree": [True], "scores agree": [True]},
        ["k"],
    )  # fmt: skip
    draws = {"k": {"mean": 1.5, "sd": 0.9, "kurtosis": 3.0, "score mean": 0.0, "score sd": 1.0}}
    assert judged({"is_exact": 1.0, "draws": draws}, known)["outcome"] == "right, passed"
