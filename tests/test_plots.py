"""What is drawn, where, with which labels."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pymc as pm
import pytest
import xarray as xr
from matplotlib.colors import to_rgb
from scipy.stats import norm

import pymc_gradmatch as gm


@pytest.fixture
def idata(data, rng):
    noise = rng.normal(0, 0.1, size=(2, 50, *data.y.shape))
    coords = {"time": data.t, "state": ["prey", "predator"]}
    x = xr.DataArray(data.x + noise, dims=("chain", "draw", "time", "state"), coords=coords)
    y = xr.DataArray(data.y, dims=("time", "state"), coords=coords)
    tree = {"posterior": xr.Dataset({"x": x}), "observed_data": xr.Dataset({"y": y})}
    return xr.DataTree.from_dict(tree)


def test_each_state_has_a_panel_with_band_mean_data_and_truth(idata, data):
    pc = gm.plot_states(idata, truth=data.x, ci_prob=0.9, labels=("time (h)", "mass (g)"))
    for k, state in enumerate(["prey", "predator"]):
        axes = pc.get_target("x", {"state": state})
        assert axes.get_title() == state
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (h)", "mass (g)")
        mean, truth = axes.get_lines()
        draws = idata["posterior"]["x"].sel(state=state)
        np.testing.assert_allclose(mean.get_ydata(), draws.mean(["chain", "draw"]))
        np.testing.assert_allclose(truth.get_ydata(), data.x[:, k])
        band, points = axes.collections
        np.testing.assert_allclose(points.get_offsets(), np.stack([data.t, data.y[:, k]], axis=1))
        edges = band.get_paths()[0].get_extents()
        assert edges.y1 == pytest.approx(float(draws.quantile(0.95, ["chain", "draw"]).max()))
    [legend] = pc.viz["figure"].item().legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries == ["90% of the curve", "posterior mean", "truth", "data"]


def top_of(band):
    return band.get_paths()[0].get_extents().y1


def test_the_band_of_new_data_is_drawn_behind_that_of_the_curve(idata, data, rng):
    x = idata["posterior"]["x"]
    new = x + rng.normal(0, 0.5, x.shape)
    with pytest.raises(ValueError, match=r"no draws of new data, only \['posterior', 'observed"):
        gm.plot_states(idata, new_data=True)
    idata["posterior_predictive"] = xr.Dataset({"y": new})
    pc = gm.plot_states(idata, new_data=True, ci_prob=0.9)
    behind, band, points = pc.get_target("x", {"state": "prey"}).collections
    assert behind.get_label() == "90% of new data"
    assert band.get_label() == "90% of the curve"
    assert behind.get_alpha() < band.get_alpha()
    for of, draws in ((behind, new), (band, x)):
        ends = draws.sel(state="prey").quantile(0.95, ["chain", "draw"])
        assert top_of(of) == pytest.approx(float(ends.max()))
    np.testing.assert_allclose(points.get_offsets()[:, 1], data.y[:, 0])
    alone = gm.plot_states(idata, var_name="y", group="posterior_predictive")
    band, _ = alone.get_target("y", {"state": "prey"}).collections
    assert band.get_label() == "89% of new data"


@pytest.mark.parametrize("law", ["normal", "log-normal"])
def test_the_band_of_new_data_follows_the_curve_where_data_are_missing(law, rng):
    """Assert it of data at the ends alone, between which the curve falls a hundredfold."""
    t = np.linspace(0, 1, 51)
    curve = 100 * np.exp(-np.log(100) * t)
    noise = 0.1 * rng.normal(size=(2, 500, 2, 1))
    ends = curve[[0, -1], None]
    new = ends + noise if law == "normal" else ends * np.exp(noise)
    x = np.broadcast_to(curve[:, None], (2, 500, 51, 1))
    dims, coords = ("chain", "draw", "time", "state"), {"time": t, "state": ["a"]}
    idata = xr.DataTree.from_dict(
        {
            "posterior": xr.Dataset({"x": (dims, x)}, coords),
            "posterior_predictive": xr.Dataset(
                {"y": (("chain", "draw", "time_observed", "state"), new)},
                {"time_observed": t[[0, -1]], "state": ["a"]},
            ),
            "observed_data": xr.Dataset(
                {"y": (("time_observed", "state"), ends)},
                {"time_observed": t[[0, -1]], "state": ["a"]},
            ),
        }
    )
    pc = gm.plot_states(idata, new_data=True, ci_prob=0.9)
    outline = pc.get_target("x", {"state": "a"}).collections[0].get_paths()[0].vertices
    drawn = outline[np.isclose(outline[:, 0], 0.5)][:, 1]
    wide = 0.164 if law == "normal" else 0.164 * 10
    np.testing.assert_allclose([drawn.min(), drawn.max()], [10 - wide, 10 + wide], atol=0.3)


def test_lines_and_text_are_seen_on_a_dark_background(idata, data):
    with plt.style.context("dark_background"):
        pc = gm.plot_states(idata, truth=data.x)
        axes = pc.get_target("x", {"state": "prey"})
        _, truth = axes.get_lines()
        for color in (truth.get_color(), axes.title.get_color(), axes.xaxis.label.get_color()):
            assert to_rgb(color) == (1, 1, 1)
        assert to_rgb(axes.get_facecolor()) == (0, 0, 0)


DECAY = gm.ODE(lambda t, x, th: [-th.rate * x.mass], ["mass"], ["rate"])
TWO = gm.ODE(lambda t, x, th: [-th.rate * x.a, th.rate * x.a - x.b], ["a", "b"], ["rate"])
AT = np.linspace(0, 2, 6)
LIKELIHOODS = {
    "normal": lambda x: pm.Normal("seen", x.a, 0.1, observed=AT),
    "with noise like the state": lambda x: pm.Normal("seen", x.a, 0.1 * x.a, observed=AT),
    "student": lambda x: pm.StudentT("seen", nu=4, mu=x.a, sigma=0.1, observed=AT),
    "log-normal": lambda x: pm.LogNormal("seen", pm.math.log(x.a), 0.3, observed=AT + 1),
    "counts": lambda x: pm.Poisson("seen", x.a, observed=np.arange(6)),
    "overdispersed": lambda x: pm.NegativeBinomial("seen", mu=x.a, alpha=3, observed=range(6)),
    "censored": lambda x: pm.Censored(
        "seen", pm.Normal.dist(x.a, 0.1), lower=0.2, upper=None, observed=AT + 0.2
    ),
}
NOT_OF_ONE_STATE = {
    "scaled": lambda x: pm.Poisson("seen", 763 * x.a, observed=range(6)),
    "a little more": lambda x: pm.Normal("seen", x.a + 0.1, 0.1, observed=AT),
    "a sum": lambda x: pm.Normal("seen", x.a + x.b, 0.1, observed=AT),
    "the noise": lambda x: pm.Normal("seen", 0.0, x.a, observed=AT),
}


def draws_of(likelihood, name="seen"):
    """Return a model of two states with a likelihood, and draws of its prior as a posterior."""
    y = np.column_stack([np.exp(-AT), AT * np.exp(-AT)])
    gp = gm.StateGP(AT, y, [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=0.1, states=TWO.states)
    gp = gp.with_grid(2)  # finer than the data
    with pm.Model(coords={"state": TWO.states}) as model:
        rate = pm.HalfNormal("rate", 2)
        x = gp.prior("x")
        likelihood(TWO.by_name(gp.at_times(x), [rate])[0])
        gm.GradientMatchingODE("match", TWO, x, {"rate": rate}, gp=gp, gamma=0.1)
    values = np.random.default_rng(1).gamma(5, 0.2, (1, 40, len(gp.t), 2))
    coords = {"time": gp.t, "state": [*TWO.states]}
    states = xr.DataArray(values, coords, ("chain", "draw", "time", "state"))
    seen = model.rvs_to_values[model[name]].eval()
    new = seen + np.random.default_rng(2).normal(0, 1, (1, 40, *seen.shape))
    dims = [f"{name}_dim_{k}" for k in range(seen.ndim)]
    tree = {
        "posterior": xr.Dataset({"x": states}),
        "posterior_predictive": xr.Dataset({name: (("chain", "draw", *dims), new)}),
        "observed_data": xr.Dataset({name: (dims, seen)}),
    }
    return xr.DataTree.from_dict(tree), model, seen, new


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_data_of_one_state_are_drawn_over_it_whatever_their_likelihood(kind):
    idata, model, seen, _ = draws_of(LIKELIHOODS[kind])
    pc = gm.plot_states(idata, model=model)
    assert [*pc.viz["plot"]["state"].values] == ["a", "b"]
    points = pc.get_target("x", {"state": "a"}).collections[-1].get_offsets()
    np.testing.assert_allclose(points, np.column_stack([AT, seen]))


SEEN = np.array([True, False, True, True, False, True])
TAKEN = {
    "some": (lambda x: pm.Normal("y", x.a[SEEN], 0.1, observed=AT[SEEN]), [0, 2, 3, 5]),
    "by number": (lambda x: pm.Normal("y", x.a[[5, 0, 3]], 0.1, observed=AT[[5, 0, 3]]), [0, 3, 5]),
    "counts": (lambda x: pm.Poisson("y", x.a[SEEN], observed=[3, 1, 4, 1]), [0, 2, 3, 5]),
    "kept above zero": (
        lambda x: pm.Poisson("y", pm.math.maximum(x.a[SEEN], 1e-9), observed=[3, 1, 4, 1]),
        [0, 2, 3, 5],
    ),
    "the last": (lambda x: pm.Normal("y", x.a[-1], 0.1, observed=2.0), [5]),
    "twice": (lambda x: pm.Normal("y", x.a[[1, 1, 4]], 0.1, observed=[1.0, 2.0, 3.0]), [1, 1, 4]),
    "replicates": (
        lambda x: pm.Normal("y", x.a[:, None], 0.1, observed=np.stack([AT, 2 * AT], axis=1)),
        [k for k in range(6) for _ in range(2)],
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_data_of_one_state_at_some_of_the_times_are_drawn_there(kind):
    """Assert it of ``"y"``, whose dims are PyMC's own."""
    likelihood, rows = TAKEN[kind]
    idata, model, seen, new = draws_of(likelihood, "y")
    pc = gm.plot_states(idata, model=model, new_data=True, ci_prob=0.9)
    assert [*pc.viz["plot"]["state"].values] == ["a", "b"]
    band, *_, drawn = pc.get_target("x", {"state": "a"}).collections
    order = np.argsort([5, 0, 3]) if kind == "by number" else np.arange(len(rows))
    np.testing.assert_allclose(
        drawn.get_offsets(), np.column_stack([AT[rows], np.ravel(seen)[order]])
    )
    together = {row: [] for row in rows}
    for row, of_one in zip(rows, new.reshape(40, -1).T[order], strict=True):
        together[row] += [*of_one]
    ends = [np.quantile(draws, 0.95) for draws in together.values()]
    assert top_of(band) == pytest.approx(max(ends))


