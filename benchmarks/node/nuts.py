"""NUTS on exact models, from where gradient matching starts; beside NumPyro with diffrax.

The rival samples the same density, in PyMC's unconstrained coordinates (x(t0) in units of its
data), from prior draws, adapting a whole mass matrix.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import arviz as az
import numpy as np
import pymc as pm
import pytensor
from numpy.typing import NDArray
from pytensor.graph.replace import vectorize_graph

import pymc_gradmatch as gm
from benchmarks.jax_rival import import_jax
from benchmarks.node.problems import SAMPLED, matched, ring
from benchmarks.node.rival import (
    USUAL,
    Settings,
    log_density,
    prior_draw,
    value_at,
    values_of_data,
)
from benchmarks.population import held
from pymc_gradmatch.sampling.posterior import compile_posterior

__all__ = ["OURS", "THEIRS", "compiled_chain", "furthest", "of_ring", "sampled"]

OURS, PLAIN, THEIRS = "gm.sample", "gm.sample, not refined", "NumPyro + diffrax"
PRESETS = {OURS: "refined", PLAIN: "fgpgm"}
CHAINS = 4
LENGTH = (500, 1_000)  # warm-up and draws of each chain; ours has nutpie's warm-up, 400
LENGTHS = {"Hes1": (500, 6_000), "chain": (500, 3_000)}  # heavy tails: R-hat needs more, by any
LONGER = (1_000, 2_000)
MIXED = 1.01
MOST_DRAWN = 10_000
KEYS = [(name, side) for name in SAMPLED for side in (OURS, PLAIN, THEIRS)]
RING_KEYS = [(21, PLAIN), (41, PLAIN), (41, THEIRS), (61, PLAIN), (101, PLAIN)]
QUICK, RING_QUICK = [("Lotka-Volterra", OURS)], [(9, OURS)]

type Row = dict[str, Any]
type Note = Callable[[Row], None]


def sampled(name: str, side: str, note: Note) -> Row:
    """Sample a problem."""
    length = LENGTHS.get(name, LENGTH)
    if side in PRESETS:
        return ours(partial(SAMPLED[name], preset=PRESETS[side]), note, length)
    return theirs(SAMPLED[name], note, length)


def of_ring(size: int, side: str, note: Note) -> Row:
    """Sample a ring, at the rival's tolerance; the rival is told the truth."""
    case = ring(size)
    if side in PRESETS:
        return ours(partial(matched, case, preset=PRESETS[side]), note, LENGTH, rtol=USUAL.rtol)
    truth = dict(case.theta) | {
        "x0": np.array([*case.x0.values()]), "sigma": case.simulate(1).sigma
    }  # fmt: skip
    return theirs(partial(matched, case), note, LENGTH, truth)


def ours(
    build: Callable[[], pm.Model], note: Note, length: tuple[int, int], **settings: float
) -> Row:
    """Build, compile and sample here."""
    start = process_time()
    model = build()
    row = {"build_s": process_time() - start}
    exact = gm.exact_model(model, **settings)
    note(row)
    idata = gm.sample(length[1], model=exact, chains=CHAINS, cores=1, random_seed=1,
                      progressbar=False)  # fmt: skip
    row |= {"seconds": process_time() - start, "memory_GB": held()}
    stats = idata["sample_stats"].dataset
    values = {rv.name: idata["posterior"][rv.name].to_numpy() for rv in exact.free_RVs}
    row |= {"divergences": int(stats["diverging"].sum()), "steps": float(stats["n_steps"].mean())}
    return row | described(values)


def theirs(
    build: Callable[..., pm.Model],
    note: Note,
    length: tuple[int, int],
    truth: Row | None = None,
) -> Row:
    """Sample there; a longer run from the mode says what is right where chains disagree."""
    import_jax()
    exact = gm.exact_model(build(preset="fgpgm"))  # no part of the rival's seconds
    start = process_time()
    chain = compiled_chain(exact, length)
    row: Row = {"compile_s": process_time() - start}
    note(row)
    known = truth is not None
    starts = [value_at(exact, truth)] * CHAINS if known else starts_of(exact, log_density(exact))
    start = process_time()
    runs = run_chains(chain, starts)
    row |= {"seconds": row["compile_s"] + process_time() - start, "memory_GB": held()}
    row |= {"divergences": sum(int(run[1].sum()) for run in runs)}
    row |= {"steps": float(np.mean([run[2].mean() for run in runs]))}
    row |= described(draws_of(exact, runs))
    note(row)
    if row["rhat"] > MIXED:
        posterior = compile_posterior(exact)
        mode = posterior.find_mode(np.random.default_rng(1))
        chain = compiled_chain(exact, LONGER, factor=mode.factor)
        parts = np.cumsum([np.size(v) for v in starts[0]])[:-1]
        there = [
            part.reshape(v.shape)
            for part, v in zip(np.split(mode.location, parts), starts[0], strict=True)
        ]
        longer = described(draws_of(exact, run_chains(chain, [there] * CHAINS)))
        row |= {f"longer {key}": value for key, value in longer.items()}
    return row


