"""The variants of a compiled class: facts and conditions of each, and the difference between two, in a line."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from ...tracer.reads.reads import LASTING
from ..settings import logs
from .keys import Keys
from .table import SpecializationTable
from .user_class import UserClass

if TYPE_CHECKING:
    from ..specialize.specialization import Specialization



class Captured(Protocol):
    """A compiled class, or what makes its specializations."""

    user: UserClass
    keys: Keys
    table: SpecializationTable


STATES = ("autocast on cpu", "autocast on cuda", "default dtype", "deterministic", "inference mode", "default device",
          "left out")  # fmt: skip
"""The names of `guards.global_state()`, in its order."""
LONGEST = 60
SAME = "nothing that is compared: what its opaque calls returned"


@dataclass(frozen=True)
class Variant:
    """One specialization: a trace with the facts and conditions under which it is used again."""

    facts: Mapping[str, str]
    """What has to be equal for it to be used again, by name: dtypes, devices, values read from outside."""
    conditions: tuple[str, ...]
    """Conditions on sizes and strides, as text."""
    kernels: tuple[str, ...]
    """The names of its kernels."""
    difference: str = ""
    """Its difference from the nearest earlier one."""
    disk: str = ""
    """Whether its trace is cached on disk, or why not; "" where nothing was tried."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that json can write."""
        return {"facts": dict(self.facts), "conditions": list(self.conditions), "kernels": list(self.kernels),
                "difference": self.difference, "disk": self.disk}  # fmt: skip


def variants_of(compiler: Captured) -> list[Variant]:
    """Every capture that there is, each with what tells it from the nearest before it."""
    found: list[Variant] = []
    for key, specializations in compiler.table.by_facts.items():
        for spec in specializations:
            made = Variant(named_facts(compiler, key, spec.captured.names), conditions_of(spec), _kernels(spec))
            near = nearest(made.facts, [v.facts for v in found])
            told = "" if near is None else difference(found[near], made)
            found.append(replace(made, difference=told, disk="" if spec.keeper is None else spec.keeper.status))
    return found


# ------------------------------------------------------------------ facts by name
def named_facts(compiler: Captured, key: Sequence[Any], names: Sequence[str]) -> dict[str, str]:
    """The facts of a key (`Keys.facts`): arguments, torch's state, what is read from outside."""
    arguments = len(names)
    reads = compiler.keys.reads_now()
    states = key[arguments : arguments + len(STATES)]
    read = dict(zip(reads.entries, key[arguments + len(STATES) + 1 : -1], strict=False))
    found = {name: _argument(fact) for name, fact in zip(names, key, strict=False)}
    found |= {name: _short(fact) for name, fact in zip(STATES, states, strict=True) if fact}
    return found | {_place(path): _short(fact) for path, fact in read.items() if _is_told(fact)}


def _argument(fact: Any) -> str:
    """(torch.float32, cpu, True, 2, ..) -> "float32, 2 axes, cpu, requires grad" """
    if not (isinstance(fact, tuple) and fact and isinstance(fact[0], torch.dtype)):
        return _short(fact) if _is_told(fact) else "the same object"
    dtype, device, requires_grad, axes, conjugate, negative = fact
    flags = {"requires grad": requires_grad, "conjugate": conjugate, "negative": negative}
    words = [str(dtype).removeprefix("torch."), f"{axes} ax{'i' if axes == 1 else 'e'}s", str(device)]
    return ", ".join([*words, *(name for name, on in flags.items() if on)])


def _short(fact: Any) -> str:
    """A frozen value as its author would write it."""
    is_scalar = isinstance(fact, tuple) and len(fact) == 2 and isinstance(fact[0], str | type)
    text = (fact[1] if isinstance(fact[1], str) else repr(fact[1])) if is_scalar else repr(fact)
    text = text.replace("torch.", "")
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 2]}.."


def _is_told(fact: Any) -> bool:
    """True if a read says more than an identity, which no reader knows; names of a library are many facts in one."""
    if isinstance(fact, LASTING):
        return False
    if isinstance(fact, tuple) and fact and isinstance(fact[0], (tuple, *LASTING)):
        return any(map(_is_told, fact))
    return not (isinstance(fact, tuple) and fact and fact[0] in ("id", "method", "function", "object"))


def _place(path: str) -> str:
    """ "global SCALE in norms@140" -> "global SCALE" """
    return path.split(" in ")[0].split("@")[0]


# ------------------------------------------------------------------ conditions on sizes
def conditions_of(spec: Specialization) -> tuple[str, ...]:
    """The assumptions of the capture about sizes and strides, in the user's names."""
    return tuple(readable(c, spec) for c in getattr(spec.captured.guard, "conditions", ()) if c != "0 == 0")


def readable(condition: str, spec: Specialization) -> str:
    """L['t0'].size()[1] == 3  ->  x.shape[1] == 3"""
    names = [spec.captured.names[i] for i in spec.captured.slots]

    def named(found: re.Match[str]) -> str:
        return names[int(found[1])] if int(found[1]) < len(names) else found[0]

    text = re.sub(r"L\['t(\d+)'\]", named, condition)
    return re.sub(r"\.(size|stride)\(\)\[", lambda m: f".{'shape' if m[1] == 'size' else 'stride'}[", text)


