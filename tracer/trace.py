"""A captured graph, and why there is none."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ..ir.errors import FusegradError
from .frames import is_user_file
from .opaque.opaque import OpaqueNode


class CaptureError(FusegradError):
    """The method cannot be captured. Internal: the runtime turns it into a record or into NotTraceableError."""

    speaks = "inside"
    message = "{reason}\n  at:   {where}"
    callee: Any = None
    """The call that stays the user's own and can be no node of the graph, where that is the reason."""

    passed: Sequence[tuple[str, str, int]] = ()
    """The lines that the error came through: (file, function, line), outermost first."""

    def __init__(self, detail: str = "", *, where: str = "unknown", **facts: Any) -> None:
        super().__init__(detail, where=where, **facts)

    def with_lines_of(self, error: BaseException) -> Self:
        """Itself, with the lines of an error's traceback."""
        steps = ((f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__))
        self.passed = [(c.co_filename, c.co_name, line) for c, line in steps if is_user_file(c.co_filename)]
        return self

    def because_of(self, callee: Any) -> Self:
        """Itself, because of this call."""
        self.callee = callee
        return self

    def without_frames(self) -> Self:
        """Another of its kind, to be kept: what is raised gathers frames, in which the tensors of a call live on."""
        copy = type(self).__new__(type(self), *self.args)
        vars(copy).update(vars(self))
        return copy


@dataclass
class Trace:
    """A captured graph: its placeholders are `fakes`, then one per captured tensor, in order."""

    graph_module: torch.fx.GraphModule
    fakes: list[Any]
    lifted: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of `fakes`, in the user's words; empty: the placeholders' own
    output_names: list[str] = field(default_factory=list)  # for outputs that have no name in the user's source
    opaque: list[OpaqueNode] = field(default_factory=list)  # in the order of their calls
    inlines: bool = False  # the body of a nested Function is in it, without the rules of its own
    rolled: tuple[Any, ...] = ()  # the sizes over which it has loops that were recognised in short traces
    lowered: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # its graph in the IR, once known

    @property
    def has_loop(self) -> bool:
        """True if a node of it is a loop over a size."""
        return any(hasattr(node.target, "fusegrad_loop") for node in self.graph_module.graph.nodes)
