"""The verdict: its conditions by name, their figures, and their sentences."""

from dataclasses import fields

import numpy as np
import pandas as pd
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.exact.diagnostics import REASONS, Condition, Diagnostics
from pymc_gradmatch.exact.importance import Mixture
from pymc_gradmatch.exact.multistart import FIRST_STARTS
from pymc_gradmatch.exact.ridges import Ridges

FAILED = {
    "finished": ("stopped by Ctrl-C", "stopped by Ctrl-C before the searches had ended"),
    "proper": (["k", "x0[a]"], "does not fall off along k, x0[a], of flat prior"),
    "solved": (0.123, "12.3% of the solutions of draws of the prior were out of steps"),
    "no_aliases": ("'a' turns 12 times in 9 equal gaps", "Such aliases fit alike"),
    "walks": (7, "7 of 48 Hamiltonian trajectories from the draws of 2 independent searches"),
    "walks_tell": (30, "only 30 of 48 Hamiltonian trajectories from the draws, half of which"),
    "ridges": (3, "a ridge extends beyond the point to which it was followed"),
    "weights": (0.93, "their weights are too uneven"),
    "searches_agree": ("k by 1.4", "2 independent searches disagree, beyond their errors most on"),
    "errors": (0.9, "agree only because their Monte Carlo errors are large"),
    "r_hat": (1.05, "4 chains of NUTS have not mixed: R-hat 1.05"),
    "effective": (120.0, "4 chains of NUTS have few effective draws"),
    "divergences": (40, "40 draws of 4 chains of NUTS diverged"),
    "tolerance": (0.8, "4 chains of NUTS solved the equations too roughly: weights leave 80%"),
    "modes_repeat": (0.25, "there are more modes than local optimisations found: 25% of them"),
    "explained": (["'a'"], "a solution that leaves much of 'a' unexplained"),
}


OF_SEARCHES = {"weights", "searches_agree", "errors", "walks", "walks_tell", "ridges"}
OF_CHAINS = {"r_hat", "effective", "divergences", "tolerance"}
CHAINS = {
    "method": "NUTS", "pareto_k": np.nan, "n_effective": 900.0, "r_hat": 1.05, "n_searches": 4,
    "n_divergences": 40,
}  # fmt: skip


def judged(*failed, **changes):
    """Return diagnostics of which some conditions fail."""
    others = OF_SEARCHES if changes.get("method") == "NUTS" else OF_CHAINS
    conditions = {
        name: Condition(name not in failed, FAILED[name][0])
        for name in reversed(REASONS)
        if name not in others
    }
    given = {
        "method": "importance sampling",
        "pareto_k": 0.31,
        "n_effective": 2_000.0,
        "n_weighted": 4_000,
        "r_hat": np.nan,
        "n_divergences": 0,
        "n_searches": 2,
        "n_rounds": 4,
        "n_climbs": 32,
        "n_walks": 48,
        "n_solutions": 9_000,
        "n_failed": {},
        "modes": pd.DataFrame({"weight": [1.0], "reached": [16]}),
        "conditions": conditions,
    }
    return Diagnostics(**given | changes)


def test_every_condition_has_a_sentence_and_a_test():
    assert set(REASONS) == set(FAILED)


def test_a_verdict_passes_where_all_conditions_hold():
    passed = judged()
    assert passed.passed
    assert repr(passed) == passed.in_words()
    assert repr(passed) == (
        "These are draws from the exact posterior: 2 independent searches agree, Pareto k 0.31 "
        "(0.70 is the limit), 2000 effective draws of 4000, 4 rounds."
    )


def test_a_passed_verdict_on_chains_has_their_figures():
    assert repr(judged(**CHAINS)) == (
        "These are draws from the exact posterior: 4 chains of NUTS have converged, R-hat 1.050, "
        "900 effective draws of 4000, 40 divergences."
    )


