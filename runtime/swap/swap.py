"""`fusegrad.swap`: modules of a model get other methods, in place, until it is taken back.

A swapped module stays the object that it was; its class is exchanged. Parameters, buffers, hooks, ties, state_dict
keys, device, dtype and optimizers are what they were, because nothing of them is touched.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...ir.errors import FusegradError
from .compatibility import misfit, signature_misfit
from .swapped_class import class_of, rebound_methods


class SwapError(FusegradError, ValueError):
    """A swap that does not fit the model, or that cannot be taken back; the model is as it was."""

    message = "fusegrad.swap({model}): {detail}\n  at:   {where}\n  fix:  {fix}"


def swap(model: nn.Module, replacements: Mapping[Any, Any]) -> Swapped:
    """Gives modules of a model other methods, such as a `forward` that calls compiled Functions.

        class Fast:
            def forward(self, hidden_states):
                return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)

        with fusegrad.swap(model, {LlamaRMSNorm: Fast}):
            ...                                             # or: swapped = fusegrad.swap(...); swapped.revert()

    Modules are changed in place: they keep parameters, buffers, hooks, name, device and dtype, whatever holds them
    keeps them, and isinstance still says what they were. A replacement's `__init__` is not called. It may have a static
    method `refuses(module)` that says why it does not fit a module, or None.

    Args:
        model: The model that has the modules.
        replacements: What to change, and what for. A key is a class of modules (exactly that class), a qualified name
            ("model.norm"), a pattern of names ("model.layers.*.mlp"), or a function or class that methods of the
            modules name globally, as a function `apply_rotary_pos_emb` of the model's source file. A value is a class
            whose methods come before the module's own, or a function, which serves as `forward`; for a global, what it
            shall mean, in this model alone.

    Returns:
        The swapped modules, as a context manager that takes the swap back at its end.

    Raises:
        SwapError: with the model unchanged, for a key that matches nothing, two keys that match one module, a
            replacement that cannot be called as the module is, that reads what the module does not have, or leaves
            parameters of it unread, and for a module whose forward something else has replaced on the instance.
    """
    return Swapped(model, _plan_swaps(model, replacements))


class Swapped:
    """The swapped modules. A context manager that takes the swap back at its end."""

    model: nn.Module
    """The model that has the modules."""

    def __init__(self, model: nn.Module, planned: list[tuple[nn.Module, type[nn.Module]]]) -> None:
        self.model = model
        self._before = [(module, type(module), after) for module, after in planned]
        self._exchange([(module, after) for module, _, after in self._before])

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The swapped modules by qualified name."""
        swapped = {id(module) for module, *_ in self._before}
        return {n: m for n, m in self.model.named_modules(remove_duplicate=False) if id(m) in swapped}

    def revert(self) -> None:
        """Gives every module its class back; the second time it does nothing.

        Raises:
            SwapError: where something else has changed a module's class since: that has to be taken back first.
        """
        for module, before, after in self._before:
            if type(module) is not after:
                detail = f"a {before.__name__} cannot be taken back, its class was exchanged again since"
                raise _swap_error(
                    self.model, detail, "take that back first: the last swap is the first to be reverted."
                )
        swapped, self._before = self._before, []
        self._exchange([(module, before) for module, before, _ in swapped])

    def _exchange(self, classes: list[tuple[nn.Module, type[nn.Module]]]) -> None:
        exchanged: list[tuple[nn.Module, type[nn.Module]]] = []
        try:
            for module, after in classes:
                exchanged.append((module, type(module)))
                module.__class__ = after
        except TypeError as error:
            for module, before in exchanged[:-1]:
                module.__class__ = before
            raise _swap_error(
                self.model, f"a {type(exchanged[-1][0]).__name__}: {error}", "replace another module."
            ) from error

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.revert()

    def __repr__(self) -> str:
        lines = [f"  {name}: {_replacement_name(module)}" for name, module in self.modules.items()]
        return "\n".join([f"{len(self._before)} modules of {type(self.model).__name__} swapped", *lines])


def _replacement_name(module: nn.Module) -> str:
    original, replacement, exchanges = type(module)._fusegrad_swapped  # type: ignore[attr-defined]
    parts = [] if replacement is None else [replacement.__name__]
    parts += [f"{_name(exchanged)} -> {_name(new)}" for exchanged, new in exchanges]
    return f"{original.__name__} by {', '.join(parts)}"


