"""Against the class itself under torch.func, where torch can: setup_context style, with a vmap rule, with a jvp."""

from __future__ import annotations

from compose.composing import LANES, Call, close, compiled, directions, each
from torch.func import grad, jvp, vmap


def same(case, compose) -> None:
    close(compose(Call(case, compiled(case).apply)), compose(Call(case, case.cls.apply)))


def differentiates(case) -> bool:
    return {"setup_context", "backward"} <= case.wrote


def batches(case) -> bool:
    return differentiates(case) and (getattr(case.cls, "generate_vmap_rule", False) or "vmap" in case.wrote)


@each("grad", where=differentiates)
def test_grad(case) -> None:
    same(case, lambda f: grad(f.loss, f.argnums)(*f.point))


@each("grad(grad)", where=differentiates)
def test_grad_grad(case) -> None:
    def twice(f):
        inner = grad(f.loss, f.argnums)
        return grad(lambda *t: sum((g * g.conj()).real.sum() for g in inner(*t)), f.argnums)(*f.point)

    same(case, twice)


@each("vmap(grad)", where=batches)
def test_vmap_grad(case) -> None:
    same(case, lambda f: vmap(grad(f.loss, f.argnums))(*f.batch(LANES)))


@each("grad(vmap)", where=batches)
def test_grad_vmap(case) -> None:
    same(case, lambda f: grad(lambda *t: vmap(f.loss)(*t).square().sum(), f.argnums)(*f.batch(LANES)))


@each("jvp", where=lambda c: "jvp" in c.wrote)
def test_jvp(case) -> None:
    same(case, lambda f: jvp(f.of_floats(f.outputs), f.floats(), directions(f.floats())))
