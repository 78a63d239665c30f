"""Operations whose results say what is in a tensor: a number for Python, or a tensor whose size depends on data.

A method that asks is captured like one that makes opaque calls: what comes before and after is compiled, and what was
answered selects what comes after. A number that is only computed with is a symbol; what Python decides by, a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

QUESTIONS = 24
"""The number of questions that one graph may ask."""
_MASKS = (torch.bool, torch.uint8)
_UNTAGGED = ("aten::equal",)
Answer = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


@lru_cache(maxsize=4096)
def _is_of_data(func: Any) -> bool:
    tagged = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return bool(tagged) or func._schema.name in _UNTAGGED


def reads_data(func: Any, args: Sequence[Any]) -> bool:
    """True if an operation says what is in a tensor. Indexing does by a mask alone."""
    if not _is_of_data(func):
        return False
    return func is not torch.ops.aten.index.Tensor or any(i is not None and i.dtype in _MASKS for i in args[1])


class DataReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it such operations are `answer`'s to run."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer = answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not reads_data(func, args):
            return func(*args, **(kwargs or {}))
        return self.answer(func, args, kwargs or {})


def is_symbolic(number: Any) -> bool:
    """True if a number that was read may be a symbol: no flag, finite, and positive where it may be a size."""
    if type(number) is int:
        return number > 0
    return type(number) is float and math.isfinite(number)
