"""The main job: ``python -m benchmarks.demo`` fits real data, then the paper's example."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import arviz as az
import matplotlib as mpl
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr

import pymc_gradmatch as gm
from benchmarks.paper.systems import keep_within

TRUTH = {"alpha": 2.0, "beta": 1.0, "gamma": 4.0, "delta": 1.0}  # of the paper's example
_TWO_COLUMNS = {"col_wrap": 2, "figure_kwargs": {"figsize": (9, 5.5), "layout": "constrained"}}


def log_lotka_volterra(t, x, theta):
    """Lotka-Volterra for the logarithms of the populations."""
    hare, lynx = pm.math.exp(x.hare), pm.math.exp(x.lynx)
    return theta.alpha - theta.beta * lynx, -theta.gamma + theta.delta * hare


def fit_lynx_hare(
    data: gm.datasets.LynxHare, *, random_seed: int = 1, progressbar: bool = True
) -> xr.DataTree:
    """Fit predator and prey to the pelt counts, with log-normal observations, by NUTS.

    Priors are those of the reference posterior, but for its prior on the first
    year's populations, which are free here.  ``gm.refine`` removes the smoothing
    bias, so that the equations are taken at their word, as the reference does.
    """
    ode = gm.ODE(log_lotka_volterra, ["hare", "lynx"], ["alpha", "beta", "gamma", "delta"])
    years, log_pelts = data.pelts.index.to_numpy(), np.log(data.pelts)
    priors = {
        "alpha": pm.TruncatedNormal.dist(1, 0.5, lower=0),
        "beta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
        "gamma": pm.TruncatedNormal.dist(1, 0.5, lower=0),
        "delta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
    }
    gp = gm.fit_gp(years, log_pelts, cov="ExpQuad", shared=True, random_seed=random_seed)
    gp, gamma, start, _ = gm.refine(ode, gp, priors=priors, random_seed=random_seed)
    with pm.Model(coords={"time_observed": years}) as model:
        theta = {
            name: model.register_rv(prior, name, initval=start[name])
            for name, prior in priors.items()
        }
        x = gp.prior("x")
        sigma = pm.LogNormal("sigma", -1, 1, initval=gp.sigma, dims="state")
        pm.LogNormal(
            "y",
            gp.at_observations(x),
            sigma,
            observed=data.pelts.to_numpy(),
            dims=("time_observed", "state"),
        )
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
        pm.Deterministic("pelts", pm.math.exp(x), dims=("time", "state"))
        return gm.sample(2000, chains=2, random_seed=random_seed, progressbar=progressbar)


def lotka_volterra(t, x, theta):
    """Lotka-Volterra as in the paper."""
    return (
        theta.alpha * x.prey - theta.beta * x.prey * x.predator,
        -theta.gamma * x.predator + theta.delta * x.prey * x.predator,
    )


def fit_lotka_volterra(
    draws: int = 20_000, *, random_seed: int = 1
) -> tuple[np.ndarray, xr.DataTree]:
    """Fit the paper's Lotka-Volterra example in its single Metropolis chain.

    Returns
    -------
    truth : array of float
        The states without noise, shape ``(time, state)``.
    idata : xarray.DataTree
    """
    ode = gm.ODE(lotka_volterra, ["prey", "predator"], [*TRUTH])
    t = np.linspace(0, 2, 20)
    truth = ode.solve(t, [5.0, 3.0], TRUTH)
    y = truth + 0.1 * np.random.default_rng(random_seed).normal(size=truth.shape)
    model = gm.build_model(
        ode,
        t,
        y,
        priors={name: pm.Uniform.dist(0, 100) for name in ode.params},
        cov="ExpQuad",
        shared=True,
        gamma=0.3,
        random_seed=random_seed,
        sigma="fixed",
        preset="fgpgm",
    )
    keep_within(model, 3.0)
    idata = gm.sample_fgpgm(
        model, draws, state_step=0.075, param_step=0.09, random_seed=random_seed
    )
    return truth, idata


def main(arguments: list[str] | None = None):
    """Run both fits, print what they found and save the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder of figures")
    parser.add_argument("--draws", type=int, default=20_000, help="Metropolis sweeps")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    start = perf_counter()
    mpl.use("Agg")

    print("1. Lynx and hare, 1900-1920: NUTS on Theorem 1, no ODE solver in the loop")
    lynx_hare = gm.datasets.lynx_hare()
    idata = fit_lynx_hare(lynx_hare)
    print(az.summary(idata, var_names=["alpha", "beta", "gamma", "delta", "sigma"]))
    print("\nBeside the published exact posterior (numerical integration, posteriordb):")
    print(compare(idata, lynx_hare.reference).to_string(), "\n")
    save_figures(
        idata,
        options.out,
        "lynx-hare",
        units={
            "alpha": "1 / year",
            "beta": "1 / (year x thousand pelts)",
            "gamma": "1 / year",
            "delta": "1 / (year x thousand pelts)",
        },
        states={"var_name": "pelts", "labels": ("year", "pelts (thousands)")},
    )

    print("\n2. Lotka-Volterra as in the paper: one Metropolis chain")
    states, idata = fit_lotka_volterra(options.draws)
    summary = az.summary(idata, var_names=[*TRUTH], kind="all")
    summary.insert(0, "truth", [*TRUTH.values()])
    print(summary.drop(columns="r_hat"), "\n")
    save_figures(
        idata,
        options.out,
        "lotka-volterra",
        units={
            "alpha": "1 / time",
            "beta": "1 / (time x population)",
            "gamma": "1 / time",
            "delta": "1 / (time x population)",
        },
        truth=TRUTH,
        states={"truth": states, "labels": ("time (any unit)", "population (any unit)")},
    )
    print(f"\nDone in {perf_counter() - start:.0f} s.")


