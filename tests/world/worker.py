"""Drives the rows of one package, in a process of its own: a crash or a hang costs one row.

    python tests/world/worker.py < rows

A row is a line of JSON: module, class, arguments, backends. One line of JSON is printed for each scene of each backend,
and one when the row is done.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from comparison import Precision, Verdict, judged, of_the_result, told
from published import class_named, imported, limit
from scenes import SCENES, Scene, Seen
from supervised import answer

import fusegrad

CALLS = {"reference": 3, "interpret": 2}
"""How often a scene is told with one compiled class: the first call is compared, the third is written out."""
SECONDS = float(os.environ.get("WORLD_SECONDS", "60"))


def tell(play: Callable[[], Any]) -> Any:
    """What a scene saw, or the exception that it raised."""
    try:
        with limit(SECONDS), contextlib.redirect_stdout(io.StringIO()):
            return play()
    except Exception as error:
        return error


def nothing() -> None:
    """Where there is neither an answer in float64 nor one by single calls."""


class Row:
    """A class beside itself compiled, scene by scene. Eager's tellings are made once for all backends."""

    def __init__(self, cls: Any, text: str) -> None:
        self.cls, self.text = cls, text
        self._eager: dict[Scene, Any] = {}

    def eager(self, scene: Scene) -> Any:
        if scene not in self._eager:
            self._eager[scene] = self._told(scene)
        return self._eager[scene]

    def _told(self, scene: Scene) -> Any:
        return tell(lambda: scene.play(self.cls.apply, scene, self.text))

    def repeats(self, scene: Scene) -> bool:
        """Whether eager says the same twice."""
        return judged(self._told(scene), self.eager(scene), True, nothing, nothing).word in ("same", "raises")

    def verdicts(self, backend: str) -> Iterator[tuple[str, Verdict]]:
        """One word a scene: the first telling that is not as eager's, else the last."""
        fast = fusegrad.compile(self.cls, backend=backend)
        for name in SCENES:
            yield name, self.verdict(fast, name, backend)
        self.fast = fast

    def verdict(self, fast: Any, name: str, backend: str) -> Verdict:
        """The first telling that is not as eager's, else the last; `fast` is what has the compiled `apply`."""
        scene = SCENES[name]
        eager = self.eager(scene)
        if not self.repeats(scene):
            return Verdict("same", "eager itself differs from run to run")
        verdict = Verdict("same")
        for _ in range(CALLS[backend]):
            ours = tell(lambda: scene.play(fast.apply, scene, self.text))
            exact = backend == "reference"
            unit = of_the_result if exact else partial(self._unit, scene)
            verdict = judged(ours, eager, exact, partial(self._float64, scene), partial(self._single, scene), unit)
            if verdict.word not in ("same", "raises"):
                break
        return verdict

    def _float64(self, scene: Scene) -> Any:
        """The answer in float64 to the same numbers."""
        return None if scene.dtype is torch.float64 else self.eager(replace(scene, wide=True))

    def _unit(self, scene: Scene) -> float:
        """In float64, the rounding of what a class casts down to; elsewhere its own error tells."""
        if scene.dtype is not torch.float64:
            return 0.0
        with Precision() as precision:
            tell(lambda: scene.play(precision.watched(self.cls.apply), scene, self.text))
        return precision.unit

    def _single(self, scene: Scene) -> Seen | Exception | None:
        checked = scene.checked
        return None if checked is None else tell(lambda: checked(self.cls.apply, scene, self.text))

    def methods(self) -> dict[str, Any]:
        """What became of each method, and the calls at which it is split."""
        compiler = self.fast._fusegrad
        records = {m: [r.status, r.reason or "", r.code or ""] for m, r in compiler.ledger.records.items()}
        return {"records": records, "split": [call_told(c) for c in getattr(compiler, "opaque_calls", [])]}


def call_told(call: Any) -> str:
    return str(getattr(call, "reason", call))[:200]


def drive(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Facts about one row, as they become known."""
    why = imported(row["module"], 120)
    cls = class_named(row["module"], row["class"])
    if cls is None:  # a module may be there though the package around it cannot be imported
        yield {"absent": why or "no such class"}
        return
    subject = Row(cls, row["arguments"])
    first = subject.eager(SCENES["backward"])
    if isinstance(first, Exception):
        yield {"absent": f"eager raises: {told(first)}"}
        return
    for backend in row["backends"]:
        before = time.process_time()
        for name, verdict in subject.verdicts(backend):
            yield {"backend": backend, "scene": name, "word": verdict.word, "detail": verdict.detail}
        yield {"backend": backend, "seconds": round(time.process_time() - before, 2), **subject.methods()}


if __name__ == "__main__":
    answer(drive)
