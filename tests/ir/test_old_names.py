"""Renamed exports: the old name works, with a DeprecationWarning."""

from __future__ import annotations

import pytest

import fusegrad.ir
from fusegrad.ir import ValueRef


def test_place_is_now_value_ref() -> None:
    with pytest.warns(DeprecationWarning, match="ValueRef"):
        assert fusegrad.ir.Place is ValueRef


def test_no_other_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Places'"):
        fusegrad.ir.Places  # noqa: B018
