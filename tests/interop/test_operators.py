"""The operators that a call becomes in somebody else's graph: torch's own checks, names, sizes, and what is refused."""

import functools

import pytest
import torch
import wrong
from compose.functions import CASES, Numbers
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

import fusegrad
from fusegrad.runtime.dynamo import operators

TABLE = [case for case in CASES if "backward" in case.wrote]


def gradients(fn, args):
    """Values and gradients of every result that has one."""
    torch.manual_seed(0)
    args = [a.clone().requires_grad_() if differentiable(a) else a for a in args]
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    ends = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    wanted = [a for a in args if differentiable(a)]
    found = torch.autograd.grad(ends, wanted, [torch.full_like(e, 0.3) for e in ends], allow_unused=True)
    return [r.detach() if isinstance(r, torch.Tensor) else r for r in results], found


def differentiable(value):
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def same(mine, his):
    for a, b in zip((*mine[0], *mine[1]), (*his[0], *his[1]), strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b or (b is None and not a.any())  # torch.compile materialises what is unused


def met_since(before):
    return [op for name, op in operators.known.items() if name not in before]


def called_on(operator, sample):
    """An operator of forward, on the tensors of a sample."""
    given = [a.clone().requires_grad_() if differentiable(a) else a for a in sample if isinstance(a, torch.Tensor)]
    return operator.overload, (*given, 0) if operator.draws else tuple(given)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_one_graph_and_torchs_own_checks(case) -> None:
    fast, before = fusegrad.compile(case.cls), set(operators.known)
    sample = case.make(Numbers(0))
    fn = torch.compile(lambda *args: fast.apply(*args), backend="aot_eager", fullgraph=True)
    expected = gradients(case.cls.apply if case.deterministic else fast.apply, sample)
    same(gradients(fn, sample), expected)
    found = met_since(before)
    assert found
    forward = next(op for op in found if "_forward_" in op.name)
    torch.library.opcheck(*called_on(forward, sample))


def test_a_backward_that_is_derived_of_jvp_under_a_transform() -> None:
    """Dynamo asks for the results of the derivative where nothing but fake tensors says that it does."""
    (case,) = [case for case in CASES if case.name == "JvpOnly"]
    fast, (x, *others) = fusegrad.compile(case.cls), case.make(Numbers(0))

    def slope(x):
        return torch.func.grad(lambda x: fast.apply(x, *others).sum())(x)

    torch.testing.assert_close(torch.compile(slope, backend="aot_eager", fullgraph=True)(x), slope(x))


def test_an_operator_of_a_backward_passes_torchs_own_checks() -> None:
    before = set(operators.known)
    fast = fusegrad.compile(wrong.sine(None))
    wrong.result(torch.compile(lambda x: fast.apply(x * 2), backend="aot_eager", fullgraph=True))
    backward = next(op for op in met_since(before) if "_backward_" in op.name)
    args = [wrong.sample(4, 3) if kind == "Tensor" else n for kind, n in zip(backward.takes, (4, 4, 3, 4), strict=True)]
    assert set(torch.library.opcheck(backward.overload, tuple(args)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("marked", [True, False])
def test_other_sizes_are_no_other_graph(marked) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    fast = fusegrad.compile(wrong.sine(None))
    fn = torch.compile(lambda x: fast.apply(x * 2) + 1, backend=counter, fullgraph=True)
    for rows in (4, 5, 6, 9):
        x = wrong.sample(rows, 3)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        fn(x).sum().backward()
        torch.testing.assert_close(x.grad, 14 * (2 * x).cos().detach())
    assert counter.frame_count == (1 if marked else 2)  # one more, to learn that the size is no constant


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode) -> None:
    fast = fusegrad.compile(wrong.sine(None))

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(fast.apply(x * 2).sum(), x)[0]

    x = wrong.sample().detach()
    made = make_fx(gradient, tracing_mode=mode)(x)
    called = [str(n.target) for n in made.graph.nodes if str(n.target).startswith("fusegrad.")]
    assert len(called) == 2
    torch.testing.assert_close(made(x), 14 * (2 * x).cos())


def in_graph_of(cls):
    """The name of the operator that forward of a fresh compilation becomes."""
    made = make_fx(fusegrad.compile(cls).apply, tracing_mode="fake")(wrong.sample())
    return next(n.target.__name__ for n in made.graph.nodes if str(n.target).startswith("fusegrad."))


def test_a_name_tells_what_it_computes() -> None:
    """The same class has the same name, one with another backward has another."""

    def scaled(scale):
        class Scaled(Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin()

            @staticmethod
            def backward(ctx, g):
                return g * scale

        return Scaled

    assert in_graph_of(scaled(2.0)) == in_graph_of(scaled(2.0)) != in_graph_of(scaled(3.0))


def push(apply, x):
    return torch.func.jvp(apply, (x,), (x,))[1]


def test_rules_that_read_other_values_are_no_one_operator() -> None:
    """The two classes have the same graphs; their jvp is not captured before it is asked for."""

    def pushed(scale):
        class Pushed(Function):
            @staticmethod
            def forward(x):
                return x.sin()

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass

            @staticmethod
            def backward(ctx, g):
                return g

            @staticmethod
            def jvp(ctx, t):
                return t * scale

        return fusegrad.compile(Pushed)

    x = wrong.sample().detach()
    for fast, scale in ((pushed(2.0), 2.0), (pushed(3.0), 3.0)):
        made = make_fx(functools.partial(push, fast.apply), tracing_mode="fake")(x)
        torch.testing.assert_close(made(x), x * scale)


def test_random_numbers_are_drawn_once() -> None:
    class Dropout(Function):
        @staticmethod
        def forward(ctx, x):
            mask = torch.rand_like(x) > 0.5
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, g):
            (mask,) = ctx.saved_tensors
            return g * mask * 7

    fast, before = fusegrad.compile(Dropout), set(operators.known)
    fn = torch.compile(lambda x: fast.apply(x * 1) * 1, backend="aot_eager", fullgraph=True)
    drawn = set()
    for _ in range(3):
        x = torch.ones(64, requires_grad=True)
        y = fn(x)
        y.sum().backward()
        assert torch.equal(x.grad, (y != 0) * 7.0)
        drawn.add(tuple(y.tolist()))
    assert len(drawn) == 3
    (forward,) = [op for op in met_since(before) if "_forward_" in op.name]
    assert torch.Tag.nondeterministic_seeded in forward.overload.tags


class Scales(Function):
    @staticmethod
    def forward(ctx, x, y):
        x.mul_(2).add_(y)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, y)
        return x

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g * y * 5, g * x * 3


class ScalesAndMore(Function):
    @staticmethod
    def forward(x, y):
        product = x * y
        return product, x.add_(y)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1], output[0])

    @staticmethod
    def backward(ctx, g, h):
        y, product = ctx.saved_tensors
        return g * product + h, g * y + 3 * h


