"""What a method reads from outside: values that are compared, tensors that are lifted, effects that forbid capture."""

from __future__ import annotations

import math
import random
import time
import types

import pytest
import torch

from fusegrad.tracer.reads.reads import Reads, scan
from fusegrad.tracer.reads.value_keys import freeze, is_library, tensor_fact

SCALE = 2.0
TABLE = {"a": [1, torch.ones(2)], "b": 3}
TENSOR = torch.ones(3)


class Settings:
    class inner:
        k = 2.0
        w = torch.ones(2)


class Plain:
    def __init__(self) -> None:
        self.k, self.w = 1.0, torch.ones(2)

    def times(self, x):
        return x * self.k


PLAIN = Plain()


def helper(x):
    return x * SCALE


def outer_helper(x):
    return helper(x)


EVERYWHERE = ("function", "names", "builtin")  # the code itself, names of torch, of Python's own


def of_the_user(reads: Reads) -> dict[str, str]:
    return {path: r.kind for path, r in reads.entries.items() if r.kind not in EVERYWHERE}


def kinds(reads: Reads) -> dict[str, str]:
    return {path.replace(f" in {__name__}", "").split("@")[0]: kind for path, kind in of_the_user(reads).items()}


def ends(reads: Reads) -> dict[str, str]:
    """The kind of every read, by what follows the root's identity."""
    read = of_the_user(reads)
    return {path.split("@")[1].lstrip("0123456789") or path.split()[1]: kind for path, kind in read.items()}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (1.0, 2.0),
        ("1", b"1"),
        ((1,), [1]),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (torch.float32, torch.float64),
        (None, 0),
        (1j, 1 + 0j),
        (torch.Size([2]), (2,)),
        ([1.0, [2.0]], [1.0, [3.0]]),
    ],
)
def test_values_that_differ_freeze_differently(a, b) -> None:
    assert freeze(a) != freeze(b)


@pytest.mark.parametrize("value", [math.nan, 1, 1.0, True, None, "x", (1, [2.0, {"k": math.nan}]), torch.bfloat16, 2j])
def test_a_value_freezes_the_same_twice(value) -> None:
    assert freeze(value) == freeze(value)
    assert hash(freeze(value)) == hash(freeze(value))


def test_nan_equals_another_nan() -> None:
    assert freeze(float("nan")) == freeze(abs(math.inf - math.inf)) != freeze(-math.nan)  # its sign can be copied


def test_a_tensor_freezes_without_its_data() -> None:
    assert freeze(torch.zeros(3)) == freeze(torch.ones(3)) == tensor_fact(torch.ones(3))
    others = (torch.ones(4), torch.ones(3).double(), torch.ones(3, requires_grad=True), torch.ones(6)[::2])
    assert all(freeze(torch.ones(3)) != freeze(t) for t in others)


def test_an_object_freezes_by_identity_and_content() -> None:
    first, second = Plain(), Plain()
    assert freeze(first) == freeze(first) != freeze(second)
    before = freeze(first)
    first.k = 2.0
    assert freeze(first) != before


def test_a_deep_container_ends_in_identity() -> None:
    deep: list = [[[[[1]]]]]
    assert freeze(deep) == freeze(deep)


def test_names_of_libraries_are_read_a_module_at_a_time() -> None:
    reads = scan(lambda x: torch.relu(x) * math.pi + torch.cos(x).tanh())
    assert [path for path, r in reads.entries.items() if r.kind == "names"] == [
        "torch.(cos relu)", "math.pi", "Tensor.tanh",
    ]  # fmt: skip
    assert set(of_the_user(reads).values()) == {"identity"} and reads.effects == []


def test_a_global_scalar_is_a_value() -> None:
    global SCALE
    reads = scan(helper)
    assert list(ends(reads).values()) == ["value"]
    before = reads.facts()
    try:
        SCALE = 3.0
        assert reads.facts() != before
    finally:
        SCALE = 2.0
    assert reads.facts() == before


def test_a_helper_is_scanned_to_any_depth() -> None:
    assert kinds(scan(lambda x: outer_helper(x)))["global SCALE"] == "value"


def test_a_helper_that_is_replaced_changes_the_facts() -> None:
    def first(x):
        return x

    def second(x):
        return x

    chosen = first

    def body(x):
        return chosen(x)

    reads = scan(body)
    before = reads.facts()
    chosen = second
    assert reads.facts() != before


