"""What an argument's classes read is found by few scans, which are counted here, and none is made twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from fusegrad.tracer.reads import reads, value_keys
from fusegrad.tracer.reads.value_keys import freeze

LEVEL = 1


def helper() -> int:
    return LEVEL


class Large:
    """More methods than a bounded memory of scans would hold."""

    def first(self) -> int:
        return helper()


def _method(n: int):
    space: dict[str, object] = {"helper": helper, "__name__": __name__}
    exec(f"def m(self): return helper() + {n}", space)
    return space["m"]


for _n in range(300):
    setattr(Large, f"method_{_n}", _method(_n))


class Below(Large):
    def second(self) -> int:
        return helper() + super().first()


class Beside(Large):
    def third(self) -> int:
        return helper() + super().first()


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    made, scan = list[int](), reads.scan

    def counted(*functions):
        made.append(len(functions))
        return scan(*functions)

    monkeypatch.setattr(reads, "scan", counted)
    reads._bodies.clear()
    yield made


def test_a_class_is_scanned_once_for_all_its_methods_and_calls(scans: list[int]) -> None:
    value = Large()
    assert freeze(value) == freeze(value)
    assert scans == [301]


def test_classes_share_the_scan_of_the_class_that_they_inherit_from(scans: list[int]) -> None:
    for _ in range(3):
        freeze(Below())
        freeze(Beside())
    assert sorted(scans) == [1, 1, 301]


def test_what_a_method_reads_is_seen_through_the_kept_scan(
    scans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = Below()
    before = freeze(value)
    monkeypatch.setattr(f"{__name__}.LEVEL", 2)
    assert freeze(value) != before
    assert sorted(scans) == [1, 301]


def test_another_method_is_seen(scans: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    value = Below()
    before = freeze(value)
    monkeypatch.setattr(Large, "first", lambda self: 3)
    assert freeze(value) != before


def test_changed_defaults_of_a_method_are_seen(scans: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    value = Below()
    before = freeze(value)
    monkeypatch.setattr(Below.second, "__defaults__", (1,))
    assert freeze(value) != before


def test_code_beyond_what_can_be_compared_ends_the_scans(scans: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_keys, "CODE", 100)
    value = Below()
    value.inner = Beside()  # type: ignore[attr-defined]
    assert freeze(value) != freeze(value)
    assert scans == [301]  # that of what both inherit from; nothing that comes after the limit is looked at


def test_a_local_class_is_scanned_once_and_not_kept(scans: list[int]) -> None:
    class Local:
        def one(self) -> int:
            return helper()

    value = Local()
    assert freeze(value) == freeze(value)
    assert scans == [1]
    gone = weakref.ref(Local)
    del Local, value
    gc.collect()
    assert gone() is None


def test_a_local_class_that_closes_over_something_is_not_kept(scans: list[int]) -> None:
    held = torch.ones(3)

    class Local:
        def one(self) -> torch.Tensor:
            return held + helper()

    value, gone = Local(), weakref.ref(held)
    assert freeze(value) == freeze(value)
    del Local, value
    held = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None


def test_a_class_that_leads_to_too_much_is_found_out_once(scans: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "FUNCTIONS", 100)
    held = torch.ones(3)

    class Endless(Large):
        def one(self) -> torch.Tensor:
            return held + helper()

    for _ in range(3):
        with value_keys.shared_allowance() as is_spent:
            assert freeze(Endless()) != freeze(Endless())
            assert is_spent()
    value_keys._endless.discard(Large)
    assert scans == [301]


def test_classes_with_slots_are_not_kept() -> None:
    class Slotted:
        __slots__ = ("inside",)

    value, gone = Slotted(), weakref.ref(Slotted)
    value.inside = 1
    assert value_keys.state_of(value) == {"inside": 1}
    del Slotted, value
    gc.collect()
    assert gone() is None
