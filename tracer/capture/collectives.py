"""Which tensors a collective of torch.distributed writes to: torch counts no version for them, and zeros stay zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..containers import tensors_in

COMMUNICATES = "communicates with other processes"
_READ_ONLY = ("send", "barrier", "monitored_barrier_", "check_for_nan")


def communicates(operation: Any) -> bool:
    """True if an operation is one of torch.distributed's, on a process group."""
    return isinstance(operation, torch._ops.OpOverload) and operation.namespace == "c10d"


class Received(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block: `outputs`, which collectives fill without reading them, and what they write to beside those."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: list[torch.Tensor] = []
        self.changed: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if communicates(func) and func._schema.name.partition("::")[2] not in _READ_ONLY:
            outputs = outputs_of(func, args)
            self.outputs += outputs
            self.changed += [] if outputs else tensors_in(args)
        return func(*args, **(kwargs or {}))


def outputs_of(operation: Any, args: Any) -> list[torch.Tensor]:
    """The arguments named outputs: an operation without them writes to all tensors that it is given."""
    named = [a.name for a in operation._schema.arguments]
    return tensors_in([value for name, value in zip(named, args, strict=False) if name.startswith("output")])
