"""Fits of many data sets as a table, a picture, a hierarchy and weights."""

import tracemalloc

import matplotlib.pyplot as plt
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
import xarray as xr
from pytensor.graph.replace import clone_replace
from scipy import stats
from scipy.special import softmax

import pymc_gradmatch as gm
from pymc_gradmatch._pymc import in_numpy

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
    exact, doubtful, failed = (one.get_offsets() for one in panel.collections)
    assert np.flatnonzero(~np.ma.getmaskarray(failed)[:, 1]).tolist() == [N_SETS - 1]
    legend = [text.get_text() for text in panel.figure.legends[0].get_texts()]
    assert legend == ["90% interval", "posterior mean", "verdict withheld", "no draws"]
    seen = np.ma.filled(exact, np.nan)[:, 1], np.ma.filled(doubtful, np.nan)[:, 1]
    is_exact = table["fit", "is_exact"].to_numpy(dtype=bool)
    np.testing.assert_allclose(seen[0], table["x0[a]", "mean"].where(is_exact))
    np.testing.assert_allclose(seen[1], table["x0[a]", "mean"].where(~is_exact))
    [bars] = panel.get_lines()
    low, high = bars.get_ydata().reshape(-1, 3)[:, :2].T
    np.testing.assert_allclose(low, table["x0[a]", "eti90_lb"])
    np.testing.assert_allclose(high, table["x0[a]", "eti90_ub"])
    plt.close("all")


def test_axes_have_units_where_they_are_given(fits):
    pc = gm.plot_fits(fits, var_names=["rate", "x0[a]"], labels={"rate": "rate (1/h)"})
    bars = [one.get_ylabel() for one in pc.viz["figure"].item().axes if not one.images]
    assert [label for label in bars if label] == ["rate (1/h)", "posterior mean"]
    panel = pc.get_target("fits", {"unknown": "rate"})
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("column", "row")
    with pytest.raises(ValueError, match=r"labels are given for \['k'\]; expected some of"):
        gm.plot_fits(fits, labels={"k": "1/h"})


def test_names_of_which_two_are_one_well_are_no_plate(fits):
    one_well_twice = fits.assign_coords(replicate=["A01", *NAMES[:-1]])
    assert not gm.plot_fits(one_well_twice, var_names=["rate"]).viz["figure"].item().axes[0].images


@pytest.mark.parametrize("backend", ["bokeh", "plotly"])
def test_other_backends_draw_intervals(backend, fits):
    pytest.importorskip(backend)
    pytest.importorskip("webcolors")
    assert gm.plot_fits(fits, backend=backend).backend == backend


