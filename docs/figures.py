"""The figures of docs/idea.md and of README: ``python -m docs.figures`` draws all of them."""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pymc as pm
from matplotlib.figure import Figure

import pymc_gradmatch as gm
from benchmarks.paper import systems

mpl.use("agg")

HERE = Path(__file__).parent / "figures"
BLUE, ORANGE, GREY = "C0", "C1", "0.35"
SYSTEM = systems.lotka_volterra
DATA = SYSTEM.simulate("low", random_seed=1)
STATE = 0  # prey
SHIFT = {"alpha": 2.8}  # a wrong value, for contrast
GAMMAS = (1.0, 0.1, 0.01)


def panels(n: int, *, width: float = 4.6, **shared) -> tuple[Figure, list]:
    """Return a figure of panels side by side."""
    figure = Figure(figsize=(width * n, 3.6), layout="constrained")
    return figure, [*np.atleast_1d(figure.subplots(1, n, **shared))]


def legend(figure: Figure, axes):
    """Write one legend below all panels."""
    entries = {
        label: handle
        for ax in np.atleast_1d(axes)
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=5)


def between(gp: gm.StateGP, n: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a fine grid with mean and sd of the states there, given the data."""
    fine = gp.with_grid(n)
    mean = fine.posterior_mean()
    C = fine.operators().C * fine.scale[:, None, None] ** 2
    places = np.searchsorted(fine.t, gp.t)
    noise = np.eye(len(gp.t)) * gp.sigma[:, None, None] ** 2
    known = np.linalg.solve(C[:, places][:, :, places] + noise, C[:, places])
    sd = np.sqrt(np.diagonal(C - np.swapaxes(C[:, places], 1, 2) @ known, axis1=1, axis2=2)).T
    return fine.t, mean, sd


def slopes(gp: gm.StateGP, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and sd of the slopes given states on the grid, in their units."""
    _, D, A = gp.operators()
    standardised = (x - gp.mean) / gp.scale
    mean = np.stack([D[k] @ standardised[:, k] for k in range(x.shape[1])], axis=1)
    return mean * gp.scale, np.sqrt(np.diagonal(A, axis1=1, axis2=2)).T * gp.scale


def curve() -> Figure:
    """Draw data and the Gaussian process through them."""
    gp = fitted()
    times, mean, sd = between(gp)
    figure, axes = panels(2)
    for k, ax in enumerate(axes):
        low, high = mean[:, k] - 2 * sd[:, k], mean[:, k] + 2 * sd[:, k]
        ax.fill_between(times, low, high, alpha=0.3, color=BLUE, label="two standard deviations")
        ax.plot(times, mean[:, k], color=BLUE, label="Gaussian process")
        ax.plot(DATA.t, DATA.y[:, k], "o", color=ORANGE, label="data")
        ax.set(title=gp.states[k], xlabel="time", ylabel="population")
    legend(figure, axes)
    return figure


def slope() -> Figure:
    """Draw the slope that the Gaussian process knows, and the true one."""
    gp = fitted()
    x = gp.posterior_mean()
    mean, sd = slopes(gp, x)
    true = SYSTEM.ode(DATA.t, DATA.x, SYSTEM.theta).eval()
    figure, axes = panels(2)
    for k, ax in enumerate(axes):
        low, high = mean[:, k] - 2 * sd[:, k], mean[:, k] + 2 * sd[:, k]
        ax.fill_between(DATA.t, low, high, alpha=0.3, color=BLUE, label="its uncertainty, from A")
        ax.plot(DATA.t, mean[:, k], color=BLUE, label="slope of the Gaussian process, D x")
        ax.plot(DATA.t, true[:, k], "--", color="black", label="true slope")
        ax.set(title=gp.states[k], xlabel="time", ylabel="population / time")
    legend(figure, axes)
    return figure


def match() -> Figure:
    """Draw the equations' slope at the true parameters and at a wrong one."""
    gp = fitted()
    x = gp.posterior_mean()
    mean, sd = slopes(gp, x)
    figure, axes = panels(2, sharey=True)
    wrong = dict(SYSTEM.theta) | SHIFT
    titles = ["alpha = 2, the truth", f"alpha = {SHIFT['alpha']}"]
    for ax, theta, title in zip(axes, (SYSTEM.theta, wrong), titles, strict=True):
        f = SYSTEM.ode(DATA.t, x, theta).eval()[:, STATE]
        d, s = mean[:, STATE], sd[:, STATE]
        ax.fill_between(DATA.t, d - 2 * s, d + 2 * s, alpha=0.3, color=BLUE)
        ax.plot(DATA.t, d, color=BLUE, label="slope of the Gaussian process")
        ax.plot(DATA.t, f, color=ORANGE, label="slope of the equations, f(x, theta)")
        ax.vlines(DATA.t, d, f, color=GREY, linewidth=1, label="mismatch")
        ax.set(title=f"prey, {title}", xlabel="time", ylabel="population / time")
    legend(figure, axes)
    return figure


def tolerance() -> Figure:
    """Draw the density of one parameter, given the smooth states, for several gammas."""
    gp = fitted()
    x = gp.posterior_mean()
    _, D, A = gp.operators()
    standardised = (x - gp.mean) / gp.scale
    alphas = np.linspace(1.7, 2.3, 301)
    residuals = np.array([
        SYSTEM.ode(DATA.t, x, dict(SYSTEM.theta) | {"alpha": alpha}).eval()[:, STATE]
        / gp.scale[STATE] - D[STATE] @ standardised[:, STATE]
        for alpha in alphas
    ])  # fmt: skip
    figure, (ax,) = panels(1, width=7)
    for gamma in GAMMAS:
        covariance = A[STATE] + gamma * np.eye(len(DATA.t))
        log_density = -0.5 * np.sum(residuals * np.linalg.solve(covariance, residuals.T).T, axis=1)
        density = np.exp(log_density - log_density.max())
        ax.plot(alphas, density / np.trapezoid(density, alphas), label=f"gamma = {gamma:g}")
    ax.axvline(SYSTEM.theta["alpha"], color="black", linestyle="--", label="truth")
    ax.set(xlabel="alpha (1 / time)", ylabel="density, by prey's mismatch alone")
    legend(figure, ax)
    return figure


def exact() -> Figure:
    """Draw the matched posterior beside the exact one, of a spiky system."""
    system = systems.fitzhugh_nagumo
    data = system.simulate("snr100", random_seed=1)
    priors = {name: pm.HalfNormal.dist(5) for name in system.ode.params}
    matched = gm.build_model(
        system.ode,
        data.t,
        data.y,
        priors=priors,
        cov="Matern52",
        gamma=3e-4,
        random_seed=1,
        sigma="fixed",
        preset="fgpgm",
    )
    settings = {"chains": 2, "random_seed": 1, "progressbar": False}
    idata = gm.sample(1_000, model=matched, **settings)
    fit = gm.fit(system.ode, data.t, data.y, priors=priors, random_seed=1, progressbar=False)
    figure, axes = panels(3)
    for ax, name in zip(axes, system.ode.params, strict=True):
        style = {"density": True, "bins": 40, "alpha": 0.6}
        ax.hist(idata["posterior"][name].to_numpy().ravel(), **style, label="gradient matching")
        ax.hist(fit.idata["posterior"][name].to_numpy().ravel(), **style, label="gm.fit: exact")
        ax.axvline(system.theta[name], color="black", linestyle="--", label="truth")
        ax.set(xlabel=name, ylabel="density")
    legend(figure, axes)
    return figure


def fitted() -> gm.StateGP:
    """Return the Gaussian processes of the first four figures."""
    return gm.fit_gp(
        DATA.t, DATA.y, cov="ExpQuad", shared=True, states=SYSTEM.ode.states, random_seed=1
    )


FIGURES = {f.__name__: f for f in (curve, slope, match, tolerance, exact)}


def readme(to: Path):
    """Run the README's first example, which ends in a picture."""
    text = (HERE.parents[1] / "README.md").read_text("utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    exec(code.replace('"states.png"', repr(str(to))), {})


def main():
    """Draw all figures, or some."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help=f"readme, {', '.join(FIGURES)}")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or [*FIGURES, "readme"]:
        if name == "readme":
            readme(options.out / "readme.png")
        else:
            FIGURES[name]().savefig(options.out / f"idea-{name}.png", dpi=110)


if __name__ == "__main__":
    main()
