"""Statements that no graph can hold run as written, once and in order, between compiled segments of their method."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from side_by_side import both, leaf, plain, same
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import fusegrad

Tensor = torch.Tensor
LOG = logging.getLogger(__name__)
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def gradients(cls: Any, *args: Any, times: int = 4) -> Any:
    """Values and gradients of some calls, and what was seen meanwhile."""
    found = []
    for n in range(times):
        given = [a.detach().add(n).requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
        out = cls.apply(*given)
        wanted = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
        found.append((out, torch.autograd.grad(out.square().sum(), wanted)))
    return found


def is_split(fast: Any, *methods: str) -> None:
    """Whether these methods, and no others, have segments that run as written."""
    calls = fast._fusegrad.ledger.opaque_calls
    assert {call.method for call in calls} == set(methods), calls


class Prints(Function):
    @staticmethod
    def forward(ctx, x, w):
        y = x.sin() * 2
        print("forward", f"{float(y.sum()):.6f}")
        z = y.exp() + w
        ctx.save_for_backward(x, z)
        print("then", tuple(z.shape))
        return z * w

    @staticmethod
    def backward(ctx, g):
        x, z = ctx.saved_tensors
        h = g * z
        print("backward", f"{float(g.sum()):.4f}")
        return h.cos() * x, h.sum(0)


@both
def test_print_happens_once_in_order_with_real_values(backend, capsys):
    def story(cls: Any) -> Any:
        found = gradients(cls, leaf(3, 4), leaf(4))
        return [f[1][0].shape for f in found] + [capsys.readouterr().out] if backend == "interpret" else [
            found, capsys.readouterr().out
        ]  # fmt: skip

    is_split(same(Prints, story, "reference" if backend == "reference" else backend), "forward", "backward")


class Logs(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * x
        if y.dim() == 2:
            LOG.warning("sum %.5f", y.sum().item())
        return y.exp()

    @staticmethod
    def backward(ctx, g):
        warnings.warn("a gradient was asked for", RuntimeWarning, stacklevel=1)
        SEEN.append(tuple(g.shape))
        return g * 2


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.getMessage()} at {record.lineno}")


@pytest.fixture
def records() -> Iterator[_Records]:
    handler = _Records()
    LOG.addHandler(handler)
    yield handler
    LOG.removeHandler(handler)


def test_log_records_and_warnings(records):
    def story(cls: Any) -> Any:
        records.texts.clear()
        SEEN.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = gradients(cls, leaf(2, 3))
        told = [(str(w.message), w.filename, w.lineno) for w in caught if w.category is RuntimeWarning]
        return found, list(records.texts), told, list(SEEN)

    is_split(same(Logs, story), "forward", "backward")


class Sorted(Function):
    """numpy from leaving torch to coming back, in several statements."""

    @staticmethod
    def forward(ctx, x, w):
        y = x.tanh() * w
        values = y.detach().cpu().numpy()
        order = np.argsort(values, axis=-1, kind="stable")
        ranked = np.take_along_axis(values, order, -1)
        s = torch.from_numpy(ranked).to(x.dtype)
        index = torch.from_numpy(order)
        ctx.save_for_backward(x, w, index)
        return s * 3 + y.mean()

    @staticmethod
    def backward(ctx, g):
        x, w, index = ctx.saved_tensors
        h = torch.zeros_like(g).scatter(-1, index, g * 3)
        t = x.tanh()
        return h * w * (1 - t * t), (h * t).sum(0)


@both
def test_numpy_between_torch(backend):
    fast = same(Sorted, lambda cls: gradients(cls, leaf(3, 5), leaf(5)), backend)
    is_split(fast, "forward")
    (call,) = fast._fusegrad.ledger.opaque_calls
    assert "lines_" in call.node and "numpy" in call.reason


class EarlyReturn(Function):
    """Which way is taken depends on the data: a graph for each, and the statements in between as written."""

    @staticmethod
    def forward(ctx, x):
        y = x.cos() + 1
        ctx.save_for_backward(x)
        if y.sum() > 3:
            return y * 2
        elif y.sum() < -100:
            y = y - 1
        return y.exp() + x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        total = g.clone()
        for _ in range(3):
            if total.abs().sum() > 5:
                break
            total = total * 2
        else:
            total = total + x
        return total * x


def test_control_flow_on_data():
    def story(cls: Any) -> Any:
        args = [leaf(2, 2), leaf(2, 2, seed=1), (leaf(2, 2).detach() * 0 + 3.1).requires_grad_()]
        return [gradients(cls, a) for a in args]

    is_split(same(EarlyReturn, story), "forward", "backward")


class Draws(Function):
    """Python's own random numbers, and a name that is bound on one way alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.p = random.random()
        y = x * 3
        if random.random() > 0.5:
            scale = float(np.round(random.random(), 2))
            y = y + scale
        ctx.save_for_backward(y)
        return y.sin()

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y.cos() * 3