def compiled_chain(
    model: pm.Model, length: tuple[int, int], factor=None, settings: Settings = USUAL
) -> Callable:
    """Return ``chain(key, start, data)``, compiled.

    It returns draws of the value variables, divergences and steps.  The data are those of the
    model's ``pm.Data``, a list that is empty where it has none.
    """
    _, jax, numpyro = import_jax()
    density = log_density(model, settings)
    metric = {} if factor is None else {"inverse_mass_matrix": factor @ factor.T}

    def chain(key, start, data):
        kernel = numpyro.infer.NUTS(
            potential_fn=lambda values: -density(values, data), dense_mass=True, **metric
        )
        mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=length[0], num_samples=length[1], progress_bar=False
        )
        mcmc.run(key, init_params=start, extra_fields=("diverging", "num_steps"))
        fields = mcmc.get_extra_fields()
        return mcmc.get_samples(), fields["diverging"], fields["num_steps"]

    example = jax.random.key(0), prior_draw(model, 0), values_of_data(model)
    return jax.jit(chain).lower(*example).compile()


def starts_of(model: pm.Model, density: Callable) -> list[list[NDArray]]:
    """Return a draw of the prior for each chain, where density and gradient are finite."""
    _, jax, _ = import_jax()
    finite, data = jax.jit(jax.value_and_grad(density)), values_of_data(model)
    starts: list[list[NDArray]] = []
    for seed in range(MOST_DRAWN):
        there = prior_draw(model, seed)
        value, gradient = finite(there, data)
        if np.isfinite(value) and all(np.isfinite(g).all() for g in gradient):
            starts.append(there)
        if len(starts) == CHAINS:
            return starts
    msg = f"the density is finite at {len(starts)} of {MOST_DRAWN} draws of the prior."
    raise ValueError(msg)


def run_chains(chain: Callable, starts: list, data: Sequence[NDArray] = ()) -> list:
    """Run a compiled chain from every start, one after the other."""
    _, jax, _ = import_jax()
    keys = jax.random.split(jax.random.key(1), len(starts))
    return [
        jax.block_until_ready(chain(key, start, list(data)))
        for key, start in zip(keys, starts, strict=True)
    ]


def draws_of(model: pm.Model, runs: list) -> dict[str, NDArray]:
    """Return draws of a model's free variables from those of their value variables."""
    draws = [np.stack(parts) for parts in zip(*(run[0] for run in runs), strict=True)]
    many = [v.type.clone(shape=(None, None, *v.type.shape))() for v in model.value_vars]
    graphs = vectorize_graph(
        model.replace_rvs_by_values(model.free_RVs),
        dict(zip(model.value_vars, many, strict=True)),
    )
    values = pytensor.function(many, graphs, mode="FAST_COMPILE", on_unused_input="ignore")(*draws)
    return {rv.name: value for rv, value in zip(model.free_RVs, values, strict=True)}


def described(values: dict[str, NDArray]) -> Row:
    """Return R-hat and effective draws over all unknowns, means and standard deviations."""
    flat = np.concatenate([v.reshape(*v.shape[:2], -1) for v in values.values()], axis=-1)
    names = [name for name, v in values.items() for _ in range(v[0, 0].size)]
    draws = az.from_dict({"posterior": {"u": flat}})
    rhat = az.rhat(draws).dataset["u"].to_numpy()
    return {
        "unknowns": len(names),
        "rhat": float(rhat.max()),
        "ess": float(az.ess(draws, method="bulk").dataset["u"].min()),
        "means": " ".join(f"{v:.6g}" for v in flat.mean(axis=(0, 1))),
        "sds": " ".join(f"{v:.6g}" for v in flat.std(axis=(0, 1))),
    }


def furthest(row, reference) -> float:
    """Return the largest distance of means, in standard deviations of the reference."""
    away = _numbers(row["means"]) - _numbers(reference["means"])
    return float(np.abs(away / _numbers(reference["sds"])).max())


def _numbers(text: str) -> NDArray[np.float64]:
    return np.array(text.split(), dtype=float)
