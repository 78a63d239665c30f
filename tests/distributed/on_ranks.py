"""What each rank of a process group does: every check in turn, the same on all ranks, against one process alone.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/on_ranks.py answer.json [check ..]
    python tests/distributed/on_ranks.py answer.json --fork 4    the same group without the time that imports take
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).parents[1] / "gallery"))
sys.path.insert(0, str(Path(__file__).parent))
import job
import rank_functions as functions
import rank_models as models
import rank_programs as programs

sys.path.insert(0, str(job.TRUST))
import forked
import kept_functions

import fusegrad
from fusegrad.examples.demo import ranks as demo_ranks
from fusegrad.examples.demo.model import Sizes
from fusegrad.examples.gallery.catalogue import CATALOGUE
from fusegrad.runtime.distributed.call import MeshesDifferError, MixedTensorsError, PlacementError

Tensor = torch.Tensor
R, S0, S1 = Replicate(), Shard(0), Shard(1)
Check = Callable[[Any], None]
CHECKS: dict[str, tuple[int, Check]] = {}


def check(ranks: int) -> Callable[[Check], Check]:
    """A check for groups of so many ranks."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = (ranks, function)
        return function

    return register


EVERY = os.environ.get("FUSEGRAD_TESTS") == "all"


def some(cases: Sequence[Any], most: int, at: int = 0) -> list[Any]:
    """A sample of many cases, another one for another `at`; all of them where all are asked for."""
    step = 1 if EVERY else max(1, -(-len(cases) // most))
    return list(cases[at % step :: step])


def seeded(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


# ------------------------------------------------------------------ DTensor against one process
def cases(rows: int) -> Iterator[tuple[type, tuple[Any, ...]]]:
    """Functions with whole arguments, the same on each rank."""
    torch.manual_seed(rows)
    yield functions.Norm, (seeded(rows, 6), seeded(6), 1e-6)
    yield functions.Gated, (seeded(rows, 6), seeded(rows, 6))
    yield functions.Softmax, (seeded(rows, 6),)
    yield functions.Linear, (seeded(rows, 6), seeded(4, 6), seeded(4))
    yield functions.Product, (seeded(rows, 6), seeded(4, 6))
    yield functions.Rows, (torch.randint(0, 5, (rows,)), seeded(5, 6))
    yield functions.Picked, (seeded(rows, 6), torch.randint(0, 6, (rows,)))
    yield functions.Rounded, (seeded(rows, 6), seeded(1))
    yield functions.Spread, (seeded(rows, 6),)
    yield functions.SquaredError, (seeded(rows, 6), seeded(rows, 6))
    if rows:  # of nothing its own Python raises
        yield functions.Stepped, (seeded(rows, 6), seeded(1))
    yield functions.MeanOfRows, (seeded(rows, 6), seeded(6))


def placements_of(args: Sequence[Any], ndim: int) -> Iterator[tuple[Any, ...]]:
    """Of each tensor, on each mesh dim: whole or any axis divided."""
    each = [[R, *map(Shard, range(a.dim()))] for a in args if isinstance(a, Tensor)]
    per_tensor = [list(itertools.product(options, repeat=ndim)) for options in each]
    yield from itertools.product(*per_tensor)


def placed(args: Sequence[Any], mesh: Any, placements: Sequence[Any]) -> list[Any]:
    supply = iter(placements)
    return fresh(args, lambda a: distribute_tensor(a, mesh, next(supply)))


def fresh(args: Sequence[Any], made: Callable[[Tensor], Tensor] = Tensor.clone) -> list[Any]:
    """The arguments again, each a leaf of its own."""
    return [made(a.detach()).requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]


def results(function: Any, args: Sequence[Any]) -> list[Tensor]:
    """Outputs and gradients, whole."""
    made = function(*args)
    made = [o for o in (made if isinstance(made, tuple) else (made,)) if o.is_floating_point()]
    weighted = [(whole(o) * torch.linspace(-1, 2, o.numel(), dtype=o.dtype).reshape(o.shape)).sum() for o in made]
    sum(weighted[1:], weighted[0]).backward()
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return [*(whole(o).detach() for o in made), *(whole(a.grad) for a in leaves)]


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(mine: Sequence[Tensor], theirs: Sequence[Tensor], what: object) -> None:
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        told = functools.partial("{}, result {}: {}".format, what, number)
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True, msg=told)


def agrees(mesh: Any, cls: type, args: Sequence[Any], each: Sequence[Sequence[Any]], **options: Any) -> Any:
    """A class on the arguments in all these placements is what it is on one process. Returns the compiled class."""
    theirs = results(cls.apply, fresh(args))  # type: ignore[attr-defined]
    fast: Any = fusegrad.compile(cls, **options)
    for placements in each:
        same(results(fast.apply, placed(args, mesh, placements)), theirs, f"{cls.__name__} at {placements}")
    return fast


def is_compiled(fast: Any) -> None:
    found = {m: r.status for m, r in fast._fusegrad.ledger.records.items()}
    assert found == {"forward": "compiled", "backward": "compiled"}, fast._fusegrad.ledger.records


@check(2)
def every_placement_of_every_function(mesh: Any) -> None:
    for rows in (8, 7) if EVERY else (7,):
        for at, (cls, args) in some(list(enumerate(cases(rows))), 3):
            is_compiled(agrees(mesh, cls, args, some(list(placements_of(args, 1)), 3, at)))


@check(4)
def every_placement_on_two_mesh_dims(mesh: Any) -> None:
    grid = init_device_mesh("cpu", (2, 2))
    for at, (cls, args) in some(list(enumerate(cases(7))), 2):
        is_compiled(agrees(grid, cls, args, some(list(placements_of(args, 2)), 2, at)))


@check(4 if EVERY else 2)
def parts_of_one_row_and_of_none(mesh: Any) -> None:
    for rows in (7, 4, 3, 2, 1, 0) if EVERY else (3, 1):
        for cls, args in some(list(cases(rows)), 1, rows):
            divided = tuple((Shard(0) if a.shape[0] == rows else R,) for a in args if isinstance(a, Tensor))
            agrees(mesh, cls, args, [divided])


@check(2)
def placements_of_results(mesh: Any) -> None:
    """What is divided stays divided, and sums over it are left to be added."""
    fast: Any = fusegrad.compile(functions.Norm)
    x, weight, eps = next(cases(7))[1]
    x, weight, _ = placed((x, weight, eps), mesh, [(S0,), (R,)])
    y = fast.apply(x, weight, eps)
    y.sum().backward()
    assert y.placements == (S0,) and x.grad.placements == (S0,), (y.placements, x.grad.placements)
    assert weight.grad.placements == (Partial(),), weight.grad.placements
    product: Any = fusegrad.compile(functions.Product)
    made = product.apply(*placed((seeded(4, 6), seeded(4, 6)), mesh, [(S1,), (S1,)]))
    assert made.placements == (Partial(),), made.placements
    reasons = [r.reason for c in (fast, product) for r in c._fusegrad.ledger.records.values()]
    assert reasons == [None] * 4 or reasons == [None] * 3, reasons


@check(2)
def partial_arguments_are_added_first(mesh: Any) -> None:
    part = torch.full((4, 6), 1.0 + mesh.get_rank(), dtype=torch.float64)
    x = DTensor.from_local(part, mesh, [Partial()])
    fast: Any = fusegrad.compile(functions.Softmax)
    cubed = fusegrad.compile(functions.Cube).apply(x, DTensor.from_local(torch.ones(6).double(), mesh, [R]))
    torch.testing.assert_close(cubed.full_tensor(), torch.full((4, 6), 27.0, dtype=torch.float64))
    torch.testing.assert_close(fast.apply(x).full_tensor(), torch.full((4, 6), 1 / 6, dtype=torch.float64))


@check(2)
def moved_arguments_are_on_record(mesh: Any) -> None:
    fast: Any = fusegrad.compile(functions.Softmax)
    (x,) = placed((seeded(4, 6),), mesh, [(S1,)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast.apply(x)
        fast.apply(x)
    said = [str(w.message) for w in caught if w.category is fusegrad.FallbackWarning]
    assert len(said) == 1 and "`x`" in said[0] and "dim 1" in said[0] and "amax" in said[0], said
    assert "rank_functions.py" in fast._fusegrad.ledger.records["forward"].reason
    strict: Any = fusegrad.compile(functions.Softmax, fullgraph=True)
    refused = raises(PlacementError, lambda: strict.apply(x))
    assert all(word in refused for word in ("Softmax", "`x`", "dim 1", "amax", "redistribute")), refused


def raises(kind: type[Exception], run: Callable[[], Any]) -> str:
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


@check(2)
def errors_say_what_to_do(mesh: Any) -> None:
    fast: Any = fusegrad.compile(functions.Norm)
    x, weight = placed((seeded(4, 6), seeded(6)), mesh, [(S0,), (R,)])
    said = raises(MixedTensorsError, lambda: fast.apply(x, seeded(6), 1e-6))
    assert "`weight`" in said and "distribute_tensor" in said, said
    other = init_device_mesh("cpu", (1, 2))
    (elsewhere,) = placed((seeded(6),), other, [(R, R)])
    assert "`weight`" in raises(MeshesDifferError, lambda: fast.apply(x, elsewhere, 1e-6))
    assert fast.apply(x, weight, 1e-6).placements == (S0,)


@check(2)
def double_backward(mesh: Any) -> None:
    """Also of what was divided along a dim, and of a backward that is not the derivative."""
    torch.manual_seed(3)
    every = {functions.Cube: (seeded(7, 4), seeded(4)), functions.SquaredError: (seeded(7, 4), seeded(7, 4))}

    def second(function: Any, x: Any, weight: Any) -> list[Tensor]:
        y = function(x, weight)
        first = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
        (whole(first[0]) ** 2).sum().backward(retain_graph=True)
        (whole(first[1]) ** 3).sum().backward()
        return [whole(t).detach() for t in (y, *first, x.grad, weight.grad)]

    for cls, args in every.items():
        theirs = second(cls.apply, *fresh(args))
        for placements in some(list(placements_of(args, 1)), 2):
            fast: Any = fusegrad.compile(cls)
            same(second(fast.apply, *placed(args, mesh, placements)), theirs, f"{cls.__name__} twice at {placements}")


@check(2)
def what_cannot_be_captured_runs_as_written(mesh: Any) -> None:
    (x,) = placed((seeded(4, 6),), mesh, [(S0,)])
    for cls in (functions.Asks, functions.Dropped):
        fast: Any = fusegrad.compile(cls)
        y = fast.apply(x)
        y.sum().backward()
        records = fast._fusegrad.ledger.records
        assert isinstance(y, DTensor) and records["forward"].status == "opaque", records
    assert y.placements == (S0,)
    asked = whole(x).sum() > 0
    same([whole(fusegrad.compile(functions.Asks).apply(x))], [whole(x) * (-1 if asked else 2)], "Asks")


@check(2)
def plain_tensors_first(mesh: Any) -> None:
    """Whatever was captured or made ready for plain tensors never meets a DTensor, whose memory is none."""
    torch.manual_seed(4)
    full = seeded(4, 6).float().detach()
    for backend in ("reference", "interpret"):
        fast: Any = fusegrad.compile(functions.Softmax, backend=backend)
        for _ in range(5):
            fast.apply(full.clone().requires_grad_()).sum().backward()
            fast.apply(full)
        for placement in (R, S0):
            x = distribute_tensor(full, mesh, [placement]).requires_grad_()
            y = fast.apply(x)
            y.sum().backward()
            torch.testing.assert_close(whole(y).detach(), torch.softmax(full, -1))
            torch.testing.assert_close(whole(x.grad), torch.zeros_like(full), atol=1e-6, rtol=0)


@check(2)
def generated_kernels_on_parts(mesh: Any) -> None:
    for rows in (7, 2) if EVERY else (2,):
        torch.manual_seed(rows)
        args = (seeded(rows, 6), seeded(rows, 6))
        agrees(mesh, functions.Gated, args, [((S0,), (R,)), ((S1,), (S1,))], backend="interpret")
        args = (seeded(rows, 6), seeded(6), 1e-6)
        agrees(mesh, functions.Norm, args, [((S0,), (R,))], backend="interpret")


@check(2)
def plain_functions(mesh: Any) -> None:
    @fusegrad.compile
    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(x) * weight

    torch.manual_seed(5)
    args = (seeded(7, 4), seeded(4))
    theirs = results(lambda x, w: torch.tanh(x) * w, fresh(args))
    for placements in some(list(placements_of(args, 1)), 3):
        same(results(scaled, placed(args, mesh, placements)), theirs, f"function at {placements}")


@check(2)
def recipes_of_the_documentation(mesh: Any) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
    text, scope = page.read_text(encoding="utf-8"), {"__name__": "__page__"}
    found = list(re.finditer(r'^```python title="in a file"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE))
    assert len(found) >= 5
    for block in found:
        above = "\n" * (text[: block.start(1)].count("\n"))
        exec(compile(above + block[1], str(page), "exec"), scope)


@check(2)
def the_demo(mesh: Any) -> None:
    """What `fusegrad demo --nproc 2` does on each rank, on a smaller model."""
    sizes = Sizes(width=16, hidden=24, heads=2, layers=1, context=12, batch=4)
    facts = demo_ranks.trained_each_way(mesh, torch.device("cpu"), sizes, 3, 0, "reference")
    assert len(facts["losses"]) == 4 and len(facts["losses"]["tensor parallel"]) == 3
    assert demo_ranks.report(facts, 2) == 0, facts
    wrong = {**facts["losses"], "tensor parallel": [1.01 * loss for loss in facts["losses"]["one process, eager"]]}
    assert demo_ranks.report({**facts, "losses": wrong}, 2) == 2


@check(2)
def the_gallery(mesh: Any) -> None:
    """Batches divided, weights whole: what each Function of the gallery is on one process."""
    for entry in some(CATALOGUE, 2):
        torch.manual_seed(6)
        args = entry.arguments(torch.float64)
        places = [(R,) if i in entry.weights or not a.dim() else (S0,) for i, a in enumerate(args) if is_tensor(a)]
        mine, theirs = placed(args, mesh, places), fresh(args)
        same(results(entry.function.apply, mine), results(entry.written.apply, theirs), f"{entry.name} of the gallery")


@check(2)
def the_gallery_with_columns_divided(mesh: Any) -> None:
    """Weights and features divided along their last dim, as tensor parallelism does; what a rule refuses is moved."""
    for entry in some(CATALOGUE, 2, 1):
        args = entry.arguments(torch.float64)
        places = [(Shard(a.dim() - 1),) if a.dim() and a.shape[-1] > 1 else (R,) for a in args if is_tensor(a)]
        mine, theirs = placed(args, mesh, places), fresh(args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)  # on record; the results are what counts here
            same(results(entry.function.apply, mine), results(entry.written.apply, theirs), f"{entry.name} divided")


@check(2)
def the_gallery_in_data_parallel(mesh: Any) -> None:
    for entry in some(CATALOGUE, 2, 2):
        models.check_layer(entry, mesh)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@check(2)
def random_programs(mesh: Any) -> None:
    """PROGRAMS="1000:3000" in the environment: from this seed to that one."""
    first, last = map(int, os.environ.get("PROGRAMS", "0:200" if EVERY else "0:8").split(":"))
    programs.check_programs(range(first, last), mesh)


@check(2)
def ranks_share_their_captures(mesh: Any) -> None:
    """On one empty cache, with no rank told to be the first."""
    found = job.judged(job.together(forked.Work(kept_functions.CLASSES[:1], kernels=False)), 0)
    assert job.is_ok(found) and sum(found["captures_by_rank"]) == 2 and found["entries"], found


# ------------------------------------------------------------------ whole models
@check(2)
def data_parallel(mesh: Any) -> None:
    models.check_ddp(mesh)


@check(2)
def fully_sharded(mesh: Any) -> None:
    models.check_fsdp(mesh)


@check(2)
def tensor_parallel(mesh: Any) -> None:
    models.check_tp(mesh)


@check(4)
def fully_sharded_and_tensor_parallel(mesh: Any) -> None:
    models.check_both(mesh)


@check(2)
def options_of_data_parallelism(mesh: Any) -> None:
    for name in some(list(models.OPTIONS), 3):
        models.check_option(name, mesh)


@check(2)
def data_parallel_in_graphs(mesh: Any) -> None:
    models.check_compiled_ddp(mesh)
    models.check_compiled_fsdp(mesh)


@check(2)
def tensor_parallel_in_graphs(mesh: Any) -> None:
    models.check_compiled_tp(mesh)


@check(2)
def in_the_graphs_of_torch_compile(mesh: Any) -> None:
    """DTensors there: sizes that change, parts of different sizes, arguments that are moved."""
    every = list(enumerate(zip(cases(7), cases(9), strict=True)))
    for at, ((cls, args), (_, others)) in some(every, 3):
        fast = fusegrad.compile(cls)
        for placements in some(list(placements_of(args, 1)), 2, at):
            torch._dynamo.reset()
            step = torch.compile(in_a_graph(fast), backend="aot_eager", fullgraph=True)
            for given in (args, others):
                theirs = results(cls.apply, fresh(given))
                same(results(step, placed(given, mesh, placements)), theirs, f"{cls.__name__} at {placements}")
        is_compiled(fast)


@check(2)
def graphs_of_the_whole_on_parts(mesh: Any) -> None:
    """Where a part would be captured as something else: sizes that are numbers to Python, parts of one row."""
    torch.manual_seed(8)
    numbers = (next(e for e in CATALOGUE if e.name == "learned_step").written, (seeded(4, 6), seeded(), 3), (S1,))
    rows = (functions.Norm, (seeded(2, 6), seeded(6), 1e-6), (S0,))
    for cls, args, placement in (numbers, rows):
        torch._dynamo.reset()
        fast: Any = fusegrad.compile(cls)
        step = torch.compile(in_a_graph(fast), backend="aot_eager", fullgraph=True)
        given = placed(args, mesh, [placement, (R,)])
        assert step(*given).placements == placement
        same(results(step, given), results(cls.apply, fresh(args)), cls.__name__)  # type: ignore[attr-defined]
        assert [r.reason for r in fast._fusegrad.ledger.records.values()] == [None, None], fast._fusegrad.ledger.records


def in_a_graph(fast: Any) -> Any:
    """A function whose whole body is one call."""
    return lambda *args: fast.apply(*args)


@check(2)
def what_breaks_a_graph(mesh: Any) -> None:
    """A method that is not captured is called between two graphs; what may not be moved is an error there, too."""
    (x,) = placed((seeded(4, 6),), mesh, [(S0,)])
    torch._dynamo.reset()
    fast: Any = fusegrad.compile(functions.Asks)
    written = functions.Asks.apply(2 * x)
    same([whole(torch.compile(lambda x: fast.apply(2 * x), backend="aot_eager")(x))], [whole(written)], "Asks")
    whole_graph = torch.compile(lambda x: fast.apply(2 * x), backend="aot_eager", fullgraph=True)
    said = raises(RuntimeError, lambda: whole_graph(x))
    assert "Asks.apply cannot be in a graph of torch.compile" in said, said
    strict: Any = fusegrad.compile(functions.Softmax, fullgraph=True)
    (columns,) = placed((seeded(4, 6),), mesh, [(S1,)])
    said = raises(RuntimeError, lambda: torch.compile(lambda x: strict.apply(x), backend="aot_eager")(columns))
    assert "Softmax.apply: `x` is S(1)" in said and "redistribute" in said, said


@check(2)
def graphs_that_see_no_parts(mesh: Any) -> None:
    """torch.export and make_fx record operations on the whole: a part would be a constant of their graphs."""
    fast: Any = fusegrad.compile(functions.Softmax)
    x, other = placed((seeded(4, 6), seeded(4, 6)), mesh, [(S0,), (S0,)])
    traced = make_fx(lambda x: fast.apply(2 * x))(x.detach())
    same([whole(traced(other.detach()))], [whole(functions.Softmax.apply(2 * other.detach()))], "make_fx")

    class Holder(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fast.apply(x)  # type: ignore[no-any-return]

    said = raises(RuntimeError, lambda: torch.export.export(Holder(), (x.detach(),)))
    assert "Softmax.apply cannot be in a graph of torch.export: it is given DTensors" in said, said


@check(2)
def collectives_within_methods(mesh: Any) -> None:
    """They run as written between compiled segments; what they write to counts as written, though zeros stay zeros."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for cls, args in (functions.SumOfRanks, lambda x: (x, group)), (functions.GatheredRanks, lambda x: (group, x)):
        fast: Any = fusegrad.compile(cls, backend="reference")
        for step in range(4):
            x = (step * (seeded(4, 6) + rank)).requires_grad_()
            found = [gradient_of_sines(c.apply(*args(x)), x, step) for c in (cls, fast)]
            same(found[1], found[0], f"{cls.__name__}, step {step}")
        split = {call.method for call in fast._fusegrad.ledger.opaque_calls}
        written = [name for name, record in fast._fusegrad.ledger.records.items() if record.status == "opaque"]
        assert split == {"forward", "backward"} and "forward" not in written and "backward" not in written, cls


def gradient_of_sines(out: Tensor, x: Tensor, step: int) -> list[Tensor]:
    """The result, and a gradient that is zero at step 0."""
    return [out, *torch.autograd.grad(out, x, step * out.detach().sin())]


def main() -> int:
    answer, *names = sys.argv[1:]
    if names[:1] == ["--fork"]:
        return as_children(answer, int(names[1]), names[2:])
    dist.init_process_group("gloo")
    return run_checks(answer, names)


def as_children(answer: str, ranks: int, names: Sequence[str]) -> int:
    """The ranks as children of this process, which has imported everything."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=on_rank, args=(answer, r, ranks, names)) for r in range(ranks)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    return max(abs(child.exitcode or 0) for child in children)


def on_rank(answer: str, rank: int, ranks: int, names: Sequence[str]) -> None:
    store = dist.FileStore(f"{answer}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    run_checks(answer, names)


def run_checks(answer: str, names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    os.environ["FUSEGRAD_CACHE_DIR"] = f"{answer}.cache"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, str] = {}
    for name, (ranks, run) in CHECKS.items():
        if ranks == dist.get_world_size() and (not names or name in names):
            found[name] = outcome_of(run, mesh)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps({n: [e[n] for e in everyone] for n in found}))
    dist.destroy_process_group()
    return 0


def outcome_of(run: Check, mesh: Any) -> str:
    """Empty, or what went wrong. A check that fails on one rank alone may leave the others waiting: gloo gives up."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusegrad.FallbackWarning)
            run(mesh)
        dist.barrier()
        return ""
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    sys.exit(main())
