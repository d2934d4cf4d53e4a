"""The rival's figures: NUTS through a numerical solver, NumPyro with diffrax.

``python -m benchmarks.rivals`` prints them, ``--out`` saves them as CSV, and
``--quick`` runs Lotka-Volterra with short chains.  JAX comes with the extra
``benchmarks``; importing this module does not need it.
"""

import argparse
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import process_time
from typing import NamedTuple

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from pymc_gradmatch.paper.systems import Simulation, System


class Prior(NamedTuple):
    """A prior by the name that PyMC and NumPyro share, with its arguments in order."""

    family: str
    arguments: tuple[float, ...]

    def pymc(self) -> TensorVariable:
        """Return it for a PyMC model."""
        return getattr(pm, self.family).dist(*self.arguments)

    def numpyro(self):
        """Return it for a NumPyro model."""
        from numpyro import distributions

        return getattr(distributions, self.family)(*self.arguments)


class Case(NamedTuple):
    """A benchmark problem: a system, its noise level, its times and the prior of theta."""

    system: System
    noise: str
    t: np.ndarray
    prior: Prior

    def simulate(self, random_seed: int) -> Simulation:
        """Return a data set."""
        return self.system.simulate(self.noise, t=self.t, random_seed=random_seed)


_HALF_NORMAL = Prior("HalfNormal", (5.0,))
_BOX = Prior("Uniform", gm.systems.protein_transduction.paper.theta_box)
_NARROW = Prior("HalfNormal", (1.0,))

CASES = [
    Case(gm.systems.lotka_volterra, "low", gm.systems.lotka_volterra.t, _HALF_NORMAL),
    Case(gm.systems.lotka_volterra, "high", gm.systems.lotka_volterra.t, _HALF_NORMAL),
    Case(gm.systems.fitzhugh_nagumo, "snr100", np.linspace(0, 10, 25), _HALF_NORMAL),
    Case(gm.systems.fitzhugh_nagumo, "snr10", np.linspace(0, 10, 20), _HALF_NORMAL),
    Case(gm.systems.protein_transduction, "low", gm.systems.protein_transduction.t, _NARROW),
    Case(gm.systems.protein_transduction, "low", gm.systems.protein_transduction.t, _BOX),
    Case(gm.systems.protein_transduction, "high", gm.systems.protein_transduction.t, _BOX),
]


class Rival(NamedTuple):
    """What the rival achieved.

    Attributes
    ----------
    ess_per_cpu_second : float
        ``ess`` divided by ``cpu_seconds_sampling``.
    ess : float
        Bulk effective sample size of all chains together, the least over theta.
    cpu_seconds_sampling : float
        Warm-up and draws of all chains, compilation left out.
    cpu_seconds_compile : float
        Tracing and compiling, once for all chains.
    gradient_us : float
        CPU microseconds of one log density with gradient at the true parameters,
        inside a compiled loop.
    rhat : float
        The largest over theta.  Where it is not near 1, ``ess`` means nothing.
    divergences : int
        Divergent transitions after warm-up.
    mean, sd : dict of str to float
        Posterior mean and standard deviation of every parameter.
    """

    ess_per_cpu_second: float
    ess: float
    cpu_seconds_sampling: float
    cpu_seconds_compile: float
    gradient_us: float
    rhat: float
    divergences: int
    mean: dict[str, float]
    sd: dict[str, float]