# ------------------------------------------------------------------ what is to be done
def _plan_swaps(model: nn.Module, replacements: Mapping[Any, Any]) -> list[tuple[nn.Module, type[nn.Module]]]:
    """Every module that is concerned, with its class to be; raises before anything is done."""
    if not isinstance(model, nn.Module) or not isinstance(replacements, Mapping) or not replacements:
        detail = "there is nothing to replace" if isinstance(model, nn.Module) else "it is no torch.nn.Module"
        raise _swap_error(model, detail, "give a model and a dict of replacements.")
    names = _names_of(model)
    by_module: dict[nn.Module, tuple[Any, Any]] = {}
    exchanges: dict[Any, Any] = {}
    for key, replacement in replacements.items():
        matching = [module for module, called in names.items() if _matches(key, module, called)]
        if matching:
            _choose(model, names, by_module, key, replacement, matching)
        else:
            exchanges[key] = _exchange_for(model, key, replacement)
    return list(_classes(model, names, by_module, tuple(exchanges.items())))


def _names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _matches(key: Any, module: nn.Module, names: list[str]) -> bool:
    if not isinstance(key, str):
        return type(module) is key
    pattern = key.split(".")  # in which `*` stands for what is between two dots
    parts = [name.split(".") for name in names]
    return any(len(name) == len(pattern) and all(map(fnmatchcase, name, pattern)) for name in parts)


def _choose(model: Any, names: Any, by_module: dict[Any, Any], key: Any, replacement: Any, matching: list[Any]) -> None:
    if not _is_replacement(replacement):
        detail = f"{_name(key)} is to be replaced by {_name(replacement)}, {_what_is_wrong_with(replacement)}"
        raise _swap_error(model, detail, "give a class with a `forward`, or a function that serves as one.")
    for module in matching:
        if module in by_module:
            detail = f"`{names[module][0]}` is matched by {_name(by_module[module][0])} and by {_name(key)}"
            raise _swap_error(model, detail, "let one key match it: name what you mean.")
        by_module[module] = key, replacement


def _is_replacement(replacement: Any) -> bool:
    is_function_class = isinstance(replacement, type) and issubclass(replacement, torch.autograd.Function)
    return isinstance(replacement, type | FunctionType) and not is_function_class


def _what_is_wrong_with(replacement: Any) -> str:
    if isinstance(replacement, nn.Module):
        return "a module with parameters of its own, which are not the model's"
    return "which is an autograd Function: say how it is called" if isinstance(replacement, type) else "no class"


def _exchange_for(model: nn.Module, key: Any, replacement: Any) -> Any:
    """The new meaning of a global that methods name; raises where the key matches nothing at all."""
    if isinstance(key, str) or not callable(key):
        raise _swap_error(model, f"no module is called {key!r}", _near(key, [n for n, _ in model.named_modules()]))
    if not any(any(rebound_methods(cls, ((key, replacement),))) for cls in _types(model)):
        detail = f"no module is exactly a {_name(key)}, and no method of one names it"
        raise _swap_error(model, detail, _near(_name(key), [c.__name__ for c in _types(model)]))
    if reason := _global_misfit(key, replacement):
        raise _swap_error(
            model, f"{_name(replacement)} cannot stand for {_name(key)}: {reason}", "give it that signature."
        )
    return replacement


def _global_misfit(key: Any, replacement: Any) -> str | None:
    if not callable(replacement) or type(replacement).__hash__ is None:
        return "it cannot be called"
    try:
        return signature_misfit(key, replacement)
    except ValueError:  # no signature to be read, as of a function in C
        return None


def _types(model: nn.Module) -> list[Any]:
    return list(dict.fromkeys(type(module) for module in model.modules()))


def _classes(model: Any, names: Any, by_module: dict[Any, Any], exchanges: Any) -> Iterator[Any]:
    concerned = {cls: tuple(e for e in exchanges if any(rebound_methods(cls, (e,)))) for cls in _types(model)}
    for module, called in names.items():
        key, replacement = by_module.get(module, (None, None))
        if replacement is None and not concerned[type(module)]:
            continue
        if (reason := misfit(module, replacement)) is not None:
            place = f"`{called[0]}`, a {type(module).__name__}" if called[0] else f"the {type(module).__name__}"
            by = f" by {_name(replacement)}" if replacement is not None else ""
            fix = "name the modules that it fits, or write one that fits this." if key else "leave this function out."
            raise _swap_error(model, f"{place}, cannot be swapped{by}: {reason}", fix)
        original: Any = type(module)
        yield module, class_of(original, replacement, concerned[type(module)])


# ------------------------------------------------------------------ what is said
def _swap_error(model: Any, detail: str, fix: str) -> SwapError:
    return SwapError(model=type(model).__name__, detail=detail, fix=fix)


def _name(key: Any) -> str:
    return repr(key) if isinstance(key, str) else str(getattr(key, "__name__", None) or repr(key)[:60])


def _near(name: Any, candidates: list[str]) -> str:
    close = difflib.get_close_matches(str(name), [n for n in candidates if n != name], 3, 0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see model.named_modules() for what there is."
