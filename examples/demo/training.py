"""A small language model trains on real text, its custom Functions eager and compiled: `fusegrad demo`.

Same weights, same batches, one step of each in turn. Then what the compiler did, and its kernels' numerics. The exit
code is 2 where the losses part, or a kernel is wrong under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

import fusegrad
from fusegrad.ir.errors import KernelCompileError
from fusegrad.runtime.profile.measure import saved_bytes
from fusegrad.runtime.report.terminal import Table, plain

from . import ranks
from .functions import FUNCTIONS
from .judgement import JUDGED_STEPS, LEARNING_RATE, TOLERANCE, divergence
from .model import IGNORED, ByteModel, Functions, Sizes, call, read_text, seeded_model, windows

NAMES = ("eager", "compiled")
TARGET = "cuda:90"
ROWS = 12  # of the table of losses
HEADER = ("for sm_90", "launches", "eager", "bytes / minimal", "eager", "saved, kB", "registers", "spills")
VERDICTS = {True: "ok", False: "WRONG"}
# One ulp of the largest value, and some more for sums in another order.
INTERPRETER_TOLERANCE = 1e-5


class Trained(NamedTuple):
    """A model in training, with the seconds and the loss of each step so far."""

    model: ByteModel
    optimizer: torch.optim.Optimizer
    seconds: list[float]
    losses: list[float]


@dataclass
class Case:
    """One Function with arguments at the model's sizes (as specifications) and at odd small ones (as tensors)."""

    function: type[Function]
    specs: tuple[Any, ...]
    small: Callable[[Callable[..., Tensor]], tuple[Any, ...]]
    fast: type[Function] = field(init=False)

    def __post_init__(self) -> None:
        self.fast = fusegrad.compile(self.function)

    @property
    def name(self) -> str:
        return self.function.__name__


