"""Doses and resets: states that jump at known times, in solvers, processes and models."""

import pickle

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.model import constraints
from pymc_gradmatch.ode import Solver

DECAY = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])

ELIMINATION = gm.ODE(lambda t, x, theta: [-theta.k * x.amount], ["amount"], ["k"])
ORAL = gm.ODE(
    lambda t, x, theta: [-theta.ka * x.gut, theta.ka * x.gut - theta.k * x.blood],
    ["gut", "blood"],
    ["ka", "k"],
)
TIMES, DOSES = np.array([6.0, 12.5, 20.0]), np.array([80.0, 100.0, 40.0])
SCHEDULE = {"amount": gm.Input(TIMES, DOSES, kind="dose")}
PRIORS = {"k": pm.LogNormal.dist(-2, 1)}


def bolus(t, start, k):
    """Return the closed form: every dose decays by itself; at its time it is there."""
    since = np.subtract.outer(t, np.append(0.0, TIMES))
    given = np.append(start, DOSES)
    return (np.where(since >= 0, np.exp(-k * np.maximum(since, 0)), 0) * given).sum(axis=1)


def positive(ode):
    return gm.ODE(ode.rhs, ode.states, ode.params, positive=ode.states)


@pytest.mark.parametrize("ode", [ELIMINATION, positive(ELIMINATION)], ids=["plain", "positive"])
@pytest.mark.parametrize("t", [np.linspace(0, 24, 13), np.array([0, 6, 12.5, 13, 20])])
def test_solutions_with_repeated_doses_are_the_closed_form(ode, t):
    """Assert it with doses at output times, the last among them, and between."""
    dosed = ode.with_inputs(SCHEDULE)
    expected = bolus(t, 50.0, 0.2)
    np.testing.assert_allclose(dosed.solve(t, [50.0], [0.2])[:, 0], expected, rtol=1e-6)
    levels = dosed.transformed
    start = [[np.log(50.0) if ode.positive else 50.0]] * 2
    found = Solver(levels.equations(), t)(start, [[0.2], [0.3]]).x[0, :, 0]
    np.testing.assert_allclose(np.exp(found) if ode.positive else found, expected, rtol=1e-8)


def test_a_dose_into_nothing_is_as_exact_in_any_unit():
    for unit in (1e-9, 1.0, 1e6):
        doses = {"gut": gm.Input([1.0], [unit], kind="dose")}
        t = np.linspace(0, 10, 5)
        x = ORAL.solve(t, [0.0, 0.0], [1.0, 0.2], inputs=doses)[:, 1]
        since = np.maximum(t - 1, 0)
        expected = unit / 0.8 * (np.exp(-0.2 * since) - np.exp(-since))
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-7 * unit)


def test_an_infusion_that_becomes_short_is_a_dose():
    infused = gm.ODE(
        lambda t, x, theta, u: [u.rate - theta.k * x.amount], ["amount"], ["k"], inputs=["rate"]
    )
    t = np.linspace(0, 24, 9)
    short = 1e-5
    edges = np.concatenate([[0.0], *([at, at + short] for at in TIMES)])
    rates = np.concatenate([[0.0], *([dose / short, 0.0] for dose in DOSES)])
    x = infused.solve(t, [50.0], [0.2], inputs={"rate": gm.Input(edges, rates, kind="previous")})
    dosed = ELIMINATION.solve(t, [50.0], [0.2], inputs=SCHEDULE)
    np.testing.assert_allclose(x[t != 6], dosed[t != 6], rtol=1e-5)


def test_a_reset_puts_a_number_in_the_place_of_a_state():
    wash = {"blood": gm.Input([3.0, 7.0], [0.0, 5.0], kind="reset")}
    t = np.array([0.0, 2.9, 3.0, 5.0, 7.0])
    x = ORAL.solve(t, [10.0, 4.0], [0.5, 0.2], inputs=wash)
    np.testing.assert_array_equal(x[[2, 4], 1], [0.0, 5.0])
    np.testing.assert_allclose(x[:, 0], 10 * np.exp(-0.5 * t), rtol=1e-6)
    again = ORAL.solve([3.0, 5.0], [10 * np.exp(-1.5), 0.0], [0.5, 0.2])[1]
    np.testing.assert_allclose(x[3], again, rtol=1e-6)


