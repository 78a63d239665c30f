"""Guards of an inline-cache entry as Python expressions: what a call must have in common with the first of its kind.

Together they say what the key of a specialisation says, and that nothing stands around the call that was not there
then; but they compare by identity first, and ask the dispatch keys of the tensors instead of torch's global state.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ...tracer.opaque import call_interception
from ...tracer.reads.attributes import is_a
from ...tracer.reads.reads import Read, Reads
from ...tracer.reads.value_keys import DEPTH, SCALARS, freeze
from ...tracer.torch_private import UNSEEN, deterministic, tensor_check
from ..capture.guards import carried_attribute, global_state, lasting_state
from ..execution.source_writer import SourceWriter, row
from ..settings.config import in_force

Tensor = torch.Tensor
ABSENT = "(AttributeError, KeyError, IndexError, ValueError, TypeError)"
"""The errors that may be raised where something that was read before is gone."""
DERIVATIVES = ("backward", "vjp", "jvp")
METHODS = ("forward", "setup_context", *DERIVATIVES)


class Unchanging:
    """An object that is what it is by identity, and never changes."""


def guard_tensors(
    text: SourceWriter, named: Sequence[tuple[str, Tensor]], reads: Reads | None = None, tracked: bool = True
) -> list[str] | None:
    """The tensors are like these, and the same ones are the same; None where that cannot be asked.

    reads: tensors from outside, which have to be like those of the present. tracked: whether it matters which of the
    named ones require a gradient.
    """
    outside = read_tensors(text, reads) if reads is not None else []
    loose = () if tracked else {name for name, _ in named}
    named = [*named, *outside]
    first: dict[int, str] = {}
    firsts = [(name, first.setdefault(id(t), name)) for name, t in named]
    twice = [f"{name} is {first_name}" for name, first_name in firsts if first_name is not name]
    tensors = {first[id(t)]: t for _, t in named}
    check = tensor_check(list(tensors.values()))
    if check is None:
        return None
    alike = f"{text.constant(check, 'alike')}({row(list(tensors))[:-2]})"
    return [alike, *twice, *_need_grad({name: t for name, t in tensors.items() if name not in loose})]


def _need_grad(tensors: dict[str, Tensor]) -> list[str]:
    """`requires_grad` of each, where the check did not see it: it looks through the grad mode."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        return []
    return [f"{'' if t.requires_grad else 'not '}{name}.requires_grad" for name, t in tensors.items()]


def guard_value(text: SourceWriter, expression: str, value: Any, depth: int = DEPTH) -> str:
    """`expression` has a value that `freeze` does not tell from this one."""
    kind = type(value)
    if value is None or kind in (bool, torch.dtype, torch.layout, torch.memory_format) or issubclass(kind, Unchanging):
        return f"{expression} is {text.constant(value, 'value')}"
    name = text.name("now")
    if kind in (int, str, bytes) or (kind is float and value == value and value != 0):
        same = text.constant(value, "value")
        return f"(({name} := {expression}) is {same} or (type({name}) is {kind.__name__} and {name} == {same}))"
    if kind is float and value == 0:  # which has a sign
        same = text.constant(value, "value")
        return f"(({name} := {expression}) is {same} or (type({name}) is float and repr({name}) == {repr(value)!r}))"
    frozen = text.constant(partial(_is_frozen, freeze(value, depth), depth), "frozen")
    if _never_changes(value):
        return f"(({name} := {expression}) is {text.constant(value, 'value')} or {frozen}({name}))"
    return f"{frozen}({expression})"  # the value itself is not kept: there may be tensors in it


def _never_changes(value: Any) -> bool:
    """True for an object that has the picture that it has for good."""
    return type(value) in SCALARS or (type(value) is tuple and all(map(_never_changes, value)))


def _is_frozen(picture: Any, depth: int, value: Any) -> bool:
    return bool(freeze(value, depth) == picture)


def read_tensors(text: SourceWriter, reads: Reads) -> list[tuple[str, Tensor]]:
    """The tensors that are read from outside: how to get each, and what it is at present."""
    entries = [r for r in reads.entries.values() if r.kind == "tensor" and isinstance(_present(r), Tensor)]
    return [(read_expression(text, r), _present(r)) for r in entries]


def _present(read: Read) -> Any:
    try:
        return read.get()
    except (AttributeError, KeyError, IndexError, ValueError, TypeError):
        return None


def read_expression(text: SourceWriter, read: Read) -> str:
    """An expression of what is read: the names on the way, where it has some."""
    if not read.steps:
        return f"{text.constant(read.get, 'read')}()"
    kind, of = read.steps[0], text.constant(read.steps[1], "of")
    if kind == "of":
        names, start = read.steps[3:], f"{of}[{read.steps[2]!r}]"
    else:
        names, start = read.steps[2:], of if kind == "is" else f"{of}.cell_contents"
    return ".".join([start, *names])


