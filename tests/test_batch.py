"""Batched fits of data sets with the same pattern: each has the draws that it has alone."""

import threading

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.distributions.transforms import Transform

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior, batch
from pymc_gradmatch.model import unfitted_model
from pymc_gradmatch.sampling import many
from pymc_gradmatch.sampling.batched_fits import ExactFits, bind_data

T = np.linspace(0, 3, 10)
RATES = (0.5, 1.0, 1.7)


def decays(seed=1, floor=0.0):
    """Return observations of a chain, a to b, of different rates."""
    rng = np.random.default_rng(seed)
    a = np.stack([3 * np.exp(-rate * T) for rate in RATES])
    b = np.stack([3 * rate * T * np.exp(-rate * T) for rate in RATES]) + 0.5
    noise = rng.normal(0, 0.1, (len(RATES), len(T), 2))
    return np.maximum(np.stack([a, b], axis=-1) + noise, floor)


def chain(**settings):
    return gm.ODE(
        lambda t, x, theta: [-theta.k * x.a, theta.k * x.a - theta.m * x.b],
        ["a", "b"], ["k", "m"], **settings,
    )  # fmt: skip


def priors():
    return {"k": pm.LogNormal.dist(0, 0.7), "m": pm.LogNormal.dist(0, 0.7)}


def fitted(ode, ys, **settings):
    return gm.fit_many(
        ode, T, ys, priors=priors(), exact=True, n_jobs=1, random_seed=5, progressbar=False,
        **settings,
    )  # fmt: skip


def missing(ys):
    ys[:, 3, 1] = np.nan
    ys[1, 4, 0] = np.nan
    return ys


def as_counts(ys):
    return np.round(20 * ys).astype(int)


def as_tables(ys):
    tables = [pd.DataFrame(y, index=T, columns=["a", "b"]) for y in ys]
    for table in tables:
        table.iloc[3, 1] = np.nan
    return tables


