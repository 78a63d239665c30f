"""torch.export of models that call compiled Functions: the program calls operators, differentiates as the class does,
and is saved and loaded by a process that has captured nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sound
import torch
import wrong
from torch.export import Dim, export

import fusegrad
from fusegrad.ir.versions import version_numbers

HERE = Path(__file__).parent
ROWS = ({0: Dim("rows", min=2)},)


def sample(rows=4):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))


def gradients(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.sum().backward()
    return y.detach(), x.grad, *[p.grad for p in model.parameters()]


def called(program):
    return [str(n.target) for n in program.graph.nodes if str(n.target).startswith("fusegrad.")]


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_has_the_backward_that_was_written(strict) -> None:
    model = sound.Model()
    program = export(model, (sample(),), strict=strict, dynamic_shapes=ROWS)
    assert len(called(program)) == 2
    loaded = program.module()
    for rows in (4, 7):
        torch.testing.assert_close(gradients(loaded, sample(rows)), gradients(model, sample(rows)))


def test_transforms_of_a_program() -> None:
    model = sound.Model()
    program = export(model, (sample(),), dynamic_shapes=ROWS).module()
    x = sample(5)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f: torch.vmap(f)(torch.stack([x, x + 1])),
        lambda f: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.vmap(torch.func.grad(lambda x: f(x[None]).sum()))(x),
        lambda f: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x),
    ):
        torch.testing.assert_close(transform(program), transform(model))


def test_vmap_inside_of_a_program() -> None:
    x = sample()
    program = export(sound.Lanes(), (x,))
    assert len(called(program)) == 1
    torch.testing.assert_close(gradients(program.module(), x), gradients(sound.Lanes(), x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_derivative_inside_of_a_program_is_refused_by_name(strict) -> None:
    """torch.export (2.13) makes constants of what torch.func.grad wraps, of any operation."""
    with pytest.raises(Exception, match=r"Louder.apply cannot be in a graph of torch.export: .*no derivative"):
        export(sound.Slope(), (sample(),), strict=strict)


WRITES_VMAP = version_numbers(torch.__version__) >= (2, 12)
"""torch.export.save of torch 2.11 writes no program with torch.func.vmap in it, of any operation."""
LOADER = """
import sys
sys.path.insert(0, sys.argv[1])
import sound, torch, fusegrad
from fusegrad.runtime.dynamo import operators

assert not operators.known
sound.SCALE = 3.0
try:
    fusegrad.load_program(sys.argv[2])
except fusegrad.FusegradError as error:
    assert "sound:Scaled is no longer what it was" in str(error), error
else:
    raise AssertionError("a class that reads another number was taken for the same")
sound.SCALE = 1.0
model = fusegrad.load_program(sys.argv[2]).module()
x, *expected = torch.load(sys.argv[3])
y = model(x.requires_grad_())
found = y.detach(), torch.autograd.grad(y.sum(), x)[0]
torch.testing.assert_close(found, tuple(expected))
print("loaded")
"""


def test_another_process_loads_it(tmp_path) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lanes = sound.Model(), sound.Lanes() if WRITES_VMAP else torch.nn.Identity()

        def forward(self, x):
            return self.model(x) + self.lanes(x) + sound.Scaled.apply(x)

    both, x = Both(), sample()
    fusegrad.save_program(export(both, (x,)), tmp_path / "both.pt2")
    given = x.clone().requires_grad_()
    y = both(given)
    torch.save([x, y.detach(), torch.autograd.grad(y.sum(), given)[0]], tmp_path / "tensors.pt")
    command = [sys.executable, "-c", LOADER, str(HERE), str(tmp_path / "both.pt2"), str(tmp_path / "tensors.pt")]
    environment = {**os.environ, "FUSEGRAD_STORE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.stdout.strip().endswith("loaded"), done.stderr[-3000:]


def test_another_process_loads_random_numbers(tmp_path) -> None:
    """Their operator comes with `load_program`, whatever was asked of fusegrad before."""

    class Noisy(torch.nn.Module):
        def forward(self, x):
            return x + fusegrad.random.uniform(x.shape, 3, like=x)

    fusegrad.save_program(export(Noisy(), (torch.zeros(4),)), tmp_path / "noisy.pt2")
    load = f"""
import fusegrad, torch
print(fusegrad.load_program({str(tmp_path / "noisy.pt2")!r}).module()(torch.zeros(4)).tolist())"""
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == str(Noisy()(torch.zeros(4)).tolist()), done.stderr[-3000:]


def test_a_class_that_nobody_can_import_is_refused_by_name(tmp_path) -> None:
    class Local(torch.nn.Module):
        def forward(self, x):
            return local.apply(x)

    local = fusegrad.compile(wrong.sine(None))
    program = export(Local(), (sample(),))
    with pytest.raises(fusegrad.FusegradError, match="cannot be imported by another process"):
        fusegrad.save_program(program, tmp_path / "local.pt2")


@pytest.mark.parametrize("strict", [False, True])
def test_a_class_that_is_declared_out_is_refused_by_name(strict) -> None:
    class Out(torch.nn.Module):
        def forward(self, x):
            return out.apply(x)

    seen = []
    out = fusegrad.compile(wrong.sine(False, seen))
    with pytest.raises(Exception, match=r"Sine.apply cannot be in a graph of torch.*it declares is_traceable = False"):
        export(Out(), (sample(),), strict=strict)
    assert not seen
