"""The exported module under vmap, in a process without fusegrad: what every composition gives.

Compared are the compiled class under vmap, and the compiled class in a loop over the lanes, which costs no captures.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad.benchmarks import functions as f
from fusegrad.runtime.export.export import ExportFormatError
from fusegrad.runtime.export.gather.gathered import ExportError

COMPOSITIONS = '''
import torch
from torch.func import grad, jvp, vmap

def compositions(function, args):
    """name -> results, of a function of tensors and constants."""
    at = [i for i, a in enumerate(args) if torch.is_tensor(a)]
    one = [args[i] for i in at]
    moving = tuple(i for i, t in enumerate(one) if t.is_floating_point())
    three = [torch.stack([t.roll(i) for i in range(3)]) for t in one]
    two = [torch.stack([t, t.roll(1)]) for t in one]
    six = [torch.stack([t, t.roll(1)]) for t in three]

    def call(*tensors):
        supply = iter(tensors)
        results = function.apply(*(next(supply) if i in at else a for i, a in enumerate(args)))
        return tuple(r for r in (results if isinstance(results, tuple) else (results,)) if torch.is_tensor(r))

    def loss(results):  # the last output is left out where there are several: its gradient is None
        floats = [r for r in results if r.is_floating_point()]
        return sum(r.float().cos().sum() for r in floats[:max(1, len(floats) - 1)])

    gradient = grad(lambda *tensors: loss(call(*tensors)), moving)

    def pushed(*tensors):
        def moved(*values):
            given = dict(zip(moving, values))
            return call(*(given.get(i, t) for i, t in enumerate(tensors)))
        return jvp(moved, tuple(tensors[i] for i in moving), tuple(tensors[i].cos() for i in moving))[1]

    def only(chosen, many, few):
        dims = tuple(0 if i == chosen else None for i in range(len(one)))
        return dims, [m if i == chosen else t for i, (m, t) in enumerate(zip(many, few))]

    yield "all", vmap(call)(*three)
    yield "last axes", vmap(call, -1, -1)(*(t.movedim(0, -1) for t in three))
    yield "vmap(grad)", vmap(gradient)(*three)
    yield "vmap(jvp)", vmap(pushed)(*three)
    yield "vmap(vmap)", vmap(vmap(call))(*six)
    yield "vmap(vmap(grad))", vmap(vmap(gradient))(*six)
    for i in range(len(one)):
        dims, tensors = only(i, three, one)
        yield f"{i} alone", vmap(call, dims)(*tensors)
        yield f"vmap(grad) of {i}", vmap(gradient, dims)(*tensors)
        yield f"grad(vmap) of {i}", grad(lambda *ts, dims=dims: loss(vmap(call, dims)(*ts)), moving)(*tensors)
    dims = tuple(None if i else 0 for i in range(len(one)))
    yield "vmap(vmap of one)", vmap(vmap(call, dims))(*only(0, six, two)[1])
    yield "vmap of one(vmap)", vmap(vmap(call), dims)(*only(0, six, three)[1])
    first = moving[0]
    def along(t):
        return vmap(call)(*(t if i == first else m for i, m in enumerate(three)))
    yield "jvp(vmap)", jvp(along, (three[first],), (three[first].cos(),))[1]
'''
COMPARE = """
import runpy
for path in sys.argv[1:]:
    args, expected = torch.load(path + ".pt")
    function = next(v for k, v in runpy.run_path(path).items() if k + ".py" == path.rsplit("/")[-1])
    found = dict(compositions(function, args))
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-4, msg=lambda m: f"{path}: {name}: {m}")
    print("compared", len(found))
    runpy.run_path(path, run_name="__main__")
    try:
        runpy.run_path(path[:-3] + "_wrong.py", run_name="__main__")
    except AssertionError:
        print("not agreed")