def failing(spec: Specialization, tensors: Sequence[torch.Tensor]) -> str | None:
    """The first condition that these tensors do not meet."""
    places = {f"t{i}": t for i, t in enumerate(tensors)}
    for condition in getattr(spec.captured.guard, "conditions", ()):
        try:
            holds = eval(condition, dict(SYMPY_INTERP), {"L": places})  # the text is torch's own, over sizes alone
        except Exception:
            holds = False
        if not holds:
            return readable(condition, spec)
    return None


def _kernels(spec: Specialization) -> tuple[str, ...]:
    """The variants of kernels that were made for it: what was compiled in, and for which sizes."""
    captured = spec.captured
    plans = [plan for e in spec.executables.values() for plan in e.plans.values()]
    runners = [runner for plan in plans for runner in plan.group_runners()]
    sources = captured.binder.sources.items()
    tensors = [captured.names[slot] for slot in captured.slots]
    names = {str(symbol): f"{tensors[at]}.{_AXIS[kind]}[{axis}]" for symbol, (at, kind, axis) in sources}
    return tuple(f"{r.name}: {_admitted(v, names)}" for r in runners for v in r.variants)


_AXIS = {"size": "shape", "stride": "stride", "value": "value"}


def _admitted(variant: Any, names: Mapping[str, str]) -> str:
    """Sizes that were compiled in, and what the kernels assume of the others."""
    pinned = [f"{symbol} = {value}" for symbol, value in variant.pinned.items()]
    text = ", ".join([*pinned, *map(str, variant.guards)]) or "every size"
    return re.sub(r"\bs\d+\b", lambda found: names.get(found[0], found[0]), text)


# ------------------------------------------------------------------ what tells two apart
def nearest(facts: Mapping[str, str], known: Sequence[Mapping[str, str]]) -> int | None:
    """The known facts with the fewest words that differ, the newest of equals."""
    order = sorted(range(len(known)), key=lambda i: (len(_words(known[i]) ^ _words(facts)), -i))
    return order[0] if order else None


def _words(facts: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, word) for name, fact in facts.items() for word in fact.split(", ")}


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def difference(one: Variant, other: Variant) -> str:
    """ "eps: 1e-06 -> 1e-05; x: float32 -> bfloat16" """
    names = _differing(one.facts, other.facts)
    if names:
        return "; ".join(f"{n}: {_change(one.facts.get(n), other.facts.get(n))}" for n in names)
    more = [c for c in other.conditions if c not in one.conditions]
    gone = [f"not {c}" for c in one.conditions if c not in other.conditions]
    return "sizes: " + " and ".join((more or gone)[:3]) if more or gone else SAME


def _change(old: str | None, new: str | None) -> str:
    """("float32, 2 axes, cpu", "bfloat16, 2 axes, cpu") -> "float32 -> bfloat16": words that stay are left out."""
    if old is None or new is None:
        return f"{old or 'absent'} -> {new or 'absent'}"
    was, now = old.split(", "), new.split(", ")
    left = [w for w in was if w not in now], [w for w in now if w not in was]
    return f"{', '.join(left[0]) or 'nothing'} -> {', '.join(left[1]) or 'nothing'}"


def why_another(compiler: Captured, facts: Sequence[Any], args: Sequence[Any]) -> str | None:
    """One line: what tells a call from the nearest variant that there is; None for the first call."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    same = compiler.table.by_facts.get(facts, [])
    if same:
        return f"sizes: not {failing(same[-1], tensors) or 'as before'}"
    known = [(key, s) for key, specializations in compiler.table.by_facts.items() for s in specializations]
    names = known[-1][1].captured.names if known else []
    if not known or len(names) != len(args):
        return None if not known else f"{len(args)} arguments, not {len(names)}"
    told = [Variant(named_facts(compiler, key, s.captured.names), (), ()) for key, s in known]
    now = Variant(named_facts(compiler, facts, names), (), ())
    near = nearest(now.facts, [v.facts for v in told])
    assert near is not None
    return difference(told[near], now)


def log_variant(compiler: Captured, key: Sequence[Any], specialization: Specialization) -> None:
    """A class has one more variant."""
    if not logs.guards.isEnabledFor(logging.INFO):
        return
    name, count = compiler.user.cls.__name__, len(list(compiler.table))
    facts = named_facts(compiler, key, specialization.captured.names)
    logs.guards.info("%s, specialization %d: %s", name, count, "; ".join(f"{n}: {f}" for n, f in facts.items()))
    logs.guards.info("  if %s", " and ".join(conditions_of(specialization)) or "whatever the sizes")


def log_captured_again(compiler: Captured, key: Sequence[Any], args: Sequence[Any]) -> None:
    """A call found no variant, and there are some."""
    if not compiler.table.by_facts or not logs.recompiles.isEnabledFor(logging.INFO):
        return
    logs.recompiles.info("%s recompiles: %s", compiler.user.cls.__name__, why_another(compiler, key, args))