def import_jax():
    """Import and return diffrax, jax and numpyro: float64, one thread, no accelerator."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    # A wild proposal of NUTS has no density; Equinox would end the run there.
    os.environ.setdefault("EQX_ON_ERROR", "nan")
    try:
        import diffrax
        import jax
        import numpyro
    except ImportError as error:
        msg = "This benchmark needs JAX, NumPyro and diffrax: pip install .[benchmarks]"
        raise ImportError(msg) from error
    jax.config.update("jax_enable_x64", True)
    return diffrax, jax, numpyro


def jax_right_hand_side(ode: gm.ODE) -> Callable:
    """Return the right-hand side of an ODE as a function ``f(t, x, theta)`` for JAX.

    The graph that the user's function writes, translated by PyTensor.
    """
    import_jax()
    from pymc.sampling.jax import get_jaxified_graph

    t = pt.scalar("t", dtype="float64")
    x = pt.vector("x", dtype="float64", shape=(len(ode.states),))
    theta = pt.vector("theta", dtype="float64", shape=(len(ode.params),))
    f = ode(t[None], x[None], [theta[i] for i in range(len(ode.params))])[0]
    graph = get_jaxified_graph([t, x, theta], [f])
    return lambda t, x, theta: graph(t, x, theta)[0]


def _model(system: System, data: Simulation, prior: Prior) -> Callable[[], None]:
    """Return the NumPyro model: theta and the initial states unknown, sigma known."""
    diffrax, jax, numpyro = import_jax()
    term = diffrax.ODETerm(jax_right_hand_side(system.ode))

    def model():
        theta = jax.numpy.stack(
            [numpyro.sample(name, prior.numpyro()) for name in system.ode.params]
        )
        near_first = numpyro.distributions.Normal(data.y[0], data.y.std(axis=0))
        x0 = numpyro.sample("x0", near_first.to_event(1))
        # The fastest of those tried, see `diffrax_nuts`.
        solution = diffrax.diffeqsolve(
            term,
            diffrax.Tsit5(),
            t0=data.t[0],
            t1=data.t[-1],
            dt0=None,
            y0=x0,
            args=theta,
            saveat=diffrax.SaveAt(ts=data.t),
            stepsize_controller=diffrax.PIDController(rtol=1e-6, atol=1e-6),
            adjoint=diffrax.RecursiveCheckpointAdjoint(),
            throw=False,
        )
        noise = numpyro.distributions.Normal(solution.ys, data.sigma)
        numpyro.sample("y", noise.to_event(2), obs=data.y)

    return model


def _gradient_us(model: Callable[[], None], init_strategy: Callable, calls: int = 2_000) -> float:
    """Return CPU microseconds of one log density with gradient, the best of three loops."""
    _, jax, numpyro = import_jax()
    information = numpyro.infer.util.initialize_model(
        jax.random.key(0), model, init_strategy=init_strategy
    )
    value_and_grad = jax.value_and_grad(information.potential_fn)

    def loop(point):
        def step(_, carry):
            point, total = carry
            value, gradient = value_and_grad(point)
            # A point that moves, or XLA would take the computation out of the loop.
            point = jax.tree.map(lambda z, g: z - 1e-12 * g, point, gradient)
            return point, total + value

        return jax.lax.fori_loop(0, calls, step, (point, 0.0))

    compiled = jax.jit(loop).lower(information.param_info.z).compile()
    seconds = []
    for _ in range(3):
        start = process_time()
        jax.block_until_ready(compiled(information.param_info.z))
        seconds.append(process_time() - start)
    return 1e6 * min(seconds) / calls


def diffrax_nuts(
    system: System,
    data: Simulation,
    *,
    prior: Prior,
    dense_mass: bool,
    warmup: int = 1_000,
    draws: int = 1_000,
    chains: int = 4,
    random_seed: int = 0,
) -> Rival:
    """Sample the exact posterior, solving the ODE at every step of NUTS.

    Theta has the given prior, the initial states a normal one around the first
    observation, as wide as each state varies over time; sigma is fixed at its
    true value.  The rival gets its best: chains start at the true parameters;
    ``Tsit5`` with ``RecursiveCheckpointAdjoint`` was the fastest or within 15 %
    of it on every system, against ``Dopri8``, ``Kvaerno5`` (protein transduction
    at these parameters is not stiff), ``DirectAdjoint`` and ``ForwardMode``; and
    every chain is one compiled program.

    Parameters
    ----------
    system : System
        One of :mod:`pymc_gradmatch.systems`.
    data : Simulation
        Its simulated data set.
    prior : Prior
        The prior of each parameter.
    dense_mass : bool
        Whether warm-up adapts a whole mass matrix, or its diagonal only.
    warmup, draws, chains : int
        Length of warm-up, draws after it, and chains, which run in sequence.
    random_seed : int
        Seed of all chains.

    Returns
    -------
    Rival

    Raises
    ------
    ImportError
        If JAX, NumPyro or diffrax is missing.

    Notes
    -----
    JAX is switched to float64 for the whole process, and to one thread if it
    has not run yet.
    """
    _, jax, numpyro = import_jax()
    model = _model(system, data, prior)
    start_at_truth = numpyro.infer.init_to_value(
        values={**system.theta, "x0": np.asarray(system.x0)}
    )

    def chain(key):
        kernel = numpyro.infer.NUTS(model, dense_mass=dense_mass, init_strategy=start_at_truth)
        mcmc = numpyro.infer.MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key, extra_fields=("diverging",))
        return mcmc.get_samples(), mcmc.get_extra_fields()["diverging"]

    keys = jax.random.split(jax.random.key(random_seed), chains)
    start = process_time()
    compiled = jax.jit(chain).lower(keys[0]).compile()
    cpu_seconds_compile = process_time() - start

    start = process_time()
    runs = [jax.block_until_ready(compiled(key)) for key in keys]
    cpu_seconds_sampling = process_time() - start

    theta = az.from_dict(
        {"posterior": {name: np.stack([run[0][name] for run in runs]) for name in system.theta}}
    )
    ess = float(az.ess(theta, method="bulk").dataset.to_array().min())
    return Rival(
        ess_per_cpu_second=ess / cpu_seconds_sampling,
        ess=ess,
        cpu_seconds_sampling=cpu_seconds_sampling,
        cpu_seconds_compile=cpu_seconds_compile,
        gradient_us=_gradient_us(model, start_at_truth),
        rhat=float(az.rhat(theta).dataset.to_array().max()),
        divergences=sum(int(run[1].sum()) for run in runs),
        mean={name: float(theta["posterior"][name].mean()) for name in system.theta},
        sd={name: float(theta["posterior"][name].std()) for name in system.theta},
    )


def main(arguments: list[str] | None = None):
    """Run the rival on every case, print a table, save it as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="Lotka-Volterra, short chains")
    parser.add_argument("--out", type=Path, help="CSV file to save")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and chains")
    options = parser.parse_args(arguments)
    size = {"warmup": 300, "draws": 300, "chains": 2} if options.quick else {}

    rows = []
    for case in CASES[:1] if options.quick else CASES:
        for dense_mass in (False, True):
            rival = diffrax_nuts(
                case.system,
                case.simulate(options.seed),
                prior=case.prior,
                dense_mass=dense_mass,
                random_seed=options.seed,
                **size,
            )
            figures = rival._asdict()
            del figures["mean"], figures["sd"]
            rows.append(
                {
                    "system": case.system.name,
                    "noise": case.noise,
                    "times": len(case.t),
                    "mass": "dense" if dense_mass else "diagonal",
                    **figures,
                }
            )
    table = pd.DataFrame(rows).set_index(["system", "noise", "times", "mass"])
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "numpyro", "diffrax"))
    print(f"Python {platform.python_version()}, {packages}, {platform.machine()}, one thread")
    print(table.to_string(float_format="{:.3g}".format))
    if options.out:
        table.to_csv(options.out, float_format="%.4g")


if __name__ == "__main__":
    main()