def test_states_have_units_of_their_own_and_data_in_own_panels_their_names():
    idata, model, *_ = draws_of(next(iter(NOT_OF_ONE_STATE.values())))
    units = {"a": "mM", "b": "mg"}
    pc = gm.plot_states(idata, model=model, labels=("time (h)", units))
    shown = {state: pc.get_target("x", {"state": state}).get_ylabel() for state in ("a", "seen")}
    assert shown == {"a": "mM", "seen": "seen"}
    pc = gm.plot_states(idata, model=model, labels=("time (h)", {"seen": "counts"}))
    shown = {state: pc.get_target("x", {"state": state}).get_ylabel() for state in ("a", "seen")}
    assert shown == {"a": "", "seen": "counts"}
    with pytest.raises(ValueError, match=r"labels are given for \['c'\]; expected some of \['a'"):
        gm.plot_states(idata, model=model, labels=("time (h)", {"c": "mM"}))


@pytest.mark.parametrize("kind", NOT_OF_ONE_STATE)
def test_other_data_at_the_times_have_a_panel_with_new_data(kind):
    idata, model, seen, new = draws_of(NOT_OF_ONE_STATE[kind])
    pc = gm.plot_states(idata, model=model, ci_prob=0.9, labels=("time (h)", "mM"))
    axes = pc.get_target("x", {"state": "seen"})
    band, points = axes.collections
    np.testing.assert_allclose(points.get_offsets(), np.column_stack([AT, seen]))
    assert top_of(band) == pytest.approx(np.quantile(new, 0.95, axis=(0, 1)).max())
    assert axes.get_title() == "seen"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (h)", "seen")
    assert pc.get_target("x", {"state": "a"}).get_ylabel() == "mM"