def cases(sizes: Sizes) -> list[Case]:
    """The Functions of the model and what it gives them. `small` takes a maker of random tensors."""
    rows, scores = sizes.batch * sizes.context, (sizes.batch, sizes.heads, sizes.context, sizes.context)
    target = torch.tensor([3, 0, IGNORED, 76, 5] * 4)
    rms_norm, softmax, swiglu, cross_entropy = FUNCTIONS
    return [
        Case(
            rms_norm,
            (spec(rows, sizes.width), spec(sizes.width), 1e-6),
            lambda random: (random(37, 96), random(96), 1e-6),
        ),
        Case(
            softmax,
            (spec(*scores), (sizes.width // sizes.heads) ** -0.5),
            lambda random: (random(2, 2, 33, 33), 0.2),
        ),
        Case(swiglu, (spec(rows, sizes.hidden),) * 2, lambda random: (random(29, 70), random(29, 70))),
        Case(
            cross_entropy,
            (spec(rows, 256), spec(rows, dtype="i64"), IGNORED),
            lambda random: (random(20, 77), target, IGNORED),
        ),
    ]


def spec(*shape: int, dtype: str = "f32") -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


# ---------------------------------------------------------------------- the job
def run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run the demo, printing as it goes; returns the facts and the exit code."""
    if options.nproc > 1:
        return ranks.run(options)
    sizes = Sizes()
    device = device_for(options.backend)
    torch.set_num_threads(1)  # matrices this small gain little from more, and lose much on a busy machine
    known = cases(sizes)
    options.output.mkdir(parents=True, exist_ok=True)
    pair = both_models(known, sizes, options.seed, device)
    introduce(pair[0], sizes, device, options)
    with fusegrad.config.patch(backend=options.backend):
        batches = windows(read_text(device), sizes, options.seed)
        train(pair, batches, options.steps)
        kept = [saved_tensor_bytes(trained.model, next(batches)) for trained in pair]
    report_training(pair, kept)
    write_losses(options.output / "losses.csv", pair)
    report_kernels(known, options.output)
    numerics = report_numerics(known, options.seed)
    print(f"\nwritten to {options.output.resolve()}:")
    print("".join(f"  {path.name}\n" for path in sorted(options.output.iterdir())))
    losses = {name: trained.losses for name, trained in zip(NAMES, pair, strict=True)}
    facts = {"losses": losses, "saved_bytes": dict(zip(NAMES, kept, strict=True)), "out": str(options.output.resolve()),
             "numerics": [{**n._asdict(), "good": n.good} for n in numerics]}  # fmt: skip
    return facts, verdict(pair, numerics)


def device_for(backend: str) -> torch.device:
    """The GPU where there is one and the backend can use it."""
    on_gpu = torch.cuda.is_available() and backend in ("auto", "triton", "inductor")
    return torch.device("cuda" if on_gpu else "cpu")


def introduce(trained: Trained, sizes: Sizes, device: torch.device, options: argparse.Namespace) -> None:
    weights = sum(p.numel() for p in trained.model.parameters())
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one cpu thread"
    print(f"fusegrad demo: torch {torch.__version__}, {where}, backend {options.backend}, seed {options.seed}")
    print(
        f"{weights:,} weights, {sizes.layers} layers of width {sizes.width}, "
        f"batches of {sizes.batch} x {sizes.context} bytes from Python's standard library\n"
    )


def both_models(known: Sequence[Case], sizes: Sizes, seed: int, device: torch.device) -> tuple[Trained, Trained]:
    """The model with the eager classes, and with the compiled ones."""
    eager = Functions(*(case.function for case in known))
    fast = Functions(*(case.fast for case in known))
    return started(eager, sizes, seed, device), started(fast, sizes, seed, device)


def started(functions: Functions, sizes: Sizes, seed: int, device: torch.device) -> Trained:
    model = seeded_model(functions, sizes, seed, device)
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), [], [])


def train(pair: Sequence[Trained], batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> None:
    """One step of each model on each batch, with a line of progress now and then."""
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        for trained in pair:
            train_step(trained, *batch)
        if step in (1, steps) or step % max(1, steps // 6) == 0:
            print(f"step {step:>4}/{steps}", *map(progress, NAMES, pair), sep="   ", flush=True)


def progress(name: str, trained: Trained) -> str:
    return f"{name} {trained.losses[-1]:.4f} in {trained.seconds[-1] * 1e3:7.1f} ms"


def train_step(trained: Trained, text: Tensor, following: Tensor) -> None:
    start = time.perf_counter()
    trained.optimizer.zero_grad()
    loss = trained.model(text, following)
    loss.backward()
    trained.optimizer.step()
    trained.losses.append(loss.item())  # waits for the device
    trained.seconds.append(time.perf_counter() - start)


def saved_tensor_bytes(model: ByteModel, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes of the saved tensors of one forward, weights and batch among them, each storage once."""
    with saved_bytes() as total:
        model(*batch)
    return total[0]


# ---------------------------------------------------------------------- reports


def report_training(pair: Sequence[Trained], kept: Sequence[int]) -> None:
    eager, fast = (trained.losses for trained in pair)
    shown = sorted({round(i * (len(eager) - 1) / (ROWS - 1)) for i in range(ROWS)})
    rows = [(i + 1, f"{eager[i]:.6f}", f"{fast[i]:.6f}", f"{fast[i] - eager[i]:+.1e}") for i in shown]
    print("\n" + plain(Table("", ("step", "eager loss", "compiled loss", "difference"), rows)) + "\n")
    first = [f"{trained.seconds[0] * 1e3:.0f}" for trained in pair]
    later = [f"{median(trained.seconds[1:] or trained.seconds) * 1e3:.1f}" for trained in pair]
    costs = [
        ("first step, ms", *first),
        ("median of the others, ms", *later),
        ("saved tensors, MB", *(f"{size / 1e6:.2f}" for size in kept)),
    ]
    print(plain(Table("", ("", *NAMES), costs)))


def write_losses(path: Path, pair: Sequence[Trained]) -> None:
    """Every step's losses, as CSV."""
    lines = [f"{i},{a!r},{b!r}" for i, (a, b) in enumerate(zip(*(t.losses for t in pair), strict=True), 1)]
    path.write_text("\n".join(["step,eager,compiled", *lines]) + "\n", encoding="utf-8")


def report_kernels(known: Sequence[Case], out: Path) -> None:
    """A row per direction at the model's sizes; the Triton text and the first Function's picture go to `out`."""
    explanations = [fusegrad.explain(case.fast, *case.specs, target=TARGET) for case in known]
    rows = [row for explanation in explanations for row in kernel_rows(explanation)]
    print("\n" + plain(Table("", HEADER, rows)))
    for case, explanation in zip(known, explanations, strict=True):
        (out / f"{case.name}.py").write_text(explanation.module, encoding="utf-8")
    fusegrad.export(known[0].fast, *known[0].specs, target=TARGET, path=out / f"{known[0].name}.svg")


def kernel_rows(explanation: Any) -> Iterator[tuple[object, ...]]:
    """Forward and backward: what is launched, what moves, and what the assembler says of the worst kernel."""
    metrics = explanation.metrics(TARGET)
    failed = next((name for name, found in metrics.items() if found["error"]), None)
    if failed is not None:
        raise KernelCompileError(kernel=failed, target=TARGET, reason=metrics[failed]["error"])
    for direction, report in explanation.directions.items():
        own = [launch.name for launch in report.launches if launch.name in metrics]
        ours, eager = (len(report.launches), report.moved), (report.eager.launches, report.eager.bytes)
        pairs = [text for n, moved in (ours, eager) for text in (n, f"{moved / report.minimal:.2f}")]
        kept = f"{explanation.saved_bytes / 1e3:.1f}" if direction == "forward" else ""
        worst = [max((metrics[name][figure] for name in own), default="") for figure in ("registers", "spills")]
        yield f"{explanation.name} {direction}", *pairs[::2], *pairs[1::2], kept, *worst


class Numerics(NamedTuple):
    """How far a Function's generated kernels are from float64, next to eager's own distance."""

    name: str
    direction: str
    eager: float
    kernels: float

    @property
    def good(self) -> bool:
        return self.kernels <= max(INTERPRETER_TOLERANCE, 2 * self.eager)


def report_numerics(known: Sequence[Case], seed: int) -> list[Numerics]:
    """The generated kernels on small odd shapes under Triton's interpreter, against float64."""
    found = [line for case in known for line in numerics_of(case, seed)]
    rows = [(f"{n.name} {n.direction}", f"{n.eager:.1e}", f"{n.kernels:.1e}", VERDICTS[n.good]) for n in found]
    header = ("largest error against float64", "eager", "interpreted kernels", "")
    print("\n" + plain(Table("", header, rows)))
    return found


def numerics_of(case: Case, seed: int) -> Iterator[Numerics]:
    """Forward and backward errors, relative to the largest value."""
    draw = torch.Generator().manual_seed(seed)
    arguments = case.small(lambda *shape: torch.randn(shape, generator=draw, requires_grad=True))
    exact = forward_backward(case.function, [a.double() if is_float(a) else a for a in arguments])
    eager = forward_backward(case.function, arguments)
    with fusegrad.config.patch(backend="interpret"):
        kernels = forward_backward(case.fast, arguments)
    for direction, part in (("forward", slice(0, 1)), ("backward", slice(1, None))):
        yield Numerics(case.name, direction, distance(eager[part], exact[part]), distance(kernels[part], exact[part]))


def is_float(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def forward_backward(function: type[Function], arguments: Sequence[Any]) -> list[Tensor]:
    """The output and the gradients of all float arguments, for a fixed output gradient."""
    fresh = [a.detach().requires_grad_() if is_float(a) else a for a in arguments]
    output = call(function, *fresh)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [a for a in fresh if is_float(a)], gradient)]


def distance(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, exact, strict=True))


# ---------------------------------------------------------------------- verdict
def verdict(pair: Sequence[Trained], numerics: Sequence[Numerics]) -> int:
    """Print whether the losses agree and the kernels are right; 2, the exit code of a difference, where not."""
    largest = divergence(*(trained.losses[:JUDGED_STEPS] for trained in pair))
    wrong = [f"{n.name} {n.direction}" for n in numerics if not n.good]
    parted = not largest <= TOLERANCE  # also where a loss is NaN
    found = f"largest relative difference {largest:.1e}, tolerance {TOLERANCE:.0e}"
    print(f"losses {'DIVERGE' if parted else 'agree'}: {found}")
    if wrong:
        print(f"WRONG under the interpreter: {', '.join(wrong)}")
    return 2 if parted or wrong else 0