@pytest.mark.parametrize("name", FAILED)
def test_a_condition_that_fails_withholds_the_verdict_and_is_named(name):
    failed = judged(name, **CHAINS if name in OF_CHAINS else {})
    assert not failed.passed
    assert repr(failed).startswith("These are not draws from the exact posterior: ")
    assert FAILED[name][1] in repr(failed)
    assert ("R-hat 1.050" if name in OF_CHAINS else "Pareto k 0.31") in repr(failed)
    assert not any(words in repr(failed) for key, (_, words) in FAILED.items() if key != name)


@pytest.mark.parametrize(("changes", "others"), [({}, OF_CHAINS), (CHAINS, OF_SEARCHES)])
def test_of_several_conditions_that_fail_the_first_reason_is_given(changes, others):
    in_order = [name for name in REASONS if name not in others]
    for number, name in enumerate(in_order):
        assert repr(judged(*in_order[number:], **changes)) == repr(judged(name, **changes))


T = np.linspace(0, 2, 9)
DECAY = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def fit():
    y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.1, (9, 1))
    priors = {"rate": pm.HalfNormal.dist(2)}
    return gm.fit(DECAY, T, y, priors=priors, sigma=0.1, random_seed=1, progressbar=False)


def test_a_fit_has_the_diagnostics_of_its_verdict(fit):
    found = fit.diagnostics
    assert fit.is_exact
    assert found.passed
    assert fit.verdict.startswith(found.in_words())
    assert set(found.conditions) == set(REASONS) - OF_CHAINS
    assert all(condition.passed for condition in found.conditions.values())
    assert found.method == "importance sampling"
    assert (found.pareto_k, found.n_effective) == (fit.pareto_k, fit.n_effective)
    assert found.n_weighted == len(fit.weights)
    assert found.n_solutions == fit.n_solutions
    assert found.n_failed == fit.failures
    assert np.isnan(found.r_hat)
    assert found.n_divergences == 0
    assert found.n_searches == 2
    assert 44 <= found.n_walks <= 48
    assert found.modes["weight"].sum() == pytest.approx(1)
    assert found.modes["reached"].tolist() == [FIRST_STARTS]
    assert {field.name for field in fields(found)} >= {"n_rounds", "conditions"}


def withheld(condition, t, y, priors, ode=DECAY, **settings):
    """Fit, and assert that one condition fails, and that the verdict is withheld."""
    fit = gm.fit(ode, t, y, priors=priors, random_seed=1, progressbar=False, **settings)
    assert not fit.diagnostics.conditions[condition].passed
    assert not fit.diagnostics.passed
    assert not fit.is_exact
    return fit


def test_oscillations_that_the_equation_lacks_are_unexplained():
    """Assert it of a decay with data that oscillate around it."""
    t = np.linspace(0, 6, 40)
    y = (np.exp(-t) + 0.3 * np.sin(3 * t))[:, None] + np.random.default_rng(1).normal(
        0, 0.02, (40, 1)
    )
    fit = withheld("explained", t, y, {"rate": pm.HalfNormal.dist(2)})
    assert fit.diagnostics.conditions["explained"].figure == ["'mass'"]
    assert "leaves much of 'mass' unexplained" in fit.verdict


def test_searches_that_are_cut_short_withhold_the_verdict(monkeypatch):
    """Assert it of weights that are too uneven, as the proposal is much too narrow."""

    def narrow(modes):
        return Mixture.single(modes.point[0], 1e-4 * modes.covariance[0])

    monkeypatch.setattr("pymc_gradmatch.exact.importance.MAX_ROUNDS", 1)
    monkeypatch.setattr("pymc_gradmatch.exact.search.mixture_of_modes", narrow)
    monkeypatch.setattr(
        "pymc_gradmatch.exact.search.follow_ridges",
        lambda _, modes: Ridges(narrow(modes), 0, modes.log_density[:1]),
    )
    y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.1, (9, 1))
    fit = withheld("weights", T, y, {"rate": pm.HalfNormal.dist(2)}, sigma=0.1)
    assert fit.diagnostics.conditions["weights"].figure == fit.pareto_k
