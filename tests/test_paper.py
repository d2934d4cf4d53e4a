"""The study of the paper's experiments: resumable, spread over processes, failures on record."""

import os
import signal
from functools import partial
from types import SimpleNamespace

import distributed
import numpy as np
import pytest
import xarray as xr
from scipy.special import logit

from benchmarks.cases import PAPER, named
from benchmarks.paper import methods, results, study, tables
from benchmarks.paper.adaptive import GAMMAS, STATES, adaptive_model
from benchmarks.paper.collapse import climb
from benchmarks.paper.figures import draw_figures
from benchmarks.paper.methods import FULL, QUICK, Draws
from benchmarks.paper.summary import summarise
from benchmarks.runner import Saved
from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.sampling.posterior import CompiledPosterior

N_SETS = 6


def tasks(method="exact", replicates=N_SETS):
    return study.tasks_of(["LV low"], [method], replicates)


def saved(out):
    results.combine(out)
    return results.load(out)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    out = tmp_path_factory.mktemp("serial")
    study.run(tasks(), out, QUICK)
    return saved(out)


@pytest.fixture
def instant(monkeypatch):
    """Enter a method that takes no time: draws around the truth; it counts its calls."""
    calls = []

    def around_truth(case, data, seed, effort):
        calls.append(seed)
        rng = np.random.default_rng(seed)
        theta = rng.normal(case.truth, 0.01, size=(2, 100, len(case.truth)))
        return Draws(theta, rng.normal(data.x, 0.01, size=(2, 100, *data.x.shape)))

    monkeypatch.setitem(methods.METHODS, "instant", around_truth)
    return calls


