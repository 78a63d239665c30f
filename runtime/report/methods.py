"""The methods of a class, and what is on record of each: compiled, derived, opaque or absent."""

from __future__ import annotations

from torch.autograd.function import Function

from ...tracer.methods import backward_method, uses_setup_context
from ..compiled.compiled import Compiled
from ..compiled.derived_backward import DERIVE_JVP
from ..fallback.records import Record

SPLIT = "generated from forward (old style): saved intermediates become extra outputs under torch.func"
TRANSPOSED = "the transpose of the derivative of forward, under torch.func; plain autograd raises, as in eager"
BATCHED = "every method over a batch"
UNCALLED = "no call has reached it"
NO_RULE = "over an opaque node no rule is derived; under transforms the class runs in eager"


def record_of_calls(compiler: Compiled, method: str, record: Record) -> Record:
    """A record, unless it says of a method that it is compiled, and no call was there at which it was."""
    called = method in compiler.ledger.records or (method == "setup_context" and "forward" in compiler.ledger.records)
    return record if called or record.status != "compiled" else Record("not yet traced", UNCALLED)


def method_records(compiler: Compiled) -> dict[str, Record]:
    cls = compiler.user.cls
    absent = Record("absent")
    has_backward = backward_method(cls) is not None
    own = {n: getattr(cls, n) is not getattr(Function, n) for n in ("jvp", "vmap")}
    reasons = {role: compiler.keys.opaque(role) for role in compiler.user.methods.roles()}
    opaque = {role: compiler.ledger.record_of(role, error) for role, error in reasons.items() if error is not None}
    # The record of a captured class; then, over it, the methods that run as written, and calls that fell back.
    derived = {
        "forward": Record("compiled"),
        "setup_context": Record("compiled") if uses_setup_context(cls) else Record("derived", SPLIT),
        "backward": _backward(compiler) if has_backward else absent if own["jvp"] else Record("derived", TRANSPOSED),
        "jvp": _own_jvp(compiler) if own["jvp"] else _derived_jvp(compiler),
        "vmap": Record("opaque", "the user's own rule runs as it is") if own["vmap"] else Record("derived", BATCHED),
    }
    recorded = {n: _partly_opaque(compiler, n, r) for n, r in compiler.ledger.records.items() if r.status == "opaque"}
    return without_rules_over_opaque(compiler, _at_run_time(compiler, derived) | opaque | recorded)


def _partly_opaque(compiler: Compiled, method: str, record: Record) -> Record:
    """A record that is of some arguments only, where the method is compiled for others."""
    captured = [s for specializations in compiler.table.by_facts.values() for s in specializations]
    serves = {"forward": bool(captured), "backward": any(s.backward.serves for s in captured)}
    if not serves.get(method):
        return record
    return Record("compiled", f"{record.reason}; for such arguments it runs in eager", record.where)


def _at_run_time(compiler: Compiled, methods: dict[str, Record]) -> dict[str, Record]:
    """With what calls found out: kernels that were refused, operations that run between others."""
    remarks = {n: r for n, r in compiler.ledger.records.items() if r.status == "compiled" and r.reason is not None}
    return methods | {n: r for n, r in remarks.items() if methods.get(n, Record("")).status == "compiled"}


def _backward(compiler: Compiled) -> Record:
    return Record("derived", "the transpose of jvp") if compiler.user.derives_backward else Record("compiled")


def _derived_jvp(compiler: Compiled) -> Record:
    if compiler.options.derive_jvp is False:
        return Record("absent", "it is compiled with derive_jvp=False")
    alone = backward_method(compiler.user.cls) is None or compiler.user.plain_function is not None
    return Record("derived", DERIVE_JVP["forward alone" if alone else compiler.options.derive_jvp])


def _own_jvp(compiler: Compiled) -> Record:
    """The user's jvp is compiled where it is declared traceable (or everything has to be)."""
    promised = compiler.ledger.must_capture("jvp")
    return Record("compiled") if promised else Record("opaque", "the user's own rule runs as it is")


def without_rules_over_opaque(compiler: Compiled, methods: dict[str, Record]) -> dict[str, Record]:
    """Nothing is derived over an opaque method; backward is traced at its first call where forward is one."""
    forward, recorded = methods["forward"], compiler.ledger.records.get("backward", Record("absent"))
    if "opaque" in (forward.status, methods["backward"].status):
        methods |= {name: Record("absent") for name, r in methods.items() if r.status == "derived"}
    if forward.status != "opaque":
        return methods
    if methods["setup_context"].status == "compiled":
        methods["setup_context"] = forward
    if methods["backward"].status == "compiled" and recorded.status != "compiled":
        methods["backward"] = Record("not yet traced", "forward runs in eager, so it is traced at its first call")
    return methods