def _first(r):
    return r[0] if isinstance(r, tuple) else r


WRITES = {
    "an argument of the graph": lambda f, x, y: _first(f(x, y)) * x,
    "a value in between": lambda f, x, y: (lambda a: _first(f(a, y)) * 2 + a)(x * 1),
    "a value whose view is read": lambda f, x, y: (lambda a: (lambda b: (f(a, y), a * b)[1])(a.view(-1)))(x + 1),
    "twice": lambda f, x, y: (lambda a: (f(a, y), f(a, y), a.sin())[2])(x * 2),
    "and the result is dropped": lambda f, x, y: (lambda a: (f(a, y), a * 3)[1])(x * 2),
}


@pytest.mark.parametrize("program", WRITES)
@pytest.mark.parametrize("cls", [Scales, ScalesAndMore])
@pytest.mark.parametrize("tracked", [True, False])
def test_writes_are_in_the_graph(cls, program, tracked) -> None:
    """torch 2.13 itself loses the gradient of an argument of the graph that its own Functions write to."""
    if cls is Scales and program == "twice":
        return  # what the first call saved is no longer what it was: an error in eager
    found = []
    for f, graph in ((cls, False), (fusegrad.compile(cls), True)):
        leaves = [torch.tensor(v, requires_grad=tracked) for v in ([1.0, -2.0, 3.0], [0.5, 1.5, -1.0])]
        x, y = leaves[0] * 1, leaves[1]
        call = functools.partial(WRITES[program], f.apply)
        result = (torch.compile(call, backend="aot_eager", fullgraph=True) if graph else call)(x, y)
        gradients = torch.autograd.grad(result.sum(), leaves) if tracked else ()
        found.append((result.detach(), x.detach(), *gradients))
    torch.testing.assert_close(found[1], found[0])


