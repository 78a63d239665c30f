"""No case of the suite needs more launches, bytes or saved bytes than the committed table says."""

from __future__ import annotations

import pytest

from fusegrad.benchmarks import limits
from fusegrad.benchmarks.plans import plan
from fusegrad.benchmarks.suite import CASES, Case

LIMITS = limits.read()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_plan_is_within_its_limits(case: Case) -> None:
    found = plan(case)
    assert not (above := limits.excesses(found, LIMITS)), "\n".join(above)
    assert found["saved"] <= found["asked"], "more is saved than the class asked for"
    assert not found["as_written"]


def test_the_table_has_the_cases_of_the_suite() -> None:
    assert set(LIMITS) == {case.name for case in CASES}


PLAN = {"case": "A", "launches": [1, 1], "bytes": [100, 200], "saved": 50}


def test_one_more_of_anything_is_above() -> None:
    table = limits.tightened({}, [PLAN], may_rise=False)
    assert not limits.excesses(PLAN, table)
    for worse in ({"launches": [1, 2]}, {"bytes": [101, 0]}, {"saved": 51}, {"case": "B"}):
        assert limits.excesses({**PLAN, **worse}, table), worse


def test_the_table_only_falls_unless_it_may_rise() -> None:
    table = limits.tightened({}, [PLAN], may_rise=False)
    mixed = {**PLAN, "launches": [2, 1], "bytes": [90, 210]}
    assert limits.tightened(table, [mixed], may_rise=False)["A"] == {
        "launches": [1, 1], "bytes": [90, 200], "saved": [50],
    }  # fmt: skip
    assert limits.tightened(table, [mixed], may_rise=True)["A"] == limits.facts(mixed)
