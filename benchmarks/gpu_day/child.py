"""A worker seen from outside: asked for a unit, it answers in time, or it is ended and another one takes its place."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
START = 180.0
"""Seconds until it is ready: torch is imported, on the pretended GPU libraries are built."""
PLACES = {
    str(Path(__file__).parents[2]): ".", str(Path(__file__).resolve().parents[2]): ".",
    sys.prefix: "python", sys.base_prefix: "python", str(Path.home()): "~",
}  # fmt: skip
TAIL = 3000
"""Characters kept of what a process said before it failed."""


class Child:
    """A process that does units of one body. `ask` starts it, and starts another where it died."""

    def __init__(self, kind: str, body: str, environment: Mapping[str, str]) -> None:
        self.command = [sys.executable, "-P", str(WORKER), kind, body]
        self.environment = dict(environment)
        self.process: subprocess.Popen[bytes] | None = None
        self.said = tempfile.TemporaryFile()
        self.pending = b""

    def ask(self, unit: str, limit: float, left: float = START) -> dict[str, Any]:
        """The answer for a unit; outcome "hung" after `limit` seconds, "died" where the process did.

        left: seconds in which all has to end, the start of a process included.
        """
        began = time.monotonic()
        if self.process is None and (failure := self._start(min(START, left))):
            return {**failure, "started": False}
        limit = min(limit, left - (time.monotonic() - began))
        assert self.process and self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"unit": unit}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._failed("died", began)
        line = self._line(time.monotonic() + limit)
        if not line:
            return self._failed("died" if line is not None else "hung", began)
        found: dict[str, Any] = json.loads(nameless(line.decode()))
        if found.pop("spoiled", False):
            self.stop()
        if found["outcome"] in ("failed", "wrong"):
            found["said"] = self._tail()
        return found

    def _start(self, limit: float) -> dict[str, Any] | None:
        self.said.truncate(0)
        self.pending = b""
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, env=self.environment,
            start_new_session=True,
        )  # fmt: skip
        began = time.monotonic()
        line = self._line(began + limit)
        return None if line else self._failed("died" if line is not None else "hung", began)

    def _line(self, until: float) -> bytes | None:
        """The next line; b"" where the process ended, None where the time did."""
        assert self.process and self.process.stdout
        while b"\n" not in self.pending:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            got = os.read(self.process.stdout.fileno(), 1 << 16)
            if not got:
                return b""
            self.pending += got
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def _failed(self, outcome: str, began: float) -> dict[str, Any]:
        assert self.process
        if outcome == "hung":  # it says where, if it still can
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        self.stop()
        code = self.process_code
        why = "did not end in time" if outcome == "hung" else f"the process ended ({code})"
        seconds = round(time.monotonic() - began, 2)
        return {"outcome": outcome, "faults": [why], "facts": {}, "seconds": seconds, "said": self._tail()}

    process_code: int | None = None

    def stop(self) -> None:
        """End the process and what it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process_code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self.process = None

    def _tail(self) -> str:
        self.said.seek(0)
        return nameless(self.said.read().decode(errors="replace"))[-TAIL:]


def nameless(text: str) -> str:
    """Without the folders of this machine: results are committed."""
    for folder, name in PLACES.items():
        text = text.replace(folder, name) if len(folder) > len("/usr") else text
    return text