def test_data_of_experiments_with_likelihoods_are_drawn_in_their_panels(two_experiments):
    _, gps, times, idata = two_experiments
    with pm.Model(coords={"experiment": gps.names}) as model:
        x, rate = gps.prior("x"), pm.HalfNormal("rate", 2)
        for number, (name, t) in enumerate(times.items()):
            with pm.Model(name=name):
                mass = gps.members[number].at_times(x[number])[:, 0]
                pm.Poisson("counts", mass, observed=np.arange(len(t)))
                pm.Normal("half", mass / 2, 0.1, observed=t)
        gm.GradientMatchingODE("match", DECAY, x, {"rate": rate}, gp=gps, gamma=1)
    seen = {
        f"{name}::{what}": (f"{name}_{what}", values)
        for name, t in times.items()
        for what, values in {"counts": np.arange(len(t)), "half": t}.items()
    }
    tree = {"posterior": idata["posterior"].dataset, "observed_data": xr.Dataset(seen)}
    pc = gm.plot_states(xr.DataTree.from_dict(tree), model=model)
    for name, t in times.items():
        for panel, values in {f"{name}: mass": range(len(t)), f"{name}: half": t}.items():
            points = pc.get_target("x", {"state": panel}).collections[-1].get_offsets()
            points = points[np.isfinite(points[:, 1])]
            np.testing.assert_allclose(points, np.column_stack([t, values]))


def test_a_truth_with_names_may_be_in_any_order(idata, data):
    table = pd.DataFrame(data.x, columns=["prey", "predator"])[["predator", "prey"]]
    pc = gm.plot_states(idata, truth=table)
    for k, state in enumerate(["prey", "predator"]):
        _, truth = pc.get_target("x", {"state": state}).get_lines()
        np.testing.assert_allclose(truth.get_ydata(), data.x[:, k])


def test_variables_without_time_and_state_are_refused(idata):
    idata["posterior"] = idata["posterior"].dataset.assign(alpha=("draw", np.ones(50)))
    with pytest.raises(ValueError, match=r"'alpha' has dims \('draw',\); expected 'state' and one"):
        gm.plot_states(idata, var_name="alpha")


def test_data_without_dims_are_refused(idata, data):
    idata["observed_data"] = xr.Dataset({"y": (("y_dim_0", "y_dim_1"), data.y)})
    with pytest.raises(
        ValueError, match=r"'y' has dims \('y_dim_0', 'y_dim_1'\); expected 'state'"
    ):
        gm.plot_states(idata)
    assert gm.plot_states(idata, observed=None)


@pytest.fixture(scope="module", params=[False, True], ids=["natural", "positive"])
def decaying(request):
    """Return a model of a decay, and draws of its rate and states that are not its posterior's."""
    positive = ["mass"] if request.param else []
    ode = gm.ODE(lambda t, x, th: [-th.rate * x.mass], ["mass"], ["rate"], positive=positive)
    rng = np.random.default_rng(1)
    t = np.linspace(0, 2, 8)
    y = np.exp(-t)[:, None] * np.exp(rng.normal(0, 0.05, (8, 1)))
    cov = pm.gp.cov.ExpQuad(1, ls=1.0)
    gp = gm.StateGP(t, y, [cov], sigma=0.05, states=ode.states, positive=bool(positive))
    priors = {"rate": pm.HalfNormal.dist(2)}
    model = gm.build_model(
        ode, t, y, priors=priors, gp=gp, gamma=0.1, sigma="fixed", preset="fgpgm"
    )
    coords = {"time": t, "state": ["mass"]}
    x = xr.DataArray(
        y * np.exp(rng.normal(0, 0.02, (1, 50, 8, 1))), coords, ("chain", "draw", "time", "state")
    )
    rate = xr.DataArray(rng.uniform(0.8, 1.2, (1, 50)), dims=("chain", "draw"))
    posterior = xr.Dataset({"x": x, "rate": rate}).assign_coords(chain=[0], draw=range(50))
    return model, gp, xr.DataTree.from_dict({"posterior": posterior})