def test_a_file_of_fits_is_not_read_at_once(fits, tmp_path):
    pytest.importorskip("zarr")
    many = xr.concat([fits.drop_vars("replicate")[["rate", "failure"]]] * 60, "replicate")
    many.to_zarr(tmp_path / "fits.zarr", zarr_format=2, encoding={"rate": {"chunks": (8, 2, 500)}})
    lazy = xr.open_dataset(tmp_path / "fits.zarr", engine="zarr", chunks=None)
    gm.tabulate(lazy.isel(replicate=slice(1)))  # what imports take is not counted
    tracemalloc.start()
    table = gm.tabulate(lazy, var_names=["rate"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < many["rate"].nbytes / 2
    np.testing.assert_array_equal(table["rate", "mean"], gm.tabulate(many)["rate", "mean"])


def test_fits_of_which_one_failed_are_tabulated_and_weighted():
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t, priors = np.linspace(0, 2, 8), lambda: {"rate": pm.HalfNormal("rate", 2)}
    ys = {name: ode.solve(t, [1.0], [k]) for name, k in {"a": 0.6, "b": 1.0, "c": 1.4}.items()}
    noise = np.random.default_rng(1).normal(0, 0.02, (3, 8, 1))
    ys = {name: y + e for (name, y), e in zip(ys.items(), noise, strict=True)}
    ys["b"][3] = np.inf
    fits = gm.fit_many(
        ode, t, ys, priors=priors, exact=True, n_jobs=1, random_seed=1, progressbar=False
    )
    table = gm.tabulate(fits)
    assert list(table.index) == ["a", "b", "c"]
    assert "infinite" in table.loc["b", ("fit", "failure")]
    assert table.loc["b", "rate"].isna().all()
    np.testing.assert_allclose(table.loc[["a", "c"], ("rate", "mean")], [0.6, 1.4], atol=0.1)
    with pm.Model():
        mean = pm.Normal("mean", 1, 1)
        weights = gm.add_fits(
            fits, {"rate": pm.TruncatedNormal.dist(mean, 1, lower=0)}, priors=priors
        )
    found = gm.reweight_fits(fits, tree({"mean": np.ones((1, 1))}), weights)
    assert found["weight"].sum(["chain", "draw"]).to_numpy() == pytest.approx([1, 0, 1])
    assert np.isnan(found["n_effective"].sel(replicate="b"))


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


def tree(draws):
    """Return draws of a hierarchy's unknowns, shape (chain, draw), as pm.sample returns them."""
    group = {name: (("chain", "draw"), values) for name, values in draws.items()}
    return xr.DataTree.from_dict({"posterior": xr.Dataset(group)})


@pytest.fixture(scope="module")
def two_stages():
    """Return normal means with known noise, in both stages, and the answer in closed form.

    Of every data set i: y_i ~ N(theta_i, NOISE^2), fitted under theta_i ~ N(0, 2^2); the population
    is theta_i ~ N(mean, spread^2).
    """
    rng, prior_sd = np.random.default_rng(3), 2.0
    y = rng.normal(0.5, 0.6, N_SETS) + rng.normal(0, NOISE, N_SETS)
    variance = 1 / (1 / NOISE**2 + 1 / prior_sd**2)
    draws = rng.normal((variance * y / NOISE**2)[:, None], np.sqrt(variance), (N_SETS, 4_000))
    fits = xr.Dataset({"theta": (("replicate", "chain", "draw"), draws[:, None])})
    with pm.Model() as model:
        mean, spread = pm.Normal("mean", 0, 1), pm.HalfNormal("spread", 1)
        population = {"theta": pm.Normal.dist(mean, spread)}
        weights = gm.add_fits(fits, population, priors={"theta": pm.Normal.dist(0, prior_sd)})
    grid = np.stack(np.meshgrid(np.linspace(-0.2, 1.2, 29), np.linspace(0.3, 1.3, 31)), axis=-1)
    grid = grid.reshape(-1, 2)
    total = np.hypot(grid[:, 1:], NOISE)
    of_population = stats.norm.logpdf(y, grid[:, :1], total).sum(axis=1)
    of_fits = stats.norm.logpdf(y, 0, np.hypot(prior_sd, NOISE)).sum()
    return y, fits, model, weights, grid, of_population - of_fits


def test_a_hierarchy_of_normal_fits_has_the_posterior_in_closed_form(two_stages):
    """Assert the potential, and with it mean and sd of the population's mean and spread."""
    *_, model, _, grid, log_ratio = two_stages
    mean, spread = pt.scalars("mean", "spread")
    given = {model["mean"]: mean, model["spread"]: spread}
    potential = in_numpy([mean, spread], clone_replace([model["fits"]], given))
    found = np.array([potential(*point)[0] for point in grid])
    log_prior = stats.norm.logpdf(grid[:, 0]) + stats.halfnorm.logpdf(grid[:, 1])
    summaries = []
    for log_density in (found, log_ratio):
        p = softmax(log_density + log_prior)
        mean = p @ grid
        summaries.append((mean, np.sqrt(p @ np.square(grid - mean))))
    (means, sds), (exact_means, exact_sds) = summaries
    assert (np.abs(means - exact_means) < 0.1 * exact_sds).all()
    np.testing.assert_allclose(sds, exact_sds, rtol=0.1)
    likely = log_ratio + log_prior > (log_ratio + log_prior).max() - 2
    np.testing.assert_allclose(found[likely], log_ratio[likely], atol=0.3)


def test_reweighted_fits_are_shrunken_as_in_closed_form(two_stages):
    """Assert means and sds of the members, averaged over the population's posterior."""
    y, fits, _, weights, grid, log_ratio = two_stages
    log_prior = stats.norm.logpdf(grid[:, 0]) + stats.halfnorm.logpdf(grid[:, 1])
    places = np.random.default_rng(1).choice(len(grid), 400, p=softmax(log_ratio + log_prior))
    mean, spread = grid[places].T[..., None]
    found = gm.reweight_fits(fits, tree({"mean": mean.T, "spread": spread.T}), weights)
    variance = 1 / (1 / NOISE**2 + 1 / spread**2)
    each = variance * (y / NOISE**2 + mean / spread**2)
    weighted = fits["theta"].weighted(found["weight"])
    sd = np.sqrt(variance.mean() + each.var(axis=0))
    error = weighted.mean(["chain", "draw"]) - each.mean(axis=0)
    assert (np.abs(error) < 5 * sd / np.sqrt(found["n_effective"])).all()
    np.testing.assert_allclose(weighted.std(["chain", "draw"]), sd, rtol=0.1)
    assert (found["pareto_k"] < 0.7).all()
    distance = np.abs(each.mean(axis=0) - 0.5)
    assert (distance < np.abs(y - 0.5)).mean() > 0.8


def test_weights_that_rest_on_a_few_draws_are_not_trusted_in_silence(two_stages):
    _, fits, _, weights, *_ = two_stages
    far = tree({"mean": np.full((1, 1), 9.0), "spread": np.full((1, 1), 0.3)})
    with pytest.warns(UserWarning, match="the weights of .* data sets are not reliable"):
        found = gm.reweight_fits(fits, far, weights)
    assert (found["pareto_k"] > 0.7).any()


def test_draws_of_another_hierarchy_or_of_other_fits_are_refused(two_stages):
    _, fits, _, weights, *_ = two_stages
    with pytest.raises(ValueError, match=r"depend on \['spread'\], of which idata have no draws"):
        gm.reweight_fits(fits, tree({"mean": np.zeros((1, 1))}), weights)
    one = tree({"mean": np.zeros((1, 1)), "spread": np.ones((1, 1))})
    with pytest.raises(ValueError, match=r"those of 24 data sets .* expected the fits"):
        gm.reweight_fits(fits.isel(replicate=slice(3)), one, weights)


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
        (
            {"rate": pm.Normal.dist(shape=7)},
            {"rate": pm.Normal.dist()},
            ValueError,
            r"has the shape \(7,\); expected a scalar, or a vector of 24",
        ),
        (
            {"rate": pm.Normal.dist()},
            {"rate": pm.Normal.dist(pm.Normal.dist())},
            ValueError,
            r"depends on other random variables",
        ),
        (
            {"rate": pm.Normal.dist()},
            {"rate": pm.Uniform.dist(0, 0.1)},
            ValueError,
            r"is zero or infinite at draws",
        ),
    ],
)
def test_what_cannot_be_weighed_is_refused(fits, population, priors, error, words):
    with pm.Model(), pytest.raises(error, match=words):
        gm.add_fits(fits, population, priors=priors)
