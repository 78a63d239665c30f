"""`explain`: launches, bytes, reasons; from tensors, meta tensors and specifications."""

from __future__ import annotations

import ast
import json

import pytest
import torch
from function_samples import CrossEntropy, Cube, LayerNorm, Linear, RMSNorm, Softmax, SwiGLU, leaf
from test_traceable import AssignsData, Declared, ReturnsSets
from torch.autograd import Function

import fusegrad
from fusegrad.ir import verify
from fusegrad.ir.errors import SpecError
from fusegrad.runtime.report.explain import UnknownTargetError
from fusegrad.runtime.values.tensor_specs import parse_spec

ROWS, WIDTH = 512, 1024
SUITE = {
    "Softmax": (Softmax, (f"f32[{ROWS},{WIDTH}]",), 4 * ROWS * WIDTH),
    "RMSNorm": (RMSNorm, (f"f32[{ROWS},{WIDTH}]", f"f32[{WIDTH}]"), 4 * (ROWS * WIDTH + WIDTH + ROWS)),
    "LayerNorm": (LayerNorm, (f"f32[{ROWS},{WIDTH}]", f"f32[{WIDTH}]", f"f32[{WIDTH}]"),
                  4 * (ROWS * WIDTH + WIDTH + ROWS)),
    "CrossEntropy": (CrossEntropy, (f"f32[{ROWS},{WIDTH}]", f"i64[{ROWS}]"), 4 * ROWS * WIDTH + 8 * ROWS),
    "SwiGLU": (SwiGLU, (f"f32[{ROWS},{WIDTH}]", f"f32[{ROWS},{WIDTH}]"), 4 * 3 * ROWS * WIDTH),
}  # fmt: skip


@pytest.mark.parametrize("name", SUITE)
def test_launches_and_saved_bytes(name) -> None:
    cls, args, saved = SUITE[name]
    found = fusegrad.explain(cls, *args).to_dict()
    assert found["launches"]["forward"] == 1 or name == "CrossEntropy"
    assert found["launches"]["forward"] <= 2 and 1 <= found["launches"]["backward"] <= 2
    assert all(k["kind"] == "triton" for k in found["kernels"])
    assert found["saved_bytes"] <= saved
    for direction in ("forward", "backward"):
        moved, least = found["bytes"][direction], found["bytes"][f"minimal_{direction}"]
        assert 0 < least <= moved <= 2 * least


def test_a_minimum_cut_saves_less_than_the_user() -> None:
    assert fusegrad.explain(SwiGLU, *SUITE["SwiGLU"][1]).saved_bytes == 4 * 2 * ROWS * WIDTH
    assert fusegrad.explain(SwiGLU, *SUITE["SwiGLU"][1], target="cpu").saved_bytes == 4 * 3 * ROWS * WIDTH


def test_bytes_of_a_kernel_that_is_known() -> None:
    class Add(Function):
        @staticmethod
        def forward(ctx, a, b):
            return a + b

        @staticmethod
        def backward(ctx, g):
            return g * 2, g * 3

    found = fusegrad.explain(Add, "bf16[100,60]", "bf16[100,60]").to_dict()
    assert found["bytes"] == {
        "forward": 3 * 2 * 6000, "backward": 3 * 2 * 6000, "minimal_forward": 3 * 2 * 6000,
        "minimal_backward": 3 * 2 * 6000,
    }  # fmt: skip
    (forward,) = [k for k in found["kernels"] if k["direction"] == "forward"]
    assert (forward["bytes_read"], forward["bytes_written"]) == (2 * 2 * 6000, 2 * 6000)
    assert found["saved_bytes"] == 0