"""


class Apart(Function):
    """Nothing saved, several outputs, one of them for all lanes the same, and objects between the tensors."""

    @staticmethod
    def forward(x, y, name):
        return x * 2 + y.sum(), (x > 0).long(), name, torch.arange(4), y * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.columns = inputs[1].shape[0]

    @staticmethod
    def backward(ctx, g, i, name, j, h):
        return g * 2, g.sum().expand(ctx.columns) + 3 * h, None


CASES: dict[str, tuple[Any, ...]] = {
    "RMSNorm": (f.RMSNorm, torch.randn(5, 32), torch.randn(32), 1e-6),
    "SwiGLU": (f.SwiGLU, torch.randn(5, 8), torch.randn(5, 8)),
    "CrossEntropy": (f.CrossEntropy, torch.randn(6, 20), torch.tensor([3, 1, -100, 0, 19, 7]), -100),
    "Apart": (Apart, torch.randn(5, 8), torch.randn(3), "name"),
}


def looped(function: Any, in_dims: Any = 0, out_dims: int = 0) -> Any:
    """vmap by hand, of a function that returns a tuple: one call for each lane."""

    def call(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        pairs = list(zip(args, dims, strict=True))
        count = next(a.shape[d] for a, d in pairs if d is not None)
        lanes = [function(*(a if d is None else a.select(d, i) for a, d in pairs)) for i in range(count)]
        return tuple(torch.stack(results, out_dims) for results in zip(*lanes, strict=True))

    return call


@pytest.mark.parametrize("name", CASES)
def test_every_composition_gives_what_the_compiled_class_gives(name: str, tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(COMPOSITIONS, space)
    by_loops = {**space, "vmap": looped}
    exec(COMPOSITIONS.replace("grad, jvp, vmap", "grad, jvp"), by_loops)
    cls, *args = CASES[name]
    path = str(tmp_path / f"{name}.py")
    text = fusegrad.export(cls, *args, path=path, derivatives=("jvp", "vmap"))
    assert "jvp and vmap." in text.splitlines()[0] and f"class {name}Batched(" in text
    wrong = text.replace("argument.movedim(dim, 0)", "argument.movedim(dim, 0).flip(0)")
    Path(f"{path[:-3]}_wrong.py").write_text(wrong, encoding="utf-8")
    expected = (space if cls is f.SwiGLU else by_loops)["compositions"](fusegrad.compile(cls), args)
    torch.save((args, dict(expected)), f"{path}.pt")
    whole = f"import sys; sys.modules['fusegrad'] = None\n{COMPOSITIONS}{COMPARE}"
    command, env = [sys.executable, "-W", "ignore", "-c", whole, path], {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("compared", "agrees with the class as it was written", "not agreed"):
        assert done.stdout.count(said) == 1, (said, done.stdout)


class Counts(Function):
    """Integers alone come out, and no backward; the kernel over lanes holds rows whole."""

    @staticmethod
    def forward(x):
        return (x > 0).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def test_limits_of_kernels_over_lanes_are_told_and_required(tmp_path: Path) -> None:
    path = tmp_path / "counts.py"
    text = fusegrad.export(Counts, "f32[20,8]", path=path, derivatives=("vmap",))
    assert "vmap holds for: x: f32[lanes, M, N]." in text
    (limit,) = re.findall(r"^vmap: N is any up to (\d+);", text, re.M)
    with pytest.raises(ValueError, match=rf"up to {limit}: export it again with --sizes N={int(limit) + 1}"):
        torch.vmap(runpy.run_path(str(path))["Counts"].apply)(torch.ones(1, 1, int(limit) + 1))


def test_vmap_needs_no_jvp() -> None:
    text = fusegrad.export(*CASES["SwiGLU"], format="py", derivatives="vmap").split("# ---- The class")[0]
    assert "def jvp" not in text.split("class SwiGLU(")[1] and "Gradients of gradients and jvp are not" in text


class OwnVmap(Function):
    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * 2

    @staticmethod
    def vmap(info, in_dims, x):
        return x * 3, in_dims[0]


class Draws(Function):
    @staticmethod
    def forward(ctx, x):
        kept = torch.rand_like(x) > 0.5
        ctx.save_for_backward(kept)
        return x * kept

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Views(Function):
    @staticmethod
    def forward(ctx, x):
        return x.t()

    @staticmethod
    def backward(ctx, g):
        return g.t()


class Writes(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (OwnVmap, "a vmap of its own"),
        (Draws, "draws random numbers"),
        (Views, "an output is an argument, a view of one"),
        (Writes, "writes into an argument"),
    ],
)
def test_what_has_no_vmap_in_a_file(cls: Any, said: str) -> None:
    with pytest.raises(ExportError, match=said) as caught:
        fusegrad.export(cls, "f32[20,8]", format="py", derivatives=("vmap",))
    assert "test_vmap.py" in str(caught.value) and "fix:" in str(caught.value)


def test_derivatives_are_for_modules() -> None:
    with pytest.raises(ExportFormatError, match="are for the format py alone"):
        fusegrad.export(*CASES["SwiGLU"], format="json", derivatives=("vmap",))
