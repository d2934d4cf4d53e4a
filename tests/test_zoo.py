"""The zoo: problems that a number determines, references that know the answer, fair judgement."""

import numpy as np
import pymc as pm
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from benchmarks.cases.case import Prior
from benchmarks.zoo import known, study
from benchmarks.zoo.__main__ import to_be_referred
from benchmarks.zoo.generator import problem
from benchmarks.zoo.priors import drawn, from_scores, to_scores
from benchmarks.zoo.problem import LAWS
from benchmarks.zoo.reference import by_ensemble, by_population, by_quadrature, moments

PRIORS = [
    Prior("Normal", (1.0, 2.0)),
    Prior("LogNormal", (0.5, 1.5)),
    Prior("HalfNormal", (3.0,)),
    Prior("HalfCauchy", (1.0,)),
    Prior("Uniform", (0.5, 20.0)),
    Prior("Gamma", (2.0, 0.7)),
    Prior("Exponential", (0.4,)),
]
NAMES = [prior.family for prior in PRIORS]
NARROW = 0.1  # of the two modes below


def two_modes(scores):
    """Return a log likelihood of two modes, the narrow one with a third of the mass."""
    wide = -0.5 * np.square((scores - 1.0) / 0.5).sum(axis=1) - scores.shape[1] * np.log(0.5)
    narrow = -0.5 * np.square((scores + 1.0) / NARROW).sum(axis=1)
    narrow = narrow - scores.shape[1] * np.log(NARROW) - np.log(2)
    # The prior weighs either; this takes it out again.
    return logsumexp([wide, narrow], axis=0) + 0.5 * np.square(scores).sum(axis=1)


@pytest.mark.parametrize("prior", PRIORS, ids=NAMES)
def test_scores_lead_back_and_are_those_of_the_prior_in_pymc(prior):
    scores = np.linspace(-7, 7, 29)
    values = from_scores(prior, scores)
    np.testing.assert_allclose(to_scores(prior, values), scores, rtol=1e-6, atol=1e-6)
    levels = pm.logcdf(prior.pymc(), values).eval(mode="FAST_COMPILE")
    np.testing.assert_allclose(np.exp(levels), norm.cdf(scores), atol=1e-6)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_in_numpy_is_the_one_in_pymc(law):
    rng = np.random.default_rng(0)
    expected, noise, limit = rng.uniform(2, 9, 12), 0.7, 3.0
    y = LAWS[law].draw(rng, expected, noise, limit)
    with pm.Model() as model:
        LAWS[law].write("y", expected, noise, limit, y)
    [theirs] = model.logp(vars=[model["y"]], sum=False)
    ours = LAWS[law].log_density(y, expected, noise, limit)
    np.testing.assert_allclose(theirs.eval(mode="FAST_COMPILE"), ours, rtol=1e-6)


def test_a_number_determines_a_problem():
    one, other = problem(13), problem(13)
    assert one.unknowns == other.unknowns
    np.testing.assert_array_equal(one.truth, other.truth)
    np.testing.assert_array_equal(one.data[0][0], other.data[0][0])
    assert np.isfinite(one.log_likelihood(one.truth[None]))


def test_a_population_and_quadrature_give_two_modes_their_shares():
    draws = by_population(two_modes, 2, 4_000, 1)
    assert (draws[:, 0] < -0.5).mean() == pytest.approx(1 / 3, abs=0.06)
    points, weights = by_quadrature(two_modes, draws)
    assert weights[points[:, 0] < -0.5].sum() == pytest.approx(1 / 3, abs=1e-2)