def test_slopes_are_those_of_the_equations_and_of_the_curve(decaying):
    model, gp, idata = decaying
    axes = gm.plot_gradient_match(idata, model=model).get_target("slope", {"state": "mass"})
    curve, equations = axes.get_lines()
    x, rate = (idata["posterior"][name].to_numpy()[0] for name in ("x", "rate"))
    x = x[..., 0]
    np.testing.assert_allclose(equations.get_ydata(), -(rate[:, None] * x).mean(0))
    levels = np.log(x) if gp.data.positive.any() else x
    slope = ((levels - gp.mean) / gp.scale) @ gp.operators().D[0].T * gp.scale
    natural = x * slope if gp.data.positive.any() else slope
    np.testing.assert_allclose(curve.get_ydata(), natural.mean(0))


def test_the_band_of_the_curve_has_what_the_states_leave_open(decaying):
    """Assert it of states that hardly vary: the variance over draws, plus A, at eight times.

    A quantile of 200 draws is known to 0.11 of its distance from the mean, eight to 0.04.
    """
    model, gp, idata = decaying
    varied = 1e-4 * np.random.default_rng(2).normal(size=(1, 200, 8, 1))
    x = idata["posterior"]["x"].mean("draw").to_numpy()[:, None] * np.exp(varied)
    dims = ("chain", "draw", "time", "state")
    drawn = xr.Dataset({"x": (dims, x), "rate": (dims[:2], np.ones((1, 200)))})
    drawn = xr.DataTree.from_dict({"posterior": drawn})
    plot = gm.plot_gradient_match(drawn, model=model, ci_prob=0.68)
    axes = plot.get_target("slope", {"state": "mass"})
    mean, edges = axes.get_lines()[0].get_ydata(), axes.collections[0].get_paths()[0].vertices
    high = [edges[np.isclose(edges[:, 0], t), 1].max() for t in gp.t]
    _, D, A = (blocks[0] for blocks in gp.operators())
    levels, natural = x[0, :, :, 0], np.ones((200, 8))
    if gp.data.positive.any():
        levels, natural = np.log(levels), levels  # d log x / dt, times x
    over_draws = (natural * ((levels - gp.mean) @ D.T)).std(axis=0)
    left_open = np.sqrt(np.diag(A)) * gp.scale * natural.mean(axis=0)
    assert (over_draws < 0.3 * left_open).all()
    expected = norm.ppf(0.84) * np.hypot(over_draws, left_open)
    assert ((high - mean) / expected).mean() == pytest.approx(1, abs=5 * 0.11 / np.sqrt(8))


@pytest.fixture(scope="module")
def gappy():
    """Return Gaussian processes of two states, of the second of which some values are missing."""
    t = np.linspace(0, 3, 9)
    y = np.stack([np.sin(t), np.cos(t)], axis=1) + np.random.default_rng(1).normal(0, 0.1, (9, 2))
    y[3:6, 1] = np.nan
    covs = [pm.gp.cov.Matern52(1, ls=np.float64(ls)) for ls in (1.0, 0.7)]
    return gm.StateGP(t, y, covs, sigma=[0.1, 0.2], states=["a", "b"])


def test_the_uncertainty_of_a_fit_is_that_of_conditioning_a_normal_vector(gappy):
    grid = gappy.with_grid(2)
    C, noise = grid.operators().C, (grid.sigma / grid.scale) ** 2
    for k, sd in enumerate((grid.posterior_sd() / grid.scale).T):
        seen = grid.observed[~np.isnan(grid.y[:, k])]
        precision = np.linalg.inv(C[k]) + np.diag(np.isin(np.arange(17), seen) / noise[k])
        np.testing.assert_allclose(sd**2, np.diagonal(np.linalg.inv(precision)), rtol=1e-6)


def test_the_fit_of_the_gaussian_processes_is_drawn_with_its_hyperparameters(gappy):
    pc = gm.plot_gp_fit(gappy, ci_prob=0.9, labels=("time (h)", "mM"))
    for k, state in enumerate(["a", "b"]):
        axes = pc.get_target("x", {"state": state})
        kernel, sigma = f"Matern52(ls={(1, 0.7)[k]})", f"sigma\N{NO-BREAK SPACE}{(0.1, 0.2)[k]}"
        assert axes.get_title() == f"{state}\n{kernel}, {sigma}"
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (h)", "mM")
        [mean] = axes.get_lines()
        np.testing.assert_allclose(mean.get_ydata()[::8], gappy.posterior_mean()[:, k])
        wide, narrow, points = axes.collections
        np.testing.assert_array_equal(points.get_offsets()[:, 1], gappy.y[:, k])
        sd = gappy.posterior_sd()[4, k]
        for band, spread in [(narrow, sd), (wide, np.hypot(sd, gappy.sigma[k]))]:
            edges = band.get_paths()[0].vertices
            high = edges[np.isclose(edges[:, 0], gappy.t[4]), 1].max()
            expected = gappy.posterior_mean()[4, k] + norm.ppf(0.95) * spread
            assert high == pytest.approx(expected)


