"""Text that exported modules have in common: imports, small functions, and the test against the class as written."""

from __future__ import annotations

IMPORTS = """from __future__ import annotations

import os

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the test below runs on a CPU too, slowly

import triton
import triton.language as tl"""

ROUNDING = """# every operation rounds by itself, and subnormal numbers are no zeros
ROUNDING = {} if os.environ.get("TRITON_INTERPRET") == "1" else {"enable_fp_fusion": False}
if ROUNDING and not torch.version.hip:
    ROUNDING["enable_reflect_ftz"] = False"""

CHECKED = """# indices are asserted to be in range; Triton would add assertions of its own, of overflow
CHECKED = {} if os.environ.get("TRITON_INTERPRET") == "1" else {"debug": True, "sanitize_overflow": False}"""

ROOMY = """# programs are few: the compiler may take all registers of a thread before it spills any
ROOMY = {} if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip else {"maxnreg": 255}"""

LIBRARY = """class StandIn:
    \"\"\"The device library for Triton's interpreter, which has none: torch's own functions.\"\"\"

    def __getattr__(self, name):
        function = getattr(torch, "round" if name == "nearbyint" else name)

        def call(*args):
            args = tl.broadcast(*args) if len(args) == 2 else args
            found = function(*(torch.tensor(a.handle.data) for a in args)).numpy()
            return tl.tensor(type(args[0].handle)(found, args[0].dtype.scalar), args[0].type)

        return call


if os.environ.get("TRITON_INTERPRET") == "1":
    libdevice = StandIn()"""

EXACT_DOT = """def exact_cast(builder, x, dtype):
    \"\"\"For Triton's interpreter, which cuts bfloat16 off instead of rounding it.\"\"\"
    if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
        return inexact_cast(builder, x, dtype)
    bits = torch.tensor(x.data).to(torch.bfloat16).view(torch.uint16).numpy()
    return type(x)(bits, dtype.scalar)


def exact_dot(builder, x, y, total, *_):
    \"\"\"For Triton's interpreter, which multiplies the bits of bfloat16.\"\"\"
    is_low, dtype = [t.dtype.scalar == tl.bfloat16 for t in (x, y)], total.data.dtype
    x, y = ((t.data.astype("uint32") << 16).view("float32") if low else t.data for t, low in zip((x, y), is_low))
    return type(total)(x.astype(dtype) @ y.astype(dtype) + total.data, total.dtype.scalar)


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime.interpreter import InterpreterBuilder

    inexact_cast, InterpreterBuilder.cast_impl = InterpreterBuilder.cast_impl, exact_cast
    InterpreterBuilder.create_dot = exact_dot"""

STAND_INS = {
    "near_power": "near_power = lambda x, ptx: tl.exp2(x)",
    "near_reciprocal": "near_reciprocal = lambda x, ptx: 1.0 / x",
    "wide_product": "wide_product = lambda x, factor, ptx: x.to(tl.uint64) * factor",
    "pairs_from_bf16": "pairs_from_bf16 = lambda x: x.to(tl.float32)",
    "rounded_pairs": "rounded_pairs = lambda v: v.to(tl.bfloat16).to(tl.float32)",
    "packed": "packed = lambda v: v",
    "packed_vector": "packed_vector = lambda v: v",
}
"""For helpers that are written in assembly: Triton's interpreter has none."""

HELPERS = [
    (
        "present",
        '''
def present(results):
    """The tensors among the results of an operation."""
    return [r for r in results if r is not None]
''',
    ),
    (
        "laid_out",
        '''
def laid_out(tensor, strides):
    """The tensor with these strides, by which the kernels index."""
    if tensor.stride() == strides or tensor.numel() < 2:
        return tensor
    if 0 in strides:
        raise ValueError(f"a tensor with strides {strides} was exported, this one has {tensor.stride()}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
''',
    ),
    (
        "expect",
        '''
def expect(name, tensor, dtype, shape, strides):
    """The tensor, if it is one that the kernels were made for, in the layout that they read."""
    if tensor.dtype != dtype or tensor.shape != shape:
        wanted, given = f"{dtype}{list(shape)}", f"{tensor.dtype}{list(tensor.shape)}"
        raise ValueError(f"{name} is {given}, and the kernels were exported for {wanted}: export them for this too")
    return laid_out(tensor, strides)
''',
    ),
    (
        "aligned",
        '''
def aligned(tensor):
    """The tensor's memory from a multiple of 16 bytes on: kernels read it in pieces of that size."""
    if tensor.data_ptr() % 16 == 0:
        return tensor
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone()
''',
    ),
    (
        "inside",
        '''
class Inside(torch.autograd.Function):
    """A launch in backward or jvp: torch.func hands over the tensors behind its wrappers."""

    @staticmethod
    def forward(launch, *tensors):
        return launch(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.launch = inputs[0].__name__

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"gradients of {ctx.launch} are not in this file")

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"gradients of {ctx.launch} are not in this file")


def inside(launch, *tensors):
    return Inside.apply(launch, *tensors)
''',
    ),
    (
        "over_lanes",
        '''
def over_lanes(call, lanes, in_dims, args):
    """The call on tensors with the lanes in front, and where its results have them."""
    results = call(*(lanes_in_front(a, d, lanes) for a, d in zip(args, in_dims, strict=True)))
    if not isinstance(results, tuple):
        return results, 0
    return results, tuple(0 if torch.is_tensor(r) else None for r in results)


def lanes_in_front(argument, dim, lanes):
    """An argument that is one for all lanes is expanded: a view, copied where a kernel is launched on it."""
    if not torch.is_tensor(argument):
        return argument
    return argument.expand(lanes, *argument.shape) if dim is None else argument.movedim(dim, 0)


def lanes_of_lanes(call):
    """The call on tensors [A, B, ..] as [A * B, ..]."""

    def folded(*args):
        both = next(a.shape[:2] for a in args if torch.is_tensor(a))
        results = call(*(a.flatten(0, 1) if torch.is_tensor(a) else a for a in args))
        if not isinstance(results, tuple):
            return results.unflatten(0, both)
        return tuple(r.unflatten(0, both) if torch.is_tensor(r) else r for r in results)

    return folded
''',
    ),
    (
        "workspace",
        '''
def workspace(size, alignment, stream):
    """Memory for Triton, in which programs describe the matrices that they read."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")
''',
    ),
    (
        "counters",
        '''
_counters = {}


def counters(name, count, device):
    """Zeros that a kernel leaves at zero, one set for each stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (name, count, device, stream)
    if key not in _counters:
        _counters[key] = torch.zeros(count, dtype=torch.int32, device=device)
    return _counters[key]
''',
    ),
]