def guard_reads(text: SourceWriter, reads: Reads) -> Iterable[str]:
    """Guard what else is read from outside: it is what it is at present."""
    for read in reads.entries.values():
        present = _present(read)
        if read.kind == "tensor" and isinstance(present, Tensor):
            continue
        write_guards = _UNCHANGED.get(read.kind)
        if write_guards is None or present is None:
            yield f"{text.constant(read.fact, 'fact')}() == {text.constant(read.fact(), 'value')}"
        else:
            yield from write_guards(text, read, present)


def same_object(text: SourceWriter, expression: str, value: Any, name: str) -> str:
    """`expression` is this very object; a method bound to a class or an object is made anew at every look."""
    is_made = is_a(value, types.MethodType | types.BuiltinMethodType) and not is_a(value.__self__, types.ModuleType)
    return f"{expression} {'==' if is_made else 'is'} {text.constant(value, name)}"


def _same_object(text: SourceWriter, read: Read, present: Any) -> Iterable[str]:
    if read.fact()[0] == "id":
        return [f"{read_expression(text, read)} is {text.constant(present, 'value')}"]
    return [f"{text.constant(read.fact, 'fact')}() == {text.constant(read.fact(), 'value')}"]


def _same_code(text: SourceWriter, read: Read, present: Any) -> Iterable[str]:
    """Guard a function's code, and its defaults, which may be changed in place."""
    function = text.constant(present, "function")
    yield f"{function}.__code__ is {text.constant(present.__code__, 'code')}"
    for name in ("__defaults__", "__kwdefaults__"):
        yield guard_value(text, f"{function}.{name}", getattr(present, name))


def _same_names(text: SourceWriter, read: Read, present: Any) -> Iterable[str]:
    """Guard the objects under names of a library's module or class; numbers by value."""
    owner, *names = read.steps
    for name, value in zip(names, present, strict=False):
        place = f"{text.constant(owner, 'library')}.{name}"
        yield guard_value(text, place, value) if type(value) in SCALARS else same_object(text, place, value, name)


def _same_builtin(text: SourceWriter, read: Read, present: Any) -> Iterable[str]:
    """Guard a name of Python's own, which a global may hide."""
    _, env, name = read.steps
    if name in env:
        return [f"{text.constant(env, 'of')}[{name!r}] is {text.constant(present, 'value')}"]
    own = f"{text.constant(builtins, 'builtins')}.{name} is {text.constant(present, 'value')}"
    return [own, f"{name!r} not in {text.constant(env, 'of')}"]


_UNCHANGED: dict[str, Callable[[SourceWriter, Read, Any], Iterable[str]]] = {
    "value": lambda text, read, present: [guard_value(text, read_expression(text, read), present)],
    "identity": _same_object,
    "function": _same_code,
    "names": _same_names,
    "builtin": _same_builtin,
}


def guard_state(text: SourceWriter) -> Iterable[str]:
    """torch's state and the settings are what they are at present; no capture watches nested calls."""
    yield from (condition.format(text.constant(subject, "torch")) for condition, subject in UNSEEN)
    yield f"not {text.constant(call_interception, 'nested')}.watchers"
    for condition, ask, answer in in_force():
        yield condition.format(text.constant(ask, "setting"), text.constant(answer, "value"))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        yield f"{text.constant(global_state, 'global_state')}() == {text.constant(global_state(), 'state')}"
    else:
        yield from guard_lasting_state(text)


def guard_lasting_state(text: SourceWriter) -> Iterable[str]:
    """The part of torch's state that backward sees at its own time."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        yield f"{text.constant(lasting_state, 'lasting_state')}() == {text.constant(lasting_state(), 'state')}"
        return
    dtype = torch.get_default_dtype
    yield f"{text.constant(dtype, 'default_dtype')}() is {text.constant(dtype(), 'value')}"
    yield f"{text.constant(deterministic, 'deterministic')}() is {text.constant(deterministic())}"


def guard_custom_attributes(text: SourceWriter, names: Sequence[str], attributes: Collection[str]) -> Iterable[str]:
    """Guard that no attributes that the methods ask for were put on these tensors."""
    if attributes and names:
        carried = text.constant(carried_attribute, "carried")
        yield f"{carried}(({row(names)}), {text.constant(frozenset(attributes), 'asked')}) is None"


def guard_methods(text: SourceWriter, cls: type, methods: Sequence[str] = METHODS) -> Iterable[str]:
    """Guard that the class has these very methods; one that is bound to the class is made at every look."""
    name = text.constant(cls, "user_class")
    return [same_object(text, f"{name}.{m}", getattr(cls, m), m) for m in methods]
