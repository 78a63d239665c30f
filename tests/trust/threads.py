"""Many threads at once on first calls, transforms, backwards and settings: all right, each key compiled once.

    python tests/trust/threads.py --threads 32 --rounds 10 --json

Each scenario runs on classes compiled afresh, with the interpreter switching threads as often as it can. The same calls
one after the other say how often a class has to be captured. A deadlock ends the process with every thread's stack.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["FUSEGRAD_STORE"] = "0"  # before the import; what is found on disk is not captured, and captures are counted

import outcome
import torch
import trust_functions as functions

import fusegrad

Tensor = torch.Tensor
SIZES = ((3, 8), (2, 16), (5, 4), (4, 12))
BACKENDS = ("reference", "interpret")
CAPTURED = tuple(cls for cls in functions.ALL if cls is not functions.Opaque)
PATIENCE = 300.0
"""Seconds after which a scenario counts as a deadlock."""


@dataclass
class Found:
    """What became of a scenario."""

    called: list[str] = field(default_factory=list)  # threads append without losing any
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    captures: int = 0
    expected: int | None = None

    @property
    def calls(self) -> int:
        return len(self.called)

    @property
    def ok(self) -> bool:
        # Never more; fewer where what a call on data learns serves another that runs meanwhile.
        return not self.wrong and not self.raised and (self.expected is None or self.captures <= self.expected)


def together(count: int, job: Callable[[int], Any], found: Found) -> None:
    """`job(i)` in `count` threads that begin at the same moment."""
    gate = threading.Barrier(count)

    def run(at: int) -> None:
        gate.wait()
        try:
            job(at)
        except Exception as error:
            found.raised.append(f"{type(error).__name__}: {error}"[:300])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def agrees(found: Found, what: str, mine: Sequence[Any], eager: Sequence[Any]) -> None:
    """One comparison with eager."""
    found.called.append(what)
    if not all(torch.allclose(m, e, rtol=1e-4, atol=1e-5) for m, e in zip(mine, eager, strict=True)):
        found.wrong.append(what)


def compare(found: Found, fast: Any, cls: Any, shape: tuple[int, int], seed: int = 0) -> None:
    """Forward and backward of one call."""
    args = functions.arguments(cls, *shape, seed)
    agrees(found, f"{cls.__name__} at {shape}", functions.run(fast, args), functions.run(cls, args))


def counted(found: Found, threads: int, make: Callable[[], Callable[[int], Any]]) -> None:
    """The jobs of `make()` at once, then those of another `make()` one after the other: as many captures."""
    before = fusegrad.stats()["captures"]
    together(threads, make(), found)
    between = fusegrad.stats()["captures"]
    job = make()
    for at in range(threads):
        job(at)
    found.captures, found.expected = between - before, fusegrad.stats()["captures"] - between


# ------------------------------------------------------------------ scenarios
def one_class(threads: int, found: Found) -> None:
    """A first call of one Function in every thread, on two backends, at four sizes."""
    for cls in functions.ALL:
        def make(cls: Any = cls) -> Callable[[int], None]:
            fast = [fusegrad.compile(cls, backend=b) for b in BACKENDS]
            return lambda at: compare(found, fast[at % 2], cls, SIZES[at // 2 % len(SIZES)], at)

        counted(found, threads, make)
        if not found.ok:
            return


def eight_classes(threads: int, found: Found) -> None:
    """First calls of eight Functions, on two backends, at four sizes."""

    def make() -> Callable[[int], None]:
        fast = [(cls, fusegrad.compile(cls, backend=BACKENDS[i // 2 % 2])) for i, cls in enumerate(functions.ALL)]

        def job(at: int) -> None:
            for step in range(4):
                cls, mine = fast[(at + step) % len(fast)]
                compare(found, mine, cls, SIZES[step], at)

        return job

    counted(found, threads, make)


def backward_elsewhere(threads: int, found: Found) -> None:
    """Forward in one thread, backward in another, on two backends."""

    def make() -> Callable[[int], None]:
        fast = [(cls, fusegrad.compile(cls, backend=BACKENDS[i % 2])) for i, cls in enumerate(functions.ALL)]
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def job(at: int) -> None:
            cls, mine = fast[at % len(fast)]
            args = functions.arguments(cls, *SIZES[at % len(SIZES)], at)
            waiting.put((cls, args, functions.first(mine.apply(*args))))
            cls, args, y = waiting.get()
            leaves = [a for a in args if isinstance(a, Tensor)]
            g = torch.linspace(-1, 2, y.numel()).view(y.shape)
            mine_found = [y.detach(), *torch.autograd.grad(y, leaves, g)]
            agrees(found, cls.__name__, mine_found, functions.run(cls, args))

        return job

    counted(found, threads, make)


class Reentrant(torch.autograd.Function):
    """A backward that runs a backward: beyond 60 of them torch goes on in threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, inner: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.depth, ctx.inner = depth, inner
        with torch.no_grad():
            return Reentrant.value(x, depth, inner)

    @staticmethod
    def value(x: Tensor, depth: int, inner: Any) -> Tensor:
        return functions.first(inner.apply(x)) if depth == 0 else Reentrant.apply(x, depth - 1, inner)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = Reentrant.value(x, ctx.depth, ctx.inner)
        (found,) = torch.autograd.grad(y, x, g)
        return found, None, None