def test_writes_to_memory_that_another_argument_shows_break_the_graph() -> None:
    fast = fusegrad.compile(Scales)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="writes to an argument that shares memory"):
        torch.compile(lambda x: fast.apply(x, x.detach()), backend="aot_eager", fullgraph=True)(torch.ones(3))


def test_an_exported_program_writes_to_its_argument() -> None:
    class Module(torch.nn.Module):
        def forward(self, x, y):
            return fast.apply(x, y) * 2

    fast = fusegrad.compile(Scales)
    program = torch.export.export(Module(), (torch.ones(3), torch.ones(3)))
    x = torch.ones(3)
    assert program.module()(x, torch.ones(3)).tolist() == [6.0] * 3 and x.tolist() == [3.0] * 3


def test_a_subclass_of_a_compiled_class_is_in_the_graph_with_its_own_methods() -> None:
    @fusegrad.compile
    class Base(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * 3

    class Other(Base):
        @staticmethod
        def backward(ctx, g):
            return g * 7

    class Third(Other):
        pass

    for cls, slope in ((Base, 3.0), (Other, 7.0), (Third, 7.0)):
        x = torch.ones(2, requires_grad=True)
        torch.compile(lambda x, cls=cls: cls.apply(x) * 2, backend="aot_eager", fullgraph=True)(x).sum().backward()
        assert x.grad.tolist() == [2 * slope] * 2


class Looks(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.sum().item() > 0 else x

    @staticmethod
    def backward(ctx, g):
        return g * 7


@pytest.mark.parametrize(("cls", "reason"), [(Looks, "depends on the data")])
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_what_cannot_be_in_a_graph_breaks_it_and_is_on_record(cls, reason) -> None:
    fast, counter = fusegrad.compile(cls), CompileCounterWithBackend("aot_eager")

    def body(x):
        return fast.apply(x * 1) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"{cls.__name__}.apply cannot be in a graph.*{reason}"):
        wrong.result(torch.compile(body, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    value, gradient = wrong.result(torch.compile(body, backend=counter))
    expected = wrong.result(lambda x: cls.apply(x * 1) + 1)
    torch.testing.assert_close((value, gradient), expected)
    assert counter.frame_count == 2
    assert reason in str(fusegrad.explain(fast, wrong.sample()))


@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_a_broken_promise_is_an_error() -> None:
    class Promised(Looks):
        is_traceable = True

    fast = fusegrad.compile(Promised)
    fn = torch.compile(lambda x: fast.apply(x) * 2, backend="aot_eager")
    with pytest.raises(Exception, match=r"Promised.forward cannot be traced: .*depends on the data"):
        wrong.result(fn)


def test_the_body_of_a_declared_class_meets_no_fake_tensor() -> None:
    seen = []
    fast = fusegrad.compile(wrong.sine(False, seen))
    fn = torch.compile(lambda x: fast.apply(x * 2) + 1, backend="aot_eager")
    for calls in (1, 2):
        wrong.result(fn)
        assert seen == [torch.Tensor] * calls
    with pytest.raises(fusegrad.FusegradError, match="it declares is_traceable = False"):
        make_fx(fast.apply, tracing_mode="fake")(wrong.sample())
    assert seen == [torch.Tensor] * 2


def test_inductor() -> None:
    """Nothing stands beside the operators, so that it has no C++ to compile."""
    fast = fusegrad.compile(wrong.sine(None))
    value, gradient = wrong.result(torch.compile(lambda x: fast.apply(x), backend="inductor", fullgraph=True))
    x = wrong.sample().detach()
    torch.testing.assert_close((value, gradient), (x.sin(), 7 * x.cos()))
