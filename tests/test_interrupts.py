"""Ctrl-C, threads, progress and its messages, and kernels that were compiled before."""

import _thread
import inspect
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from types import SimpleNamespace

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from rich.console import Console
from scipy.integrate import _odepack_py

import pymc_gradmatch as gm
from pymc_gradmatch import numerics, reporting
from pymc_gradmatch.gp import fit
from pymc_gradmatch.sampling import coordinates, density, metropolis, posterior
from pymc_gradmatch.sampling.posterior import compile_posterior, compiled_for

T = np.linspace(0, 6, 15)
WAVES = [
    np.stack([np.sin(T + phase), np.cos(T)], axis=1)
    + np.random.default_rng(k).normal(0, 0.1, (15, 2))
    for k, phase in enumerate(np.linspace(0, 1, 12))
]

family = pm.gp.cov.ExpQuad


def _of_the_family(width):
    return family(1, ls=width)


@pytest.mark.slow
def test_a_kernel_that_reads_a_global_is_the_one_of_the_global_as_it_is_now(monkeypatch):
    settings = {"bounds": {"width": (0.1, 100)}, "n_starts": 1, "random_seed": 1}
    before = gm.fit_gp(T, WAVES[0], cov=_of_the_family, **settings)
    monkeypatch.setitem(globals(), "family", pm.gp.cov.Matern52)
    after = gm.fit_gp(T, WAVES[0], cov=_of_the_family, **settings)
    expected = gm.fit_gp(T, WAVES[0], cov=lambda width: pm.gp.cov.Matern52(1, ls=width), **settings)
    np.testing.assert_array_equal(after.sigma, expected.sigma)
    assert (np.abs(after.sigma / before.sigma - 1) > 1e-3).all()


def test_a_kernel_written_again_is_not_compiled_again(monkeypatch):
    """Assert that a cell of a notebook that runs twice costs one compilation."""

    def kernel():
        return lambda width: pm.gp.cov.Matern52(1, ls=width)

    settings = {"bounds": {"width": (0.1, 100)}, "n_starts": 1, "random_seed": 1}
    first = gm.fit_gp(T, WAVES[0], cov=kernel(), **settings)
    monkeypatch.setattr(fit, "in_numpy", None)
    again = gm.fit_gp(T, WAVES[0], cov=kernel(), **settings)
    np.testing.assert_array_equal(again.sigma, first.sigma)