def test_the_schema_of_the_dictionary() -> None:
    found = fusegrad.explain(RMSNorm, *SUITE["RMSNorm"][1]).to_dict()
    report = {"schema", "name", "target", "methods", "kernels", "launches", "bytes", "saved_bytes", "kept", "groups",
              "cuts", "opaque", "products", "segments", "variants", "numerics", "eager", "peak_memory", "slabs",
              "made_again"}  # fmt: skip
    assert set(found) == report and found["schema"] == 2
    assert found["opaque"] == [] and not any(found["segments"].values())
    assert (found["name"], found["target"]) == ("RMSNorm", "cuda:90")
    assert set(found["methods"]) == {"forward", "setup_context", "backward", "jvp", "vmap"}
    assert all(set(m) == {"status", "reason", "where", "code", "fix"} for m in found["methods"].values())
    assert {n: m["status"] for n, m in found["methods"].items()} == {
        "forward": "compiled", "setup_context": "compiled", "backward": "compiled", "jvp": "derived",
        "vmap": "derived",
    }  # fmt: skip
    facts = {"name", "direction", "source", "bytes_read", "bytes_written", "bytes_cached", "kind", "times"}
    for kernel in found["kernels"]:
        assert set(kernel) == facts | {"walk"}
        assert kernel["direction"] in ("forward", "backward")
        ast.parse(kernel["source"])
        assert kernel["name"] in kernel["source"]
    json.dumps(found)


def test_the_cost_in_eager_counts_operations_and_the_memory_that_they_touch() -> None:
    class Scaled(Function):
        @staticmethod
        def forward(ctx, x, row):
            ctx.save_for_backward(row)
            return (x * row.expand(64, 100).contiguous()).T  # a copy, a product, and two views

        @staticmethod
        def backward(ctx, g):
            return g.T * ctx.saved_tensors[0], None

    found = fusegrad.explain(Scaled, "f32[64,100]", "f32[100]")
    whole, row = 4 * 64 * 100, 4 * 100
    assert found.to_dict()["eager"] == {
        "forward": {"launches": 2, "bytes": (row + whole) + 3 * whole, "at_least": False},
        "backward": {"launches": 1, "bytes": 2 * whole + row, "at_least": False},
    }
    assert f"; eager: 2 launches, {row + 4 * whole:,} bytes, " in str(found)


def test_a_derived_backward_has_no_cost_in_eager() -> None:
    class Square(Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx, t):
            return 2 * ctx.saved_tensors[0] * t

    found = fusegrad.explain(Square, "f32[64]")
    assert set(found.directions) == {"forward", "backward"} and set(found.to_dict()["eager"]) == {"forward"}


def test_the_text_and_the_module() -> None:
    found = fusegrad.explain(fusegrad.compile(RMSNorm), *SUITE["RMSNorm"][1])
    text = str(found)
    for part in ("RMSNorm on cuda:90", "forward: 1 launch, ", "saved tensors:", "x the minimum traffic"):
        assert part in text
    assert repr(found) == text
    ast.parse(found.module)
    assert all(k.name in found.module for k in found.kernel_records)
    assert len(found.kernels) == len(found.kernel_records)


def test_the_program_is_valid() -> None:
    found = fusegrad.explain(LayerNorm, *SUITE["LayerNorm"][1])
    program = found.program
    verify(program.forward)
    for graph in program.backward.values():
        verify(graph)
    assert found.graph() is program.forward and found.graph("backward") in program.backward.values()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ("f32[8,16]", "f32[16]"),
        lambda: (torch.empty(8, 16, device="meta"), torch.empty(16, device="meta")),
        lambda: (torch.randn(8, 16), torch.randn(16)),
        lambda: (leaf(8, 16), leaf(16)),
    ],
)
def test_arguments_of_every_kind(make) -> None:
    expected = fusegrad.explain(RMSNorm, "f32[8,16]", "f32[16]").to_dict()
    assert fusegrad.explain(RMSNorm, *make()).to_dict() == expected


def test_nothing_runs_and_nothing_is_kept(monkeypatch) -> None:
    fast = fusegrad.compile(Softmax)
    fusegrad.explain(fast, "f32[1000000,100000]")
    assert not fast._fusegrad.table.by_facts and not fast._fusegrad.ledger.records


def test_inputs_that_need_no_gradient() -> None:
    found = fusegrad.explain(Softmax, leaf(3, 4)).to_dict()
    assert found["launches"]["backward"] == 1


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942", "cpu"])
def test_targets(target) -> None:
    found = fusegrad.explain(RMSNorm, *SUITE["RMSNorm"][1], target=target).to_dict()
    assert found["target"] == target
    kinds = {k["kind"] for k in found["kernels"]}
    assert kinds == ({"aten"} if target == "cpu" else {"triton"})
    if target == "cpu":
        assert found["launches"]["forward"] > 4 and all(k["source"] == "" for k in found["kernels"])