def counted(x, theta, y):
    size = np.int64(y.sum() // y.sum() * 20)
    pm.Poisson("a_counted", size * pt.maximum(x.a, 1e-3), observed=y[:, 0], dims="time_observed")
    pm.Poisson("b_counted", 20 * pt.maximum(x.b, 1e-3), observed=y[:, 1])


def overdispersed(x, theta, y):
    alpha = pm.Gamma("alpha", 2, y.mean() / 100, dims="state", initval=np.ones(2))
    pm.NegativeBinomial("seen", mu=20 * pt.stack([x.a, x.b], axis=1), alpha=alpha, observed=y)


def of_table(x, theta, y):
    noise = pm.HalfNormal("noise", float(y["a"].std()))
    for name in y:
        seen = y[name].notna().to_numpy()
        pm.StudentT(
            f"{name}_seen", nu=4, mu=getattr(x, name)[seen], sigma=noise, observed=y[name][seen]
        )


def censored(x, theta, y):
    at_least = np.maximum(y, 0.7)
    of_state = pm.Normal.dist(pt.stack([x.a, x.b], axis=1), 0.1)
    pm.Censored("seen", of_state, lower=0.7, upper=None, observed=at_least)


KINDS = {
    "as they are": ({}, {}, lambda ys: ys),
    "missing values": ({}, {}, missing),
    "positive states": ({"positive": ["a", "b"]}, {}, lambda ys: ys),
    "one positive state": ({"positive": ["a"]}, {}, lambda ys: ys),
    "a start that is known": ({}, {"start": {"a": 3.0}}, lambda ys: ys),
    "a prior of a start": ({}, {"start": {"b": pm.LogNormal.dist(-0.7, 0.2)}}, lambda ys: ys),
    "noise that is known": ({}, {"sigma": 0.1}, lambda ys: ys),
    "a prior of the noise": ({}, {"sigma": pm.HalfNormal.dist(0.3)}, lambda ys: ys),
    "counts": ({}, {"likelihood": counted}, as_counts),
    "counts with noise of their own": (
        {"positive": ["a", "b"]},
        {"likelihood": overdispersed},
        as_counts,
    ),
    "a table with what is missing": ({}, {"likelihood": of_table}, as_tables),
    "below a limit": ({}, {"likelihood": censored}, lambda ys: ys),
    "doses": (
        {"inputs": []},
        {"inputs": {"b": gm.Input([1.1], [0.2], kind="dose")}},
        lambda ys: ys,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_posterior_with_replaced_numbers_is_that_of_its_own_model(kind, rng):
    """Assert the same draws of the prior, and the same density and derivatives there."""
    of_ode, settings, change = KINDS[kind]
    ode, ys = chain(**of_ode), change(decays(floor=0.02))
    fits = ExactFits(ode, priors(), 1_000, settings)
    first, *others = [(T, y, 1) for y in ys]
    posterior = fits._batched_posterior(first, fits._check(*first[:2]))
    written = posterior.batch
    of_model = {name: value for name, value in settings.items() if name == "sigma"}
    of_data = {name: value for name, value in settings.items() if name != "sigma"}
    for t, y, seed in others:
        told = fits._check(t, y)
        assert posterior is fits._batched_posterior((t, y, seed), told)
        one = posterior.data_set(told, np.random.default_rng(4))
        written.number.set_values(one)
        written.set_data_sets([one])
        if "likelihood" in settings:  # scales are those of solutions, the same ones here
            y, of_data["likelihood"] = bind_data(settings["likelihood"], y)
        alone = ExactPosterior(
            unfitted_model(
                ode, t, y, priors=priors(), settings=of_model, random_seed=4, progressbar=False,
                **of_data,
            )
        )  # fmt: skip
        own = written.written.with_data(one.data)
        points = own.draw_prior(20, np.random.default_rng(3))
        np.testing.assert_allclose(
            points, alone.draw_prior(20, np.random.default_rng(3)), rtol=1e-12
        )
        widths = np.full(points.shape[1], 0.5)
        expected = alone(points), *alone.expand(points, widths)[1:]
        for found in (own, written):
            values = found(points), *found.expand(points, widths)[1:]
            for value, right in zip(values, expected, strict=True):
                np.testing.assert_allclose(value, right, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("kind", ["as they are", "missing values", "positive states"])
def test_draws_are_those_of_each_data_set_alone(kind):
    """Assert it to Monte Carlo error: rounding changes the draws of an adaptive search."""
    of_ode, settings, change = KINDS[kind]
    ode, ys = chain(**of_ode), change(decays(floor=0.02))
    fits = fitted(ode, ys, draws=4_000, **settings)
    assert list(fits["failure"].values) == [""] * len(ys)
    for place, y in enumerate(ys):
        alone = gm.fit(ode, T, y, priors=priors(), random_seed=1, progressbar=False, **settings)
        assert fits["is_exact"][place] == alone.is_exact
        posterior = alone.idata["posterior"].dataset
        for name in ("k", "m", "x0"):
            sd = posterior[name].std("draw")
            apart = np.abs(fits[name][place].mean("draw") - posterior[name].mean("draw")) / sd
            assert float(apart.max()) < 5 * np.sqrt(2 / 1_000)  # effective draws, at least


@pytest.mark.parametrize("size", [1, 2])
def test_draws_are_the_same_to_the_last_bit_in_groups_of_any_size(monkeypatch, size):
    ys = missing(decays())
    together = fitted(chain(), ys)
    monkeypatch.setattr(many, "MAX_BATCH", size)
    apart = fitted(chain(), ys)
    for name in ("k", "m", "x0", "sigma", "x", "pareto_k", "verdict"):
        np.testing.assert_array_equal(together[name], apart[name])


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"max_seconds": 1e-6}, "out of time"), ({"preset": "fgpgm"}, "no argument preset")],
)
def test_arguments_of_single_fits_are_refused_by_these(settings, words):
    with pytest.raises((TimeoutError, TypeError), match=words):
        fitted(chain(), decays(), **settings)


