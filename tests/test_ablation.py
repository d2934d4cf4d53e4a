"""The switches of ``benchmarks.ablation``, and what its table says of a fit."""

import pytest

from benchmarks.ablation import SWITCHES, WHOLE, summary_of, table_of, without


def row(mean=0.0, sd=1.0, is_exact=1.0):
    """Return what is kept of a fit with one unknown."""
    moments = {"mean": mean, "sd": sd, "kurtosis": 3.0}
    scores = {f"score {name}": value for name, value in moments.items()}
    return {
        "is_exact": is_exact, "failed": 0.0, "seconds": 1.0, "verdict": "so", "k": 0.1,
        "n_effective": 10_000.0 + mean, "n_solutions": 100,
        "draws": [{"unknown": "k", "kind": "parameter", "below": 0.5} | moments | scores],
    }  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_what_it_names_and_puts_it_back(name):
    def values():
        return [getattr(of, attribute) for of, attribute, _ in SWITCHES[name].changes]

    before = values()
    with without(SWITCHES[name]):
        assert all(now is not then for now, then in zip(values(), before, strict=True))
    assert values() == before


def test_verdicts_lost_and_false_ones_are_told_beside_the_whole_engine():
    fits = table_of(
        {
            (WHOLE, "zoo", 0): row(), (WHOLE, "zoo", 1): row(),
            ("walks", "zoo", 0): row(mean=1.0), ("walks", "zoo", 1): row(is_exact=0.0),
            (WHOLE, "zoo", 2): row() | {"failed": 1.0}, ("walks", "zoo", 2): row(),
        },
        {},
    )  # fmt: skip
    table = summary_of(fits)
    assert table.loc[WHOLE, ["fits", "same", "passed", "moved", "false"]].tolist() == [
        2,
        2,
        2,
        0,
        0,
    ]
    assert table.loc["walks", ["fits", "same", "lost", "false", "of"]].tolist() == [2, 1, 1, 1, 1]
    assert table.loc["walks", "moved"] == pytest.approx(1 - 2 * 0.02**0.5 / 10, abs=1e-3)