def test_an_ode_with_doses_and_inputs_can_be_pickled():
    rhs = _fed
    ode = gm.ODE(rhs, ["amount"], ["k"], inputs=["rate"])
    given = SCHEDULE | {"rate": gm.Input([0, 10], [1.0, 2.0])}
    known = ode.with_inputs(given)
    again = pickle.loads(pickle.dumps(known))
    x = [one.solve([0.0, 7.0, 9.0], [1.0], [0.7]) for one in (known, again)]
    np.testing.assert_array_equal(*x)


def _fed(t, x, theta, u):
    return [u.rate - theta.k * x.amount]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"blod": gm.Input([1], [1], kind="dose")}, r"doses are given to \['blod'\]; expected"),
        ({"gut": gm.Input([1], [1], kind="previous")}, "the ODE has none"),
        ({"gut": 100.0}, "the ODE has none"),
    ],
)
def test_doses_that_do_not_fit_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        ORAL.with_inputs(inputs)


def test_a_dose_is_no_input_of_a_right_hand_side():
    ode = gm.ODE(lambda t, x, theta, u: [u.x - x.x], ["x"], ["k"], inputs=["x"])
    with pytest.raises(ValueError, match=r"missing for \['x'\]"):
        ode.with_inputs({"x": gm.Input([1], [1], kind="dose")})
    with pytest.raises(TypeError, match="a dose has no value between its times"):
        gm.Input([1], [1], kind="dose")(np.zeros(3))


def _slow(t, s, breaks, carried, cov):
    """Return Cov(x(t), x(s)) of x(b) = carried x(b-), from pieces simulated as a linear map."""
    edges = np.concatenate([[-np.inf], breaks, [np.inf]])

    def weights(time):
        # How much each piece's process, at its own clamped time, enters x(time).
        rows, w = [], 1.0
        j = np.searchsorted(breaks, time, side="right")
        for i in range(j, -1, -1):
            at = np.clip(time, edges[i], edges[i + 1])
            fresh = i > 0 and np.isnan(carried[i - 1])
            rows.append((i, w, at, None if i == 0 or fresh else edges[i]))
            if i > 0:
                w *= 0.0 if fresh else carried[i - 1]
        return rows

    total = 0.0
    for i, w, a, start in weights(t):
        for k, v, b, _ in weights(s):
            if i == k:
                total += w * v * cov(a, b)
                if start is not None:
                    total += w * v * (cov(start, start) - cov(a, start) - cov(start, b))
    return total


def test_a_broken_kernel_carries_over_what_is_said():
    t, breaks, carried = np.linspace(0, 6, 13), [1.2, 3.0, 4.7], [0.4, np.nan, 0.0]
    kernel = gm.kernels.Broken(pm.gp.cov.ExpQuad(1, ls=0.8), breaks, carried)
    expected = [
        [
            _slow(a, b, np.array(breaks), carried, lambda x, y: np.exp(-((x - y) ** 2) / 1.28))
            for b in t
        ]
        for a in t
    ]
    np.testing.assert_allclose(kernel(t[:, None]).eval(), expected, atol=1e-12)
    h = 1e-4
    blocks = gm.derivatives.evaluate_blocks(kernel, t)
    ahead = kernel(np.append(t, t + h)[:, None]).eval()
    np.testing.assert_allclose(blocks.dk_dt1, (ahead[13:, :13] - ahead[:13, :13]) / h, atol=1e-3)


@pytest.fixture(scope="module")
def drug():
    """Return data of which one time is that of a dose."""
    t = np.array([0, 1, 2.5, 4, 6, 6.7, 8, 10, 12, 13, 15, 17, 19.5, 21, 22, 24.0])
    x = bolus(t, 60.0, 0.2)[:, None]
    return t, x + np.random.default_rng(1).normal(0, 2.0, x.shape)


def test_the_prior_mean_jumps_and_what_deviates_from_it_does_not(drug):
    t, y = drug
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=3.0)], sigma=2.0)
    ode = ELIMINATION.with_inputs(SCHEDULE)
    dosed = gp.with_breaks(ode.jumps, *ode.steps)
    expected = gp.mean + DOSES @ (dosed.t >= TIMES[:, None])
    np.testing.assert_allclose(dosed.prior_mean[:, 0], expected)
    np.testing.assert_array_equal(dosed.with_grid(2).breaks, TIMES)
    np.testing.assert_array_equal(
        dosed.with_breaks(ode.jumps, *ode.steps).prior_mean, dosed.prior_mean
    )
    at = np.searchsorted(dosed.t, TIMES)
    smooth = dosed.posterior_mean()[:, 0]
    assert (np.abs(smooth[at] - smooth[at - 1] - DOSES) < 0.2 * DOSES).all()
    with pm.Model():
        theta, x = {"k": pm.HalfNormal("k")}, gp.with_breaks(ode.jumps).prior("x")
        with pytest.raises(ValueError, match=r"with_breaks\(ode.jumps, \*ode.steps\)"):
            gm.GradientMatchingODE("match", ode, x, theta, gp=gp.with_breaks(ode.jumps), gamma=0.1)


