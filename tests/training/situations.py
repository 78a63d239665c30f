"""What training code does around a Function: one story each, told with a class, and what it saw."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.utils.parametrize as parametrize
from side_by_side import leaf, plain
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training_functions import Kind

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor], Tensor]
Story = Callable[[Kind, Any], Any]
SITUATIONS: dict[str, Story] = {}


def situation(story: Story) -> Story:
    SITUATIONS[story.__name__] = story
    return story


def on_tensors(story: Callable[[Call], Any]) -> Story:
    """A story that needs no more than the call itself."""

    def told(kind: Kind, c: Any) -> Any:
        torch.manual_seed(0)
        return story(lambda x, w: kind.call(c, x, w))

    told.__name__ = story.__name__
    return situation(told)


def on_modules(story: Callable[[Callable[..., Layer]], Any]) -> Story:
    """A story about modules that hold the Function."""

    def told(kind: Kind, c: Any) -> Any:
        torch.manual_seed(0)
        return story(lambda seed=1, **options: Layer(kind, c, seed, **options))

    told.__name__ = story.__name__
    return situation(told)


class Layer(torch.nn.Module):
    def __init__(self, kind: Kind, function: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.kind, self.function = kind, function
        self.w = torch.nn.Parameter(plain(6, seed=seed).to(dtype))
        self.bias = torch.nn.Parameter(plain(6, seed=seed + 5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.kind.call(self.function, x, self.w) + self.bias


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return leaf(4, 6, dtype=dtype), leaf(6, seed=1, dtype=dtype)


def learnt(y: Tensor, *leaves: Tensor) -> list[Any]:
    """The result and what arrives at the leaves, where a gradient comes back at all."""
    if y.requires_grad:
        (y.float() * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y, *(t.grad for t in leaves)]


def within(call: Call, around: Callable[[], AbstractContextManager[Any]], inside: bool = False) -> Any:
    """Twice each: the second call may take another way than the first."""
    seen = []
    for _ in range(2):
        x, w = inputs()
        with around():
            y = call(x, w)
            if inside:
                seen.append(learnt(y, x, w))
        if not inside:
            seen.append(learnt(y, x, w))
    return seen


def step_with(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def losses(layer: torch.nn.Module, optimizer: Any, steps: int = 3, scaler: Any = None, clip: bool = False) -> list[Any]:
    seen = []
    for step in range(steps):
        loss = layer(plain(4, 6, seed=step)).float().pow(2).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip:
            seen.append(torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1))
        step_with(optimizer, scaler)
        optimizer.zero_grad()
        seen.append(loss.detach())
    return [*seen, *(p.detach().clone() for p in layer.parameters())]


# ------------------------------------------------------------------ mixed precision
@on_tensors
def autocast_around_the_call(call: Call) -> Any:
    return within(call, lambda: torch.autocast("cpu", torch.bfloat16))


@on_tensors
def autocast_around_backward_too(call: Call) -> Any:
    return within(call, lambda: torch.autocast("cpu", torch.float16), inside=True)


@on_tensors
def autocast_left_and_entered(call: Call) -> Any:
    seen = [within(call, nullcontext)]
    seen.append(within(call, lambda: torch.autocast("cpu", torch.bfloat16)))
    with torch.autocast("cpu", torch.bfloat16):
        seen.append(within(call, lambda: torch.autocast("cpu", enabled=False)))
    return [*seen, within(call, nullcontext)]


@on_tensors
def autocast_for_another_device(call: Call) -> Any:
    return within(call, lambda: torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()))


@on_modules
def grad_scaler(make: Callable[..., Layer]) -> Any:
    layer, scaler = make(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", torch.bfloat16):
        return [losses(layer, torch.optim.SGD(layer.parameters(), 0.1), 3, scaler, clip=True), scaler.get_scale()]


@on_modules
def grad_scaler_that_overflows(make: Callable[..., Layer]) -> Any:
    layer, scaler = make(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    return [losses(layer, torch.optim.SGD(layer.parameters(), 0.1), 2, scaler), scaler.get_scale()]


@on_modules
def parameters_in_bfloat16(make: Callable[..., Layer]) -> Any:
    layer = make(dtype=torch.bfloat16)
    x = leaf(4, 6, dtype=torch.bfloat16)
    return learnt(layer(x), x, *layer.parameters())


# ------------------------------------------------------------------ memory
def checkpointed(call: Call, **options: Any) -> Any:
    return within(lambda x, w: checkpoint(call, x, w, **options), nullcontext)


@on_tensors
def checkpoint_reentrant(call: Call) -> Any:
    return checkpointed(call, use_reentrant=True)


@on_tensors
def checkpoint_not_reentrant(call: Call) -> Any:
    return checkpointed(call, use_reentrant=False)


@on_tensors
def checkpoint_with_the_last_tensor_never_computed_again(call: Call) -> Any:
    return checkpointed(lambda x, w: call(call(x, w), w).sin(), use_reentrant=False, early_stop=True)


@on_tensors
def checkpoint_under_autocast(call: Call) -> Any:
    def told(reentrant: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return within(lambda x, w: checkpoint(call, x, w, use_reentrant=reentrant), nullcontext)

    return [told(True), told(False)]


@on_tensors
def checkpoint_within_checkpoint(call: Call) -> Any:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(call, x.cos(), w, use_reentrant=False)

    return checkpointed(inner, use_reentrant=False)


def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.sigmoid.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@on_tensors
def checkpoint_that_is_selective(call: Call) -> Any:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(keep_products)

    return checkpointed(lambda x, w: call(x.sin(), w).cos(), use_reentrant=False, context_fn=contexts)


@on_tensors
def save_on_cpu(call: Call) -> Any:
    return within(call, torch.autograd.graph.save_on_cpu)


@on_tensors
def hooks_that_pack_saved_tensors(call: Call) -> Any:
    packed: list[tuple[Any, ...]] = []

    def pack(t: Tensor) -> Any:
        packed.append((tuple(t.shape), t.dtype))
        return t.detach().numpy().copy() if t.dtype is not torch.bfloat16 else t

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else torch.from_numpy(kept)

    return [within(call, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)), packed]


@on_tensors
def hooks_that_are_forbidden(call: Call) -> Any:
    return within(call, lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"))


@on_tensors
def mutation_of_what_is_saved(call: Call) -> Any:
    x, w = inputs()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        rows = x * 1
        y = call(rows, w)
        rows.zero_()
        return learnt(y, x, w)


# ------------------------------------------------------------------ grad modes
@on_tensors
def no_grad(call: Call) -> Any:
    return within(call, torch.no_grad)


@on_tensors
def inference_mode(call: Call) -> Any:
    seen = [within(call, nullcontext), within(call, torch.inference_mode)]
    with torch.inference_mode():
        y = call(*inputs())
        seen += [y.is_inference(), y * 1]
    return [*seen, within(call, nullcontext)]


@on_tensors
def rows_made_in_inference_mode(call: Call) -> Any:
    """Outside they may be read; what would keep them for backward raises."""
    with torch.inference_mode():
        x, w = plain(4, 6) * 1, plain(6, seed=1) * 1
    seen: list[Any] = [call(x, w)]
    for pair in ((x, leaf(6, seed=1)), (leaf(4, 6), w)):
        try:
            seen.append(learnt(call(*pair), *pair))
        except RuntimeError as error:
            seen.append(str(error))
    return [*seen, call(x, w)]


@on_tensors
def enable_grad_within_no_grad(call: Call) -> Any:
    with torch.no_grad():
        return within(call, torch.enable_grad, inside=True)


@on_tensors
def frozen_weights_and_frozen_rows(call: Call) -> Any:
    seen = []
    for frozen in ((False, True), (True, False), (True, True), (False, False)):
        x, w = inputs()
        x.requires_grad_(not frozen[0])
        w.requires_grad_(not frozen[1])
        seen.append(learnt(call(x, w), x, w))
    return seen


# ------------------------------------------------------------------ backward
@on_tensors
def backward_twice_through_a_kept_graph(call: Call) -> Any:
    x, w = inputs()
    y = call(x, w)
    if y.requires_grad:
        for _ in range(3):
            y.float().sum().backward(retain_graph=True)
    return [y, x.grad, w.grad]


@on_tensors
def gradients_that_accumulate(call: Call) -> Any:
    x, w = inputs()
    for step in range(3):
        learnt(call(x * (step + 1), w))
    return [x.grad, w.grad]


@on_tensors
def backward_in_threads(call: Call) -> Any:
    x, w = inputs()
    results = [call(x, w) for _ in range(4)]
    found: list[Any] = [None] * 4

    def back(at: int) -> None:
        found[at] = torch.autograd.grad(results[at].float().sum(), (x, w), allow_unused=True)

    threads = [threading.Thread(target=back, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@on_tensors
def hooks_on_tensors(call: Call) -> Any:
    x, w = inputs()
    seen: list[Any] = []
    y = call(x, w)
    y.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad * 3))
    y.grad_fn.register_hook(lambda gi, go: seen.append([gi, go]))
    y.grad_fn.register_prehook(lambda go: seen.append(go))
    torch.autograd.graph.register_multi_grad_hook((x, w), lambda gs: seen.append(list(gs)))
    y.retain_grad()
    return [learnt(y, x, w), y.grad, seen]


@on_tensors
def anomaly_mode(call: Call) -> Any:
    return within(call, torch.autograd.detect_anomaly, inside=True)


@on_tensors
def gradients_by_an_edge(call: Call) -> Any:
    x, w = inputs()
    middle = x * 2
    edge = torch.autograd.graph.get_gradient_edge(middle)
    y = call(middle, w)
    del middle
    return torch.autograd.grad(y.float().sum(), [edge])


@on_tensors
def gradients_of_gradients(call: Call) -> Any:
    x, w = inputs()
    first = torch.autograd.grad(call(x, w).float().pow(2).sum(), (x, w), create_graph=True, allow_unused=True)
    total = sum(g.float().pow(2).sum() for g in first if g is not None and g.requires_grad)
    if isinstance(total, Tensor):
        total.backward()
    firsts = [g if g is None else g.detach() for g in first]  # their nodes are compiled, too, and so called otherwise
    return [*firsts, x.grad, w.grad]


@on_tensors
def gradients_in_a_batch(call: Call) -> Any:
    x, w = inputs()
    y = call(x, w)
    return torch.autograd.grad(y, (x, w), plain(3, 4, 6).to(y.dtype), is_grads_batched=True, allow_unused=True)


@on_tensors
def gradients_that_are_expanded_or_strided(call: Call) -> Any:
    seen = []
    for weight in (torch.ones(()).expand(4, 6), plain(6, 4).t(), plain(8, 6)[::2], plain(4, 1).expand(4, 6)):
        x, w = inputs()
        y = call(x, w)
        y.backward(weight.to(y.dtype))
        seen.append([x.grad, w.grad])
    return seen


# ------------------------------------------------------------------ modules
@on_modules
def functional_calls(make: Callable[..., Layer]) -> Any:
    layer, other = make(), {"w": leaf(6, seed=9)}
    y = functional_call(layer, other, plain(4, 6))
    return [learnt(y, other["w"]), layer.w.grad, layer.bias.grad, layer(plain(4, 6))]


@on_modules
def deep_copies(make: Callable[..., Layer]) -> Any:
    layer = make()
    before = learnt(layer(plain(4, 6)), *layer.parameters())
    twin = copy.deepcopy(layer)
    same = twin.function is layer.function
    after = losses(twin, torch.optim.SGD(twin.parameters(), 0.1))
    return [before, same, after, layer(plain(4, 6))]


@on_modules
def averaged_models(make: Callable[..., Layer]) -> Any:
    layer = make()
    average = torch.optim.swa_utils.AveragedModel(layer, use_buffers=True)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        losses(layer, optimizer, 1)
        average.update_parameters(layer)
    return average(plain(4, 6))


class Doubled(torch.nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2

    def right_inverse(self, w: Tensor) -> Tensor:
        return w / 2


@on_modules
def parametrizations(make: Callable[..., Layer]) -> Any:
    layer = make()
    parametrize.register_parametrization(layer, "w", Doubled())
    seen = [losses(layer, torch.optim.SGD(layer.parameters(), 0.1))]
    with parametrize.cached():
        seen += learnt(layer(plain(4, 6)) + layer(plain(4, 6, seed=2)), *layer.parameters())
    parametrize.remove_parametrizations(layer, "w")
    return [*seen, layer(plain(4, 6))]


@on_modules
def optimizers(make: Callable[..., Layer]) -> Any:
    seen = []
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"foreach": True, "maximize": True}):
        layer = torch.nn.Sequential(make(1), make(2))
        seen.append(losses(layer, torch.optim.AdamW(layer.parameters(), 0.05, **options), clip=True))
    return seen


@on_modules
def steps_within_backward(make: Callable[..., Layer]) -> Any:
    layer = make()
    stepping = {p: torch.optim.SGD([p], 0.1) for p in layer.parameters()}

    def step(p: Tensor) -> None:
        stepping[p].step()
        stepping[p].zero_grad()

    for p in layer.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        layer(plain(4, 6, seed=seed)).float().pow(2).mean().backward()
    return [p.detach() for p in layer.parameters()]


@on_modules
def hooks_on_modules(make: Callable[..., Layer]) -> Any:
    layer, seen = make(), []
    layer.register_forward_pre_hook(lambda _, a: (a[0] * 2,))
    layer.register_forward_hook(lambda _, a, out: out * 3)
    layer.register_full_backward_pre_hook(lambda _, g: (g[0] * 5,))
    layer.register_full_backward_hook(lambda _, gi, go: seen.append([gi, go]))
    x = leaf(4, 6)
    return [learnt(layer(x), x, *layer.parameters()), seen]


@on_modules
def parameters_that_are_exchanged(make: Callable[..., Layer]) -> Any:
    layer, other = make(1), make(2)
    seen = [layer(plain(4, 6))]
    layer.load_state_dict(other.state_dict())
    seen.append(layer(plain(4, 6)))
    layer.load_state_dict(make(3).state_dict(), assign=True)
    seen.append(learnt(layer(plain(4, 6)), *layer.parameters()))
    layer.double()
    return [*seen, learnt(layer(plain(4, 6).double()), layer.w)]


@on_modules
def weights_that_are_tied(make: Callable[..., Layer]) -> Any:
    one, two = make(1), make(2)
    two.w = one.w
    stack = torch.nn.Sequential(one, two)
    return losses(stack, torch.optim.SGD(stack.parameters(), 0.1))


# ------------------------------------------------------------------ torch's state
@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@on_tensors
def the_default_dtype(call: Call) -> Any:
    return [within(call, lambda: default_dtype(torch.float64), inside=True), within(call, nullcontext)]


@on_tensors
def a_default_device(call: Call) -> Any:
    return [within(call, lambda: torch.device("cpu"), inside=True), within(call, nullcontext)]


@on_tensors
def tensors_without_data(call: Call) -> Any:
    """Asked before and after tensors with data."""
    seen = []
    for device in ("meta", "cpu", "meta"):
        x, w = (t.detach().to(device).requires_grad_() for t in inputs())
        y = call(x, w)
        y.sum().backward()
        seen.append([(t.shape, t.dtype, str(t.device)) for t in (y, x.grad, w.grad) if t is not None])
    return seen


@on_tensors
def a_default_device_without_data(call: Call) -> Any:
    with torch.device("meta"):
        y = call(torch.randn(4, 6, requires_grad=True), torch.randn(6))
    return [y.shape, y.dtype, str(y.device), y.requires_grad]


# ------------------------------------------------------------------ torch.func over modules
def each_alone(layers: list[Layer], x: Tensor) -> list[Any]:
    """Results and gradients of several layers, one after the other."""
    return [learnt(layer(x), *layer.parameters()) for layer in layers]


def all_at_once(layers: list[Layer], x: Tensor) -> list[Any]:
    """The same of their ensemble: parameters in a batch, and one call."""
    parameters, buffers = stack_module_state(layers)  # type: ignore[arg-type]
    bare = copy.deepcopy(layers[0]).to("meta")
    y = vmap(lambda p, b: functional_call(bare, (p, b), (x,)))(parameters, buffers)
    weights = torch.linspace(-1, 1, y[0].numel()).reshape(y[0].shape)
    (y.float() * weights).sum().backward()
    grads = [p.grad for p in parameters.values()]
    return [[y[i], *(None if g is None else g[i] for g in grads)] for i in range(len(layers))]


def per_sample(layer: Layer, rows: Tensor) -> dict[str, Tensor]:
    """The gradient of every row's own loss, at once."""
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(p: Any, x: Tensor) -> Tensor:
        return functional_call(layer, p, (x[None],)).float().pow(2).sum()

    return vmap(grad(loss), (None, 0))(parameters, rows)


def one_by_one(layer: Layer, rows: Tensor) -> dict[str, Tensor]:
    found: list[dict[str, Tensor]] = []
    for row in rows:
        layer.zero_grad()
        layer(row[None]).float().pow(2).sum().backward()
        found.append({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()})
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}
