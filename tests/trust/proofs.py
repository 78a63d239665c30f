"""Every kernel that the tests know, proved: in range, wide enough, no two programs at one place.

    python tests/trust/proofs.py [--json] [--bodies 1] [--graphs 100] [--suite 1] [--all]

Kernels come from the bodies of tests/codegen at aligned and odd sizes on two targets, from random graphs, and from the
Functions of tests/suite: what their methods, the derived ones, second derivatives and those over batches compile to.
Ten minutes of one core: --graphs and --suite N take more or less, --all 300 graphs and every Function.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
for folder in ("codegen", "suite", "trust"):
    sys.path.insert(0, str(TESTS / folder))

import outcome  # noqa: E402
import torch  # noqa: E402
from bodies import BODIES  # noqa: E402
from harness import K, M, N, graph_of  # noqa: E402

import fusegrad  # noqa: E402
from fusegrad import codegen  # noqa: E402
from fusegrad.codegen import TARGETS, Kernel, Kernels  # noqa: E402
from fusegrad.codegen.proofs import Proof, prove_kernel  # noqa: E402
from fusegrad.ir import Graph  # noqa: E402
from fusegrad.ir.errors import Unfusible  # noqa: E402
from fusegrad.runtime.execution.graph_to_kernels import optimize  # noqa: E402
from fusegrad.runtime.execution.kernel_plan import KernelPlan  # noqa: E402
from fusegrad.runtime.values.sizes import BoundSizes  # noqa: E402

SIZES = {"wide": {M: 4096, N: 4096, K: 8}, "odd": {M: 67, N: 50257, K: 4096}}
ON = ("cuda:90", "interpret")


@dataclass(frozen=True)
class Subject:
    """A kernel and the graph that it is of."""

    origin: str
    graph: Graph
    kernels: Kernels
    kernel: Kernel

    @property
    def key(self) -> tuple[Any, ...]:
        k = self.kernel
        shapes = [(v.shape, v.params["strides"]) for v in self.graph.inputs]
        return k.source, str(
            (k.guards, k.pinned, k.grid, k.constants, shapes, [getattr(a, "value", 0) for a in k.arguments])
        )


# ------------------------------------------------------------------ where kernels come from
def bodies() -> dict[str, Any]:
    import test_dequantised
    import test_layout
    import test_matrix_products
    import test_mixed_axes

    found = {f"body {n}": b for n, b in BODIES.items()}
    for module in (test_layout, test_mixed_axes, test_matrix_products, test_dequantised):
        found |= {f"{module.__name__[5:]} {n}": b for n, b in module.CASES.items()}
    return found


def of_bodies() -> Iterator[Subject]:
    for name, (function, inputs) in bodies().items():
        for size, sizes in SIZES.items():
            for target in ON:
                yield from of_body(f"{name} {size} {target}", function, inputs, sizes, target)


def of_body(origin: str, function: Any, inputs: Any, sizes: Any, target: str) -> Iterator[Subject]:
    symbols = {s for i in inputs.values() for n in i.shape if not isinstance(n, int) for s in n.free_symbols}
    graph = graph_of(function, **inputs)
    with contextlib.suppress(Unfusible):
        kernels = codegen.generate(
            graph, target=TARGETS[target], hints={**dict.fromkeys(symbols, 8), **sizes}, name="k"
        )
        yield from (Subject(origin, graph, kernels, k) for k in kernels.kernels)


def of_random_graphs(count: int) -> Iterator[Subject]:
    from test_random_graphs import CHUNKED, RANDOM, TWO_LEVELS

    for seed in range(count):
        rng = random.Random(seed)
        graph = optimize(RANDOM.Grower(seed + 20_000).grow(rng.randint(4, 24)))
        plan = KernelPlan(graph, "kernel", "interpret", torch.device("cpu"))
        plan.target = (TARGETS["interpret"], CHUNKED, TWO_LEVELS, TARGETS["cuda:90"])[seed % 4]
        sizes = BoundSizes({RANDOM.M: (17, 33, 4096)[seed % 3]})
        yield from generated_by(f"random graph {seed}", functools.partial(plan.cut, sizes))


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Graph, Kernels]]]:
    """What is generated inside."""
    found: list[tuple[Graph, Kernels]] = []
    own = codegen.generate

    def generate(graph: Graph, **how: Any) -> Kernels:
        kernels = own(graph, **how)
        found.append((graph, kernels))
        return kernels

    codegen.generate = generate  # type: ignore[assignment]
    try:
        yield found
    finally:
        codegen.generate = own


def of_suite(each: int = 1) -> Iterator[Subject]:
    from functions import CASES

    for case in CASES[::each]:
        torch.manual_seed(0)
        yield from generated_by(case.name, lambda c=case: compiled(c))  # type: ignore[misc]


def compiled(case: Any) -> None:
    """The methods' kernels by explain; on the CPU forward, backward, its own, jvp, vmap and vmap of vjp run."""
    fusegrad.explain(case.cls, *case.make(8))
    fast, arguments = fusegrad.compile(case.cls, backend="interpret"), case.make(5)
    with contextlib.suppress(Exception):
        out = fast.apply(*arguments)
        outs = [
            o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
        torch.autograd.backward(outs, [torch.randn_like(o) for o in outs], create_graph=True)
        grads = [a.grad for a in arguments if isinstance(a, torch.Tensor) and a.grad is not None]
        again = [g for g in grads if g.requires_grad]
        torch.autograd.backward(again, [torch.randn_like(g) for g in again])
    places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    with contextlib.suppress(Exception):
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]

        def function(*given: Any) -> Any:
            filled = list(plain)
            for i, g in zip(places, given, strict=True):
                filled[i] = g
            return fast.apply(*filled)

        given = tuple(plain[i] for i in places)
        torch.func.jvp(function, given, tuple(map(torch.randn_like, given)))
        batches = [torch.stack([g, g]) for g in given]
        torch.func.vmap(function)(*batches)
        torch.func.vmap(torch.func.vjp(function, *given)[1])(_ones_like(torch.func.vmap(function)(*batches)))


