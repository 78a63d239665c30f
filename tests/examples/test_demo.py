"""The demo: its text, its model, its verdict, and one short run of the whole job."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.autograd import Function, gradcheck

from fusegrad.__main__ import main
from fusegrad.examples.demo import training, whole_attention
from fusegrad.examples.demo.functions import FUNCTIONS, CausalSoftmax, CrossEntropy, RMSNorm, SwiGLU
from fusegrad.examples.demo.model import IGNORED, Functions, Sizes, call, read_text, seeded_model, window, windows
from fusegrad.runtime.commands import demo

CPU = torch.device("cpu")
SMALL = Sizes(width=16, hidden=24, heads=2, layers=1, context=12, batch=3)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


ARGUMENTS = [
    (RMSNorm, lambda: (random(5, 8), random(8), 1e-6)),
    (CausalSoftmax, lambda: (random(2, 5, 5), 0.3)),
    (SwiGLU, lambda: (random(4, 6), random(4, 6))),
    (CrossEntropy, lambda: (random(4, 7), torch.tensor([3, IGNORED, 0, 6]), IGNORED)),
]


@pytest.mark.parametrize(("function", "arguments"), ARGUMENTS, ids=lambda a: getattr(a, "__name__", ""))
def test_backwards_are_right(function: type[Function], arguments: object) -> None:
    torch.manual_seed(0)
    assert gradcheck(lambda *a: call(function, *a), arguments())  # type: ignore[operator]


def test_cross_entropy_is_torchs() -> None:
    logits, target = torch.randn(6, 9), torch.tensor([1, IGNORED, 8, 0, IGNORED, 4])
    expected = torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED)
    torch.testing.assert_close(call(CrossEntropy, logits, target, IGNORED), expected)


def test_windows_stop_at_the_end_of_a_file() -> None:
    assert window(torch.tensor([1, 2, 3]), 1, 4).tolist() == [2, 3, IGNORED, IGNORED]


def test_batches_follow_the_text() -> None:
    text, following = next(windows(read_text(CPU), SMALL, seed=0))
    assert text.shape == following.shape == (3, 12)
    known = following[:, :-1] != IGNORED
    assert (text[:, 1:] == following[:, :-1])[known].all()


def test_weights_depend_on_the_seed_alone() -> None:
    one, two = (seeded_model(Functions(*FUNCTIONS), SMALL, 7, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_saved_bytes_counts_each_storage_once() -> None:
    model = seeded_model(Functions(*FUNCTIONS), SMALL, 0, CPU)
    batch = next(windows(read_text(CPU), SMALL, seed=0))
    assert 0 < training.saved_tensor_bytes(model, batch) < 1 << 20


@pytest.mark.parametrize(("fast", "parts"), [([2.0, 1.0], False), ([2.0, 1.01], True), ([2.0, math.nan], True)])
def test_verdict(fast: list[float], parts: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model = seeded_model(Functions(*FUNCTIONS), SMALL, 0, CPU)
    optimizer = torch.optim.SGD(model.parameters())
    pair = [training.Trained(model, optimizer, [], losses) for losses in ([2.0, 1.0], fast)]
    assert training.verdict(pair, []) == 2 * parts
    assert ("DIVERGE" in capsys.readouterr().out) == parts


def test_wrong_kernels_fail_the_demo() -> None:
    wrong = training.Numerics("RMSNorm", "backward", eager=1e-7, kernels=1e-2)
    assert training.verdict([training.Trained(None, None, [], [1.0])] * 2, [wrong]) == 2  # type: ignore[arg-type]


def test_an_installation_without_the_example_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for missing in ("fusegrad.examples.no_demo", "fusegrad.no_examples.demo"):
        monkeypatch.setattr(demo, "EXAMPLE", missing)
        assert main(["demo"]) == 1
        assert "its example is not in this installation" in capsys.readouterr().err


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["dmo"])
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "invalid choice: 'dmo'" in error and "did you mean demo?" in error


def test_attention_as_one_function(capsys: pytest.CaptureFixture[str]) -> None:
    """The generated kernels train as eager does, and what they move and save grows with the context, not its square."""
    assert whole_attention.main(["--backend", "interpret", "--steps", "2"]) == 0
    assert "losses agree" in capsys.readouterr().out
    short, long = (list(whole_attention.kernel_rows(Sizes(), [n])) for n in (512, 2048))
    assert [row[2] for row in long] == ["1", "3"]
    for before, after in zip(short, long, strict=True):
        assert float(after[4]) == pytest.approx(4 * float(before[4]), rel=0.1)
        assert float(after[5]) > 12 * float(before[5])  # eager's
    assert float(long[0][6]) < float(long[0][7]) / 8


def test_the_whole_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--steps", "3", "--out", str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert "losses agree" in found.err and "WRONG" not in found.err
    assert [len(losses) for losses in json.loads(found.out)["losses"].values()] == [3, 3]
    assert len((tmp_path / "losses.csv").read_text(encoding="utf-8").splitlines()) == 4
    for function in FUNCTIONS:
        assert "@triton.jit" in (tmp_path / f"{function.__name__}.py").read_text(encoding="utf-8")
    assert (tmp_path / "RMSNorm.svg").read_text(encoding="utf-8").startswith("<svg")