def test_pythons_random_numbers():
    def story(cls: Any) -> Any:
        random.seed(7)
        return gradients(cls, leaf(3), times=6), random.random()

    same(Draws, story, may=("forward", "backward"))


class Keeps(Function):
    """once_differentiable, a free variable, a default, and ctx within the statements."""

    @staticmethod
    def forward(ctx, x, scale=2.0):
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        h = g.exp()
        SEEN.append((ctx.scale, ctx.needs_input_grad, round(float(h.sum()), 3)))
        return h * ctx.scale + x, None


def test_ctx_is_read_within_a_segment():
    def story(cls: Any) -> Any:
        SEEN.clear()
        return gradients(cls, leaf(3)), list(SEEN), _double(cls)

    is_split(same(Keeps, story), "backward")


def _double(cls: Any) -> str:
    x = leaf(3)
    (g,) = torch.autograd.grad(cls.apply(x).sum(), x, create_graph=True)
    try:
        g.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "differentiated"


def test_double_backward_is_eagers():
    def story(cls: Any) -> Any:
        x, w = leaf(3, 4), leaf(4)
        first = torch.autograd.grad(cls.apply(x, w).sum(), (x, w), create_graph=True)
        return first, torch.autograd.grad(sum(f.square().sum() for f in first), (x, w), allow_unused=True)

    same(Prints, story)


class Fills(Function):
    """A list that is made before the statements is filled within: no graph may keep the list of its capture."""

    @staticmethod
    def forward(ctx, x):
        seen = [x.sum()]
        y = x * 2
        seen.append(torch.from_numpy(y.numpy() + 1).sum())
        return y + seen[-1]

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_a_list_that_is_filled():
    same(Fills, lambda cls: gradients(cls, leaf(3)), may=("forward",))


class Catches(Function):
    """What torch raises is caught, and said: which way is taken depends on the data."""

    @staticmethod
    def forward(ctx, a):
        try:
            made = torch.linalg.cholesky(a)
            failed = False
        except torch.linalg.LinAlgError:
            print("not positive definite")
            made, failed = torch.zeros_like(a), True
        ctx.failed = failed
        ctx.save_for_backward(made)
        return made * 2

    @staticmethod
    def backward(ctx, g):
        (made,) = ctx.saved_tensors
        return None if ctx.failed else g * made


def test_errors_that_are_caught(capsys):
    def story(cls: Any) -> Any:
        good = torch.eye(3).mul(2).requires_grad_()
        bad = torch.eye(3).mul(-1).requires_grad_()
        return [cls.apply(a) for a in (good, bad, good, bad, good)], capsys.readouterr().out

    same(Catches, story, may=("forward",))


