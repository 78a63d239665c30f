"""A child process that is asked in lines of JSON: one that dies or stays silent costs the question that it was at."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Asked = dict[str, Any]
Answer = dict[str, Any]
_END = None


class Child:
    """The process, started when it is first asked."""

    def __init__(self, command: Sequence[str], seconds: float, log: Path | None = None) -> None:
        self.command, self.seconds, self.log = command, seconds, log
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def _start(self) -> subprocess.Popen[str]:
        errors: Any = subprocess.DEVNULL if self.log is None else self.log.open("a")
        made = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._lines = queue.Queue()
        threading.Thread(target=_read, args=(made.stdout, self._lines.put), daemon=True).start()
        return made

    def ask(self, asked: Asked) -> Iterator[Answer]:
        """The answers to one question; the last one is `{"done": ..}`, or `{"lost": why}` where the child is gone."""
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            yield self._lost()
            return
        while True:
            answer = self._answer()
            yield answer
            if "done" in answer or "lost" in answer:
                return

    def once(self, asked: Asked) -> Answer:
        """The first answer to a question that has one."""
        first, *_ = self.ask(asked)
        return first

    def _answer(self) -> Answer:
        try:
            line = self._lines.get(timeout=self.seconds)
        except queue.Empty:
            return self._lost(f"silent for {self.seconds:g} s")
        return self._lost() if line is _END else json.loads(line)

    def _lost(self, why: str = "") -> Answer:
        process = self._process
        assert process is not None
        if why:
            process.kill()
        code = process.wait()
        self._process = None
        return {"lost": why or f"the process ended with {code}"}

    def end(self) -> None:
        """Ends the child."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _read(stream: Any, put: Callable[[str | None], None]) -> None:
    for line in stream:
        put(line)
    put(_END)


def answer(answers: Callable[[Asked], Iterable[Answer]]) -> None:
    """The child's side: a line for each answer to each question, and one when the question is done."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print goes elsewhere
    for line in sys.stdin:
        try:
            for told in answers(json.loads(line)):
                print(json.dumps(told), file=out, flush=True)
        except Exception as error:  # of the driver itself: the next question has an answer all the same
            print(json.dumps({"lost": f"{type(error).__name__}: {error}"[:200]}), file=out, flush=True)
            continue
        print(json.dumps({"done": True}), file=out, flush=True)