def compare(idata: xr.DataTree, reference: pd.DataFrame) -> pd.DataFrame:
    """Put posterior means and standard deviations beside a reference posterior."""
    draws = idata["posterior"].dataset[list(reference.index)]
    mean, sd = draws.mean().to_pandas(), draws.std().to_pandas()
    return pd.DataFrame(
        {
            "mean": mean,
            "sd": sd,
            "reference mean": reference["mean"],
            "reference sd": reference["sd"],
            "distance in reference sd": (mean - reference["mean"]) / reference["sd"],
        }
    ).round(4)


def save_figures(
    idata: xr.DataTree,
    folder: Path,
    name: str,
    *,
    units: Mapping[str, str],
    states: dict,
    truth: Mapping[str, float] | None = None,
):
    """Save a trace plot, parameter histograms and the states over the data."""
    figures = {
        "trace": plot_trace(idata, units),
        "parameters": plot_parameters(idata, units, truth),
        "states": gm.plot_states(idata, **states),
    }
    for kind, figure in figures.items():
        path = folder / f"{name}-{kind}.png"
        figure.savefig(path, dpi=150)
        print(f"saved {path}")


def plot_trace(idata: xr.DataTree, units: Mapping[str, str]) -> az.PlotCollection:
    """Plot the draws of each parameter against the draw's number."""
    figure = az.plot_trace(
        idata, var_names=list(units), labeller=_with_units(units), **_TWO_COLUMNS
    )
    if idata["posterior"].sizes["chain"] > 1:
        figure.add_legend("chain")
    return figure


def plot_parameters(
    idata: xr.DataTree, units: Mapping[str, str], truth: Mapping[str, float] | None = None
) -> az.PlotCollection:
    """Plot a histogram of each parameter, with the true value where it is known."""
    figure = az.plot_dist(
        idata,
        var_names=list(units),
        kind="hist",
        labeller=_with_units(units),
        visuals={"point_estimate_text": truth is None},
        **_TWO_COLUMNS,
    )
    if truth is not None:
        line = {"color": "black", "linestyle": "--", "label": "truth"}
        az.add_lines(figure, values=dict(truth), visuals={"ref_line": line})
        handles = figure.get_target(next(iter(truth)), {}).get_legend_handles_labels()
        figure.viz["figure"].item().legend(*handles, loc="outside lower center")
    return figure


def _with_units(units: Mapping[str, str]) -> az.labels.MapLabeller:
    shown = {name: f"{name} ({unit})" for name, unit in units.items()}
    return az.labels.MapLabeller(var_name_map=shown)


if __name__ == "__main__":
    main()
