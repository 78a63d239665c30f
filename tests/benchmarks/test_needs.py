"""No kernel of the suite spills more, or reads and writes narrower, than the committed table says."""

from __future__ import annotations

import pytest

from fusegrad.benchmarks import needs
from fusegrad.benchmarks.kernels import kernels
from fusegrad.benchmarks.plans import TARGET
from fusegrad.benchmarks.suite import CASES, Case

TABLE = needs.read()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_case_needs_no_more(case: Case) -> None:
    found = kernels(case, [TARGET])
    assert not any(n["errors"] for n in found["targets"][TARGET] if n)
    assert not (worse := needs.excesses(found, TABLE)), "\n".join(worse)


def test_spills_and_narrow_accesses_are_found() -> None:
    def row(spills: int, load: int, store: int) -> dict[str, object]:
        streams = {"load": {"16": 4, str(load): 1}, "store": {str(store): 2}}
        return {"case": "A", "targets": {TARGET: [{"spills": spills, "streams": streams}, None]}}

    table = {"A": needs.facts(row(8, 16, 4))}
    assert not needs.excesses(row(8, 16, 4), table) and not needs.excesses(row(0, 16, 16), table)
    assert all(needs.excesses(row(*worse), table) for worse in ((12, 16, 4), (8, 8, 4), (8, 16, 2)))


def test_the_table_has_the_cases_of_the_suite() -> None:
    assert set(TABLE) == {case.name for case in CASES}
