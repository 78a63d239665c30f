"""The Function that runs under torch.func: setup_context style, with the values in between as hidden outputs.

Old-style classes and saved intermediates, which eager refuses there, become whole. Under vmap all three rules are
batched: the Function of a batch is made of the same rules, one level up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.autograd.function import Function

from . import forward_mode, reverse
from .batched_rules import BatchedRules
from .rules import FunctionRules


def function_of(rules: FunctionRules) -> Any:
    """The Function of these rules, the same at each call."""
    if rules.function is None:
        rules.function = _make_function(rules)
    return rules.function


def _make_function(rules: FunctionRules) -> Any:
    def forward(*args: Any) -> tuple[Any, ...]:
        return rules.run_forward(args)

    body: dict[str, Any] = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(rules.setup_context),
        "backward": staticmethod(partial(reverse.backward, rules)),
        "jvp": staticmethod(partial(forward_mode.jvp, rules)),
        "vmap": staticmethod(partial(_vmap, rules)),
    }
    if rules.compiler.user.overrides("vmap"):
        body["generate_vmap_rule"] = rules.compiler.user.cls.generate_vmap_rule  # type: ignore[attr-defined]  # torch raises
    return type(rules.spec.captured.name, (Function,), body)


def _vmap(rules: FunctionRules, info: Any, in_dims: Any, *args: Any) -> Any:
    """The user's vmap, else the same rules over a batch, as a Function again."""
    if rules.compiler.user.overrides("vmap"):
        return rules.user_vmap(info, in_dims, args)
    key = (tuple(in_dims), info.randomness)
    if key not in rules.batches:
        rules.batches.setdefault(key, BatchedRules(rules, *key))
    batched = rules.batches[key]
    return function_of(batched).apply(*args), tuple(batched.out_dims())
