"""A case: an ODE with everything that a study fixes about it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from benchmarks.paper import systems

__all__ = ["Case", "Prior", "named"]

# A truncated normal is one above zero; PyMC and NumPyro have other words for it.
ABOVE_ZERO = {"TruncatedNormal": ({"lower": 0.0}, {"low": 0.0})}
NOTHING: tuple[dict, dict] = ({}, {})


class Prior(NamedTuple):
    """A prior by the name that PyMC and NumPyro share, with its arguments in order."""

    family: str
    arguments: tuple[Any, ...]

    def pymc(self, **kwargs) -> TensorVariable:
        """Return it for a PyMC model."""
        limits, _ = ABOVE_ZERO.get(self.family, NOTHING)
        return getattr(pm, self.family).dist(*self.arguments, **limits, **kwargs)

    def numpyro(self):
        """Return it for a NumPyro model."""
        from numpyro import distributions

        _, limits = ABOVE_ZERO.get(self.family, NOTHING)
        return getattr(distributions, self.family)(*self.arguments, **limits)


@dataclass(frozen=True, eq=False)
class Case:
    """An ODE with its truth, its times, its noise and its priors.

    Attributes
    ----------
    name, citation : str
        What tables call it, and where it comes from, with what deviates from there.
    ode : ODE
        The right-hand side.
    x0, theta : mapping of str to float
        True states at the first time and true parameters, in the order of the ODE's.
    t : array of float
        Times of the observations; the first is where ``x0`` holds.
    sigma_of : callable
        Maps the true states to the standard deviation of each state's noise.
    prior : mapping of str to Prior
        The prior of every parameter.
    stiff : bool
        Whether the exact posterior needs an implicit solver.
    paper : PaperSettings, optional
        How Wenk et al. (2019) fit it, if they do.
    """

    name: str
    citation: str
    ode: gm.ODE
    x0: Mapping[str, float]
    theta: Mapping[str, float]
    t: NDArray[np.float64]
    sigma_of: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    prior: Mapping[str, Prior]
    stiff: bool = False
    paper: systems.PaperSettings | None = None

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def truth(self) -> NDArray[np.float64]:
        """True parameters, in the order of ``ode.params``."""
        return np.array(list(self.theta.values()))

    def simulate(self, random_seed: int | np.random.Generator) -> systems.Simulation:
        """Return one of the data sets; its number is the seed of the noise."""
        x = self.ode.solve(self.t, self.x0, self.theta)
        sigma = self.sigma_of(x)
        noise = np.random.default_rng(random_seed).normal(size=x.shape) * sigma
        return systems.Simulation(self.t, x + noise, x, sigma)

    def priors(self) -> dict[str, TensorVariable]:
        """Return the prior of every parameter, for PyMC."""
        return {name: prior.pymc() for name, prior in self.prior.items()}

    def model(self, data: systems.Simulation, **settings) -> pm.Model:
        """Build the model of a data set, with settings of ``gm.build_model``."""
        return gm.build_model(self.ode, data.t, data.y, priors=self.priors(), **settings)

    def arguments(self, data: systems.Simulation) -> dict[str, Any]:
        """Return the arguments of ``gm.fit``, but for seed and progress bar."""
        return {"ode": self.ode, "t": data.t, "y": data.y, "priors": self.priors()}

    def plain(self, data: systems.Simulation) -> pm.Model:
        """Write the posterior that ``gm.fit`` samples as a plain PyMC model, data as ``pm.Data``.

        Starts and noise have the priors that :func:`~pymc_gradmatch.exact_model` describes.
        """
        with pm.Model() as model:
            theta = {name: model.register_rv(p.pymc(), name) for name, p in self.prior.items()}
            y = self._given(data)
            x0 = self._start(y)
            self._observe(self.ode.solve(data.t, x0, theta), y)
        return model

    def _given(self, data: systems.Simulation) -> TensorVariable:
        return pm.Data("given", data.y)

    def _start(self, y: TensorVariable) -> Any:
        return pm.Normal("x0", y[0], 5 * y.std(axis=0), shape=len(self.x0))

    def _observe(self, x: TensorVariable, y: TensorVariable):
        sigma = pm.HalfNormal("sigma", y.std(axis=0), shape=len(self.x0))
        pm.Normal("y", x, sigma, observed=y)

    def paper_gp(self, data: systems.Simulation, random_seed: int) -> gm.StateGP:
        """Fit the paper's kernel, step 1 of Algorithm 1."""
        cov, shared = self.paper.cov, self.paper.shared
        return gm.fit_gp(data.t, data.y, cov=cov, shared=shared, random_seed=random_seed)

    def paper_model(self, data: systems.Simulation, random_seed: int, **settings) -> pm.Model:
        """Build the paper's density: its kernel and gamma, sigma at its estimate."""
        gp = self.paper_gp(data, random_seed)
        return self.model(
            data, gp=gp, gamma=self.paper.gamma, sigma="fixed", preset="fgpgm", **settings
        )


def named(cases: Iterable[Case], name: str) -> Case:
    """Return the case of a name."""
    return next(case for case in cases if case.name == name)