@pytest.fixture
def restless():
    """Have threads change at every step."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
def test_fits_in_four_threads_are_those_of_one():
    """Assert it of threads that come first, while nothing is compiled yet."""

    def sigma(y):
        return gm.fit_gp(T, y, cov="ExpQuad", n_starts=2, random_seed=1).sigma

    fit._compiled_kernel.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sigma, WAVES))
    np.testing.assert_array_equal(found, [sigma(y) for y in WAVES])


def decay_models(*priors):
    """Return a model of one decaying state, of the same data, for each prior of its rate."""
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, 8)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (8, 1))
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.02)
    return [
        gm.build_model(
            ode, t, y, priors={"rate": p}, gp=gp, gamma=0.1, sigma="fixed", preset="fgpgm"
        )
        for p in priors
    ]


@pytest.mark.slow
def test_a_bug_in_exchanging_numbers_is_no_second_compilation(monkeypatch):
    first, second = decay_models(pm.HalfNormal.dist(1.1), pm.HalfNormal.dist(1.2))
    posteriors = [compile_posterior(first)]

    def bug(*_):
        raise ValueError

    monkeypatch.setattr(posterior, "_starts", bug)
    with pytest.raises(ValueError):  # noqa: PT011
        compiled_for(second, posteriors)
    assert len(posteriors) == 1


@pytest.mark.slow
def test_parameters_start_at_their_own_model_s_prior_not_at_the_compiled_one_s():
    low, high = decay_models(pm.LogNormal.dist(-4.1, 0.1), pm.LogNormal.dist(4.1, 0.1))
    exchanged = compile_posterior(low).for_model(high)
    assert abs(exchanged.draw_start(1)[0] - 4.1) < 1


def test_axes_of_a_normal_come_the_widest_first_also_where_curvature_is_negative():
    variances, axes = coordinates._inverse(np.diag([-5.0, 0.5, 2.0]))
    np.testing.assert_allclose(variances, [2, 0.5, 0.2])
    np.testing.assert_allclose(np.abs(axes), np.eye(3)[:, [1, 2, 0]], atol=1e-12)


@pytest.mark.slow
def test_the_paper_s_chain_never_touches_the_initial_values_of_the_user_s_model(monkeypatch):
    """Assert that another thread, here the copying itself, sees the model as it is."""
    [model] = decay_models(pm.HalfNormal.dist(1))
    with model:
        pm.Normal("extra", initval=3.0)
    seen = []
    copy = metropolis.remove_value_transforms

    def copied(view, *args):
        seen.append(model.rvs_to_initial_values[model["extra"]])
        return copy(view, *args)

    monkeypatch.setattr(metropolis, "remove_value_transforms", copied)
    gm.sample_fgpgm(model, draws=10, burn_in=10, random_seed=1, progressbar=False)
    assert seen == [3.0]


def test_a_failed_integration_is_told_whatever_the_language(monkeypatch):
    """Assert NaN where the solution blows up, and a solution where it does not."""
    messages = dict.fromkeys(_odepack_py._msgs, "Fertig.")
    monkeypatch.setattr(_odepack_py, "_msgs", messages)
    blow_up = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    with pytest.warns(UserWarning, match="1 of 2 draws failed"):
        solution = blow_up.solve([0.0, 1.0, 2.0], x0=[1.0], theta={"rate": [1.0, -1.0]})
    assert np.isnan(solution[0]).all()
    np.testing.assert_allclose(solution[1][:, 0], [1, 1 / 2, 1 / 3], rtol=1e-6)


@pytest.fixture(scope="module")
def decay():
    [model] = decay_models(pm.HalfNormal.dist(1))
    return model


def interrupting(when):
    """Return nutpie's progress display as one that presses Ctrl-C, once, when it is time."""

    class Interrupting(posterior.NutpieProgressBarManager):
        runs = 0

        def __init__(self, *args):
            super().__init__(*args)
            type(self).runs += 1
            self.pressed = False

        def update(self, progresses):
            if not self.pressed and when(self.runs, progresses):
                self.pressed = True
                _thread.interrupt_main()

    return Interrupting


