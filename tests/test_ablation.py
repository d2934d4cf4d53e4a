"""The switches of ``benchmarks.ablation``: what they take away is there, and is put back."""

import pytest

from benchmarks.ablation import SWITCHES, without


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_what_it_names_and_puts_it_back(name):
    def values():
        return [getattr(of, attribute) for of, attribute, _ in SWITCHES[name].changes]

    before = values()
    with without(SWITCHES[name]):
        assert all(now is not then for now, then in zip(values(), before, strict=True))
    assert values() == before