def test_the_four_lines_are_the_built_model_with_doses(drug):
    t, y = drug
    fitted = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=3.0)], sigma=2.0)
    built = gm.build_model(
        ELIMINATION,
        t,
        y,
        priors=PRIORS,
        inputs=SCHEDULE,
        gp=fitted,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    ode = ELIMINATION.with_inputs(SCHEDULE)
    gp = fitted.with_breaks(ode.jumps, *ode.steps)
    with pm.Model() as model:
        theta = {"k": pm.LogNormal("k", -2, 1)}
        x = gp.prior("x")
        pm.Normal("y", gp.at_observations(x), gp.sigma, observed=y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.1)
    points = [m.point_logps(round_vals=12) for m in (model, built)]
    assert points[0] == pytest.approx(points[1])


def test_a_dose_at_the_last_time_is_asked_for_and_then_known(drug):
    t, y = drug
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=3.0)], sigma=2.0)
    ode = ELIMINATION.with_inputs({"amount": gm.Input([t[-1]], [60.0], kind="dose")})

    def match(gp):
        with pm.Model():
            theta, x = {"k": pm.HalfNormal("k")}, gp.prior("x")
            gm.GradientMatchingODE("match", ode, x, theta, gp=gp, gamma=0.1)

    with pytest.raises(
        ValueError, match=r"jump at t = 24, .*with_breaks\(ode.jumps, \*ode.steps\)"
    ):
        match(gp)
    match(gp.with_breaks(ode.jumps, *ode.steps))


def test_times_that_rounding_parts_are_one_break_at_which_all_happens():
    t, y = np.linspace(-1, 2, 11), np.sin(np.arange(11.0))[:, None]
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=3.0)], sigma=2.0)
    apart = [0.3, 3 * 0.1]
    assert apart[0] != apart[1]
    assert np.abs(t - 0.2).min() < 1e-15
    twice = gp.with_breaks([*apart, 0.2, 0.2 + 5e-16], [[2], [1], [1], [3]], [[1], [0], [5], [1]])
    np.testing.assert_array_equal(twice.breaks, [t[4], 0.3])
    assert t[4] != 0.2
    np.testing.assert_array_equal(np.stack(twice.steps)[..., 0], [[3, 2], [16, 1]])
    again = gp.with_breaks(0.3).with_breaks(3 * 0.1, 1.0, 7.0)
    np.testing.assert_array_equal(again.breaks, [0.3])
    np.testing.assert_array_equal(again.steps[1], [[7.0]])