def engine_threads(threads: int, found: Found) -> None:
    """First backwards inside of 70 nested ones, where torch goes on in threads of its own."""

    def make() -> Callable[[int], None]:
        fast = fusegrad.compile(functions.Softmax)

        def job(at: int) -> None:
            x = functions.arguments(functions.Softmax, 3, 8, at)[0]
            mine, eager = ([y.detach(), *torch.autograd.grad(y.sum(), x)] for y in (
                Reentrant.apply(x * 2, 70, fast), Reentrant.apply(x * 2, 70, functions.Softmax)))  # fmt: skip
            agrees(found, "70 nested backwards", mine, eager)

        return job

    counted(found, min(threads, 8), make)


_forward_mode = threading.Lock()


def one_at_a_time(run: Callable[[], Tensor]) -> Tensor:
    """torch has one forward-mode level for all threads: two of them at once raise in eager, too."""
    with _forward_mode:
        return run()


TRANSFORMS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sin().sum()),
    "jvp": lambda f: lambda x: one_at_a_time(lambda: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]),
    "vmap": lambda f: torch.func.vmap(f),
    "vmap(grad)": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum())),
    "jacrev": lambda f: torch.func.jacrev(f),
    "grad(grad)": lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sin().sum())(x).cos().sum()),
}


def transforms(threads: int, found: Found) -> None:
    """torch.func in every thread at once: another transform in each, of one Function."""

    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x**3 / (1 + x * x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return g * (3 * x**2 + x**4) / (1 + x * x) ** 2

        @staticmethod
        def jvp(ctx: Any, t: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return t * (3 * x**2 + x**4) / (1 + x * x) ** 2

    x = torch.linspace(-1, 1, 12).view(3, 4)
    eager = {name: make(Cube.apply)(x) for name, make in TRANSFORMS.items()}

    def make() -> Callable[[int], None]:
        fast = [fusegrad.compile(Cube, backend=b) for b in BACKENDS]
        names = list(TRANSFORMS)

        def job(at: int) -> None:
            name = names[at // 2 % len(names)]
            agrees(found, name, [TRANSFORMS[name](fast[at % 2].apply)(x)], [eager[name]])

        return job

    counted(found, threads, make)


def tasks(threads: int, found: Found) -> None:
    """asyncio: tasks and threads of tasks, each with settings of its own."""
    fast = {cls: fusegrad.compile(cls) for cls in functions.ALL}

    async def task(at: int) -> None:
        cls, backend = functions.ALL[at % len(functions.ALL)], BACKENDS[at % 2]
        with fusegrad.config.patch(backend=backend):
            for step in range(3):
                await asyncio.sleep(0)
                if fusegrad.config.settings().backend != backend:
                    found.wrong.append(f"settings of task {at}")
                compare(found, fast[cls], cls, SIZES[step], at)
                await asyncio.to_thread(compare, found, fast[cls], cls, SIZES[3], at)

    async def everything() -> None:
        await asyncio.gather(*(task(at) for at in range(threads)))

    asyncio.run(everything())
    used = {b for f in fast.values() for spec in f._fusegrad.table for b in spec.executables}
    if not {"reference"} < used:
        found.wrong.append(f"only {used} was used")


def questions(threads: int, found: Found) -> None:
    """`explain`, `stats` and other Functions, uncompiled ones and modules among them, while Functions are captured."""
    fast = {cls: fusegrad.compile(cls) for cls in functions.ALL}
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    x = torch.linspace(-1, 1, 24).view(3, 8)
    expected = module(x)

    def job(at: int) -> None:
        cls = functions.ALL[at // 4 % len(functions.ALL)]
        if at % 4 == 0:
            return compare(found, fast[cls], cls, SIZES[at // 4 % len(SIZES)], at)
        if at % 4 == 1:
            found.called.append(str(fusegrad.explain(fast[cls], *functions.arguments(cls, 3, 8))))
            return None
        if at % 4 == 2:
            args = functions.arguments(cls, 3, 8, at)
            return agrees(found, "uncompiled", functions.run(cls, args), functions.run(cls, args))
        for _ in range(20):
            agrees(found, "a module", [module(x)], [expected])
            fusegrad.stats()
        return None

    together(threads, job, found)


def compiled_once(threads: int, found: Found) -> None:
    """Subclasses of a compiled class, plain functions and trees, first used by many threads at once."""

    class Fast(fusegrad.compile(functions.Softmax)):  # type: ignore[misc]
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 3 * g

    class Eager(functions.Softmax):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 3 * g

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).tanh()

    def tree(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": given["a"] + given["b"], "product": given["a"] * given["b"]}

    fast_plain, fast_tree = fusegrad.compile(plain), fusegrad.compile(tree, pytree=True)
    a, b = torch.ones(3, 4), torch.linspace(0, 1, 12).view(3, 4)

    def job(at: int) -> None:
        compare(found, Fast, Eager, SIZES[at % len(SIZES)], at)
        agrees(found, "plain", [fast_plain(a, b)], [plain(a, b)])
        agrees(found, "tree", [*fast_tree({"a": a, "b": b}).values()], [*tree({"a": a, "b": b}).values()])

    together(threads, job, found)


def forgotten(threads: int, found: Found) -> None:
    """What methods read outside changes while they run: every result is of one of the states."""
    state = {"scale": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * state["scale"]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    fast, scales = fusegrad.compile(Scaled), (1.0, 2.0, 3.0)
    x = torch.ones(4)

    def job(at: int) -> None:
        for step in range(20):
            if at == 0:
                state["scale"] = scales[step % 3]
            found.called.append("a number that changes")
            if fast.apply(x)[0].item() not in scales:
                found.wrong.append("a result of no state")

    together(min(threads, 8), job, found)


SCENARIOS = (one_class, eight_classes, backward_elsewhere, engine_threads, transforms, tasks, questions,
             compiled_once, forgotten)  # fmt: skip


def run(scenario: Callable[[int, Found], None], threads: int) -> Found:
    """A scenario under frequent switches; a deadlock ends the process with the stacks of all threads."""
    interval, found = sys.getswitchinterval(), Found()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    sys.setswitchinterval(1e-6)
    try:
        scenario(threads, found)
    finally:
        sys.setswitchinterval(interval)
        faulthandler.cancel_dump_traceback_later()
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--threads", type=int, default=32)
    options.add_argument("--rounds", type=int, default=3)
    names = " ".join(s.__name__ for s in SCENARIOS)
    options.add_argument("--only", default=names, help=f"the scenarios to run, of {names}")
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/threads.json")
    chosen = options.parse_args()
    wanted = [s for s in SCENARIOS if s.__name__ in chosen.only.split()]
    numbers: dict[str, Any] = {}
    started = time.perf_counter()
    for scenario in wanted:
        rounds = [run(scenario, chosen.threads) for _ in range(chosen.rounds)]
        bad = [f for f in rounds if not f.ok]
        numbers[scenario.__name__] = {
            "rounds": len(rounds), "calls": sum(f.calls for f in rounds), "bad_rounds": len(bad),
            "captures": sum(f.captures for f in rounds), "expected": sum(f.expected or 0 for f in rounds),
        }  # fmt: skip
        why = [f"\n   {f.wrong} {f.raised}" for f in bad[:3]]
        print(f"{scenario.__name__:20} {numbers[scenario.__name__]}", *why, flush=True)
    seconds = round(time.perf_counter() - started, 1)
    if chosen.json:
        found = {"threads": chosen.threads, "seconds": seconds, "deadlocks": 0, "scenarios": numbers}
        print(outcome.write("threads", found))
    return int(any(n["bad_rounds"] for n in numbers.values()))


if __name__ == "__main__":
    sys.exit(main())
