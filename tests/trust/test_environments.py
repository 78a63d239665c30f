"""A slice of `make environments`: some of those that need a process of their own."""

from __future__ import annotations

import environments
import pytest

ALONE = {name: row for name, row in environments.ENVIRONMENTS.items() if row.alone}


@pytest.mark.parametrize("name", ALONE)
def test_environments(name) -> None:
    assert environments.run(ALONE[name]) == ""
