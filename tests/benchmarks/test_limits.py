"""No case of the suite needs more launches, bytes or saved bytes than the committed table says."""

from __future__ import annotations

from importlib.metadata import version

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


COUNTED = limits.counted(CASES)
OF_THIS_TRITON = limits.INSTRUCTIONS + version("triton")


@pytest.mark.parametrize("case", COUNTED, ids=lambda c: c.name)
def test_a_kernel_issues_no_more_instructions_than_its_limit(case: Case) -> None:
    if OF_THIS_TRITON not in LIMITS[case.name]:
        pytest.skip(f"{limits.COMPILED} has no {OF_THIS_TRITON}: another compiler makes other machine code")
    found = limits.instructions_of(case)[OF_THIS_TRITON]
    assert all(f <= at_most for f, at_most in zip(found, LIMITS[case.name][OF_THIS_TRITON], strict=True)), (
        f"{case.name}: {found} warp instructions for 32 elements, the limit is {LIMITS[case.name][OF_THIS_TRITON]}"
    )


def test_every_function_has_a_limit_of_instructions() -> None:
    assert {case.function for case in COUNTED} == {case.function for case in CASES}
    versions = [{name for name in LIMITS[case.name] if name.startswith(limits.INSTRUCTIONS)} for case in COUNTED]
    assert all(versions) and all(found == versions[0] for found in versions)


def test_the_table_has_the_cases_of_the_suite() -> None:
    assert set(LIMITS) == {case.name for case in CASES}


PLAN = {"case": "A", "launches": [1, 1], "bytes": [100, 200], "saved": 50}


def test_one_more_of_anything_is_above() -> None:
    table = limits.tightened({}, [PLAN], may_rise=False)
    assert not limits.excesses(PLAN, table)
    for worse in ({"launches": [1, 2]}, {"bytes": [101, 0]}, {"saved": 51}, {"case": "B"}):
        assert limits.excesses({**PLAN, **worse}, table), worse


def test_more_instructions_are_above_and_those_of_another_triton_stay() -> None:
    name, other = f"{limits.INSTRUCTIONS}1.0", f"{limits.INSTRUCTIONS}2.0"
    table = limits.tightened({}, [{**PLAN, name: [10.0, 20.0]}], may_rise=False)
    assert not limits.excesses({**PLAN, name: [10.0, 19.9]}, table)
    assert limits.excesses({**PLAN, name: [10.1, 20.0]}, table) and limits.excesses({**PLAN, other: [1.0, 1.0]}, table)
    both = limits.tightened(table, [{**PLAN, other: [9.0, 9.0]}], may_rise=False)["A"]
    assert both[name] == [10.0, 20.0] and both[other] == [9.0, 9.0]


def test_the_table_only_falls_unless_it_may_rise() -> None:
    table = limits.tightened({}, [PLAN], may_rise=False)
    mixed = {**PLAN, "launches": [2, 1], "bytes": [90, 210]}
    assert limits.tightened(table, [mixed], may_rise=False)["A"] == {
        "launches": [1, 1], "bytes": [90, 200], "saved": [50],
    }  # fmt: skip
    assert limits.tightened(table, [mixed], may_rise=True)["A"] == limits.facts(mixed)