@pytest.mark.parametrize(
    ("name", "target"),
    [("h100", "cuda:90"), ("RTX 4090", "cuda:89"), ("3090", "cuda:86"), ("T4", "cuda:75"), ("l4", "cuda:89"),
     ("mi300x", "hip:gfx942"), ("cuda:100", "cuda:100")],
)  # fmt: skip
def test_devices_are_targets_by_their_names(name: str, target: str) -> None:
    found = fusegrad.explain(Softmax, "f16[4096,4096]", target=name)
    assert (found.target, found.device, found.to_dict()["target"]) == (target, name, target)
    assert found.directions["forward"].launches


def test_kernels_of_a_device_are_for_its_own_multiprocessors() -> None:
    args = ("f16[16384,4096]", "f16[4096]", 1e-6)
    l4, rtx = (fusegrad.explain(RMSNorm, *args, target=name) for name in ("l4", "4090"))
    assert l4.target == rtx.target
    assert l4.directions["backward"].moved != rtx.directions["backward"].moved  # partial sums of other programs


@pytest.mark.parametrize("target", ["cuda:42", "tpu", "", "cuda"])
def test_an_unknown_target(target) -> None:
    if not target:
        assert fusegrad.explain(Softmax, "f32[3,4]", target=target).target == "cuda:90"
        return
    with pytest.raises(UnknownTargetError, match=f"target='{target}'.*there is no such target") as found:
        fusegrad.explain(Softmax, "f32[3,4]", target=target)
    assert "cuda:90" in str(found.value) and isinstance(found.value, ValueError)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("f32[3,4]", (torch.float32, (3, 4))),
        (" bf16 [ 8_192 , 4 ] ", (torch.bfloat16, (8192, 4))),
        ("float16[2]", (torch.float16, (2,))),
        ("i64[]", (torch.int64, ())),
        ("bool[2,0]", (torch.bool, (2, 0))),
        ("double[1,]", (torch.float64, (1,))),
    ],
)
def test_specifications(spec, expected) -> None:
    assert parse_spec(spec) == expected


@pytest.mark.parametrize("spec", ["f31[3]", "f32[3", "[3]", "f32[a]", "f32[-1]", "f32(3)", ""])
def test_specifications_that_cannot_be_read(spec) -> None:
    with pytest.raises(SpecError, match="not a tensor specification"):
        parse_spec(spec)


def test_a_misspelt_specification_is_an_error_and_a_text_argument_is_none() -> None:
    with pytest.raises(SpecError):
        fusegrad.explain(Softmax, "f99[3,4]")

    class Mode(Function):
        @staticmethod
        def forward(ctx, x, mode):
            return x.sum() if mode == "sum" else x.mean()

        @staticmethod
        def backward(ctx, g):
            return g, None

    assert fusegrad.explain(Mode, "f32[3,4]", "sum").to_dict()["methods"]["forward"]["status"] == "compiled"


@pytest.mark.parametrize(
    ("cls", "reason"), [(ReturnsSets, "a set"), (AssignsData, ".data"), (Declared, "is_traceable")]
)
def test_opaque_methods(cls, reason) -> None:
    found = fusegrad.explain(cls, "f32[3]").to_dict()
    forward = found["methods"]["forward"]
    assert forward["status"] == "opaque" and reason in forward["reason"]
    assert forward["where"].rsplit(":", 1)[0] == cls.forward.__code__.co_filename
    assert found["launches"] == {"forward": 0, "backward": 0} and found["saved_bytes"] == 0
    assert reason in str(fusegrad.explain(cls, "f32[3]"))