class Fails(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        if float(y.sum()) > 100:
            raise ValueError(f"too large: {float(y.sum()):.1f}")
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_errors_of_their_own():
    def story(cls: Any) -> Any:
        found = [gradients(cls, leaf(3))]
        with pytest.raises(ValueError, match=r"too large: 600\.0"):
            cls.apply(torch.full((3,), 100.0))
        return [*found, gradients(cls, leaf(3))]

    same(Fails, story)


def test_a_method_that_is_exchanged(capsys):
    class Mine(Function):
        @staticmethod
        def forward(ctx, x):
            print("one")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def other(ctx: Any, x: Tensor) -> Tensor:
        print("two")
        return x * 5

    fast = fusegrad.compile(Mine)
    assert torch.equal(fast.apply(plain(3)), plain(3) * 2)
    assert torch.equal(fast.apply(plain(3)), plain(3) * 2)
    Mine.forward = staticmethod(other)
    assert torch.equal(fast.apply(plain(3)), plain(3) * 5)
    assert torch.equal(fast.apply(plain(3)), plain(3) * 5)
    assert capsys.readouterr().out == "one\none\ntwo\ntwo\n"


def test_a_free_variable_that_changes(capsys):
    scale = [2.0]
    factor = 3.0

    class Mine(Function):
        @staticmethod
        def forward(ctx, x):
            y = x * factor
            print(scale[0], factor)
            return y + 1

        @staticmethod
        def backward(ctx, g):
            return g * factor

    fast = fusegrad.compile(Mine)
    for _ in range(3):
        assert torch.equal(fast.apply(plain(3)), plain(3) * factor + 1)
        scale[0], factor = scale[0] + 1, factor + 1
    assert capsys.readouterr().out == "2.0 3.0\n3.0 4.0\n4.0 5.0\n"


def test_a_dead_branch_is_no_segment():
    class Quiet(Function):
        @staticmethod
        def forward(ctx, x, verbose):
            if verbose:
                print("loud")
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2, None

    is_split(same(Quiet, lambda cls: gradients(cls, leaf(3), False)))


def test_fullgraph_says_the_line():
    with pytest.raises(fusegrad.NotTraceableError, match="print"):
        fusegrad.compile(Prints, fullgraph=True).apply(leaf(3, 4), leaf(4))


def test_vmap_and_forward_mode_are_eagers():
    class Both(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            y = x * 2
            SEEN.append("forward")
            return y.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (x * 2).cos() * 2

        @staticmethod
        def jvp(ctx, t):
            (x,) = ctx.saved_tensors
            return t * (x * 2).cos() * 2

    def story(cls: Any) -> Any:
        x = plain(3, 4)
        SEEN.clear()
        batched = torch.vmap(cls.apply)(x)
        moved = torch.func.jvp(cls.apply, (x,), (x.cos(),))
        return batched, moved, torch.func.vmap(torch.func.grad(lambda v: cls.apply(v).sum()))(x), set(SEEN)

    same(Both, story, may=("forward", "torch.func", "vmap", "jvp"))


def test_what_is_changed_and_read_is_not_apart():
    counter, table = [1], torch.ones(3)

    class Counts(Function):
        @staticmethod
        def forward(ctx, x):
            counter[0] += 1
            return x * counter[0]

        @staticmethod
        def backward(ctx, g):
            table.mul_(2)
            return g * table

    def story(cls: Any) -> Any:
        counter[0] = 1
        table.fill_(1)
        return gradients(cls, leaf(3)), counter[0], table.clone()

    same(Counts, story, opaque=("forward", "backward"))


@torch.jit.script
def swish_of_a_script(x: Tensor) -> Tensor:
    return x.mul(x.sigmoid())


def test_functions_of_torch_script_are_seen_through():
    class Scripted(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return swish_of_a_script(x)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * swish_of_a_script(x).exp()

    def story(cls: Any) -> Any:
        x = leaf(3, 4)
        y = cls.apply(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradients(cls, leaf(3, 4)), y, torch.autograd.grad(g.sum(), x)

    is_split(same(Scripted, story, tolerance=1e-6))


def test_functions_of_torch_compile_are_seen_through():
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) * x, backend="eager")

    class Faster(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return compiled(x) + 1

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return compiled(g) * x

    is_split(same(Faster, lambda cls: gradients(cls, leaf(3, 4)), tolerance=1e-6))


class OneArm(Function):
    @staticmethod
    def forward(ctx, x, p):
        if p > 0:
            mask = x > 0
            ctx.extra = 3.0
        y = x * 2
        if y.sum() > -100 or p > 0:
            y = torch.where(mask, y, y.sin()) if p > 0 else y + 1
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx, g):
        SEEN.append(float(g.sum()) * (ctx.extra if ctx.p > 0 else 1))
        return g * 2, None


@both
@pytest.mark.parametrize("p", [0, 1])
def test_what_one_arm_of_a_branch_bound_reaches_a_segment_that_may_not_read_it(p, backend):
    is_split(same(OneArm, lambda cls: gradients(cls, leaf(3, 4), p), backend), "forward", "backward")


def test_a_name_or_an_attribute_that_is_read_unbound_raises_pythons_error():
    class Unbound(Function):
        @staticmethod
        def forward(ctx, x, p):
            if p > 0:
                mask = x > 0
            SEEN.append(float(mask.sum()))
            return x * mask

        @staticmethod
        def backward(ctx, g):
            return g, None

    class NotOnCtx(Function):
        @staticmethod
        def forward(ctx, x):
            if x.sum() > 100:
                ctx.scale = 2.0
            return x * 2

        @staticmethod
        def backward(ctx, g):
            SEEN.append(float(g.sum()))
            SEEN.append(ctx.scale)
            return g

    same(Unbound, lambda cls: gradients(cls, leaf(3), 0))
    same(NotOnCtx, lambda cls: gradients(cls, leaf(3)))


def test_a_segment_meets_a_name_as_unbound_in_the_calls_in_which_it_is():
    class Sometimes(Function):
        @staticmethod
        def forward(ctx, x):
            if x.sum() > 3:
                scale = 2.0
            try:
                print(scale)
                return x * scale
            except UnboundLocalError as error:
                print(error)
                return x * 3

        @staticmethod
        def backward(ctx, g):
            return g

    same(Sometimes, lambda cls: gradients(cls, torch.zeros(3, requires_grad=True)))


class DrawsAgain(Function):
    """What one segment binds is read by another alone."""

    @staticmethod
    def forward(ctx, x):
        ctx.state = torch.get_rng_state()
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        mask = torch.rand_like(g)
        torch.set_rng_state(now)
        return g * mask


def test_what_a_segment_binds_for_another_one():
    def story(cls: Any) -> Any:
        torch.manual_seed(3)
        return gradients(cls, leaf(3)), torch.rand(2)

    is_split(same(DrawsAgain, story), "forward", "backward")


class DrawsAndCounts(Function):
    """Two effects, of which only the first can be taken out of the method."""

    @staticmethod
    def forward(x, a):
        return x.cumsum(-1) * 0.25

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        noisy = g * torch.rand(g.shape, generator=RANDOM)
        TIMES[0] += 1
        return noisy * TIMES[0], g * x


RANDOM, TIMES = torch.Generator(), [0]


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_effect_behind_a_segment_happens_once(create_graph):
    def story(cls: Any) -> Any:
        RANDOM.manual_seed(3)
        TIMES[0] = 0
        found = []
        for _ in range(4):
            x, a = leaf(3), leaf(3, seed=1)
            first = torch.autograd.grad(cls.apply(x, a).sum(), (x, a), create_graph=create_graph)
            found += [t.detach() for t in first]
            if create_graph:
                found += torch.autograd.grad(first[1].sum(), x)
        return [t.tolist() for t in found], TIMES[0]

    assert story(fusegrad.compile(DrawsAndCounts)) == story(DrawsAndCounts)


class Refuses(Function):
    """Says something, then raises where it does not like what it is given."""

    @staticmethod
    def forward(ctx, x, k, n):
        SEEN.append("forward")
        if n == 1:
            raise ValueError(f"forward of {float(x.sum()):.1f}")
        if n != 2:
            ctx.k = k
        return x * k

    @staticmethod
    def backward(ctx, g):
        SEEN.append("backward")
        return g * ctx.k, None, None


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
@pytest.mark.parametrize("order", [(0, 1, 2, 0), (1, 2, 0, 0, 1, 2), (2, 1, 0, 1)])
def test_a_method_that_raises_ran_once(order):
    def story(cls: Any) -> Any:
        SEEN.clear()
        found: list[Any] = []
        for n in order:
            x = leaf(3)
            try:
                found += torch.autograd.grad(cls.apply(x, 2.0, n).sum(), x)[0].tolist()
            except (ValueError, AttributeError) as error:
                found.append(str(error))
            found.append(list(SEEN))
        return found

    assert story(fusegrad.compile(Refuses)) == story(Refuses)


class WritesThroughNumpy(Function):
    """numpy writes to the memory of values in between: their new content goes on in the graph."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        z = y + 1
        np.negative(y.numpy(), out=y.numpy(), where=y.numpy() > 0)
        ctx.save_for_backward(y)
        return y.exp() * z

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        h = g * y
        h.numpy()[0] = 3.0
        return h.sin() + g


@both
def test_numpy_writes_to_a_value_in_between(backend):
    fast = same(WritesThroughNumpy, lambda cls: gradients(cls, leaf(3, 4)), backend)
    is_split(fast, "forward", "backward")
    assert not {"forward", "backward"} & {m for m, r in fast._fusegrad.ledger.records.items() if r.status == "opaque"}


class WritesToShared(Function):
    """numpy writes to memory that another value shows: no result of the lines says that."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2
        z = y[0]
        np.add(y.numpy(), z.numpy(), out=y.numpy())
        return y + z

    @staticmethod
    def backward(ctx, g):
        return g * 3


def test_numpy_writes_to_a_value_that_has_a_view():
    same(WritesToShared, lambda cls: gradients(cls, leaf(3, 4)), opaque=("forward",))


class SavesWhereItCatches(Function):
    """What is tried also saves, so that it cannot be taken out."""

    @staticmethod
    def forward(ctx, matrix, b):
        try:
            factor = torch.linalg.cholesky(matrix)
            found = torch.cholesky_solve(b, factor)
            ctx.save_for_backward(factor, found)
            ctx.failed = False
        except Exception:
            ctx.failed = True
            found = torch.zeros_like(b)
        return found

    @staticmethod
    def backward(ctx, g):
        if ctx.failed:
            return None, None
        factor, found = ctx.saved_tensors
        solved = torch.cholesky_solve(g, factor)
        return -found @ solved.mT, solved


def test_what_catches_and_cannot_be_taken_out_is_the_users_whole():
    fast = fusegrad.compile(SavesWhereItCatches)
    with pytest.warns(fusegrad.FallbackWarning, match="catches what torch raises"):
        for sign in (1, 1, -1, 1, -1):
            given = [(sign * torch.eye(3)).requires_grad_(), leaf(3, 2)]
            told = []
            for cls in (SavesWhereItCatches, fast):
                out = cls.apply(*given)
                told.append((out, *torch.autograd.grad(out.sum(), given, allow_unused=True)))
            for wanted, mine in zip(*told, strict=True):
                assert (wanted is None and mine is None) or torch.equal(wanted, mine)
    assert {r.code for r in fast._fusegrad.ledger.records.values()} <= {"FG020", None}


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_code_that_is_assigned_between_forward_and_backward_is_what_runs(backend: str) -> None:
    def times_nine(ctx: Any, g: Tensor) -> Tensor:
        return g * 9

    class Logs(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            SEEN.append("backward")
            return g * 3

    fast, x = fusegrad.compile(Logs, backend=backend), leaf(3)
    was = Logs.backward.__code__
    for code, factor, seen in ((was, 3.0, 1), (times_nine.__code__, 9.0, 0), (was, 3.0, 1)):
        y = fast.apply(x)
        SEEN.clear()
        Logs.backward.__code__ = code
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, torch.full((3,), factor)) and len(SEEN) == seen