@pytest.fixture(autouse=True)
def _keyboard():
    """Have Ctrl-C interrupt: where a shell began the tests in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ENDLESS = {"draws": 2_000_000, "tune": 100, "random_seed": 1, "progressbar": False}


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_ctrl_c_returns_the_draws_so_far_and_starts_no_second_run(decay, monkeypatch, cores):
    bars = interrupting(lambda _, chains: chains[0].finished_draws > 1_000)
    monkeypatch.setattr(posterior, "NutpieProgressBarManager", bars)
    idata = gm.sample(chains=2, cores=cores, model=decay, **ENDLESS)
    drawn = idata["posterior"].dataset
    assert bars.runs == 1
    assert 100 < drawn.sizes["draw"] < ENDLESS["draws"]
    assert drawn.sizes["draw"] == idata["sample_stats"].sizes["draw"]
    assert all(np.isfinite(values).all() for values in drawn.data_vars.values())
    assert "observed_data" in idata.children


@pytest.mark.slow
def test_ctrl_c_before_the_first_draw_is_ctrl_c(decay, monkeypatch):
    bars = interrupting(lambda *_: True)
    monkeypatch.setattr(posterior, "NutpieProgressBarManager", bars)
    with pytest.raises(KeyboardInterrupt):
        gm.sample(chains=1, cores=1, model=decay, **ENDLESS | {"tune": 1_000_000})


@pytest.mark.slow
def test_a_sampler_that_makes_no_headway_ends_in_words(decay, monkeypatch):
    """Assert it of a run that has little to show at first, as if its trees were long.

    A chain that waits for its turn counts too.
    """
    monkeypatch.setattr(density, "STEPS_BEFORE_CHECK", 1_000)
    monkeypatch.setattr(density, "MAX_STEPS_PER_DRAW", 0)
    with pytest.raises(RuntimeError, match=r"no progress: \d+ of 4000200 draws .* narrower priors"):
        gm.sample(chains=2, cores=1, model=decay, **ENDLESS)


@pytest.mark.slow
def test_a_sampler_gives_up_by_work_not_by_the_clock(decay, monkeypatch):
    """Assert it of one that is looked at often: it has not done enough to be judged."""
    monkeypatch.setattr(density, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(density, "MAX_STEPS_PER_DRAW", 0)
    monkeypatch.setattr(density, "MIN_SHARE", 1.0)
    idata = gm.sample(50, tune=50, chains=2, cores=1, model=decay, random_seed=1, progressbar=False)
    assert idata["posterior"].sizes["draw"] == 50


@pytest.mark.slow
def test_ctrl_c_returns_the_draws_so_far_of_the_paper_s_chain(decay, monkeypatch):
    """Assert it of a chain of two thousand, at the thirtieth draw after ten that are discarded."""
    sweep, sweeps = metropolis.CompiledMetropolis.astep, []

    def pressing(*args):
        sweeps.append(1)
        if len(sweeps) == 10 + 30:
            os.kill(os.getpid(), signal.SIGINT)
        return sweep(*args)

    monkeypatch.setattr(metropolis.CompiledMetropolis, "astep", pressing)
    idata = gm.sample_fgpgm(decay, 2_000, burn_in=10, random_seed=1, progressbar=False)
    drawn = idata["posterior"].dataset
    assert drawn.sizes["draw"] in (29, 30)
    assert len(sweeps) == 40
    assert all(np.isfinite(values).all() for values in drawn.data_vars.values())
    assert {*idata["observed_data"].data_vars} == {"y"}


@pytest.fixture
def shown(monkeypatch):
    """Return what the displays show, which come up at once, not after a second."""
    words = []

    class AtOnce:
        def __init__(self, delay, show):
            assert delay <= 0.5
            self.start = show

        def cancel(self):
            pass

        join = cancel

    class Display(reporting.Progress):
        def start(self):
            words.extend(task.description for task in self.tasks if not self.disable)

        def update(self, task, *, description):
            super().update(task, description=description)
            self.start()

    monkeypatch.setattr(reporting, "Timer", AtOnce)
    monkeypatch.setattr(reporting, "Progress", Display)
    return words


@pytest.mark.slow
def test_sampling_and_climbing_say_what_they_do(decay, shown):
    gm.sample(50, tune=100, chains=1, random_seed=1, model=decay)
    assert shown == [
        "compiling the model",
        "finding the mode",
        "fitting coordinates to the posterior",
    ]
    shown.clear()
    gm.find_MAP(model=decay, random_seed=1)
    assert shown == ["compiling the model", "finding the mode"]


@pytest.mark.slow
def test_refining_says_what_it_does(shown):
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.02, (15, 1))
    gp = gm.StateGP(T, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.02)
    settings = {"priors": {"rate": pm.HalfNormal.dist(1)}, "preset": "refined", "gp": gp}
    gm.build_model(ode, T, y, random_seed=1, **settings)
    assert shown[0] == "seeking the ODE's solution from draws of the prior"
    assert shown[1] == "re-centring on the ODE's solution: round 1"
    shown.clear()
    gm.build_model(ode, T, y, random_seed=1, progressbar=False, **settings)
    assert not shown


def test_building_and_checking_say_what_they_do(shown):
    y = np.exp(-T)[:, None] + np.random.default_rng(1).normal(0, 0.02, (15, 1))
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    settings = {"priors": {"rate": pm.HalfNormal.dist(1)}, "gamma": 1e-3, "random_seed": 1}
    gm.build_model(ode, experiments=[gm.Experiment(T, y, name="only")], **settings, preset="fgpgm")
    assert shown == ["fitting Gaussian processes", "writing the model"]
    shown.clear()
    model = gm.build_model(ode, T, y, sigma="fixed", **settings, preset="fgpgm")
    assert shown == ["fitting Gaussian processes", "writing the model"]
    shown.clear()
    rate, start = np.random.default_rng(1).normal(1, 0.02, (2, 2, 200, 1))
    x = (start * np.exp(-rate * T))[..., None]
    drawn = az.from_dict({"posterior": {"rate": rate[..., 0], "x": x}})
    gm.integrate_check(drawn, model=model, n_draws=1_000, random_seed=1)
    assert [*dict.fromkeys(words.split(":")[0] for words in shown)] == [
        "writing the exact posterior",
        "optimising from the draws, and from prior draws",
        "searching",
        "drawing",
    ]
    shown.clear()
    gm.integrate_check(drawn, model=model, n_draws=1_000, random_seed=1, progressbar=False)
    assert not shown


def test_what_is_done_within_a_second_needs_no_words(monkeypatch):
    shows = []
    monkeypatch.setattr(reporting.Progress, "start", lambda _: shows.append(1))
    monkeypatch.setattr(reporting, "DISPLAY_DELAY", 3600)
    with reporting.reporting("finding the mode") as say:
        say("the second climb")
    assert not shows


def test_what_is_done_is_shown_with_its_brackets(monkeypatch):
    shown, doing = StringIO(), "fitting 'dose [/kg]', then '5 [mM]'"
    terminal = Console(file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(reporting, "Console", lambda **_: terminal)
    at_once = {"cancel": lambda: None, "join": lambda: None}
    monkeypatch.setattr(reporting, "Timer", lambda _, show: SimpleNamespace(start=show, **at_once))
    with reporting.reporting(doing):
        pass
    assert doing in shown.getvalue()


@pytest.mark.parametrize("argument", [{"initvals": {"rate": 1.0}}, {"nuts_sampler": "numpyro"}])
def test_an_argument_that_only_pymc_has_is_refused_with_what_to_call(decay, argument):
    with pytest.raises(TypeError, match=rf"no argument '{next(iter(argument))}'.*pm\.sample"):
        gm.sample(model=decay, **argument)


@pytest.mark.slow
def test_the_hint_for_times_in_decades_can_be_followed_literally():
    """Assert that a decay seen from 4e-6 to 4e6 is refused, and fitted in s = log t."""
    t = np.geomspace(4e-6, 4e6, 41)
    y = 3 + np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (41, 1))
    with pytest.raises(ValueError, match=r"s = np\.log\(t\).*dx/ds = t f\(t, x, theta\)"):
        gm.fit_gp(t, y, cov="Matern52")

    def decay_in_log_time(s, x, theta):
        t = pt.exp(s)
        return [t * -theta.rate * (x.mass - 3)]

    ode = gm.ODE(decay_in_log_time, ["mass"], ["rate"])
    s = np.log(t)
    gp = gm.fit_gp(s, y, cov="Matern52", n_starts=2, random_seed=1)
    priors = {"rate": pm.HalfNormal.dist(5)}
    found = gm.refine(ode, gp, priors=priors, random_seed=1, progressbar=False)
    assert found.theta["rate"] == pytest.approx(1, rel=0.2)


def test_times_from_zero_in_decades_are_told_to_leave_zero_out():
    t = np.append(0, np.geomspace(4e-6, 4e6, 40))
    with pytest.raises(
        ValueError, match=r"np\.log\(t\).*Leave out the times that are not positive"
    ):
        gm.fit_gp(t, np.exp(-t)[:, None], cov="Matern52")


@pytest.mark.slow
def test_very_many_coordinates_are_sampled_without_any_matrix(monkeypatch, caplog):
    """Assert the posterior of the dense road, with a line in the log, from limits set low."""
    [model] = decay_models(pm.HalfNormal.dist(1))
    settings = {"chains": 2, "cores": 1, "random_seed": 1, "progressbar": False, "model": model}
    dense = gm.sample(2_000, **settings)
    monkeypatch.setattr(coordinates, "MAX_DENSE", 5)
    monkeypatch.setattr(coordinates, "MAX_BAND_SIZE", 5)
    monkeypatch.setattr(numerics, "hessian", None)
    monkeypatch.setattr(coordinates, "hessian", None)
    with caplog.at_level("INFO", "pymc.gradmatch"):
        sparse = gm.sample(2_000, **settings)
    assert "9 coordinates: sampled with nutpie's low-rank mass matrix" in caplog.text
    one, other = dense["posterior"]["rate"], sparse["posterior"]["rate"]
    # At least 400 of the 4000 draws are effective, in both.
    assert abs(float(one.mean() - other.mean())) < 5 * float(one.std()) * np.sqrt(2 / 400)
    assert float(one.std() / other.std()) == pytest.approx(1, abs=5 / np.sqrt(400))


def test_a_fit_has_the_four_chains_that_pymc_recommends_unless_told_otherwise():
    assert inspect.signature(gm.sample).parameters["chains"].default == 4