def test_an_input_and_a_dose_that_rounding_parts_are_matched():
    ode = gm.ODE(
        lambda t, x, theta, u: [u.flow - theta.k * x.amount], ["amount"], ["k"], inputs=["flow"]
    ).with_inputs(
        {
            "flow": gm.Input([0, 0.3], [1.0, 0.0], kind="previous"),
            "amount": gm.Input([3 * 0.1], [2.0], kind="dose"),
        }
    )
    t = np.linspace(0, 1, 11)
    gp = gm.StateGP(t, np.cos(t)[:, None], [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    gp = gp.with_breaks(ode.jumps, *ode.steps)
    assert len(gp.breaks) == 1
    with pm.Model():
        theta, x = {"k": pm.HalfNormal("k")}, gp.prior("x")
        gm.GradientMatchingODE("match", ode, x, theta, gp=gp, gamma=0.1)


def test_a_dose_and_a_start_at_the_same_time_are_refused(drug):
    t, y = drug
    doses = {"amount": gm.Input([0.0, 6.0], [60.0, 80.0], kind="dose")}
    with pytest.raises(ValueError, match=r"\['amount'\] are given a dose at t = 0, the first time"):
        gm.build_model(
            ELIMINATION, t, y, priors=PRIORS, inputs=doses, start={"amount": 0.0}, preset="fgpgm"
        )


def least_squares_posterior(t, y, sigma):
    """Return mean and sd of k by quadrature; the start, of flat prior, is integrated out."""
    k = np.linspace(0.1, 0.3, 4001)
    given = np.array([bolus(t, 0.0, rate) for rate in k])
    design = np.exp(-k[:, None] * t) / sigma
    residual = (y[:, 0] - given) / sigma
    norm = np.square(design).sum(axis=1)
    misfit = np.square(residual).sum(axis=1) - (design * residual).sum(axis=1) ** 2 / norm
    log_prior = -0.5 * (np.log(k) + 2) ** 2 - np.log(k)
    height = -0.5 * misfit - 0.5 * np.log(norm) + log_prior
    weights = np.exp(height - height.max())
    weights /= weights.sum()
    mean = weights @ k
    return mean, np.sqrt(weights @ (k - mean) ** 2)


@pytest.mark.slow
def test_draws_with_repeated_doses_are_those_of_the_closed_form(drug):
    """Assert it for the one call, and the matched posterior within a third of its width."""
    t, y = drug
    fit = gm.fit(
        ELIMINATION, t, y, priors=PRIORS, inputs=SCHEDULE, sigma="fixed", random_seed=1,
        progressbar=False,
    )  # fmt: skip
    [constraint] = constraints(fit.model)
    mean, sd = least_squares_posterior(t, y, constraint.gp.sigma[0])
    assert fit.is_exact
    error = 6 / np.sqrt(fit.n_effective)
    assert fit.table.loc["k", "mean"] == pytest.approx(mean, abs=error * sd)
    assert fit.table.loc["k", "sd"] == pytest.approx(sd, rel=2 * error)
    matched = gm.sample(1000, model=fit.model, random_seed=1, progressbar=False)
    draws = matched["posterior"]["k"]
    assert abs(draws.mean() - mean) < 0.33 * sd
    assert 0.85 < draws.std() / sd < 1.15
    check = gm.integrate_check(matched, model=fit.model, random_seed=1)
    assert check.is_exact
    assert check.moved.loc["k", "exact_mean"] == pytest.approx(mean, abs=0.2 * sd)
    later = gm.predict(fit.idata, model=fit.model, t=[0.0, 12.4, 12.5, 40.0])
    x = later["posterior_predictive"]["x"].mean(("chain", "draw")).to_numpy()[:, 0]
    np.testing.assert_allclose(x, bolus([0.0, 12.4, 12.5, 40.0], x[0], mean), atol=1.0)


@pytest.mark.slow
def test_hidden_and_positive_states_take_doses():
    """Assert truth within four standard deviations: a gut that is never seen, blood in logs."""
    t = np.array([0.5, 1, 2, 3, 4.5, 6, 7.9, 8.5, 9, 10, 11, 13, 15, 18.0])
    doses = {"gut": gm.Input([8.0], [100.0], kind="dose")}
    truth = {"ka": 1.2, "k": 0.25}
    ode = gm.ODE(ORAL.rhs, ORAL.states, ORAL.params, positive=ORAL.states)
    start = 100 * np.exp(-1.2 * 0.5), 100 * 1.2 / 0.95 * (np.exp(-0.125) - np.exp(-0.6))
    x = ode.solve(t, start, truth, inputs=doses)[:, 1]
    y = x * np.exp(np.random.default_rng(3).normal(0, 0.05, len(t)))
    table = np.stack([np.full(len(t), np.nan), y], axis=1)
    fit = gm.fit(
        ode, t, table, inputs=doses, random_seed=1, progressbar=False,
        priors={"ka": pm.LogNormal.dist(0, 1), "k": pm.LogNormal.dist(-1, 1)},
    )  # fmt: skip
    assert fit.is_exact
    found = fit.table.loc[list(truth)]
    assert (np.abs(found["mean"] - [*truth.values()]) < 4 * found["sd"]).all()


@pytest.mark.slow
def test_a_washout_is_fitted_with_the_number_that_it_leaves():
    """Assert truth within four standard deviations, by NUTS on the matched posterior too."""
    t = np.linspace(0, 12, 25)
    wash = {"blood": gm.Input([5.0], [0.0], kind="reset")}
    truth = {"ka": 0.3, "k": 0.5}
    x = ORAL.solve(t, [20.0, 5.0], truth, inputs=wash)
    y = x + np.random.default_rng(3).normal(0, 0.2, x.shape)
    priors = {name: pm.HalfNormal.dist(2) for name in truth}
    fit = gm.fit(ORAL, t, y, priors=priors, inputs=wash, random_seed=1, progressbar=False)
    assert fit.is_exact
    found = fit.table.loc[list(truth)]
    assert (np.abs(found["mean"] - [*truth.values()]) < 4 * found["sd"]).all()
    matched = gm.sample(500, model=fit.model, random_seed=1, progressbar=False)["posterior"]
    for name in truth:
        assert abs(matched[name].mean() - found.loc[name, "mean"]) < 0.4 * found.loc[name, "sd"]


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_many_data_sets_take_the_same_doses(drug, exact):
    t, y = drug
    rates = np.array([0.2, 0.15])
    noise = y[:, 0] - bolus(t, 60.0, 0.2)
    ys = np.stack([bolus(t, 60.0, k) + noise for k in rates])[..., None]
    road = {"exact": True} if exact else {"preset": "refined"}
    fits = gm.fit_many(
        ELIMINATION, t, ys, priors=PRIORS, inputs=SCHEDULE, n_jobs=1, random_seed=1,
        progressbar=False, **road,
    )  # fmt: skip
    mean, sd = (getattr(fits["k"], f)(["chain", "draw"]) for f in ("mean", "std"))
    assert (np.abs(mean - rates) < 4 * sd).all()
    assert (fits["failure"] == "").all()
    if exact:
        assert fits["is_exact"].all()


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["dose", "previous"])
def test_what_happens_a_rounding_beside_an_output_time_happens_then(shift, kind):
    t = np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    at = 0.3 + shift * np.spacing(0.3)
    if kind == "dose":
        given = DECAY.with_inputs({"mass": gm.Input([at], [2.0], kind="dose")})
        expected = np.exp(-t) + np.where(t >= 0.3, 2 * np.exp(0.3 - t), 0)
    else:
        fed = gm.ODE(lambda t, x, theta, u: [u.u - theta.k * x.mass], ["mass"], ["k"], inputs=["u"])
        given = fed.with_inputs({"u": gm.Input([0.0, at], [0.0, 2.0], kind="previous")})
        expected = np.exp(-t) + np.where(t >= 0.3, 2 * (1 - np.exp(0.3 - t)), 0)
    np.testing.assert_allclose(given.solve(t, [1.0], [1.0])[:, 0], expected, rtol=1e-6)
    drawn = Solver(given.equations(), t)([[1.0]], [[1.0]]).x
    np.testing.assert_allclose(drawn[0, :, 0], expected, rtol=1e-6)


def test_a_start_alone_is_given_nothing_a_second_time():
    dosed = DECAY.with_inputs({"mass": gm.Input([0.0], [5.0], kind="dose")})
    assert Solver(dosed.equations(), np.array([0.0]))([[1.0]], [[1.0]]).x.item() == 1


def test_what_was_given_before_the_first_time_moves_no_data():
    t = np.linspace(0, 8, 17)
    y = 100 * np.exp(-0.4 * t)[:, None] + np.random.default_rng(1).normal(0, 2, (17, 1))
    settings = {"priors": {"k": pm.HalfNormal.dist(1)}, "random_seed": 1, "progressbar": False}
    fitted = [
        constraints(gm.build_model(DECAY, t, y, inputs=inputs, **settings, preset="fgpgm"))[
            0
        ].gp.sigma
        for inputs in (None, {"mass": gm.Input([-24.0, 0.0], [100.0, 100.0], kind="dose")})
    ]
    np.testing.assert_array_equal(*fitted)


def test_a_positive_state_is_not_washed_out_to_zero():
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"], positive=["mass"])
    with pytest.raises(ValueError, match=r"\['mass'\] are positive states, and reset to zero"):
        ode.with_inputs({"mass": gm.Input([1.0], [0.0], kind="reset")})


def test_positive_states_of_several_experiments_take_inputs():
    ode = gm.ODE(
        lambda t, x, theta, u: [u.q - theta.k * x.mass], ["mass"], ["k"],
        positive=["mass"], inputs=["q"],
    )  # fmt: skip
    t = np.linspace(0, 4, 9)
    experiments = {}
    for name, rate in (("a", 0.2), ("b", 0.5)):
        given = {"q": gm.Input([0.0, 4.0], [rate, rate])}
        y = ode.solve(t, [2.0], [0.5], inputs=given)
        noise = np.random.default_rng(1).normal(0, 0.05, y.shape)
        experiments[name] = gm.Experiment(t, y * np.exp(noise), inputs=given)
    priors = {"k": pm.HalfNormal.dist(1)}
    model = gm.build_model(
        ode, experiments=experiments, priors=priors, random_seed=1, sigma="fixed", preset="fgpgm"
    )
    assert np.isfinite(model.compile_logp(mode="FAST_COMPILE")(model.initial_point()))