def _ones_like(values: Any) -> Any:
    return tuple(map(torch.ones_like, values)) if isinstance(values, tuple) else torch.ones_like(values)


def generated_by(origin: str, action: Callable[[], Any]) -> Iterator[Subject]:
    with watched() as found:
        action()
    for graph, kernels in found:
        yield from (Subject(origin, graph, kernels, k) for k in kernels.kernels)


def once(subjects: Iterator[Subject]) -> Iterator[Subject]:
    seen = set()
    for subject in subjects:
        if subject.key not in seen:
            seen.add(subject.key)
            yield subject


# ------------------------------------------------------------------ proofs
def prove(subject: Subject) -> Proof:
    return prove_kernel(subject.kernel, subject.graph, subject.kernels)


@dataclass
class Total:
    """What was proved, in numbers."""

    numbers: collections.Counter[str]
    conditions: collections.Counter[str]
    unproved: list[str]
    seconds: list[float]

    def take(self, subject: Subject) -> Proof:
        started = time.perf_counter()
        proof = prove(subject)
        self.seconds.append(time.perf_counter() - started)
        self.numbers.update(kernels=1, accesses=len(proof.claims), stores_apart=proof.apart, narrow=proof.narrow)
        self.numbers.update(kernels_proved=int(proof.proved))
        for claim in proof.claims:
            self.numbers[f"accesses_{claim.answer}"] += 1
        self.unproved += [f"{subject.origin}: {proof.kernel}: {f}" for f in proof.faults]
        return proof

    def written(self) -> dict[str, Any]:
        times = sorted(self.seconds) or [0.0]
        return {
            **dict(sorted(self.numbers.items())), "unproved": self.unproved,
            "milliseconds": {"median": round(times[len(times) // 2] * 1e3, 1), "most": round(times[-1] * 1e3, 1)},
        }  # fmt: skip


def everything(chosen: Mapping[str, int]) -> Iterator[Subject]:
    """Kernels of bodies, so many random graphs, and every so manieth Function of the suite; none for 0."""
    if chosen["bodies"]:
        yield from of_bodies()
    yield from of_random_graphs(chosen["graphs"])
    if chosen["suite"]:
        yield from of_suite(chosen["suite"])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--bodies", type=int, default=1, help="those of tests/codegen; 0 for none")
    options.add_argument("--graphs", type=int, default=100, help="so many random graphs")
    options.add_argument("--suite", type=int, default=1, help="every so manieth Function of tests/suite; 0 for none")
    options.add_argument("--json", action="store_true", help="write benchmarks/results/trust/proofs.json")
    options.add_argument("--all", action="store_true", help="300 random graphs, and all Functions")
    chosen = options.parse_args()
    if chosen.all:
        chosen.bodies, chosen.graphs, chosen.suite = 1, 300, 1
    total = Total(collections.Counter(), collections.Counter(), [], [])
    sources = {name: getattr(chosen, name) for name in ("bodies", "graphs", "suite")}
    for subject in once(everything(sources)):
        for fault in total.take(subject).faults:
            print(f"{subject.origin}: {fault}", flush=True)
    found = {"sources": sources, **total.written()}
    print({k: v for k, v in found.items() if k != "unproved"}, len(total.unproved), "unproved")
    if chosen.json:
        outcome.write("proofs", found)
    return 0 if not total.unproved else 1


if __name__ == "__main__":
    sys.exit(main())