def test_a_closure_scalar_is_a_value() -> None:
    k = 2

    def body(x):
        return x * k

    reads = scan(body)
    assert kinds(reads) == {"closure k": "value"}
    before = reads.facts()
    k = 2.0
    assert reads.facts() != before


def test_an_attribute_chain_is_followed() -> None:
    reads = scan(lambda x: x * Settings.inner.k)
    assert ends(reads) == {".inner.k": "value"}
    before = reads.facts()
    Settings.inner.k = 5.0
    try:
        assert reads.facts() != before
    finally:
        Settings.inner.k = 2.0


def test_an_attribute_that_disappears_is_a_fact_and_no_error() -> None:
    class Here:
        k = 1

    reads = scan(lambda x: x * Here.k)
    before = reads.facts()
    del Here.k
    assert reads.facts() != before


def test_tensors_are_found_by_path() -> None:
    reads = scan(lambda x: x * TENSOR + Settings.inner.w + TABLE["a"][1] + PLAIN.w)
    for tensor in (TENSOR, Settings.inner.w, TABLE["a"][1], PLAIN.w):
        path = reads.tensor_path(tensor)
        assert path is not None and path.get() is tensor
    assert reads.tensor_path(torch.ones(3)) is None


def test_a_rebound_tensor_is_found_and_does_not_change_the_facts() -> None:
    w = torch.ones(3)

    def body(x):
        return x * w

    reads = scan(body)
    before = reads.facts()
    w = torch.zeros(3)
    assert reads.facts() == before and reads.tensor_path(w) is not None
    w = torch.zeros(4)
    assert reads.facts() != before
    w = 3.0
    assert reads.facts() != before


def test_a_container_is_compared_by_content() -> None:
    table = {"k": 1.0, "w": torch.ones(2)}

    def body(x):
        return x * table["k"] + table["w"]

    reads = scan(body)
    before = reads.facts()
    table["w"].mul_(2)
    assert reads.facts() == before
    table["k"] = 2.0
    assert reads.facts() != before


def test_a_method_reads_its_object() -> None:
    own = Plain()

    def body(x):
        return own.times(x)

    reads = scan(body)
    before = reads.facts()
    own.k = 7.0
    assert reads.facts() != before


def test_what_torch_wrapped_is_scanned() -> None:
    @torch.autograd.function.once_differentiable
    def body(ctx, g):
        return g * SCALE

    assert kinds(scan(body)) == {"closure fn": "identity", "global SCALE": "value"}


def test_inner_functions_are_scanned() -> None:
    def body(x):
        return (lambda y: y * SCALE)(x)

    assert kinds(scan(body)) == {"global SCALE": "value"}


def test_a_closure_of_an_inner_function_is_scanned() -> None:
    k = 3.0

    def body(x):
        def inner(y):
            return y * k

        return inner(x)

    assert kinds(scan(body)).get("closure k") == "value"


def test_recursive_helpers_end() -> None:
    def body(x):
        return body(x) * SCALE if x is None else x

    assert kinds(scan(body))["global SCALE"] == "value"


def test_an_empty_cell_is_no_error() -> None:
    def body(x):
        return x * later

    reads = scan(body)
    assert reads.effects == []
    later = 2.0
    assert body(1.0) == 2.0


def effects(reads: Reads) -> list[tuple[str, str]]:
    return [(effect.reason, effect.where) for effect in reads.effects]


def place(fn: types.FunctionType, line: int) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + line}"


def test_print_is_an_effect_with_its_line() -> None:
    def body(x):
        y = x * 2
        print(y)
        return y

    assert effects(scan(body)) == [("it calls `print`", place(body, 2))]


def test_assigning_a_global_is_an_effect() -> None:
    def body(x):
        global SCALE
        SCALE = 4.0
        return x

    assert effects(scan(body)) == [("it assigns the global `SCALE`", place(body, 2))]


def test_assigning_data_is_an_effect() -> None:
    def body(x):
        y = torch.zeros_like(x)
        y.data = x + 1
        return y

    assert effects(scan(body)) == [("it assigns `.data` of a tensor", place(body, 2))]


def test_time_and_random_are_effects() -> None:
    assert scan(lambda x: x * time.time()).effects[0][0] == "it uses the module `time`"
    assert scan(lambda x: x * random.random()).effects[0][0] == "it uses the module `random`"


@pytest.mark.parametrize("name", ["id", "hash", "repr", "open", "input", "eval", "exec", "setattr", "globals"])
def test_builtins_that_see_more_than_values_are_effects(name) -> None:
    body = eval(f"lambda x: {name}(x)")
    assert scan(body).effects[0][0] == f"it calls `{name}`"


