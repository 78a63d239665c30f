"""Captures from disk: found again by another process with the same code, by no one else, and right in what they do."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import fusegrad
from fusegrad.codegen import Kernel
from fusegrad.runtime.cache import entry_files
from fusegrad.runtime.capture.captured_backward import BackwardEntry
from fusegrad.runtime.compiled.variants import variants_of
from fusegrad.runtime.persistence import keeper
from fusegrad.runtime.persistence import plan_documents as plans
from fusegrad.runtime.settings import config
from fusegrad.tracer.function import ForwardCapture

CLASS = '''
import torch
from torch.autograd.function import Function
from functools import partial
import kept_helper

FACTOR = 2.0
SETTINGS = {"shift": 0.5}
TABLE = torch.ones(3)

class Config:
    power = 2

def closed_over(bias):
    class Gate(Function):
        @staticmethod
        def forward(ctx, x, y, slope=1.0):
            gate = torch.sigmoid(x * slope)
            normed = kept_helper.scaled(gate) * y + bias
            ctx.save_for_backward(x, y, gate)
            ctx.slope, ctx.shape = slope, x.shape
            return normed * FACTOR + SETTINGS["shift"]

        @staticmethod
        def backward(ctx, grad):
            x, y, gate = ctx.saved_tensors
            grad = grad * FACTOR
            wrong = kept_helper.scaled(grad * y * gate) * ctx.slope  # not the derivative: what is written is what runs
            return wrong.reshape(ctx.shape), grad * kept_helper.scaled(gate), None
    return Gate

Gate = closed_over(0.25)
'''
HELPER = "def scaled(t, by=3.0):\n    return t * by\n"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSEGRAD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with config.patch(store=True):
        yield


def written(tmp_path: Path, source: str = CLASS, helper: str = HELPER) -> ModuleType:
    """The two modules, imported as a new process would."""
    (tmp_path / "kept_helper.py").write_text(helper)
    (tmp_path / "kept_class.py").write_text(source)
    for name in ("kept_helper", "kept_class"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module("kept_class")


def operands(rows: int = 5, columns: int = 24) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, columns, requires_grad=True) for _ in range(2)]


def results(apply: Callable[..., Any], *more: Any, rows: int = 5, expanded: bool = False) -> list[torch.Tensor]:
    args = operands(rows)
    out = apply(*args, *more)
    gradient = torch.ones(()).expand(out.shape) if expanded else torch.arange(out.numel()).reshape(out.shape) / 7.0
    return [out.detach(), *torch.autograd.grad(out, args, gradient)]


def called(cls: type, *more: Any, **how: Any) -> int:
    """Compile the class anew, compare it with itself uncompiled, forward and backward; captures found on disk."""
    before = fusegrad.stats()
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    for mine, users in zip(results(fast.apply, *more, **how), results(cls.apply, *more, **how), strict=True):
        torch.testing.assert_close(mine, users, rtol=2e-6, atol=2e-6)
    after = fusegrad.stats()
    found = after["from_disk"] - before["from_disk"]
    assert found == 0 or after["captures"] == before["captures"], "it was captured all the same"
    return int(found)


def disk(fast: Any) -> str:
    """What `explain` says of the only capture."""
    (variant,) = variants_of(fast._fusegrad)
    return variant.disk


# ------------------------------------------------------------------ found again
def test_the_same_class_is_not_captured_twice(tmp_path: Path) -> None:
    assert called(written(tmp_path).Gate) == 0
    compiled = fusegrad.stats()["compiles"]
    assert called(written(tmp_path).Gate) == 1
    assert fusegrad.stats()["compiles"] == compiled, "no kernel is generated again"


@pytest.mark.parametrize("rows", [6, 16, 33])
def test_a_stored_capture_serves_other_batch_sizes(tmp_path: Path, rows: int) -> None:
    called(written(tmp_path).Gate)
    assert called(written(tmp_path).Gate, rows=rows) == 1


def test_a_batch_of_one_is_another_capture(tmp_path: Path) -> None:
    called(written(tmp_path).Gate)
    assert called(written(tmp_path).Gate, rows=1) == 0
    assert called(written(tmp_path).Gate, rows=1) == 1


def test_gradients_of_a_layout_that_is_not_on_disk_are_captured(tmp_path: Path) -> None:
    called(written(tmp_path).Gate)
    cls = written(tmp_path).Gate
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    for _ in range(2):
        for mine, users in zip(
            results(fast.apply, expanded=True), results(cls.apply, expanded=True), strict=True
        ):
            torch.testing.assert_close(mine, users)
    assert called(written(tmp_path).Gate, expanded=True) == 1


def test_after_a_layout_that_is_not_kept_another_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    called(written(tmp_path).Gate)
    cls = written(tmp_path).Gate
    fast, args = fusegrad.compile(cls, backend="interpret", fullgraph=True), operands()

    def refuse(self: Any) -> None:
        raise plans.NotKept("an operation runs between the kernels")

    monkeypatch.setattr(keeper.CaptureStore, "_require_nothing_said", refuse)
    for gradient in (torch.ones(()).expand(5, 24), torch.randn(24, 5).T, torch.randn(5, 24)):
        mine, users = (torch.autograd.grad(c.apply(*args), args, gradient) for c in (fast, cls))
        torch.testing.assert_close(mine, users)


def test_often_called_it_is_written_out_as_any_other(tmp_path: Path) -> None:
    called(written(tmp_path).Gate)
    cls = written(tmp_path).Gate
    fast = fusegrad.compile(cls, backend="interpret")
    before = fusegrad.stats()["captures"]
    for _ in range(6):
        mine = results(fast.apply)
    torch.testing.assert_close(mine, results(cls.apply))
    assert fusegrad.stats()["captures"] == before
    assert fast._fusegrad.inline_cache.latest(tuple(operands())) is not None


COMPOSITIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "grad": lambda f, x, y: torch.func.grad(lambda x: f(x, y).square().sum())(x.detach()),
    "vmap": lambda f, x, y: torch.func.vmap(lambda x, y: f(x, y))(x.detach()[None], y.detach()[None]),
    "jvp": lambda f, x, y: torch.func.jvp(lambda x: f(x, y.detach()), (x.detach(),), (y.detach(),)),
    "hooks": lambda f, x, y: _with_hooks(f, x, y),
    "no_grad": lambda f, x, y: torch.no_grad()(f)(x, y),
    "saved": lambda f, x, y: [t.shape for t in f(x, y).grad_fn.saved_tensors],
    "ctx": lambda f, x, y: (f(x, y).grad_fn.slope, tuple(f(x, y).grad_fn.shape)),
}


def _with_hooks(f: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = f(x, y)
    return torch.autograd.grad(out.sum(), (x, y))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_what_no_table_tells_is_captured_then(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    fast = fusegrad.compile(written(tmp_path).Gate, backend="interpret")
    never = fusegrad.compile(written(tmp_path).Gate, backend="interpret")
    with config.patch(store=False):
        expected = COMPOSITIONS[name](never.apply, *operands())
    results(fast.apply)
    assert disk(fast) == "from disk"
    torch.testing.assert_close(COMPOSITIONS[name](fast.apply, *operands()), expected)


def test_explain_tells_what_came_from_disk(tmp_path: Path) -> None:
    for expected in ("cached on disk", "from disk"):
        fast = fusegrad.compile(written(tmp_path).Gate, backend="interpret")
        results(fast.apply)
        found = fusegrad.explain(fast, *operands())
        assert found.to_dict()["variants"][0]["disk"] == expected
        assert expected in str(found)


def test_a_second_derivative_is_the_one_of_eager(tmp_path: Path) -> None:
    def second(apply: Callable[..., Any]) -> Any:
        x, y = operands()
        (first,) = torch.autograd.grad(apply(x, y).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), y)

    called(written(tmp_path).Gate)
    cls = written(tmp_path).Gate
    fast = fusegrad.compile(cls, backend="interpret")
    results(fast.apply)
    assert disk(fast) == "from disk"
    torch.testing.assert_close(second(fast.apply), second(fusegrad.compile(cls, backend="reference").apply))


def test_every_field_of_a_kernel_has_a_form_on_disk() -> None:
    assert plans._FIELDS.keys() == {f.name for f in fields(Kernel) if f.compare}


def test_every_fact_of_a_capture_is_in_a_table_or_captured_again(tmp_path: Path) -> None:
    """A field that is added to a capture has to be decided on here as well."""
    called(written(tmp_path).Gate)
    fast = fusegrad.compile(written(tmp_path).Gate, backend="interpret")
    results(fast.apply)
    ((spec,),) = fast._fusegrad.table.by_facts.values()
    (entry,) = spec.backward.entries.values()
    for kind, stored in ((ForwardCapture, spec.captured.forward), (BackwardEntry, entry)):
        assert vars(stored).keys() | AGAIN >= {f.name for f in fields(kind)}


def test_what_comes_from_disk_has_every_attribute(tmp_path: Path) -> None:
    """One that is added to a specialisation or an executable is set for those from disk, too."""
    found = []
    for _ in range(2):
        fast = fusegrad.compile(written(tmp_path).Gate, backend="interpret")
        results(fast.apply)
        ((spec,),) = fast._fusegrad.table.by_facts.values()
        found.append((vars(spec).keys(), vars(next(iter(spec.executables.values()))).keys()))
    (spec_now, run_now), (spec_stored, run_stored) = found
    assert spec_now - spec_stored - {"session", "since"} == set()
    assert run_now - run_stored - {"trace"} == set()


AGAIN = {"serves_all_sizes", "session", "trace", "since", "fakes", "fake_outputs", "fake_hidden", "constants"}


def test_a_step_that_is_left_out_stays_so_on_disk(tmp_path: Path) -> None:
    """Kept and found under the same name; backward follows its forward, also where it runs outside of the block."""
    for again in range(2):
        fast = fusegrad.compile(written(tmp_path).Gate, backend="interpret", fullgraph=True)
        args = operands()
        with config.patch(disable=("fuse", "algebra")):
            out = fast.apply(*args)
        mine = torch.autograd.grad(out.sum(), args)
        for got, want in zip(mine, torch.autograd.grad(written(tmp_path).Gate.apply(*args).sum(), args), strict=True):
            torch.testing.assert_close(got, want)
        ((spec,),) = fast._fusegrad.table.by_facts.values()
        entries = spec.backward.entries.values()
        made = [*spec.executables.values(), *(x for e in entries for x in e.executables.values())]
        assert {e.switches.off for e in made} == {frozenset({"fuse", "algebra"})}
        assert disk(fast) == ("from disk" if again else "cached on disk")


# ------------------------------------------------------------------ by no one else
EDITS: dict[str, Callable[[str], str]] = {
    "forward": lambda s: s.replace("torch.sigmoid(x * slope)", "torch.tanh(x * slope)"),
    "backward": lambda s: s.replace("grad = grad * FACTOR", "grad = grad * FACTOR * 2"),
    "a constant in the code": lambda s: s.replace("+ bias", "+ bias * 1.5"),
    "the same number of another type": lambda s: s.replace("FACTOR = 2.0", "FACTOR = 2"),
    "a global": lambda s: s.replace("FACTOR = 2.0", "FACTOR = 2.5"),
    "what a dict holds": lambda s: s.replace('"shift": 0.5', '"shift": 0.75'),
    "a closure": lambda s: s.replace("closed_over(0.25)", "closed_over(0.5)"),
    "a default": lambda s: s.replace("slope=1.0", "slope=0.5"),
    "what is saved": lambda s: s.replace("(x, y, gate)\n", "(x, y, gate * 2)\n"),
    "what is put on ctx": lambda s: s.replace("ctx.slope, ctx.shape = slope,", "ctx.slope, ctx.shape = slope * 2,"),
    "a comment": lambda s: s.replace("# not the derivative", "# really not the derivative"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_class_is_captured_again(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    edited = EDITS[name](CLASS)
    assert edited != CLASS
    assert called(written(tmp_path, edited).Gate) == 0
    assert called(written(tmp_path).Gate) == 1, "and the first is still there"


@pytest.mark.parametrize("helper", [HELPER.replace("* by", "* by * 2"), HELPER.replace("3.0", "4.0")])
def test_an_edited_helper_in_another_module_is_captured_again(tmp_path: Path, helper: str) -> None:
    called(written(tmp_path).Gate)
    assert called(written(tmp_path, helper=helper).Gate) == 0


CHANGES: dict[str, Callable[[ModuleType], Any]] = {
    "a global": lambda m: setattr(m, "FACTOR", 7.0),
    "what a dict holds": lambda m: m.SETTINGS.update(shift=7.0),
    "a helper": lambda m: setattr(m.kept_helper, "scaled", lambda t: t * 7.0),
    "a default of a helper": lambda m: setattr(m.kept_helper.scaled, "__defaults__", (7.0,)),
    "the code of a helper": lambda m: setattr(m.kept_helper.scaled, "__code__", (lambda t, by=3.0: t - by).__code__),
    "a closure": lambda m: setattr(m.Gate.forward.__closure__[0], "cell_contents", 7.0),
    "a method": lambda m: setattr(m.Gate, "backward", staticmethod(lambda ctx, g: (g, g * 2, None))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_without_an_edit_is_captured_again(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    module = written(tmp_path)
    CHANGES[name](module)
    assert called(module.Gate) == 0


@pytest.mark.parametrize("name", ["a global", "what a dict holds", "a helper", "a closure"])
def test_what_changes_after_a_stored_call_is_noticed(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    module = written(tmp_path)
    fast = fusegrad.compile(module.Gate, backend="interpret")
    results(fast.apply)
    assert disk(fast) == "from disk"
    CHANGES[name](module)
    torch.testing.assert_close(results(fast.apply), results(module.Gate.apply), rtol=2e-6, atol=2e-6)


PATCHES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a function": (torch, "sigmoid", lambda old: lambda t: old(t) * 2),
    "a method": (torch.Tensor, "erfinv", lambda old: lambda t: old(t) * 2),
    "an operator": (torch.Tensor, "__mul__", lambda old: lambda a, b: old(a, b) + 1),
    "another method of torch's": (torch.Tensor, "erfinv", lambda old: torch.Tensor.erfc),
    "another function": (torch.nn.functional, "silu", lambda old: lambda t: old(t) * 2),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_torch_that_someone_changed_reads_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    called(written(tmp_path).Gate)
    place, attribute, changed = PATCHES[name]
    monkeypatch.setattr(place, attribute, changed(getattr(place, attribute)))
    assert called(written(tmp_path).Gate) == 0
    monkeypatch.undo()


def test_a_patch_that_says_it_is_torchs_own_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    called(written(tmp_path).Gate)
    old = torch.sigmoid

    def doubled(t: Any) -> Any:
        return old(t) * 2

    doubled.__module__, doubled.__name__ = "torch", "sigmoid"
    monkeypatch.setattr(torch, "sigmoid", functools.wraps(old)(doubled))
    assert called(written(tmp_path).Gate) == 0


def _with_default_dtype(cls: type) -> int:
    torch.set_default_dtype(torch.float64)
    try:
        return called(cls)
    finally:
        torch.set_default_dtype(torch.float32)


def _deterministic(cls: type) -> int:
    torch.use_deterministic_algorithms(True)
    try:
        return called(cls)
    finally:
        torch.use_deterministic_algorithms(False)


def _under(mode: Any) -> Callable[[type], int]:
    def call(cls: type) -> int:
        with mode():
            return called(cls)

    return call


STATES: dict[str, Callable[[type], int]] = {
    "default dtype": _with_default_dtype,
    "deterministic": _deterministic,
    "default device": _under(lambda: torch.device("cpu")),
    "settings": _under(lambda: config.patch(check=False)),
    "a step left out": _under(lambda: config.patch(disable="algebra")),
    "switched off": _under(lambda: config.patch(store=False)),
    "a constant argument": lambda cls: called(cls, 0.5),
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_of_torch_is_captured_again(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    assert STATES[name](written(tmp_path).Gate) == 0


def test_autocast_is_not_kept(tmp_path: Path) -> None:
    cls = written(tmp_path).Gate
    for _ in range(2):
        fast = fusegrad.compile(cls, backend="interpret")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results(fast.apply)
        assert disk(fast) != "from disk"
        assert "autocast" in disk(fast)


@pytest.mark.parametrize("version", ["fusegrad", "torch", "triton"])
def test_another_version_is_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    called(written(tmp_path).Gate)
    other = {**entry_files.versions(), version: "0.0"}
    monkeypatch.setattr(entry_files, "versions", lambda: other)
    monkeypatch.setattr(keeper, "IMPORTED", keeper.installation())
    assert called(written(tmp_path).Gate) == 0


def test_edited_sources_of_fusegrad_are_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called(written(tmp_path).Gate)
    monkeypatch.setattr(keeper, "sources_of_ours", lambda: ["edited"])
    assert called(written(tmp_path).Gate) == 1, "what this process imported is what counts"
    monkeypatch.setattr(keeper, "IMPORTED", keeper.installation())
    assert called(written(tmp_path).Gate) == 0


# ------------------------------------------------------------------ what cannot be told with certainty is not kept
UNSURE = {
    "a tensor from outside": ("+ bias", "+ bias + TABLE[0]"),
    "an import": ("            gate = torch.sig", "            import math\n            gate = torch.sig"),
    "an operator that is registered": ("torch.sigmoid(x * slope)", "torch.ops.aten.sigmoid(x * slope)"),
    "a bound method": ("+ bias", "+ bias + Config().__class__.power"),
    "a nested Function": ("torch.sigmoid(x * slope)", "Inner.apply(x * slope)"),
    "a partial of a class": ("* FACTOR + ", "* partial(Config)().power + "),
}
INNER = '''
class Inner(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sigmoid()
    @staticmethod
    def backward(ctx, g):
        return g
'''


@pytest.mark.parametrize("name", UNSURE)
def test_what_is_unsure_is_not_kept(tmp_path: Path, name: str) -> None:
    source = CLASS.replace("def closed_over", INNER + "\ndef closed_over").replace(*UNSURE[name])
    for _ in range(2):
        cls = written(tmp_path, source).Gate
        fast = fusegrad.compile(cls, backend="interpret")
        mine = results(fast.apply)
        torch.testing.assert_close(mine, results(cls.apply), rtol=2e-6, atol=2e-6)
        assert disk(fast) != "from disk"
        assert disk(fast).startswith("traced in every process: ")


def test_a_class_without_a_file_is_not_kept(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "kept_class"}
    written(tmp_path)
    exec(compile(CLASS, "<notebook cell>", "exec"), names)
    fast = fusegrad.compile(names["Gate"], backend="interpret")
    results(fast.apply)
    assert "is in no file" in disk(fast)


# ------------------------------------------------------------------ files that are not what they were
def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("capture.json"))


def _rewritten(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Damage that the sums do not show: they are made anew."""

    def damage(path: Path) -> None:
        content = json.dumps(change(json.loads(path.read_text()))).encode()
        path.write_bytes(content)
        manifest = json.loads((path.parent / "manifest.json").read_text())
        manifest["files"]["capture.json"] = entry_files.sha256(content)
        (path.parent / "manifest.json").write_text(json.dumps(manifest))

    return damage


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:100]),
    "empty": lambda p: p.write_bytes(b""),
    "a flipped bit": lambda p: p.write_bytes(p.read_bytes().replace(b"sigmoid", b"sigmoie")),
    "gone": lambda p: p.unlink(),
    "no manifest": lambda p: (p.parent / "manifest.json").unlink(),
    "no JSON": lambda p: _rewritten(lambda d: "nothing of the kind")(p),
    "another format": _rewritten(lambda d: {**d, "format": 0}),
    "no plan": _rewritten(lambda d: {k: v for k, v in d.items() if k == "format"}),
    "a guard that calls": _rewritten(
        lambda d: {**d, "forward": {**d["forward"], "guard": ["__import__('os').abort()"]}} if "forward" in d else d
    ),
    "an operation that does not exist": _rewritten(lambda d: json.loads(json.dumps(d).replace("sigmoid", "sigmund"))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_captured_again(tmp_path: Path, name: str) -> None:
    called(written(tmp_path).Gate)
    assert len(entries(tmp_path)) == 2
    for path in entries(tmp_path):
        DAMAGES[name](path)
    cls = written(tmp_path).Gate
    fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
    torch.testing.assert_close(results(fast.apply), results(cls.apply), rtol=2e-6, atol=2e-6)
    assert disk(fast) != "from disk"
    assert called(written(tmp_path).Gate) == 1, "and the entry is whole again"


def test_an_entry_of_another_key_is_not_taken(tmp_path: Path) -> None:
    called(written(tmp_path).Gate)
    (kept,) = (p.parent for p in entries(tmp_path) if "forward" in json.loads(p.read_text()))
    called(written(tmp_path, EDITS["forward"](CLASS)).Gate)
    others = [p.parent for p in entries(tmp_path) if p.parent != kept and "forward" in json.loads(p.read_text())]
    for name in ("capture.json", "manifest.json"):
        (others[0] / name).write_bytes((kept / name).read_bytes())
    assert called(written(tmp_path, EDITS["forward"](CLASS)).Gate) == 0


# ------------------------------------------------------------------ another process
SCRIPT = """
import json, sys, torch, fusegrad, kept_class
args = [torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_() for _ in range(2)]
out = fusegrad.compile(kept_class.Gate, backend="interpret", fullgraph=True).apply(*args)
grads = torch.autograd.grad(out.sum() if "expanded" in sys.argv else out.square().sum(), args)
print(json.dumps([fusegrad.stats(), [t.tolist() for t in (out, *grads)]]))
"""


def process(tmp_path: Path, seed: str, *words: str) -> Any:
    """Statistics and results of a process of its own."""
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "FUSEGRAD_STORE": "1", "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def test_another_process_finds_it(tmp_path: Path) -> None:
    """A root of a size is a function of Python to torch, which lies elsewhere in each process."""
    written(tmp_path, CLASS.replace("normed * FACTOR", "normed * FACTOR * x.shape[0] ** -0.5"))
    (first, expected), (second, again) = process(tmp_path, "1"), process(tmp_path, "2")
    assert (first["from_disk"], second["from_disk"], second["captures"]) == (0, 1, 0)
    assert expected == again
    third, (out, *_) = process(tmp_path, "3", "expanded")  # traced again, for a gradient of another layout
    assert third["from_disk"] == 1 and out == expected[0]


EQUAL = '''
import torch
from torch.autograd import Function

class Attention(Function):
    @staticmethod
    def forward(ctx, q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ g
'''


def test_sizes_that_are_found_to_be_equal_may_be_named_otherwise_the_second_time(tmp_path: Path) -> None:
    """That scores have as many columns as there are values is known once forward is lowered, which is done once."""
    random = torch.Generator().manual_seed(0)
    args = [torch.randn(2, 3, 45, 16, generator=random, requires_grad=True) for _ in range(3)]
    for gradient in (torch.randn(2, 3, 45, 16, generator=random), torch.ones(()).expand(2, 3, 45, 16)):
        cls = written(tmp_path, EQUAL).Attention
        fast = fusegrad.compile(cls, backend="interpret", fullgraph=True)
        ours, users = (torch.autograd.grad(c.apply(*args), args, gradient) for c in (fast, cls))
        for mine, theirs in zip(ours, users, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert disk(fast) == "from disk"


KEEPING = '''
import torch
from torch.autograd import Function

class Gate(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.same, ctx.shape, ctx.mode, ctx.scale = x is y, y.shape, ("sum", 2, None), 0.5
        ctx.save_for_backward(x, y)
        return x * y + (1 if ctx.same else 2)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        assert ctx.mode == ("sum", 2, None) and not ctx.same and ctx.shape == y.shape
        return g * y * 2 * ctx.scale, g * x * 7 * ctx.shape[0]
'''


def test_what_is_on_ctx_is_known_where_the_world_has_changed_since(tmp_path: Path) -> None:
    """backward, of a layout that is not on disk, is the user's own: forward cannot be captured again for its ctx."""
    called(written(tmp_path, KEEPING).Gate)
    cls = written(tmp_path, KEEPING).Gate
    fast = fusegrad.compile(cls, backend="interpret")
    found = []
    for apply in (fast.apply, cls.apply):
        args = operands()
        out = apply(*args)
        torch.set_default_dtype(torch.float64)
        try:
            found.append(torch.autograd.grad(out, args, torch.ones((), dtype=torch.float32).expand(out.shape)))
        finally:
            torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found[0], found[1])
    assert "what it reads is no longer what it was" in str(fast._fusegrad.ledger.records)
