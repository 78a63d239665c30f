"""Eight-bit floats: every byte, every rounding, and a kernel that reads and writes them."""

import pytest
import torch
from torch.autograd import Function

import fusegrad
from fusegrad import explain

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def to_float8(dtype):
    @fusegrad.compile(backend="interpret", fullgraph=True)
    class ToFloat8(Function):
        @staticmethod
        def forward(ctx, x):
            return x.to(dtype)

    return ToFloat8


def from_float8(other):
    @fusegrad.compile(backend="interpret", fullgraph=True)
    class FromFloat8(Function):
        @staticmethod
        def forward(ctx, x):
            return x.to(other)

    return FromFloat8


def awkward_numbers(dtype):
    """Every value, every midpoint between neighbours, their float32 neighbours, and what lies outside."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = every[every.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    exact = torch.cat([finite, middles])
    near = [torch.nextafter(exact, torch.full_like(exact, bound)) for bound in (-1e30, 1e30)]
    far = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 460.0, 464.0, 470.0, 480.0, 500.0, 61440.0, 65536.0, 1e30, 3e38])
    other = torch.tensor([float("inf"), float("nan")])
    everything = torch.cat([exact, *near, far, -far, other, -other, torch.randn(500) * 100])
    return everything


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rounding_is_torchs(dtype):
    torch.manual_seed(0)
    x = awkward_numbers(dtype)
    ours, theirs = to_float8(dtype).apply(x), x.to(dtype)
    same = (ours.view(torch.uint8) == theirs.view(torch.uint8)) | (ours.float().isnan() & theirs.float().isnan())
    assert same.all(), [(x[i].item(), ours[i].item(), theirs[i].item()) for i in (~same).nonzero()[:3, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_every_byte_is_the_number_that_torch_reads(dtype, other):
    x = torch.arange(256, dtype=torch.uint8).view(dtype)
    ours = from_float8(other).apply(x)
    assert ours.dtype == other
    torch.testing.assert_close(ours, x.to(other), rtol=0, atol=0, equal_nan=True)


class RowScaled(Function):
    """A quantiser for matrix products: one scale per row, the gradient straight through."""

    @staticmethod
    def forward(ctx, x):
        scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
        q = (x.float() / scale).to(torch.float8_e4m3fn)
        ctx.mark_non_differentiable(q, scale)
        return (q.float() * scale).to(x.dtype), q, scale

    @staticmethod
    def backward(ctx, grad, _q, _scale):
        return grad


@pytest.mark.parametrize("shape", [(5, 17), (3, 64), (1, 1), (0, 4)])
def test_a_row_quantiser(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    fast = fusegrad.compile(RowScaled, backend="interpret", fullgraph=True)
    for ours, theirs in zip(fast.apply(x), RowScaled.apply(x), strict=True):
        assert ours.dtype == theirs.dtype and ours.requires_grad == theirs.requires_grad
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_it_is_one_kernel_for_every_target(target):
    explanation = explain(RowScaled, "bf16[512,1024]", target=target)
    assert [(k.direction, k.kind) for k in explanation.kernels][:1] == [("forward", "triton")]
    assert explanation.to_dict()["launches"]["forward"] == 1
    (found,) = [m for name, m in explanation.metrics().items() if "forward" in name]
    assert not found["error"] and found["spills"] in (0, -1)


def test_a_torch_that_does_not_saturate_gets_nan(monkeypatch):
    from fusegrad.tracer.lowering import rules

    monkeypatch.setattr(rules, "SATURATES", False)
    fast = to_float8(torch.float8_e4m3fn)
    with fusegrad.config.patch(check=False):
        found = fast.apply(torch.tensor([440.0, 464.0, 465.0, -500.0])).float()
    assert found[:2].tolist() == [448.0, 448.0] and found[2:].isnan().all()