def test_a_forward_that_is_compiled_for_some_arguments() -> None:
    class Either(Function):
        @staticmethod
        def forward(ctx, x, n):
            if n > 1:
                SEEN[0] += 1
                return x * SEEN[0]
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g, None

    fast, x = fusegrad.compile(Either), torch.ones(3)
    fast.apply(x, 1)
    with pytest.warns(fusegrad.FallbackWarning):
        fast.apply(x, 2)
    record = fusegrad.explain(fast, x, 1).methods["forward"]
    assert record.status == "compiled" and "for such arguments it runs in eager" in record.reason
    assert record.code == "FG021"


SEEN = [0]


def test_an_opaque_backward() -> None:
    class Backward(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            SEEN[0] += 1
            return g * SEEN[0]

    found = fusegrad.explain(Backward, "f32[3]").to_dict()
    assert found["methods"]["forward"]["status"] == "compiled"
    assert found["methods"]["backward"]["status"] == "opaque" and found["launches"]["backward"] == 0


def test_own_rules_are_named() -> None:
    from test_under_torch_func import OwnRules

    methods = fusegrad.explain(OwnRules, "f32[3]").to_dict()["methods"]
    assert {methods[n]["status"] for n in ("jvp", "vmap")} == {"opaque"}
    assert "user's own rule" in methods["jvp"]["reason"]


def test_a_forward_alone_has_its_other_methods_derived() -> None:
    class Forward(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    methods = fusegrad.explain(Forward, "f32[3]").to_dict()["methods"]
    assert [methods[n]["status"] for n in ("forward", "setup_context", "backward")] == [
        "compiled", "derived", "derived",
    ]  # fmt: skip


def test_products_are_library_calls() -> None:
    found = fusegrad.explain(Linear, "f32[64,128]", "f32[32,128]", "f32[32]").to_dict()
    assert any(k["kind"] == "library" for k in found["kernels"])
    assert found["bytes"]["forward"] < 10 * 4 * (64 * 128 + 32 * 128 + 64 * 32)


def test_outputs_that_are_saved_count_once() -> None:
    assert fusegrad.explain(Cube, "f32[100]").saved_bytes == 2 * 400


def test_plain_functions() -> None:
    @fusegrad.compile
    def f(x, k=2.0):
        return x.exp() * k

    found = fusegrad.explain(f, "f32[100]").to_dict()
    assert found["name"] == "f" and found["launches"] == {"forward": 1, "backward": 1}


class OldStyle(Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()


def test_what_is_derived_says_of_what() -> None:
    methods = fusegrad.explain(OldStyle, "f32[3]").methods
    assert {n for n, m in methods.items() if m.status == "derived"} == {"setup_context", "backward", "jvp", "vmap"}
    assert "transpose of the derivative" in methods["backward"].reason
    assert methods["setup_context"].reason.startswith("generated from forward (old style)")
    assert "(None)" not in str(fusegrad.explain(OldStyle, "f32[3]"))


class Counts(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        SEEN[0] += 1
        return x * SEEN[0]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_without_arguments_it_tells_what_calls_found() -> None:
    fast = fusegrad.compile(Doubled)
    assert fusegrad.explain(fast).methods["forward"].status == "not yet traced"
    out = fast.apply(torch.ones(3, requires_grad=True))
    found = fusegrad.explain(fast)
    assert [found.methods[m].status for m in ("forward", "backward")] == ["compiled", "not yet traced"]
    assert len(found.variants) == 1 and found.methods["backward"].code == "FG004"
    out.sum().backward()
    assert fusegrad.explain(fast).methods["backward"].status == "compiled"
    with pytest.raises(TypeError, match="missing a required argument"):
        fusegrad.explain(Linear, "f32[3]")


def test_backward_of_an_opaque_forward_has_kernels_once_it_was_captured() -> None:
    fast = fusegrad.compile(Counts)
    assert fusegrad.explain(fast, "f32[3]").methods["backward"].status == "not yet traced"
    x = torch.linspace(0, 1, 3, requires_grad=True)
    with pytest.warns(fusegrad.FallbackWarning):
        fast.apply(x).sum().backward()
    for target, name in (("cuda:90", "Counts_backward"), ("cpu", "aten.cos.default")):
        found = fusegrad.explain(fast, "f32[3]", target=target)
        assert name in [k.name for k in found.kernels] and "first call" in found.methods["backward"].reason
