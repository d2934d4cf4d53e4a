"""Fits of many data sets as a table, a picture and a hierarchy."""

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm

N_SETS, N_DRAWS, NOISE = 24, 1_000, 0.25
NAMES = [f"{row}{column}" for row in "AB" for column in range(1, 13)]
FAILED, DOUBTFUL = 3, 5


@pytest.fixture
def measured(rng):
    """Return a number for each data set: the log of a rate of its own, with noise."""
    return rng.normal(0.3, 0.4, N_SETS) + rng.normal(0, NOISE, N_SETS)


@pytest.fixture
def fits(measured, rng):
    """Return draws of what each data set says by itself, under a standard normal prior."""
    variance = 1 / (1 / NOISE**2 + 1)
    z = rng.normal(size=(N_SETS, 2, N_DRAWS // 2))
    rate = np.exp((variance * measured / NOISE**2)[:, None, None] + np.sqrt(variance) * z)
    rate[FAILED] = np.nan
    each = ("replicate", "chain", "draw")
    failure = np.where(np.arange(N_SETS) == FAILED, "ValueError: no", "")
    is_exact = ~np.isin(np.arange(N_SETS), [FAILED, DOUBTFUL])
    return xr.Dataset(
        {
            "rate": (each, rate),
            "x0": ((*each, "state"), np.stack([rate, 2 * rate], axis=-1)),
            "x": ((*each, "time", "state"), np.zeros((*rate.shape, 4, 2))),
            "failure": ("replicate", failure),
            "is_exact": ("replicate", is_exact),
            "pareto_k": ("replicate", np.full(N_SETS, 0.3)),
        },
        {"replicate": NAMES, "state": ["a", "b"]},
    )


def test_a_table_has_what_the_draws_say_and_why_some_are_missing(fits):
    table = gm.tabulate(fits, ci_prob=0.9)
    assert list(table.index) == NAMES
    assert [*table.columns.get_level_values(0).unique()] == ["rate", "x0[a]", "x0[b]", "fit"]
    draws = fits["rate"].sel(replicate="A2")
    assert table.loc["A2", ("rate", "mean")] == pytest.approx(float(draws.mean()))
    assert table.loc["A2", ("rate", "sd")] == pytest.approx(float(draws.std()))
    ends = table.loc["A2", "rate"][["eti90_lb", "eti90_ub"]]
    np.testing.assert_allclose(ends, np.quantile(draws, [0.05, 0.95]))
    np.testing.assert_allclose(table["x0[b]", "mean"], 2 * table["rate", "mean"])
    without = table[table["fit", "failure"] != ""]
    assert list(without.index) == [NAMES[FAILED]]
    assert without["rate"].isna().all(axis=None)


def test_wells_are_drawn_in_their_places(fits):
    pc = gm.plot_fits(fits, var_names=["rate"])
    panel = pc.get_target("fits", {"unknown": "rate"})
    [image] = panel.get_images()
    means = gm.tabulate(fits)["rate", "mean"].to_numpy().reshape(2, 12)
    np.testing.assert_allclose(np.ma.filled(image.get_array(), np.nan), means)
    failed, doubtful = panel.get_lines()
    np.testing.assert_allclose(failed.get_xydata(), [[FAILED, 0]])
    np.testing.assert_allclose(doubtful.get_xydata(), [[DOUBTFUL, 0]])
    assert [label.get_text() for label in panel.get_yticklabels()] == ["A", "B"]
    plt.close("all")


def test_other_names_are_drawn_in_the_order_of_their_means(fits):
    mice = fits.assign_coords(replicate=[f"mouse {k}" for k in range(N_SETS)])
    pc = gm.plot_fits(mice, ci_prob=0.9)
    panel = pc.get_target("fits", {"unknown": "x0[a]"})
    table = gm.tabulate(mice, ci_prob=0.9).sort_values(("x0[a]", "mean"))
    assert [label.get_text() for label in panel.get_xticklabels()] == list(table.index)
    exact, doubtful = (one.get_offsets() for one in panel.collections)
    seen = np.ma.filled(exact, np.nan)[:, 1], np.ma.filled(doubtful, np.nan)[:, 1]
    is_exact = table["fit", "is_exact"].to_numpy(dtype=bool)
    np.testing.assert_allclose(seen[0], table["x0[a]", "mean"].where(is_exact))
    np.testing.assert_allclose(seen[1], table["x0[a]", "mean"].where(~is_exact))
    [bars] = panel.get_lines()
    low, high = bars.get_ydata().reshape(-1, 3)[:, :2].T
    np.testing.assert_allclose(low, table["x0[a]", "eti90_lb"])
    np.testing.assert_allclose(high, table["x0[a]", "eti90_ub"])
    plt.close("all")


def test_an_unknown_that_is_none_is_refused(fits):
    with pytest.raises(ValueError, match=r"var_names has \['x'\]; expected some of \['rate'"):
        gm.plot_fits(fits, var_names=["x"])
    with pytest.raises(ValueError, match=r"expected .*'replicate', 'chain', 'draw'"):
        gm.tabulate(fits.isel(replicate=0))


def in_population(fits, **settings):
    """Return a hierarchy of fits, and its weights."""
    with pm.Model() as model:
        mean, spread = pm.Normal("mean", 0, 1), pm.HalfNormal("spread", 0.5)
        weights = gm.add_fits(
            fits, {"rate": pm.LogNormal.dist(mean, spread)},
            priors={"rate": pm.LogNormal.dist(0, 1)}, **settings,
        )  # fmt: skip
    return model, weights


def test_weights_are_those_of_the_population_beside_the_prior(fits):
    """Assert the density of a point, draw by draw, and the worth of the weights."""
    model, weights = in_population(fits)
    mean, spread = 0.2, 0.3
    rate = fits["rate"].to_numpy().reshape(N_SETS, -1).T

    def log_density(m, s):
        return -np.log(s) - 0.5 * np.square((np.log(rate) - m) / s)

    ratio = np.exp(log_density(mean, spread) - log_density(0, 1))
    found, worth = (
        pm.draw(pm.do(model, {"mean": mean, "spread": spread}).named_vars["fits_n_effective"], 1),
        np.square(ratio.sum(axis=0)) / np.square(ratio).sum(axis=0),
    )
    is_there = np.arange(N_SETS) != FAILED
    np.testing.assert_allclose(found[is_there], worth[is_there], rtol=1e-9)
    at = {model["mean"]: mean, model["spread"]: spread}
    np.testing.assert_allclose(
        weights.eval(at)[:, is_there], (ratio / ratio.sum(axis=0))[:, is_there]
    )
    total = np.log(ratio.mean(axis=0)[is_there]).sum()
    assert float(model["fits"].eval(at)) == pytest.approx(total, rel=1e-9)


@pytest.mark.slow
def test_a_hierarchy_of_fits_is_that_of_the_data(fits, measured):
    """Assert mean and sd of the population's unknowns beside those of the joint model."""
    with in_population(fits)[0]:
        of_fits = pm.sample(1_000, chains=2, cores=1, random_seed=1, progressbar=False)
    with pm.Model():
        mean, spread = pm.Normal("mean", 0, 1), pm.HalfNormal("spread", 0.5)
        noise = pm.math.sqrt(spread**2 + NOISE**2)
        pm.Normal("y", mean, noise, observed=np.delete(measured, FAILED))
        jointly = pm.sample(1_000, chains=2, cores=1, random_seed=1, progressbar=False)
    for name in ("mean", "spread"):
        one, other = of_fits["posterior"][name], jointly["posterior"][name]
        assert abs(float(one.mean() - other.mean())) < 0.25 * float(other.std())
        assert float(one.std() / other.std()) == pytest.approx(1, abs=0.2)
    assert float(of_fits["posterior"]["fits_n_effective"].mean(["chain", "draw"]).min()) > 50


@pytest.mark.parametrize(
    ("population", "priors", "error", "words"),
    [
        ({"k": pm.Normal.dist()}, {}, ValueError, r"but there are no draws of it"),
        ({"rate": pm.Normal.dist()}, {}, ValueError, r"expected the prior"),
        ({"rate": 1.0}, {"rate": pm.Normal.dist()}, TypeError, r"expected distributions"),
    ],
)
def test_what_cannot_be_weighed_is_refused(fits, population, priors, error, words):
    with pm.Model(), pytest.raises(error, match=words):
        gm.add_fits(fits, population, priors=priors)