SELF_TEST = '''
def difference(ours, theirs):
    """The largest difference beside the largest finite number (at least 1e-3); NaN and infinities alike."""
    if not theirs.numel():
        return 0.0
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (ours, theirs))
    same = (a == b) | (a.isnan() & b.isnan())
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 1.0
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf")).max().item() / max(scale, 1e-3)


def compare_with_eager({rows}):
    """Outputs and gradients beside those of the class as it was written; the largest difference."""
{inputs}
    tensors = ({tensors})

    def call(function, {names}):
        results = function.apply({arguments})
        return [r for r in (results if isinstance(results, tuple) else (results,)) if torch.is_tensor(r)]

    wanted = [t for t in tensors if t.requires_grad]
    worst = 0.0
    found = {{}}
    for function in ({name}, {written}):
        results = call(function, *tensors)
        torch.manual_seed(1)
        weights = [torch.randn(r.shape, device=r.device).to(r.dtype) for r in results if r.requires_grad]
        kept = [r for r in results if r.requires_grad]
        gradients = torch.autograd.grad(kept, wanted, weights, allow_unused=True) if kept else ()
        found[function] = [*results, *(g for g in gradients if g is not None)]
{forward_mode}    for ours, theirs in zip(found[{name}], found[{written}], strict=True):
        error = difference(ours, theirs)
        limit = 2e-2 if theirs.dtype in (torch.bfloat16, torch.float16) else 1e-4
        print(f"{{str(tuple(theirs.shape)):>20}} {{str(theirs.dtype):>15}}  relative difference {{error:.1e}}")
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and error <= limit, (error, limit)
        worst = max(worst, error)
    return worst


def self_test():
    """The comparison{at_lengths}."""
    worst = {comparisons}
    print(f"{name}: agrees with the class as it was written, within {{worst:.1e}}")


if __name__ == "__main__":
    self_test()
'''

INSIDE_VMAP = '''
    @staticmethod
    def vmap(info, in_dims, launch, *tensors):
        """The launch over lanes; one that is over lanes already takes more of them."""
        over = BATCHED.get(launch)
        call = lanes_of_lanes(partial(inside, launch)) if over is None else partial(inside, over)
        return over_lanes(call, info.batch_size, in_dims[1:], tensors)
'''

LANES_TEST = """
    # vmap beside a loop over the lanes
    many = [torch.stack([t.detach().roll(i) for i in range(3)]).requires_grad_(t.requires_grad) for t in tensors]
    batched = torch.vmap(lambda *lane: tuple(call({name}, *lane)))(*many)
    looped = [torch.stack(lanes) for lanes in zip(*(call({written}, *lane) for lane in zip(*many)))]
    for function, results in (({name}, batched), ({written}, looped)):
        kept = [r for r in results if r.requires_grad]
        moved = [t for t in many if t.requires_grad]
        given = [r.detach().cos() for r in looped if r.requires_grad]
        gradients = torch.autograd.grad(kept, moved, given, allow_unused=True) if kept else ()
        found[function] += [*results, *(g for g in gradients if g is not None)]
"""

_PUSHED = """
    def pushed(function):
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, d) if t.requires_grad else t for t, d in moving]
            return [torch.autograd.forward_ad.unpack_dual(r).tangent for r in call(function, *duals)]

    moving = [(t, torch.randn(t.shape, device=device).to(t.dtype)) for t in tensors]
"""

OWN_JVP = (
    _PUSHED
    + """    for function in ({name}, {written}):
        found[function] += [t for t in pushed(function) if t is not None]
"""
)

TRANSPOSED_JVP = (
    _PUSHED
    + """    # forward mode is the transpose of backward: <jvp(d), g> == <d, backward(g)>
    left = [(t.double() * w).sum() for t, w in zip((t for t in pushed({name}) if t is not None), weights)]
    wanted = [d for t, d in moving if t.requires_grad]
    right = [(d.double() * g).sum() for d, g in zip(wanted, gradients) if g is not None]
    error = abs(sum(left) - sum(right)).item() / sum((w.double() ** 2).sum() for w in weights).sqrt().item()
    print(f"{{'jvp':>36}}  difference of <jvp(d), g> and <d, backward(g)> {{error:.1e}}")
    assert error <= 2e-2 * max(1.0, sum((d.double() ** 2).sum() for _, d in moving).sqrt().item()), error
"""
)
