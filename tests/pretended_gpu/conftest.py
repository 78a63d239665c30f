"""A process with the pretended GPU that tests send scenes to, and the counts of what was launched in it."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from building import lacks, libraries

LIMIT = 240.0
"""Seconds in which a scene has to end."""
Play = Callable[..., dict[str, Any]]


class Worker:
    """Plays scenes in a process of its own, another one after a process that died."""

    def __init__(self, vendor: str) -> None:
        self.vendor = vendor
        self.process: subprocess.Popen[str] | None = None
        self.said = tempfile.TemporaryFile("w+")
        self.cache = tempfile.TemporaryDirectory()  # what was tuned once is not timed again

    def play(self, scene: str, limit: float = LIMIT, **arguments: Any) -> dict[str, Any]:
        process = self._started()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"scene": scene, "arguments": arguments, "limit": limit}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if answer:
            return json.loads(answer)  # type: ignore[no-any-return]
        process.wait()
        self.process = None
        self.said.seek(0)
        pytest.fail(f"the process died ({process.returncode}):\n{self.said.read()[-6000:]}")

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            built = libraries()
            environment = {**os.environ, "TRITON_CACHE_DIR": str(built / "triton"), "FUSEGRAD_STORE": "0"}
            environment["FUSEGRAD_CACHE_DIR"] = self.cache.name
            environment["FUSEGRAD_DISABLE"] = "patience"  # one process makes classes of the same lines without end
            environment["PRETENDED_GPU"] = self.vendor
            command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self.said, text=True, env=environment
            )
            assert self.process.stdout
            self.process.stdout.readline()  # it is ready
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.wait(30)
        self.cache.cleanup()


@pytest.fixture(scope="session")
def worker() -> Iterator[Callable[[str], Worker]]:
    """The worker of a vendor, started when it is asked for."""
    if reason := lacks():
        pytest.skip(f"no pretended GPU: {reason}")
    workers: dict[str, Worker] = {}
    yield lambda vendor: workers.setdefault(vendor, Worker(vendor))
    for each in workers.values():
        each.stop()


@pytest.fixture
def play(worker: Callable[[str], Worker], request: pytest.FixtureRequest) -> Play:
    """`play(scene, ...)` -> launches by kernel. It may not raise, differ from eager, or have wrong parameters."""
    return _player(worker("nvidia"), request)


@pytest.fixture
def play_on_amd(worker: Callable[[str], Worker], request: pytest.FixtureRequest) -> Play:
    """The same on a GPU of AMD's."""
    return _player(worker("amd"), request)


def _player(worker: Worker, request: pytest.FixtureRequest) -> Play:
    def played(scene: str, **arguments: Any) -> dict[str, Any]:
        answer = worker.play(scene, **arguments)
        request.node.user_properties.append(("pretended_gpu", [scene, arguments, answer]))
        assert not answer["error"], answer["error"]
        assert not answer["problems"], "\n".join(answer["problems"])
        assert not answer["found"], "\n".join(answer["found"])
        return answer["launches"]  # type: ignore[no-any-return]

    return played


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts over all scenes that were played."""
    reports = [r for each in terminalreporter.stats.values() for r in each if hasattr(r, "user_properties")]
    scenes = [v for r in reports for k, v in r.user_properties if k == "pretended_gpu" and r.when == "call"]
    if not scenes:
        return
    kernels: collections.Counter[str] = collections.Counter()
    for _, _, answer in scenes:
        kernels.update(answer["launches"])
    functions = {name for scene, given, _ in scenes for name in [given.get("name", "").partition("[")[0]] if name}
    wrong = sum(len(a["problems"]) for _, _, a in scenes)
    differ = sum(len(a["found"]) for _, _, a in scenes)
    errors = sum(bool(a["error"]) for _, _, a in scenes)
    terminalreporter.write_line(
        f"pretended GPU: {len(scenes)} scenes, {len(functions)} Functions, {kernels.total()} launches of "
        f"{len(kernels)} kernels, {wrong} parameter errors, {differ} differences, {errors} errors"
    )
