"""`FUSEGRAD_LOGS`: what is turned on, what is told, and that nothing is told of a call that finds what it needs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from function_samples import Linear, RMSNorm, leaf, run
from test_traceable import AssignsData, ObjectOnCtx

import fusegrad
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.kernels import autotune as tune
from fusegrad.runtime.settings import logs


@pytest.fixture(autouse=True)
def quiet_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield
    fusegrad.config.logs("")
    assert not logging.getLogger("fusegrad").handlers and logging.getLogger("fusegrad").propagate


def told(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("[fusegrad.")]


def of(name: str, lines: list[str]) -> str:
    return "\n".join(line.removeprefix(f"[fusegrad.{name}] ") for line in lines if f".{name}]" in line)


# ------------------------------------------------------------------ the words
@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("", {}),
        ("trace, +codegen ,-guards", {"trace": logging.INFO, "codegen": logging.DEBUG, "guards": logs.SILENT}),
        ("all,-cache", {**dict.fromkeys(logs.NAMES, logging.INFO), "cache": logs.SILENT}),
        ("+all", dict.fromkeys(logs.NAMES, logging.DEBUG)),
    ],
)
def test_words(text, levels) -> None:
    assert logs.levels_of(text) == levels


def test_an_unknown_name() -> None:
    with pytest.raises(logs.LogsError, match=r"there is no log 'recompile' \[FG203\](.|\n)*did you mean recompiles\?"):
        fusegrad.config.logs("trace,recompile")
    with pytest.raises(ValueError, match=r"use some of trace, .*, all, help"):
        fusegrad.config.logs("xyz")


def test_the_environment(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FUSEGRAD_LOGS", "fussion")
    with pytest.warns(UserWarning, match="did you mean fusion"):  # a typo must not keep a program from running
        logs._from_environment()
    monkeypatch.setenv("FUSEGRAD_LOGS", "fusion,help")
    fusegrad.config.logs()
    assert logs.fusion.isEnabledFor(logging.INFO) and not logs.fusion.isEnabledFor(logging.DEBUG)
    text = capsys.readouterr().err
    assert all(f"  {name} " in text for name in (*logs.NAMES, "all"))


# ------------------------------------------------------------------ what is told
def test_everything_of_a_first_call_and_nothing_of_the_next(capsys) -> None:
    fusegrad.config.logs("+all")
    fast: Any = fusegrad.compile(RMSNorm, backend="interpret")
    run(fast, leaf(6, 16), leaf(16))
    lines = told(capsys)
    captures = of("trace", lines)
    assert "RMSNorm.forward traced in" in captures and "RMSNorm.backward for gradients" in captures
    assert "function_samples.py:" in captures and "aten.mul.Tensor" in captures and "rsqrt" in captures
    fused = of("fusion", lines)
    assert "RMSNorm_forward: fused groups: 1, library calls: 0" in fused and "writes" in fused
    assert "RMSNorm_forward for interpret" in of("codegen", lines) and "warps" in of("codegen", lines)
    assert "RMSNorm, specialization 1: x: float32, 2 axes, cpu, requires grad" in of("guards", lines)
    assert "x.shape[1] = 16" in of("guards", lines) and of("recompiles", lines) == ""
    run(fast, leaf(6, 16), leaf(16))
    run(fast, leaf(6, 16), leaf(16))
    assert told(capsys) == []


def test_the_kernel_text_is_told(capsys) -> None:
    fusegrad.config.logs("codegen")
    fusegrad.explain(RMSNorm, "f32[8,16]", "f32[16]")
    text = capsys.readouterr().err
    assert "[fusegrad.codegen] RMSNorm_forward for cuda:90\n@triton.jit\ndef RMSNorm_forward(" in text
    assert "warps" not in text, "that is for +codegen"


def test_cuts_are_told(capsys) -> None:
    fusegrad.config.logs("fusion")
    fusegrad.explain(Linear, "f32[640,1280]", "f32[320,1280]", "f32[320]")
    fused = of("fusion", told(capsys))
    assert "library calls: 1" in fused and "a matmul is a library call" in fused and "[FG110]" in fused


def test_recompiles_say_what_differs(capsys) -> None:
    fusegrad.config.logs("recompiles")
    fast: Any = fusegrad.compile(RMSNorm, backend="interpret")
    fast.apply(leaf(6, 16).detach(), torch.ones(16))
    assert told(capsys) == []
    fast.apply(leaf(6, 16).detach().double(), torch.ones(16, dtype=torch.float64))
    (line,) = told(capsys)
    assert line.startswith("[fusegrad.recompiles] RMSNorm recompiles: x: float32 -> float64; ")
    fast.apply(torch.ones(6, 32)[:, ::2], torch.ones(16))
    assert "sizes: not x.stride" in told(capsys)[0]
    fast.apply(torch.ones(6, 40), torch.ones(40))
    assert told(capsys) == ["[fusegrad.recompiles] RMSNorm_forward is generated again: x.shape[1]: 16 -> 40"]


def test_what_runs_as_written_is_told(capsys) -> None:
    fusegrad.config.logs("trace")
    with pytest.warns(fusegrad.FallbackWarning):
        fusegrad.compile(ObjectOnCtx).apply(leaf(3))
    assert "ObjectOnCtx.forward runs in eager: `ctx.kept` is a Kept with tensors" in of("trace", told(capsys))


def test_lines_that_run_as_written_are_told(capsys) -> None:
    fusegrad.config.logs("trace")
    with pytest.warns(fusegrad.FallbackWarning):
        fusegrad.compile(AssignsData).apply(leaf(3))
    assert "AssignsData.forward is split: it assigns `.data`" in of("trace", told(capsys))


def test_the_cache(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    fusegrad.config.logs("+cache")
    key = "ab" * 32
    assert cache.get(key) is None
    cache.put(key, {"ptx": b"text"})
    assert cache.get(key) is not None
    cache.default().sweep(0)
    lines = of("cache", told(capsys)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["miss", "written", "hit", "evicted"]


def test_autotune(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path))
    fusegrad.config.logs("autotune")
    for _ in range(2):
        tune.fastest("gpu", "norm", "text", (8, 16), {"own": int, "wide": int}, lambda launches: [2e-3, 1e-3])
    first, second = of("autotune", told(capsys)).splitlines()
    assert first == "norm [8, 16]: timed; own 2.0 us, wide 1.0 us; chosen: wide"
    assert second == "norm [8, 16]: found again; own, wide; chosen: wide"


# ------------------------------------------------------------------ Python's logging
def test_who_uses_logging_needs_no_words_of_ours() -> None:
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("fusegrad.trace"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fusegrad.explain(RMSNorm, "f32[8,16]", "f32[16]")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [r.name for r in records] == ["fusegrad.trace"] * 2


def test_nothing_is_told_unless_asked_for(capsys) -> None:
    run(fusegrad.compile(RMSNorm), leaf(6, 16), leaf(16))
    assert told(capsys) == [] and not any(logger.isEnabledFor(logging.INFO) for logger in logs._loggers.values())


def test_a_capture_makes_no_records_for_those_who_listen_to_every_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest does: for each guard torch would look up two stacks."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, :3] * 2, y], 1).reshape(-1)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
            return None, None

    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[method-assign]
    records = logging.getLogger("torch.__trace")
    monkeypatch.setattr(records, "handlers", [listener])
    fusegrad.compile(Doubled).apply(torch.ones(4, 5), torch.ones(4, 2))
    assert not [r.__dict__ for r in heard]
    assert records.handlers == [listener]