@pytest.mark.slow
def test_a_study_survives_the_death_of_a_worker(serial, tmp_path, monkeypatch):
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        with distributed.Client(cluster) as client:
            victim = next(iter(client.run(os.getpid).values()))
        save, killed = Saved.save, []

        def save_and_kill(fits, task, result):
            save(fits, task, result)
            if len(list(fits.here.glob("*.nc"))) == 2:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

        monkeypatch.setattr(Saved, "save", save_and_kill)
        study.run(tasks(), tmp_path, QUICK, scheduler=cluster.scheduler_address)
    assert killed
    spread = saved(tmp_path)
    assert (spread["failure"] == "").all()
    assert spread.sizes == serial.sizes
    for name in ("mean", "sd", "rmse", "x"):
        # One BLAS may sum in another order than the next; the optimum is known to 1e-8.
        xr.testing.assert_allclose(spread[name], serial[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fits_are_close_to_the_truth_and_seeds_on_record(serial):
    fits = serial.sel({"method": "exact", "case": "LV low"})
    assert (fits["rmse_overall"] < 0.15).all()
    assert fits["data_seed"].to_numpy().tolist() == list(range(N_SETS))
    assert fits["method_seed"].to_numpy().tolist() == [task.seed for task in tasks()]


def test_seeds_differ_between_cases_methods_and_replicates():
    every = study.tasks_of([case.name for case in PAPER], list(methods.METHODS), 10)
    assert len({task.seed for task in every}) == len(every) == len(set(every))


@pytest.mark.slow
def test_an_interrupted_study_resumes_without_fitting_again(instant, tmp_path, monkeypatch):
    save = Saved.save

    def interrupted(fits, task, result):
        save(fits, task, result)
        if task == tasks("instant")[2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Saved, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.run(tasks("instant"), tmp_path, QUICK)
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "fits").rglob("*.nc")}
    assert len(there) == 3
    monkeypatch.setattr(Saved, "save", save)
    instant.clear()
    study.run(tasks("instant"), tmp_path, QUICK)
    assert instant == [task.seed for task in tasks("instant")[3:]]
    assert all(path.stat().st_mtime_ns == time for path, time in there.items())


def test_chains_of_other_lengths_get_a_folder_of_their_own(instant, tmp_path):
    study.run(tasks("instant", 1), tmp_path, QUICK)
    with pytest.raises(ValueError, match=r"'draws': 200.*'draws': 1000.*--out"):
        study.run(tasks("instant", 2), tmp_path, FULL)
    assert len(instant) == 1


@pytest.fixture
def failing(monkeypatch):
    """Enter a method that always fails."""

    def without_start(case, data, seed, effort):
        msg = "no start was found."
        raise ValueError(msg)

    monkeypatch.setitem(methods.METHODS, "failing", without_start)


@pytest.mark.slow
def test_a_failing_fit_is_a_row_with_its_reason(instant, failing, tmp_path):
    study.run(tasks("failing", 2) + tasks("instant", 2), tmp_path, QUICK)
    fits = saved(tmp_path)
    failed = fits.sel({"method": "failing", "case": "LV low"})
    assert failed["failure"].to_numpy().tolist() == ["ValueError: no start was found."] * 2
    assert failed["mean"].isnull().all()
    assert failed["fitted"].all()
    table = tables.summary(fits)
    assert table.loc[("LV low", "failing"), "failures"] == 2
    assert table.loc[("LV low", "instant"), "failures"] == 0
    assert tables.failures(fits).to_numpy().tolist() == [2]


@pytest.mark.slow
def test_where_all_fits_failed_the_tables_say_why(failing, tmp_path, capsys):
    study.run(tasks("failing", 2), tmp_path, QUICK)
    fits = saved(tmp_path)
    tables.write_tables(fits, tmp_path)
    assert "ValueError: no start was found." in capsys.readouterr().out
    assert draw_figures(fits, tmp_path) == []


def test_tasks_run_through_small_studies_first_and_keep_compilations_together():
    order = study.tasks_of(["LV low", "PT low"], ["nuts", "exact"], 12)
    assert [task.replicate for task in order[:4]] == [0] * 4
    assert [task[1:] for task in order[4:8]] == [("nuts", r) for r in range(1, 5)]
    assert max(task.replicate for task in order) == 11
    assert len(order) == 48


def test_a_trajectory_that_cannot_be_integrated_is_infinitely_wrong():
    case = named(PAPER, "LV low")
    data = case.simulate(0)
    theta = np.broadcast_to([90.0, -90.0, -90.0, 90.0], (2, 10, 4))
    draws = Draws(theta, np.broadcast_to(data.x, (2, 10, *data.x.shape)), is_chain=False)
    result = summarise(case, data, draws)
    assert np.isinf(result["rmse_overall"]).all()
    assert np.isnan(result["trajectory"].sel(start="true")).any()


def test_the_inferred_start_is_that_of_the_states():
    case = named(PAPER, "LV low")
    data = case.simulate(0)
    theta = np.broadcast_to(case.truth, (2, 10, 4))
    x = np.broadcast_to(data.x + 0.5, (2, 10, *data.x.shape))
    errors = summarise(case, data, Draws(theta, x, is_chain=False))["rmse"]
    assert (errors.sel(start="true") < 1e-5).all()
    assert (errors.sel(start="inferred") > 0.1).all()


ATTRIBUTES = {"lengthscale": "ls", "a": "a", "b": "b"}


def estimates_of(fitted, owners):
    """Return the hyperparameters of a fit by their names in the adaptive model."""
    named = {}
    for owner, cov in zip(owners, fitted.covs, strict=False):
        kernel, variance = cov._factor_list
        there = {
            name: getattr(kernel, at) for name, at in ATTRIBUTES.items() if hasattr(kernel, at)
        }
        named |= {f"{name} of {owner}": value.eval() for name, value in there.items()}
        named[f"variance of {owner}"] = variance.eval()
    return named


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the estimate of sigma ended at its low bound")
@pytest.mark.parametrize("name", ["LV low", "PT high", "FHN SNR 100, 10 points"])
def test_adaptive_gradient_matching_at_the_estimates_is_fgpgm(name):
    case = named(PAPER, name)
    data, settings = case.simulate(0), case.paper
    fitted = case.paper_gp(data, random_seed=0)
    adaptive, fixed = adaptive_model(case, data, fitted), methods.paper_model(case, data)
    low, high = np.log(GAMMAS)
    share = (np.log(settings.gamma) - low) / (high - low)
    point = fixed.initial_point() | {"log tolerance_interval__": logit(share)}
    estimates = estimates_of(fitted, case.ode.states[: 1 if settings.shared else None])
    point |= {f"{name}_log__": np.log(value) for name, value in estimates.items()}
    point[STATES] = point["x_standardized__"].T
    factors = {
        adaptive: ("prior of the states", "y", "gradient_match"),
        fixed: ("x", "y", "gradient_match"),
    }
    log_densities = [
        model.compile_logp(vars=[model[factor] for factor in each], sum=False, mode=EVALUATE_ONCE)(
            {name: point[name] for name in model.initial_point()}
        )
        for model, each in factors.items()
    ]
    for ours, expected in zip(*log_densities, strict=True):
        np.testing.assert_allclose(ours.sum(), expected.sum(), rtol=1e-6)


def test_evidence_climbs_to_its_maximum_and_is_the_integral():
    """Assert both for x ~ N(h, s^2), h ~ N(1, 1): log p(h) without x is that of its prior."""
    s = 0.1

    def density(u):
        h, x = u
        z = (x - h) / s
        value = -(z**2 + (h - 1) ** 2) / 2 - np.log(2 * np.pi * s)
        return value, np.array([z / s - (h - 1), -z / s])

    is_fixed = np.array([True, False])
    posterior = SimpleNamespace(density=density, roles=SimpleNamespace(is_fixed=is_fixed))
    posterior.along = partial(CompiledPosterior.along, posterior)
    evidence, mode = climb(posterior, np.array([-2.0, 0.0]), is_fixed)
    np.testing.assert_allclose(mode, [1, 1], atol=0.02)
    np.testing.assert_allclose(evidence, -np.log(2 * np.pi) / 2, atol=1e-3)


def test_names_that_two_systems_share_stay_apart():
    fits = []
    for name in ("PT low", "FHN SNR 10, 20 points"):
        case = named(PAPER, name)
        data = case.simulate(0)
        theta = np.broadcast_to(case.truth, (1, 5, len(case.truth)))
        draws = Draws(theta, data.x[None, None], is_chain=False)
        fit = summarise(case, data, draws)
        fits.append(fit.assign_attrs(case=name, method="exact", replicate=0))
    both = results.stacked(fits).sel({"method": "exact", "replicate": 0})
    assert both["mean"].sel(case="PT low", param="V") == 0.017
    assert np.isnan(both["mean"].sel(case="FHN SNR 10, 20 points", param="V"))
    assert both["x"].sel(case="FHN SNR 10, 20 points", state="V").notnull().sum() == 20
    assert both["x"].sel(case="PT low", state="V").isnull().all()
