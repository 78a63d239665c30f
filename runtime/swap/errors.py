"""The one refusal of `fusegrad.swap`."""

from __future__ import annotations



