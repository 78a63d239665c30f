"""Logs of what the compiler does: `FUSEGRAD_LOGS="trace,fusion,+codegen,-guards"`, `config.logs(...)`.

name: one message for each event; +name: with every detail; -name: nothing; all: every name; help: what there is. The
loggers are Python's own, `fusegrad.trace` and so on. Only traces, generations and look-ups on disk are told, nothing
of a call that finds what it needs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from ...ir.codes import code_of
from ...ir.errors import FusegradError

if TYPE_CHECKING:
    import torch

    from ...tracer.trace import Trace

VARIABLE = "FUSEGRAD_LOGS"
ROOT = "fusegrad"
NAMES = {
    "trace": "what was traced, in how many milliseconds, and what runs in eager; +trace: every line and operation",
    "fusion": "groups, library calls, and the reason for every cut",
    "codegen": "the text of every kernel; +codegen: its grid, warps and guards, too",
    "guards": "the facts and the guards of each specialization",
    "recompiles": "why a call recompiles: its difference from the nearest specialization, in one line",
    "autotune": "candidates, their times, and the choice",
    "cache": "hits, misses and evictions; +cache: entries written, too",
}
EVERY = "all"
SILENT = logging.CRITICAL + 10
LEVELS = {"": logging.INFO, "+": logging.DEBUG, "-": SILENT}

_loggers = {name: logging.getLogger(f"{ROOT}.{name}") for name in NAMES}
trace, fusion, codegen, guards, recompiles, autotune, cache = _loggers.values()


class LogsError(FusegradError, ValueError):
    """A name that is none of the logs."""

    message = "{asked}: there is no log {name!r}\n  at:   {where}\n  fix:  {fix}"


# ------------------------------------------------------------------ turning them on
def set_logs(words: str | None = None) -> None:
    """Turn logs on and off for the process: "trace,+codegen"; "" for none; None for what the environment says.

    Raises LogsError for an unknown name.
    """
    source = "config.logs" if words is not None else VARIABLE
    levels = levels_of(os.environ.get(VARIABLE, "") if words is None else words, source)
    for name, logger in _loggers.items():
        logger.setLevel(levels.get(name, logging.NOTSET))
    _print_to_stderr(bool(levels))


def levels_of(text: str, source: str = VARIABLE) -> dict[str, int]:
    """ "trace,+codegen" -> {"trace": INFO, "codegen": DEBUG}; later words win."""
    levels: dict[str, int] = {}
    for word in filter(None, (w.strip() for w in text.split(","))):
        sign = word[0] if word[0] in "+-" else ""
        name = word[len(sign) :].strip()
        if name == "help":
            print(help_text(), file=sys.stderr)
        elif name == EVERY:
            levels |= dict.fromkeys(NAMES, LEVELS[sign])
        elif name in NAMES:
            levels[name] = LEVELS[sign]
        else:
            place = {"where": "the environment"} if source == VARIABLE else {}
            raise LogsError(asked=source, name=name, fix=_instead(name), **place)
    return levels


def _instead(name: str) -> str:
    near = get_close_matches(name, NAMES, n=1)
    return f"did you mean {near[0]}?" if near else f"use some of {', '.join(NAMES)}, all, help"


def help_text() -> str:
    """The text that FUSEGRAD_LOGS=help prints."""
    wide = max(map(len, NAMES))
    lines = (f"  {name:<{wide}}  {meaning}" for name, meaning in {**NAMES, EVERY: "every one of them"}.items())
    return "\n".join([f'{VARIABLE}="name,+name,-name": what is told on stderr', *lines])


_handler: logging.Handler | None = None


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is at the time."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


def _print_to_stderr(is_on: bool) -> None:
    """Our handler, while a log is turned on through us; users of `logging` have handlers of their own."""
    global _handler
    root = logging.getLogger(ROOT)
    if _handler is not None:
        root.removeHandler(_handler)
        root.propagate, _handler = True, None
    if is_on:
        _handler = _Stderr()
        _handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(_handler)
        root.propagate = False


# ------------------------------------------------------------------ what is told
@contextmanager
def capturing(name: str, result: Callable[[], Trace], place: str | None = None) -> Iterator[None]:
    """Log a trace, with its time and its lines. result: what came of it."""
    began = time.perf_counter()
    yield
    if trace.isEnabledFor(logging.INFO):
        milliseconds = (time.perf_counter() - began) * 1e3
        operations = [n for n in result().graph_module.graph.nodes if n.op == "call_function"]
        suffix = f" ({place})" if place else ""
        trace.info("%s traced in %.1f ms: %d operations%s", name, milliseconds, len(operations), suffix)
        for node in operations:
            trace.debug("  %s", _line_of(node))


def _line_of(node: torch.fx.Node) -> str:
    _, place, line = node.meta.get("fusegrad_origin") or (None, None, None)
    value: Any = node.meta.get("val")
    kind = f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}" if hasattr(value, "dtype") else ""
    return f"{node.name:<16} {node.target!s:<32} {kind:<24} {place or ''}  {(line or '').strip()}".rstrip()


def log_opaque_method(name: str, reason: str | None, place: str | None) -> None:
    """Log that a method falls back to eager."""
    trace.info("%s runs in eager: %s (%s) [%s]", name, reason, place, code_of(reason))


def log_split(call: str) -> None:
    """Log that lines of a method, or a call in it, fall back to eager between compiled parts."""
    trace.info("%s", call)


def _from_environment() -> None:
    """Turn on at import what the environment names; a mistake there must not keep the program from running."""
    try:
        set_logs()
    except LogsError as error:
        warnings.warn(str(error), stacklevel=2)


if os.environ.get(VARIABLE):
    _from_environment()