def test_an_ensemble_mends_a_population_that_is_too_narrow_along_a_thin_ridge():
    """Assert moments that are known, of a banana a tenth as wide as long, from half of it."""

    def ridge(scores):
        along, across = scores.T  # the prior is N(0, I): here only across is told, by a parabola
        return -0.5 * np.square((across - 0.3 * np.square(along)) / 0.1)

    rng = np.random.default_rng(0)
    along = 0.5 * rng.normal(size=1_000)
    narrow = np.stack([along, 0.3 * np.square(along)], 1)
    draws = by_ensemble(ridge, narrow, 2_000, 1)
    places = np.linspace(-6, 6, 4_001)
    density = np.exp(-0.5 * np.square(places) - 0.5 * np.square(0.3 * np.square(places)) / 1.01)
    expected = np.sqrt((density * np.square(places)).sum() / density.sum())
    assert moments(narrow).sd[0] < 0.6 * expected
    assert moments(draws).sd[0] == pytest.approx(expected, rel=0.05)


def test_quadrature_too_coarse_for_a_mode_is_none():
    pilot = np.random.default_rng(0).normal(size=(500, 2))
    assert by_quadrature(lambda scores: -0.5 * np.square(scores / 1e-4).sum(axis=1), pilot) is None


def test_the_rotation_has_a_fifth_of_its_mass_at_low_frequencies():
    w, weights, _, _ = known.by_frequency(known.rotation(0))
    assert weights[w < known.SLOW].sum() == pytest.approx(0.19, abs=0.005)


@pytest.fixture
def posed():
    return known.rotation(0)


def row_of(posed, values, n_effective=2_000.0):
    """Return the row of a fit with some draws."""
    draws = study.summary_of(posed, values, np.zeros(len(values)))
    return {"is_exact": 1.0, "n_effective": n_effective, "draws": draws}


def test_right_draws_are_not_false_and_those_without_a_mode_are(posed):
    rng = np.random.default_rng(0)
    w, weights, mean, covariance = known.by_frequency(posed)
    places = rng.choice(len(w), 4_000, p=weights)
    noise = np.linalg.cholesky(covariance[places]) @ rng.normal(size=(4_000, 2, 1))
    values = np.column_stack([w[places], mean[places] + noise[..., 0]])
    of = study.as_row(posed, known.by_quadrature(posed, 0))
    assert study.judged(row_of(posed, values), of)["false"] == 0
    found = study.judged(row_of(posed, values[values[:, 0] > known.SLOW]), of)
    assert found["false"] == 1
    assert "w: 0.4" in found["wrong"]
    doubted = of | {"of": {n: one | {"agree": [False] * 3} for n, one in of["of"].items()}}
    assert np.isnan(study.judged(row_of(posed, values), doubted)["false"])


def test_every_extreme_rank_of_a_passed_fit_is_looked_at():
    def ranked(below, is_exact=1.0):
        return {"is_exact": is_exact, "draws": [{"below": below}]}

    rows = {number: ranked(0.5) for number in range(20)}
    rows |= {20: ranked(0.001), 21: ranked(0.999), 22: ranked(0.0, is_exact=0.0)}
    chosen = to_be_referred(rows, 5)
    assert chosen[:2] == [20, 21]
    assert 22 not in chosen
    assert len(chosen) >= 5
    assert to_be_referred(rows | {23: {"is_exact": 0.0}}, 5) == chosen


def test_moments_of_weights_are_those_of_repeated_values():
    values = np.random.default_rng(0).normal(size=(20, 2))
    counts = np.arange(20)
    for one, other in zip(
        moments(values, counts), moments(values.repeat(counts, axis=0)), strict=True
    ):
        np.testing.assert_allclose(one, other)


def test_draws_of_a_prior_are_its():
    rng = np.random.default_rng(0)
    values = [drawn(Prior("Exponential", (0.5,)), rng) for _ in range(4_000)]
    assert np.mean(values) == pytest.approx(2.0, rel=0.1)


def test_the_interval_of_a_share():
    assert study.clopper_pearson(0, 60) == (0.0, pytest.approx(0.0596, abs=1e-3))
    assert study.clopper_pearson(60, 60)[1] == 1.0
