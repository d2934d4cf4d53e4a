"""Four problems of the collection of published problems, written by hand.

Equations, data, bounds and nominal parameters are facts from the collection
(data/README.md says which state of it); the lines are our own.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pymc as pm

import pymc_gradmatch as gm
from benchmarks.published.problem import Problem, linear, measured

__all__ = ["PROBLEMS"]


def _times(table: pd.DataFrame) -> np.ndarray:
    """Return the times of measurements, from 0 on, where the start is known; three at least."""
    t = np.union1d(0.0, table["time"])
    return t if len(t) > 2 else np.linspace(t[0], t[-1], 3)


def _by_observable(table: pd.DataFrame):
    """Yield each observable, the places of its measurements among the times, and its rows."""
    t = _times(table)
    for name, rows in table.groupby("observable", sort=False):
        yield name, np.searchsorted(t, rows["time"]), rows


def _of_states(table: pd.DataFrame) -> Callable:
    """Return the likelihood of states that are measured with known errors."""

    def likelihood(x, theta):
        for name, places, rows in _by_observable(table):
            seen = getattr(x, name)[places]
            pm.Normal(f"seen_{name}", seen, rows["sd"].to_numpy(), observed=rows["value"])

    return likelihood


# Boehm: dimers of two STAT5 proteins move into the nucleus and back.

RATIO, SPECIFICITY, TOTAL = 0.693, 0.107, 207.6
CYTOPLASM, NUCLEUS = 1.4, 0.45  # volumes


def _boehm(t, x, theta):
    k = linear(theta)
    epo = 1.25e-7 * pm.math.exp(-k.Epo_degradation_BaF3 * t)
    to_aa, to_ab, to_bb = (
        k.k_phos * epo * pair for pair in (x.STAT5A**2, x.STAT5A * x.STAT5B, x.STAT5B**2)
    )
    in_aa, in_ab, in_bb = k.k_imp_homo * x.pApA, k.k_imp_hetero * x.pApB, k.k_imp_homo * x.pBpB
    out_aa, out_ab, out_bb = (
        k.k_exp_homo * x.nucpApA, k.k_exp_hetero * x.nucpApB, k.k_exp_homo * x.nucpBpB
    )  # fmt: skip
    inwards, outwards = CYTOPLASM / NUCLEUS, NUCLEUS / CYTOPLASM
    return {
        "STAT5A": -2 * to_aa - to_ab + outwards * (2 * out_aa + out_ab),
        "STAT5B": -2 * to_bb - to_ab + outwards * (2 * out_bb + out_ab),
        "pApB": to_ab - in_ab,
        "pApA": to_aa - in_aa,
        "pBpB": to_bb - in_bb,
        "nucpApA": inwards * in_aa - out_aa,
        "nucpApB": inwards * in_ab - out_ab,
        "nucpBpB": inwards * in_bb - out_bb,
    }


def _boehm_likelihood(table: pd.DataFrame) -> Callable:
    def likelihood(x, theta):
        s = SPECIFICITY
        a, aa, ab = s * x.STAT5A, s * x.pApA, x.pApB
        b, bb = (1 - s) * x.STAT5B, (1 - s) * x.pBpB
        percent = {
            "pSTAT5A_rel": 100 * (ab + 2 * aa) / (ab + a + 2 * aa),
            "pSTAT5B_rel": 100 * (ab + 2 * bb) / (ab + b + 2 * bb),
            "rSTAT5A_rel": 100 * (ab + a + 2 * aa) / (2 * ab + a + 2 * aa + b + 2 * bb),
        }
        for name, places, rows in _by_observable(table):
            log_sd = pm.Uniform(f"log10_sd_{name}", -5, 5)
            pm.Normal(f"seen_{name}", percent[name][places], 10.0**log_sd, observed=rows["value"])

    return likelihood


def _boehm_problem() -> Problem:
    [(condition, table)] = measured("Boehm").items()
    start = {"STAT5A": TOTAL * RATIO, "STAT5B": TOTAL * (1 - RATIO)}
    states = ["STAT5A", "STAT5B", "pApB", "pApA", "pBpB", "nucpApA", "nucpApB", "nucpBpB"]
    return Problem(
        "Boehm",
        "Boehm et al. (2014). Identification of isoform-specific dynamics in phosphorylation-"
        "dependent STAT5 dimerization. J. Proteome Res. 13(12).",
        _boehm,
        states,
        {
            condition: gm.Experiment(
                _times(table),
                start=dict.fromkeys(states, 0.0) | start,
                likelihood=_boehm_likelihood(table),
            )
        },
        best=-138.222,
        in_likelihood=[f"log10_sd_{name}" for name, _, _ in _by_observable(table)],
    )


# Bruno: an enzyme cleaves carotenoids; two of six assays run at a speed of their own.


def _bruno(t, x, theta):
    k = linear(theta)
    cut_car, cut_10 = k.kb1 * x.bcar, k.kb2 * x.b10
    cry_to_10, cry_to_oh10 = k.kc1 * x.bcry, k.kc2 * x.bcry
    cut_oh10, cut_zea = k.kc4 * x.ohb10, k.k5 * x.zea
    slopes = {
        "bcar": -cut_car,
        "bcry": -cry_to_10 - cry_to_oh10,
        "b10": cut_car - cut_10 + cry_to_10,
        "bio": cut_car + cut_10 + cry_to_oh10,
        "ohb10": cry_to_oh10 - cut_oh10 + cut_zea,
        "ohbio": cry_to_10 + cut_oh10 + cut_zea,
        "zea": -cut_zea,
    }
    return {name: k.speed * slope for name, slope in slopes.items()}


BRUNO_STARTS = {
    "condition1": ("b10", lambda theta: 10.0**theta.log10_init_b10_1),
    "condition2": ("bcar", lambda theta: 10.0**theta.log10_init_bcar1),
    "condition3": ("bcar", lambda theta: 10.0**theta.log10_init_bcar2),
    "condition4": ("bcry", lambda theta: 10.0**theta.log10_init_bcry_1),
    "condition5": ("ohb10", lambda theta: 10.0**theta.log10_init_ohb10_1),
    "condition6": ("zea", lambda theta: 10.0**theta.log10_init_zea_1),
}


def _bruno_problem() -> Problem:
    states = ["bcar", "bcry", "b10", "bio", "ohb10", "ohbio", "zea"]
    conditions = {}
    for name, table in measured("Bruno").items():
        state, start = BRUNO_STARTS[name]
        conditions[name] = gm.Experiment(
            _times(table),
            start=dict.fromkeys(states, 0.0) | {state: start},
            likelihood=_of_states(table),
        )
    return Problem(
        "Bruno",
        "Bruno et al. (2016). Enzymatic study on AtCCD4 and AtCCD7 and their potential to form "
        "acyclic regulatory metabolites. J. Exp. Bot. 67(21). Where a multiplier of the collection "
        "is 0 there is nothing to multiply.",
        _bruno,
        states,
        conditions,
        best=46.688,
        switched={"log10_speed": ("log10_szea", ["condition3", "condition6"])},
    )


# Armistead: sphingolipids of zebrafish larvae, wild type and mutant.

ARMISTEAD_STARTS = {
    "wild_type": {"Cer": 0.988, "Sphinga": 0.000732, "Sphingo": 0.000395, "S1P": 1.551},
    "mutant": {"Cer": 0.822, "Sphinga": 0.000795, "Sphingo": 0.000364, "S1P": 2.07},
}


def _armistead(t, x, theta):
    k = linear(theta)
    made, kept = k.k00 * (1 + k.alpha_cer_here), 1 - k.alpha_hai1a_here
    to_cer, to_sphingo, back = k.k0 * x.Sphinga, k.k1 * x.Cer, k.k2 * x.Sphingo
    to_s1p, from_s1p = k.k3 * kept * x.Sphingo, k.k4 * x.S1P
    return {
        "Cer": to_cer - to_sphingo + back - k.k_d * x.Cer,
        "Sphingo": to_sphingo - back - to_s1p + from_s1p,
        "S1P": to_s1p - from_s1p - k.k5 * x.S1P,
        "Sphinga": made - to_cer,
    }


def _armistead_likelihood(table: pd.DataFrame) -> Callable:
    def likelihood(x, theta):
        k = linear(theta)
        for name, places, rows in _by_observable(table):
            seen, relative = getattr(x, name)[places], getattr(k, f"sd_{name}_obs")
            pm.Normal(f"seen_{name}", seen, relative * seen, observed=rows["value"])

    return likelihood


def _armistead_problem() -> Problem:
    return Problem(
        "Armistead",
        "Armistead et al. (2024). A sphingolipid rheostat controls apoptosis versus apical cell "
        "extrusion as alternative tumour-suppressive mechanisms. Cell Death Dis. 15.",
        _armistead,
        ["Cer", "Sphingo", "S1P", "Sphinga"],
        {
            name: gm.Experiment(
                _times(table),
                start=ARMISTEAD_STARTS[name],
                likelihood=_armistead_likelihood(table),
            )
            for name, table in measured("Armistead").items()
        },
        best=301.916,
        switched={f"{name}_here": (name, ["wild_type"]) for name in ("alpha_cer", "alpha_hai1a")},
    )


# Crauste: T cells after an infection.


def _crauste(t, x, theta):
    k = linear(theta)
    n, e, late, p = x.Naive, x.EarlyEffector, x.LateEffector, x.Pathogen
    aroused, older, remembered = k.delta_NE * n * p, k.delta_EL * e, k.delta_LM * late
    return {
        "Naive": -k.mu_N * n - aroused,
        "EarlyEffector": aroused + k.rho_E * e * p - k.mu_EE * e**2 - older,
        "LateEffector": older - k.mu_LL * late**2 - k.mu_LE * e * late - remembered,
        "Memory": remembered,
        "Pathogen": k.rho_P * p**2 - (k.mu_PE * e + k.mu_PL * late + k.mu_P) * p,
    }


def _crauste_problem() -> Problem:
    [(condition, table)] = measured("Crauste").items()
    start = {
        "Naive": 8090.0, "EarlyEffector": 0.0, "LateEffector": 0.0, "Memory": 0.0, "Pathogen": 1.0,
    }  # fmt: skip
    return Problem(
        "Crauste",
        "Crauste et al. (2017). Identification of nascent memory CD8 T cells and modeling of their "
        "ontogeny. Cell Syst. 4(3).",
        _crauste,
        [*start],
        {condition: gm.Experiment(_times(table), start=start, likelihood=_of_states(table))},
        best=-190.964,
    )


PROBLEMS = {
    problem.name: problem
    for problem in (
        _boehm_problem(), _bruno_problem(), _armistead_problem(), _crauste_problem(),
    )
}  # fmt: skip
