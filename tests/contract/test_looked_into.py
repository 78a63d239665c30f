"""What those see who look into a call: attributes of `grad_fn`, anomaly mode, warnings, logs, inference mode."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from side_by_side import both, gradients, leaf, same
from torch.autograd import Function

import fusegrad

Tensor = torch.Tensor
CALLS = 4
"""From the third on a call is written out."""


class Kept(Function):
    """Numbers, sizes, tensors and containers on ctx."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha, ctx.shape, ctx.twice, ctx.parts = alpha, x.shape, x * 2, [1, {"x": x}]
        return x * alpha

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x * ctx.alpha * ctx.parts[0] + ctx.twice, None


class Numbers(Function):
    @staticmethod
    def forward(x, alpha):
        return x * alpha

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.alpha = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return g * ctx.alpha, None


# ------------------------------------------------------------------ attributes of grad_fn
@both
@pytest.mark.parametrize("cls", [Kept, Numbers], ids=lambda c: c.__name__)
def test_grad_fn_has_the_attributes_of_ctx(cls, backend) -> None:
    def story(c: Any) -> Any:
        seen = []
        for _ in range(CALLS):
            node = c.apply(leaf(3), 2.0).grad_fn
            shown = {name for name in dir(node) if not name.startswith("_")}
            is_one = isinstance(node, c._backward_cls)
            seen.append((sorted(vars(node)), node.alpha, hasattr(node, "beta"), shown, is_one))
            if cls is Kept:
                seen.append((node.shape, node.twice, node.parts is node.parts))
        return seen

    same(cls, story, backend)


@both
@pytest.mark.parametrize("written", ["alpha", "twice", "parts", "deleted", "same", "vars"])
def test_what_is_assigned_to_grad_fn_is_seen_by_backward(written, backend) -> None:
    def story(c: Any) -> Any:
        seen = []
        for _ in range(CALLS):
            x = leaf(3)
            y = c.apply(x, 2.0)
            _write(y.grad_fn, written)
            try:
                seen.append(gradients(x, of=y))
            except AttributeError as error:
                seen.append(str(error).partition("'")[0])
        return seen

    same(Kept, story, backend, may=("attributes of grad_fn",), flags=False)


def _write(node: Any, what: str) -> None:
    if what == "alpha":
        node.alpha = 10.0
    elif what == "twice":
        node.twice = torch.ones(3)
    elif what == "parts":
        node.parts[0] = 7
    elif what == "deleted":
        node.shape, _ = 1, node.alpha
        del node.alpha
    elif what == "vars":
        vars(node)["alpha"] = 3.0
    else:
        node.alpha = 2.0


@pytest.mark.parametrize(("written", "reason"), [("alpha", "FG009"), ("same", None)])
def test_a_ctx_that_was_changed_is_on_record(written, reason) -> None:
    fast = fusegrad.compile(Kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusegrad.FallbackWarning)
        for _ in range(CALLS):
            y = fast.apply(leaf(3), 2.0)
            _write(y.grad_fn, written)
            y.sum().backward()
    record = fast._fusegrad.ledger.records.get("attributes of grad_fn")
    assert (record and record.code) == reason
    assert fast._fusegrad.ledger.records["forward"].status == "compiled"


# ------------------------------------------------------------------ anomaly mode
class NaN(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return Inner.apply(g * x)


class Inner(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * float("nan")


@pytest.mark.parametrize("since", ["forward", "gradient", "double backward"])
def test_anomaly_mode_names_what_it_names_in_eager(since) -> None:
    def story(c: Any) -> Any:
        x = leaf(3)
        with torch.autograd.set_detect_anomaly(since == "forward", check_nan=True):
            y = c.apply(x).sum()
        with torch.autograd.set_detect_anomaly(since != "double backward"):
            (g,) = torch.autograd.grad(y, x, create_graph=True)
        with torch.autograd.set_detect_anomaly(True):
            g.sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = same(NaN, story, may=("anomaly mode",))
    assert fast._fusegrad.ledger.records["anomaly mode"].code == "FG008"


def test_anomaly_mode_shows_the_line_of_the_call() -> None:
    class Bad(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("nan")

    fast = fusegrad.compile(Bad)
    for _ in range(CALLS):
        nan = pytest.raises(RuntimeError, match="'BadBackward' returned nan")
        with warnings.catch_warnings(record=True) as told, nan:
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly():
                fast.apply(leaf(3)).sum().backward()  # this very line
        assert any("# this very line" in str(w.message) for w in told)


# ------------------------------------------------------------------ warnings and logs
def test_saved_variables_are_deprecated() -> None:
    class Old(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_variables
            return g * x

    for cls in (Old, fusegrad.compile(Old)):
        with pytest.warns(DeprecationWarning, match="'saved_variables' is deprecated") as told:
            cls.apply(leaf(3)).sum().backward()
        assert {warning.filename for warning in told} == {__file__}


@both
def test_torch_logs_nothing_of_a_users_mistake(backend) -> None:
    class TooFar(Function):
        @staticmethod
        def forward(ctx, x, y):
            return torch.lerp(x, y[:, :2], 0.5)

        @staticmethod
        def backward(ctx, g):
            return g, None

    def story(c: Any) -> Any:
        return c.apply(leaf(4, 3), leaf(4, 3))

    log, heard = logging.getLogger("torch._subclasses.fake_tensor"), Heard()
    before = list(log.filters)
    log.addHandler(heard)
    try:
        same(TooFar, story, backend, may=("forward", "backward"))
        assert heard.records == [] and log.filters == before
        log.error("failed while attempting to run meta for %s", "a user's own fake")
        assert len(heard.records) == 1
    finally:
        log.removeHandler(heard)


class Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record.getMessage())


def test_an_error_of_the_user_comes_without_ours() -> None:
    class TooFar(Function):
        @staticmethod
        def forward(ctx, x):
            return x[7]

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(IndexError) as raised:
        fusegrad.compile(TooFar).apply(leaf(3))
    assert raised.value.__context__ is None and raised.value.__cause__ is None


# ------------------------------------------------------------------ inference mode
class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), x.detach(), x.view(-1) * 1

    @staticmethod
    def backward(ctx, g, h, i):
        return -g


@both
@pytest.mark.parametrize("made_inside", [False, True])
def test_views_in_inference_mode(made_inside, backend) -> None:
    def story(c: Any) -> Any:
        x, seen = leaf(2, 3), []
        with torch.inference_mode():
            for _ in range(CALLS):
                given = leaf(2, 3) if made_inside else x
                for y in c.apply(given):
                    base = None if y._base is None else y._base is given
                    seen.append((y.requires_grad, y._is_view(), y.is_inference(), base))
        return seen

    same(Reversed, story, backend)