def test_the_error_of_a_search_is_reported_and_the_others_end(monkeypatch):
    judged = many.ExactFits._search

    def failing(self, target, seed):
        if target.constraints[0].gp.y[0, 0] == ys[1, 0, 0]:
            target(target.draw_prior(10, np.random.default_rng(1)))
            msg = "of this one alone"
            raise ValueError(msg)
        return judged(self, target, seed)

    ys = decays()
    monkeypatch.setattr(many.ExactFits, "_search", failing)
    fits = fitted(chain(), ys)
    assert list(fits["failure"].values) == ["", "ValueError: of this one alone", ""]
    assert np.isfinite(fits["k"][[0, 2]]).all()


def test_an_interrupt_ends_all_searches(monkeypatch):
    """Assert that Ctrl-C, which the main thread gets, leaves no thread behind."""

    def pressed(*args):
        raise KeyboardInterrupt

    before = threading.active_count()
    monkeypatch.setattr(batch.BatchPosterior, "respond", pressed)
    with pytest.raises(KeyboardInterrupt):
        fitted(chain(), decays())
    assert threading.active_count() == before


def test_a_likelihood_is_that_of_each_data_set(monkeypatch):
    """Assert the draws of single fits, with one posterior written for all."""
    written = []
    write = ExactFits._write

    def counting(self, *args):
        written.append(args)
        return write(self, *args)

    monkeypatch.setattr(ExactFits, "_write", counting)
    ys = as_counts(decays(floor=0.02))
    fits = fitted(chain(), ys, draws=4_000, likelihood=counted)
    assert list(fits["failure"].values) == [""] * len(ys)
    assert len(written) == 1
    for place, y in enumerate(ys):
        alone = gm.fit(
            chain(), T, priors=priors(), random_seed=1, progressbar=False,
            likelihood=lambda x, theta, y=y: counted(x, theta, y),
        )  # fmt: skip
        assert fits["is_exact"][place] == alone.is_exact
        posterior = alone.idata["posterior"].dataset
        for name in ("k", "m", "x0"):
            sd = posterior[name].std("draw")
            apart = np.abs(fits[name][place].mean("draw") - posterior[name].mean("draw")) / sd
            assert float(apart.max()) < 5 * np.sqrt(2 / 1_000)


class Above(Transform):
    """Keeps a number that no graph of the likelihood contains."""

    name, ndim_supp = "above", 0

    def __init__(self, lowest):
        self.lowest = lowest

    def forward(self, value, *inputs):
        """Return the coordinate."""
        return pt.log(value - self.lowest)

    def backward(self, value, *inputs):
        """Return the number."""
        return pt.exp(value) + self.lowest

    def log_jac_det(self, value, *inputs):
        """Return the log of the derivative."""
        return value


def test_a_likelihood_with_numbers_outside_graphs_is_fitted_alone(monkeypatch):
    """Assert that the first other data set is compared with its own model."""
    alone = []
    monkeypatch.setattr(
        ExactFits, "_fit_separately", lambda self, *one: alone.append(one) or ValueError("-")
    )

    def bounded(x, theta, y):
        s = pm.LogNormal("s", transform=Above(float(y.min() / 2)))
        pm.Normal("seen", x.a + x.b, s, observed=y.sum(axis=1))

    with pytest.raises(ValueError, match="-"):
        fitted(chain(), decays(floor=0.02), likelihood=bounded)
    assert len(alone) == len(RATES)


def test_a_likelihood_without_an_argument_for_data_is_refused():
    with pytest.raises(TypeError, match=r"expected likelihood\(x, theta, y\)"):
        fitted(chain(), decays(), likelihood=lambda x, theta: None)
