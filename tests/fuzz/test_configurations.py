"""Random settings make no difference: a few in each run of the tests, more with `make fuzz-configurations`."""

from __future__ import annotations

from typing import Any

import pytest
from configurations import Configuration, configuration, suite
from configurations import tested as tried

from fusegrad.codegen.emit import mathematics
from fusegrad.ir.switches import SWITCHES

SEEDS = (0, 5, 7, 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_configuration(seed: int) -> None:
    found = tried(seed)
    assert found.modes and not found.faults, f"`make fuzz-configurations SEED={seed} N=1`\n{found.faults[0]['text']}"


def test_every_setting_is_drawn() -> None:
    drawn = [configuration(seed) for seed in range(3 * len(SWITCHES))]
    assert {c.disable for c in drawn if len(c.disable) == 1} >= {(name,) for name in SWITCHES}
    assert {c.backend for c in drawn} == {"reference", "interpret"} and any(len(c.disable) >= 8 for c in drawn)
    for flag in ("debug", "store", "guess"):
        assert {getattr(c, flag) for c in drawn} == {True, False}
    assert {c.dynamic for c in drawn} == {True, False} and configuration(4) == configuration(4)
    assert len(suite()) > 100


def test_a_wrong_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself: with a primitive emitted wrongly it does not stay quiet."""
    wrong: dict[str, Any] = {name: mathematics.rules["sqrt"] for name in ("sigmoid", "tanh", "exp", "rsqrt", "log")}
    for name, rule in wrong.items():
        monkeypatch.setitem(mathematics.rules, name, rule)
    seeds = range(30)
    chosen = Configuration(backend="interpret")
    assert any(tried(seed, chosen).faults for seed in seeds)