@pytest.fixture
def searches(rng):
    """Return what three searches found, of which the first has another mean of one unknown."""
    by_search = ("search", "unknown")
    mean = np.array([[5.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    plain = {name: (by_search, np.zeros((3, 2))) for name in ("log_sd", "log_sd_error")}
    weights = rng.dirichlet(np.ones(100))
    found = xr.Dataset(
        plain
        | {
            "mean": (by_search, mean),
            "mean_error": (by_search, np.full((3, 2), 0.1)),
            "weight": ("weighted_draw", weights),
        },
        {"search": range(3), "unknown": ["alpha", "beta"]},
        {"pareto_k": 0.9, "reliable_k": 0.7, "n_effective": 12.0, "errors_allowed": 4.0},
    )
    return xr.DataTree.from_dict({"searches": found}), weights


def test_searches_are_drawn_beside_each_other_with_their_errors(searches):
    idata, weights = searches
    pc = gm.plot_verdict(idata)
    panels = pc.viz["plot"].to_numpy().ravel()
    means, widths, heaviest = panels
    assert means.get_ylabel() == "from their mean (posterior sd)"
    assert widths.get_ylabel() == "from their mean (log)"
    for axis, expected in zip(means.get_lines(), [10 / 3, -5 / 3, -5 / 3], strict=True):
        low, high = axis.get_ydata()[:2]
        assert (low, high) == pytest.approx((expected - 0.4, expected + 0.4))
    assert [tick.get_text() for tick in means.get_xticklabels()] == ["alpha", "beta"]
    assert heaviest.get_title() == "Pareto k 0.90 (limit 0.70),\n12 effective draws"
    share, _ = heaviest.get_lines()
    np.testing.assert_allclose(np.diff(share.get_ydata()), np.sort(weights)[::-1])


def test_of_many_unknowns_those_are_drawn_whose_searches_differ_most(searches):
    found = searches[0]["searches"].dataset
    places = [0] + [1] * 30  # the second unknown, which is the same in all searches, 30 times
    many = found.isel(unknown=places).assign_coords(unknown=["other", *map(str, range(30))])
    pc = gm.plot_verdict(xr.DataTree.from_dict({"searches": many}))
    means = pc.viz["plot"].to_numpy().ravel()[0]
    names = [tick.get_text() for tick in means.get_xticklabels()]
    assert len(names) == 20
    assert names[0] == "other"
    assert means.get_title() == "means of 3 searches\n20 that differ most"


def test_a_verdict_is_drawn_of_what_has_one(idata):
    with pytest.raises(ValueError, match=r"groups \['posterior', 'observed_data'\]; expected 'sea"):
        gm.plot_verdict(idata)


@pytest.mark.parametrize("plot", [gm.plot_states, gm.plot_gradient_match, gm.plot_verdict])
def test_a_plot_of_a_fit_says_where_its_draws_are(plot, idata, decaying):
    fit = SimpleNamespace(idata=idata)
    settings = {"model": decaying[0]} if plot is gm.plot_gradient_match else {}
    with pytest.raises(TypeError, match=r"is a SimpleNamespace; expected .*: its \.idata"):
        plot(fit, **settings)


def test_slopes_of_experiments_are_refused(two_experiments):
    model, _, _, idata = two_experiments
    with pytest.raises(ValueError, match="1 GradientMatchingODE of several experiments; expected"):
        gm.plot_gradient_match(idata, model=model)


@pytest.mark.parametrize("backend", ["bokeh", "plotly"])
def test_other_backends_draw_all_plots(backend, idata, data, gappy, searches):
    pytest.importorskip(backend)
    pytest.importorskip("webcolors")
    for pc in [
        gm.plot_states(idata, truth=data.x, backend=backend),
        gm.plot_gp_fit(gappy, backend=backend),
        gm.plot_verdict(searches[0], backend=backend),
    ]:
        assert pc.backend == backend


def test_a_forecast_is_drawn_without_data(idata):
    del idata["observed_data"]
    axes = gm.plot_states(idata).get_target("x", {"state": "prey"})
    assert len(axes.collections) == 1


def test_slopes_of_a_model_without_a_constraint_or_of_other_draws_are_refused(decaying):
    model, _, idata = decaying
    with pm.Model() as empty:
        pm.Normal("rate")
    with pytest.raises(ValueError, match="the model has 0 GradientMatchingODE; expected one"):
        gm.plot_gradient_match(idata, model=empty)
    others = xr.DataTree.from_dict({"posterior": idata["posterior"].dataset.drop_vars("rate")})
    with pytest.raises(ValueError, match=r"the draws have no \['rate'\]"):
        gm.plot_gradient_match(others, model=model)


@pytest.fixture(scope="module")
def two_experiments():
    """Return a model of two experiments on grids of their own, and states that count its times."""
    ode = gm.ODE(lambda t, x, th: [-th.rate * x.mass], ["mass"], ["rate"])
    times = {"short": np.linspace(0, 1, 5), "long": np.linspace(0, 3, 7)}
    cov = pm.gp.cov.ExpQuad(1, ls=1.0)
    gp = gm.StateGPs(
        {name: gm.StateGP(t, np.exp(-t)[:, None], [cov], 0.1) for name, t in times.items()}
    )
    with pm.Model(coords={"experiment": gp.names}) as model:
        x = gp.prior("x")
        gm.GradientMatchingODE("match", ode, x, {"rate": pm.HalfNormal("rate", 2)}, gp=gp, gamma=1)
    noise = np.random.default_rng(1).normal(0, 0.1, (1, 50, *gp.t.shape, 1))
    coords = {"experiment": list(gp.names), "time": range(gp.t.shape[1]), "state": ["mass"]}
    dims = ("chain", "draw", "experiment", "time", "state")
    states = xr.DataArray(np.exp(-gp.t)[..., None] + noise, coords, dims)
    labels = [f"{name}: mass[{t!r}]" for name, at in times.items() for t in at.tolist()]
    y = xr.DataArray(np.exp(-np.concatenate([*times.values()])), {"observation": labels})
    tree = {"posterior": xr.Dataset({"x": states}), "observed_data": xr.Dataset({"y": y})}
    return model, gp, times, xr.DataTree.from_dict(tree)


def test_each_experiment_has_panels_on_its_own_times(two_experiments):
    model, gp, times, idata = two_experiments
    truth = np.exp(-gp.t)[..., None]
    pc = gm.plot_states(idata, model=model, truth=truth, var_name="x")
    for number, (name, t) in enumerate(times.items()):
        axes = pc.get_target("x", {"state": f"{name}: mass"})
        mean, exact = (line.get_xydata() for line in axes.get_lines())
        mean, exact = mean[np.isin(mean[:, 0], gp.t[number])], exact[np.isfinite(exact[:, 1])]
        of_one = idata["posterior"]["x"].mean(["chain", "draw"]).sel(experiment=name, state="mass")
        np.testing.assert_allclose(mean, np.stack([gp.t[number], of_one], axis=1))
        np.testing.assert_allclose(exact[-1], [t[-1], np.exp(-t[-1])])
        points = axes.collections[-1].get_offsets()
        points = points[np.isfinite(points[:, 1])]
        np.testing.assert_allclose(points, np.stack([t, np.exp(-t)], axis=1))


def test_experiments_that_were_solved_at_common_times_need_no_model(two_experiments):
    _, _, _, idata = two_experiments
    counted = idata["posterior"].dataset
    ahead = counted.assign_coords(time=np.linspace(0, 4, counted.sizes["time"]))
    pc = gm.plot_states(xr.DataTree.from_dict({"posterior": ahead}))
    mean, *_ = pc.get_target("x", {"state": "short: mass"}).get_lines()
    assert mean.get_xdata()[-1] == 4
    with pytest.raises(TypeError, match=r"'x' are only counted; expected the model .*pass model="):
        gm.plot_states(idata)


def drawn(pc, panel, var_name="x"):
    """Return the ends of the mean's times, the truth if there is one, and the data's times."""
    axes = pc.get_target(var_name, {"state": panel})
    mean, *truth = [line.get_xydata() for line in axes.get_lines()]
    mean, *truth = [line[np.isfinite(line[:, 1])] for line in (mean, *truth)]
    points = axes.collections[-1].get_offsets()
    return mean[[0, -1], 0].tolist(), truth, points[np.isfinite(points[:, 1]), 0].tolist()


@pytest.mark.parametrize("chosen", [["long", "short"], ["long"], ["short"], "long"], ids=str)
def test_experiments_are_found_by_their_names(two_experiments, chosen):
    """Assert that another order, some, and a single one are drawn on their own times."""
    model, _, times, idata = two_experiments
    some = idata["posterior"].dataset.sel(experiment=chosen)
    tree = {"posterior": some, "observed_data": idata["observed_data"].dataset}
    pc = gm.plot_states(xr.DataTree.from_dict(tree), model=model)
    names = [chosen] if isinstance(chosen, str) else chosen
    assert pc.viz["plot"].sizes["state"] == len(names)
    for name in names:
        ends, _, of_data = drawn(pc, f"{name}: mass")
        assert ends == [times[name][0], times[name][-1]]
        np.testing.assert_allclose(of_data, times[name])


def test_experiments_that_the_model_does_not_have_are_refused(two_experiments):
    model, _, _, idata = two_experiments
    other = idata["posterior"].dataset.assign_coords(experiment=["short", "wide"])
    with pytest.raises(ValueError, match=r"7 times of the experiments \['short', 'wide'\]; the mo"):
        gm.plot_states(xr.DataTree.from_dict({"posterior": other}), model=model)


def test_data_on_counted_times_are_drawn_on_those_of_the_model(two_experiments):
    model, _, times, idata = two_experiments
    y = idata["posterior"]["x"].mean(["chain", "draw"]).rename("y")
    tree = {"posterior": idata["posterior"].dataset, "observed_data": y.to_dataset()}
    pc = gm.plot_states(xr.DataTree.from_dict(tree), model=model)
    np.testing.assert_allclose(drawn(pc, "long: mass")[2], times["long"])


def in_a_list(truths):
    return list(truths.values())


def by_name(truths):
    return dict(reversed(truths.items()))


@pytest.mark.parametrize("given", [in_a_list, by_name])
def test_each_experiment_has_a_truth_at_its_own_times(two_experiments, given):
    """Assert it of arrays at the times of the data, of which there are not as many."""
    model, _, times, idata = two_experiments
    truths = {name: np.exp(-t)[:, None] for name, t in times.items()}
    pc = gm.plot_states(idata, model=model, truth=given(truths))
    for name, t in times.items():
        _, [truth], _ = drawn(pc, f"{name}: mass")
        at = np.isin(truth[:, 0], t)
        np.testing.assert_allclose(truth[at], np.stack([t, np.exp(-t)], axis=1))


def test_a_labelled_truth_of_experiments_is_found_by_name(two_experiments):
    model, _, _, idata = two_experiments
    truth = idata["posterior"]["x"].mean(["chain", "draw"])
    pc = gm.plot_states(idata, model=model, truth=truth.isel(experiment=[1, 0]).transpose())
    for name in ("short", "long"):
        mean, exact = pc.get_target("x", {"state": f"{name}: mass"}).get_lines()
        np.testing.assert_allclose(exact.get_ydata(), mean.get_ydata())


def test_a_truth_of_other_experiments_is_refused(two_experiments):
    model, _, times, idata = two_experiments
    truths = {name: np.exp(-t)[:, None] for name, t in times.items()}
    with pytest.raises(ValueError, match=r"1 experiments; expected one for each of \['short', 'lo"):
        gm.plot_states(idata, model=model, truth=[truths["short"]])
    with pytest.raises(ValueError, match=r"missing for \['long'\]"):
        gm.plot_states(idata, model=model, truth={"short": truths["short"]})


@pytest.fixture
def refined(idata, data):
    """Return draws on a grid of two points from one time of the data to the next."""
    fine = np.linspace(data.t[0], data.t[-1], 2 * len(data.t) - 1)
    x = idata["posterior"]["x"].interp(time=fine)
    return xr.DataTree.from_dict(
        {"posterior": x.to_dataset(), "observed_data": idata["observed_data"].dataset}
    )


def test_a_truth_may_be_at_the_times_of_the_data(refined, data):
    _, [truth], _ = drawn(gm.plot_states(refined, truth=data.x), "prey")
    np.testing.assert_allclose(truth, np.stack([data.t, data.x[:, 0]], axis=1))


def test_a_truth_may_have_times_of_its_own(refined, data):
    table = pd.DataFrame(data.x[::-3], index=data.t[::-3], columns=["prey", "predator"])
    labelled = xr.DataArray(table, dims=("at", "state")).transpose()
    for given in (table, labelled):
        _, [truth], _ = drawn(gm.plot_states(refined, truth=given), "prey")
        expected = np.stack([data.t[::-3], data.x[::-3, 0]], axis=1)[::-1]
        np.testing.assert_allclose(truth, expected)


def test_a_truth_at_unknown_times_is_refused(refined, data):
    with pytest.raises(ValueError, match=r"truth has 10 times; expected 39 or 20, those of the dr"):
        gm.plot_states(refined, truth=data.x[::2])


@pytest.mark.parametrize("column", [0, [0]])
def test_a_truth_of_other_states_is_refused(idata, data, column):
    with pytest.raises(ValueError, match=r"truth has shape \(20,.*column for each of \['prey', 'p"):
        gm.plot_states(idata, truth=data.x[:, column])


def test_the_dims_of_draws_may_be_in_any_order(idata, data):
    idata["posterior"] = idata["posterior"].dataset.transpose("state", "time", "draw", "chain")
    _, [truth], _ = drawn(gm.plot_states(idata, truth=data.x), "predator")
    np.testing.assert_allclose(truth, np.stack([data.t, data.x[:, 1]], axis=1))


def test_slopes_of_draws_whose_dims_are_in_another_order_are_the_same(decaying):
    model, _, idata = decaying
    turned = idata["posterior"].dataset.transpose("state", "time", "draw", "chain")
    lines = [
        gm.plot_gradient_match(tree, model=model).get_target("slope", {"state": "mass"}).get_lines()
        for tree in (idata, xr.DataTree.from_dict({"posterior": turned}))
    ]
    for one, other in zip(*lines, strict=True):
        np.testing.assert_allclose(one.get_ydata(), other.get_ydata())


def test_slopes_of_draws_on_another_grid_are_refused(decaying):
    model, _, idata = decaying
    posterior = idata["posterior"].dataset
    shorter, later = posterior.isel(time=slice(5)), posterior.assign_coords(time=posterior.time + 1)
    for other in (shorter, later):
        with pytest.raises(ValueError, match=r"'x', of shape .* 8 times from 0 to 2; expected dra"):
            gm.plot_gradient_match(xr.DataTree.from_dict({"posterior": other}), model=model)
    with pytest.raises(ValueError, match=r"groups \['prior'\]; expected 'posterior' among them"):
        gm.plot_gradient_match(xr.DataTree.from_dict({"prior": posterior}), model=model)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"ci_prob": 89}, "ci_prob is 89; expected a number between 0 and 1"),
        ({"ci_prob": 1.0}, "ci_prob is 1.0; expected a number between 0 and 1"),
        ({"labels": "year"}, "labels is 'year'; expected two, of the x axis and of the y axis"),
        ({"labels": ("year",)}, r"labels is \('year',\); expected two"),
        ({"labels": {"a": "mM", "b": "mg"}}, r"labels is \{'a': .*; expected two"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_refused_by_all_plots(
    setting, message, idata, decaying, gappy
):
    model, _, of_model = decaying
    for plot in [
        lambda **settings: gm.plot_states(idata, **settings),
        lambda **settings: gm.plot_gradient_match(of_model, model=model, **settings),
        lambda **settings: gm.plot_gp_fit(gappy, **settings),
    ]:
        with pytest.raises(ValueError, match=message):
            plot(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"var_name": "z"}, r"'posterior' has no 'z'; expected var_name to be one of \['x'\]"),
        ({"observed": "z"}, r"'observed_data' has no 'z'; expected observed to be one of \['y'\]"),
        ({"group": "prior"}, r"groups \['posterior', 'observed_data'\]; expected 'prior' among"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_with_what_is(setting, message, idata):
    with pytest.raises(ValueError, match=message):
        gm.plot_states(idata, **setting)


def test_data_that_are_not_called_y_are_drawn_where_they_are_named(idata):
    idata["observed_data"] = idata["observed_data"].dataset.rename(y="counts")
    for settings, n_drawn in [({}, 1), ({"observed": "counts"}, 2)]:
        axes = gm.plot_states(idata, **settings).get_target("x", {"state": "prey"})
        assert len(axes.collections) == n_drawn


def test_states_without_names_are_refused(idata):
    idata["posterior"] = idata["posterior"].dataset.drop_vars("state")
    with pytest.raises(ValueError, match=r"'x' has no coord for its dim 'state'; expected the nam"):
        gm.plot_states(idata)


def test_states_are_drawn_against_dates(idata, data):
    days = pd.date_range("2020-01-01", periods=len(data.t))
    for group in ("posterior", "observed_data"):
        idata[group] = idata[group].dataset.assign_coords(time=days)
    pc = gm.plot_states(idata, truth=pd.DataFrame(data.x, days, ["prey", "predator"]))
    axes = pc.get_target("x", {"state": "prey"})
    for line in axes.get_lines():
        np.testing.assert_array_equal(line.get_xdata(), days)
    pc.viz["figure"].item().draw_without_rendering()
    assert len(axes.get_xticklabels()) > 2
    assert all(label.get_rotation() == 30 for label in axes.get_xticklabels())


def test_draws_that_are_infinite_are_left_out_and_counted(idata):
    x = idata["posterior"]["x"].copy(deep=True)
    x[0, 3, 10:, 0] = np.inf
    idata["prior"] = x.to_dataset()
    axes = gm.plot_states(idata, group="prior").get_target("x", {"state": "prey"})
    [mean] = axes.get_lines()
    kept = np.delete(x.stack(sample=["chain", "draw"]).sel(state="prey").to_numpy(), 3, axis=1)
    np.testing.assert_allclose(mean.get_ydata(), kept.mean(axis=1))
    assert mean.get_label() == "prior mean of the 99 finite draws"
    idata["prior"] = xr.full_like(x, np.inf).to_dataset()
    with pytest.raises(ValueError, match="all 100 draws of 'x' are infinite somewhere"):
        gm.plot_states(idata, group="prior")


def test_an_interval_is_not_said_to_be_all(idata):
    band, _ = gm.plot_states(idata, ci_prob=0.999).get_target("x", {"state": "prey"}).collections
    assert band.get_label() == "99.9% of the curve"


def test_the_processes_of_experiments_are_drawn_on_their_own_times(two_experiments):
    _, gp, times, _ = two_experiments
    pc = gm.plot_gp_fit(gp)
    for number, (name, t) in enumerate(times.items()):
        ends, _, of_data = drawn(pc, f"{name}: 0")
        assert ends == [t[0], t[-1]]
        np.testing.assert_allclose(of_data, t)
        axes = pc.get_target("x", {"state": f"{name}: 0"})
        assert axes.get_title().startswith(f"{name}: 0\nExpQuad(ls=1)")
        mean = axes.get_lines()[0].get_xydata()
        expected = gp.members[number].posterior_mean()[:, 0]
        at = np.isin(mean[:, 0], gp.t[number])
        np.testing.assert_allclose(mean[at, 1], expected, rtol=1e-6)


@pytest.fixture
def one_state(idata):
    groups = {name: idata[name].dataset.isel(state=[0]) for name in idata.children}
    return xr.DataTree.from_dict(groups | {"posterior_predictive": groups["posterior"]})


def test_the_legend_of_one_panel_is_not_cut(one_state, data, decaying):
    model, gp, of_model = decaying
    for pc in [
        gm.plot_states(one_state, truth=data.x[:, :1]),
        gm.plot_states(one_state, group="posterior_predictive"),
        gm.plot_gradient_match(of_model, model=model),
        gm.plot_gp_fit(gp),
    ]:
        figure = pc.viz["figure"].item()
        figure.draw_without_rendering()
        [legend] = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


def many_states(data):
    """Plot states with long names."""
    names = [f"phosphorylated_receptor_complex_{k}" for k in range(4, 12)]
    x = xr.DataArray(
        np.tile(data.x, (1, 5, 1, 4)),
        {"time": data.t, "state": names},
        ("chain", "draw", "time", "state"),
    )
    return gm.plot_states(xr.DataTree.from_dict({"posterior": x.to_dataset(name="x")}))


def ten_kernels(data):
    cov = 1.3 * pm.gp.cov.RatQuad(1, ls=1.2, alpha=2.0)
    return gm.plot_gp_fit(gm.StateGP(data.t, np.tile(data.y, (1, 5)), [cov] * 10, sigma=0.1))


@pytest.mark.parametrize("plot", [many_states, ten_kernels])
def test_titles_do_not_overlap_and_are_not_cut(plot, data):
    pc = plot(data)
    figure = pc.viz["figure"].item()
    figure.draw_without_rendering()
    titles = [panel.title for panel in pc.viz["plot"].to_numpy().ravel()]
    assert len({title.get_fontsize() for title in titles}) == 1
    boxes = [title.get_window_extent() for title in titles]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_the_names_of_experiments_are_no_formulas(idata):
    name = "5$_dose$^"
    several = idata["posterior"].dataset.expand_dims(experiment=[name])
    pc = gm.plot_states(xr.DataTree.from_dict({"posterior": several}))
    assert pc.get_target("x", {"state": f"{name}: prey"}).get_title() == r"5\$_dose\$^: prey"


def test_a_state_may_be_called_by_a_formula(idata):
    named = idata["posterior"].dataset.assign_coords(state=["$x_1$", "$x_2$"])
    pc = gm.plot_states(xr.DataTree.from_dict({"posterior": named}))
    assert pc.get_target("x", {"state": "$x_1$"}).get_title() == "$x_1$"


def test_long_names_of_unknowns_can_be_read(searches):
    """Assert that they are within the figure, whose panels are as high as those of short names."""
    found = searches[0]["searches"].dataset
    names = [f"x0[wild type with 5$ of glucose$, phosphorylated_receptor_{k}]" for k in "ab"]
    heights = []
    for unknown in (["a", "b"], names):
        pc = gm.plot_verdict(
            xr.DataTree.from_dict({"searches": found.assign_coords(unknown=unknown)})
        )
        figure, panel = pc.viz["figure"].item(), pc.viz["plot"].to_numpy().ravel()[0]
        figure.draw_without_rendering()
        assert all(tick.get_window_extent().y0 >= 0 for tick in panel.get_xticklabels())
        heights.append(panel.get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.2)
    assert r"5\$ of glucose\$" in panel.get_xticklabels()[0].get_text()