def test_a_users_own_function_called_print_is_none() -> None:
    module = types.ModuleType("own")
    exec("def print(x): return x\ndef body(x): return print(x)", module.__dict__)
    assert scan(module.body).effects == []


def test_an_effect_in_a_helper_counts() -> None:
    def loud(x):
        print(x)
        return x

    def body(x):
        return loud(x)

    assert effects(scan(body)) == [("it calls `print`", place(loud, 1))]


LOG: list[int] = []


def test_changing_a_container_from_outside_is_an_effect() -> None:
    seen: set[int] = set()

    def appends(x):
        LOG.append(1)
        return x

    def adds(x):
        seen.add(1)
        return x

    assert effects(scan(appends)) == [("it calls `append` of a list from outside", place(appends, 1))]
    assert effects(scan(adds)) == [("it calls `add` of a set from outside", place(adds, 1))]


def test_a_container_of_ones_own_may_be_changed() -> None:
    def body(x):
        parts, table = [], {}
        parts.append(x)
        table["k"] = x
        table["k"] += 1
        return parts

    assert scan(body).effects == []


def test_asking_a_container_is_no_effect_and_reads_its_content() -> None:
    table = {"k": 1.0}

    def body(x):
        return x * table.get("k", 2.0)

    reads = scan(body)
    assert reads.effects == []
    before = reads.facts()
    table["k"] = 3.0
    assert reads.facts() != before


def test_facts_of_methods_do_not_depend_on_where_python_puts_them() -> None:
    own = Plain()

    def body(x):
        return own.times(x)

    reads = scan(body)
    before = reads.facts()
    keep = [own.times for _ in range(50)]
    assert reads.facts() == before and len(keep) == 50


def test_assigning_a_nonlocal_is_an_effect() -> None:
    count = 0

    def body(x):
        nonlocal count
        count += 1
        return x

    assert effects(scan(body)) == [("it assigns the nonlocal `count`", place(body, 2))]


def test_a_nonlocal_of_ones_own_inner_function_is_none() -> None:
    def body(x):
        total = 0

        def inner(y):
            nonlocal total
            total += y

        inner(x)
        return total

    assert scan(body).effects == []


PARTS = {"a": [PLAIN]}
TENSORS = [torch.zeros(3)]


def test_assigning_into_what_is_not_ones_own_is_an_effect() -> None:
    store: dict[str, int] = {}

    def item(x):
        store["n"] = 1
        return x

    def attribute(x):
        PLAIN.k = 3
        return x

    def deleted(x):
        del store["n"]
        return x

    def deeper(x):
        PARTS["a"][len(store)].items[x.dim() + 1] += 2
        return x

    def of_tensors(x):
        TENSORS[0][1] = 2.0  # an operation of torch's
        return x

    assert effects(scan(deeper)) == [("it changes `PARTS`, which is not its own", place(deeper, 1))]
    assert not effects(scan(of_tensors))
    assert effects(scan(item)) == [("it changes `store`, which is not its own", place(item, 1))]
    assert effects(scan(attribute)) == [("it changes `PLAIN`, which is not its own", place(attribute, 1))]
    assert scan(deleted).effects


def test_attributes_of_ctx_and_items_of_tensors_are_no_effect() -> None:
    def forward(ctx, x):
        ctx.k = 3
        x = x.clone()
        x[0] = 1
        return x

    assert scan(forward).effects == []


def test_library_code_is_not_scanned() -> None:
    assert is_library(torch.relu) and is_library(math.sqrt) and not is_library(helper)
    assert scan(torch.nn.functional.gelu).entries == {}


def test_augmented_assignments_outside_are_effects() -> None:
    class Counter:
        calls = 0
        inner = [0]  # noqa: RUF012

    counts, box = [0, 0], {"n": [1]}

    def of_an_attribute(x):
        Counter.calls += 1
        return x

    def of_an_item(x):
        counts[0] += 1
        return x

    def of_an_item_further_in(x):
        Counter.inner[0] *= 2
        return x

    def of_ones_own(x):
        mine = [0]
        mine[0] += 1
        x[0] += counts[1]
        return x * mine[0] + len(box)

    assert "`Counter`" in scan(of_an_attribute).effects[0][0]
    assert "`counts`" in scan(of_an_item).effects[0][0]
    assert "`Counter`" in scan(of_an_item_further_in).effects[0][0]
    assert not scan(of_ones_own).effects
