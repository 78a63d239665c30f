"""`fusegrad.profile`: how long a compiled Function takes here, beside the class as written, and what a GPU would need.

Two kinds of figures that are never mixed: *measured* ones, of the machine at hand, and *modelled* ones, of a GPU that
is named: the least time in which its memory could move what the kernels move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...codegen.devices import MULTIPROCESSORS, Device
from ..api import compile
from ..capture.guards import is_float
from ..compiled.compiled import Compiled
from ..dispatch.compiled_class import compile_class
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.pytree import arguments
from ..kernels.machine_code.model import model_figures
from ..report import terminal as screen
from ..report.explain import compiler_of, explain
from ..report.explanation import Explanation, binary_figures
from ..report.roofline import model_launches, model_sums
from ..settings.suggestions import meant
from ..values.tensor_specs import is_spec, parse_spec
from .devices import device_named
from .inductor_costs import inductor_costs
from .measure import copy_bandwidth, operations, peak_bytes, saved_bytes, times_of
from .report import Measured, Profile, ProfileArgumentError

Tensor = torch.Tensor
Apply = Callable[..., Any]
BASELINES = ("eager", "torch.compile")
OURS = "fusegrad"


def profile(
    target_class: Any,
    /,
    *args: Any,
    baselines: Sequence[str] = ("eager",),
    device: str = "h100",
    seconds: float = 0.5,
    metrics: bool = False,
    progress: bool | None = None,
) -> Profile:
    """Time forward and backward of a compiled Function, and model its kernels on a named GPU.

    What cannot be timed says why in its row.

    Args:
        target_class: A Function class or a function, compiled or not yet.
        args: Of one call: tensors, or specifications such as "bf16[8192,4096]", for which random tensors are made (on
            the GPU, if there is one).
        baselines: What to time beside it: "eager" (the class as you wrote it), "torch.compile", of which the launches
            and bytes are counted, too: Inductor lowers your methods for an H100, in a process of its own (seconds).
        device: Of the model: "h100", "4090" or another of `codegen/devices.py`.
        seconds: That each candidate is called for, per direction.
        metrics: Also compile the kernels for that device (no GPU needed), report registers, spills, shared memory and
            occupancy, and model each launch by its instructions: a model's time, beside the measured one where a GPU is
            at hand.
        progress: A bar on stderr; by default where that is a terminal.

    Returns:
        Tables that print, with everything in them as attributes.

    Raises:
        UnknownDeviceError: for a device that is not in the table.
        ProfileArgumentError: for another baseline.
        SpecError: for a specification that cannot be read.
    """
    modelled_on, fast = device_named(device), _compiled_class(target_class)
    compiler = compiler_of(fast)
    _require_known(compiler, baselines)
    real = _real_arguments(compiler, fast, args)
    place = next((a.device for a in real if isinstance(a, Tensor)), torch.device("cpu"))
    # The model first: arguments that do not fit are refused before anything is timed.
    explanation = explain(fast, *args, target=device)
    result = Profile(
        name=compiler.user.cls.__name__, backend=compiler.options.backend_for(real), machine=_machine(place),
        arguments=", ".join(map(_description, real)), measured=[], saved={}, operations={},
        modelled=model_launches(explanation, modelled_on, explanation.sizes), device=modelled_on,
        sums=model_sums(explanation, modelled_on),
        binaries=_binaries(explanation, modelled_on) if metrics and explanation.kernel_records else {},
        copy_bandwidth=copy_bandwidth(place, seconds),
    )  # fmt: skip
    if "torch.compile" in baselines:
        counted = inductor_costs(explanation, modelled_on)
        result.sums = sorted([*result.sums, *counted.sums], key=lambda row: row.direction != "forward")
        result.not_counted = counted.why_not
    # Then the candidates one after the other, forward and backward of each.
    candidates = list(_candidates(compiler, fast, baselines))
    with screen.progress(2 * len(candidates), f"profile {result.name}", progress) as advance:
        for name, apply in candidates:
            _measure(result, name, apply, real, place, seconds, advance)
    return result


def _binaries(explanation: Explanation, device: Device) -> dict[str, dict[str, Any]]:
    """Registers and memory of the compiled kernels, how full they can make a multiprocessor; a model of each launch."""
    processor, binaries, found = MULTIPROCESSORS[device.target], explanation.binaries(device.target), {}
    for kernel in explanation.kernel_records:
        binary = binaries[kernel.name][device.target]
        occupancy = processor.occupancy(binary.registers, binary.shared, kernel.num_warps)
        found[kernel.name] = {
            **binary_figures(binary), "warps": kernel.num_warps, "occupancy": occupancy,
            **model_figures(kernel, binary, explanation.sizes, device),
        }  # fmt: skip
    return found


def run_once(target_class: Any, args: Sequence[Any]) -> str:
    """Call a Function, compiled afresh, forward and backward, once without grad mode; its name."""
    source = compiler_of(_compiled_class(target_class))
    fast: Any = compile_class(source.user.original, source.options)
    compiler = compiler_of(fast)
    real = _real_arguments(compiler, target_class, args)
    _without_grad(fast.apply, real)()
    if outputs := _differentiable(fast.apply(*real)):
        _backward(outputs, real)()
    return compiler.user.cls.__name__


def _require_known(compiler: Compiled, baselines: Sequence[str]) -> None:
    unknown = [b for b in baselines if b not in BASELINES]
    if unknown:
        raise ProfileArgumentError(
            function=compiler.user.cls.__name__, detail=f"there is no baseline {unknown[0]!r}",
            fix=f"{meant(unknown[0], BASELINES)}some of {', '.join(BASELINES)}.",
        )  # fmt: skip


# ------------------------------------------------------------------ arguments
def _real_arguments(compiler: Dispatcher, target: Any, args: Sequence[Any]) -> list[Any]:
    """All arguments of a call, with tensors in place of specifications."""
    return list(_with_gradients(compiler.user.complete([_real(a) for a in arguments(target, tuple(args))])))


def _real(value: Any) -> Any:
    """A tensor for a specification: normal numbers, small integers."""
    if not is_spec(value):
        return value
    (dtype, shape), device = parse_spec(value), "cuda" if torch.cuda.is_available() else "cpu"
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 2, shape, device=device).to(dtype)


def _with_gradients(values: Sequence[Any]) -> Iterator[Any]:
    """Where no argument asks for a gradient, every floating one is taken to."""
    has_gradients = any(isinstance(v, Tensor) and v.requires_grad for v in values)
    for value in values:
        if isinstance(value, Tensor):
            value = value.detach().requires_grad_(value.requires_grad or (not has_gradients and is_float(value)))
        yield value


def _description(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _machine(place: torch.device) -> str:
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"CPU, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"


# ------------------------------------------------------------------ measuring
def _compiled_class(target_class: Any) -> Any:
    return target_class if hasattr(target_class, "_fusegrad") else compile(target_class)


def _candidates(compiler: Dispatcher, fast: Any, baselines: Sequence[str]) -> Iterator[tuple[str, Apply]]:
    yield OURS, _call_of(compiler, fast)
    if "eager" in baselines:
        yield "eager", compiler.user.run
    if "torch.compile" in baselines:
        yield "torch.compile", torch.compile(lambda *args: compiler.user.run(*args), dynamic=False)


def _call_of(compiler: Dispatcher, fast: Any) -> Apply:
    """The call that a user makes; of containers, the flat one beneath it."""
    if hasattr(fast, "_fusegrad_flat"):
        return lambda *args: compiler(args, {})
    return getattr(fast, "apply", fast)  # type: ignore[no-any-return]


def _measure(
    result: Profile, name: str, apply: Apply, args: Sequence[Any], place: torch.device, seconds: float,
    advance: screen.Advance,
) -> None:  # fmt: skip
    """forward without a graph, then backward of a forward that is kept. What fails says so in its row."""
    # Backward of a forward that is kept: its graph is made once, and only its own time counts.
    direction = "forward"
    advance(f"{name} forward")
    try:
        _time(result, name, direction, _without_grad(apply, args), place, seconds)
        _warm_up(apply, args)
        with saved_bytes() as total:
            outputs = _differentiable(apply(*args))
        if outputs:
            result.saved[name], direction = total[0], "backward"
            advance(f"{name} backward")
            _time(result, name, direction, _backward(outputs, args), place, seconds)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        result.measured.append(Measured(name, direction, None, why))


WARM_UP = 3


def _warm_up(apply: Apply, args: Sequence[Any]) -> None:
    """Forward and backward a few times: a node that is made before its backward was prepared goes the long way."""
    for _ in range(WARM_UP):
        if outputs := _differentiable(apply(*args)):
            _backward(outputs, args)()


def _time(
    result: Profile, name: str, direction: str, call: Callable[[], Any], place: torch.device, seconds: float
) -> None:
    result.measured.append(Measured(name, direction, times_of(call, place, seconds)))
    result.peaks.setdefault(name, {})[direction] = peak_bytes(call, place)
    if name == OURS:
        result.operations[direction], result.traces[direction] = operations(call, place)


def _without_grad(apply: Apply, args: Sequence[Any]) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return apply(*args)

    return forward


def _differentiable(outputs: Any) -> list[Tensor]:
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    return [o for o in flat if isinstance(o, Tensor) and o.requires_grad]


def _backward(outputs: Sequence[Tensor], args: Sequence[Any]) -> Callable[[], Any]:
    inputs = list({id(a): a for a in args if isinstance(a, Tensor) and a.requires_grad}.values())
    gradients = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
