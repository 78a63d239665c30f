"""fusegrad tune: the neighbours of every kernel of a compiled Function, timed on the GPU at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...ir.errors import UnsupportedBackendError
from ..kernels.autotune import Trial, record_trials


@dataclass(frozen=True)
class Tuned:
    """The result of `tune_function`. Prints as a table; `to_dict()` is plain values."""

    function: str
    device: str
    trials: tuple[Trial, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rows = [row for trial in self.trials for row in _rows(trial)]
        wide = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines = [f"{self.function} on {self.device}", *("  ".join(map(str.ljust, r, wide)).rstrip() for r in rows)]
        return "\n  ".join(lines if rows else [*lines, "no kernel has neighbours to be compared with"])


def _rows(trial: Trial) -> Iterator[tuple[str, str, str, str]]:
    """kernel, candidate, time, and whether it was chosen."""
    for at, candidate in enumerate(trial.candidates):
        time = "stored" if trial.milliseconds is None else f"{trial.milliseconds[at] * 1e3:.1f} us"
        label = f"{trial.kernel} {list(trial.sizes)}" if at == 0 else ""
        yield label, candidate, time, "<- chosen" if candidate == trial.chosen else ""


def tune_function(fast: Any, /, *args: Any) -> Tuned:
    """Time the neighbours of every kernel of a compiled Function, forward and backward, on the GPU at hand.

    args: tensors on the GPU, or specifications such as "bf16[8192,4096]", for which random tensors are made. The
    answers are stored: processes that tune (FUSEGRAD_TUNE=1) take them from there, without timing anything.
    Raises UnsupportedBackendError where there is no GPU.
    """
    from .profile import run_once  # the layers above know this file

    device = _gpu()
    with record_trials() as trials:
        name = run_once(fast, args)
    return Tuned(name, device, tuple(trials))


def _gpu() -> str:
    """The GPU's name."""
    if not torch.cuda.is_available():
        raise UnsupportedBackendError(
            backend="triton", what="tuning", reason="there is no GPU on which kernels could be timed",
            fix="run it on the machine that is to be tuned for; `explain` and `profile` show kernels without a GPU.",
        )  # fmt: skip
    return torch.cuda.get_device_name()
