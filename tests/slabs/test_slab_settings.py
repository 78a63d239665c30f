"""The memory of a slab as a setting: of one class, of a block, of the process; what it cannot be; and plans on disk."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fusegrad

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
sys.path.insert(0, str(Path(__file__).parent))
from losses import LOSSES
from watching_slabs import both_ways, of, walked

IGNORE_INDEX = next(c for c in LOSSES if c.name == "IgnoreIndex")


class Plain(IGNORE_INDEX.cls):  # type: ignore[name-defined, misc]
    """One that pickles find."""


def slabs(fast: Any) -> int:
    """How many slabs forward is."""
    with walked() as seen:
        both_ways(fast.apply, IGNORE_INDEX.arguments(37, 16))
    return len(of(seen, "forward"))


@pytest.mark.parametrize("backend", ["interpret", "reference"])
def test_of_a_class_and_of_a_block(backend: str) -> None:
    """The block's comes first; calls under either keep their own."""
    with fusegrad.config.patch(disable="streams"):
        fast = fusegrad.compile(IGNORE_INDEX.cls, backend=backend, slab_bytes=15_900)
        few = slabs(fast)
        with fusegrad.config.patch(slab_bytes=6_000):
            many = slabs(fast)
        with fusegrad.config.patch(slab_bytes=1 << 20):
            assert slabs(fast) == 0
        assert slabs(fast) == few and 1 < few < many
        assert slabs(fusegrad.compile(IGNORE_INDEX.cls, backend=backend)) == 0


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "256MB", float("inf")])
def test_what_it_cannot_be(value: Any) -> None:
    for refused in (
        lambda: fusegrad.compile(IGNORE_INDEX.cls, slab_bytes=value),
        lambda: fusegrad.config.patch(slab_bytes=value).__enter__(),
    ):
        with pytest.raises(fusegrad.config.ConfigError, match="slab_bytes cannot be") as refusal:
            refused()
        assert "use a positive whole number of bytes" in str(refusal.value)


def test_none_leaves_it_to_the_class() -> None:
    with fusegrad.config.patch(disable="streams", slab_bytes=None):
        assert slabs(fusegrad.compile(IGNORE_INDEX.cls, backend="interpret", slab_bytes=12_000)) > 1


def test_a_pickle_keeps_it() -> None:
    fast = fusegrad.compile(Plain, slab_bytes=12_000)
    assert pickle.loads(pickle.dumps(fast)) is fast
    assert fast._fusegrad.options.slab_bytes == 12_000


def test_explain_goes_by_it() -> None:
    with fusegrad.config.patch(disable="streams"):
        fast = fusegrad.compile(IGNORE_INDEX.cls, slab_bytes=12_000)
        (report,) = fusegrad.explain(fast, *IGNORE_INDEX.arguments(37, 16)).directions["forward"].slabs.values()
        assert (report.limit, report.slabs > 1) == (12_000, True)
        assert not fusegrad.explain(IGNORE_INDEX.cls, *IGNORE_INDEX.arguments(37, 16)).directions["forward"].slabs


# ------------------------------------------------------------------ other processes
CALLS = """
import sys
sys.path[:0] = {folders!r}
import torch, fusegrad
from losses import LOSSES
from watching_slabs import both_ways, of, walked
case = next(c for c in LOSSES if c.name == "IgnoreIndex")
fast = fusegrad.compile(case.cls, backend="interpret", fullgraph=True)
with walked() as seen:
    found = both_ways(fast.apply, case.arguments(37, 16))
print(len(of(seen, "forward")), len(of(seen, "backward")), [float(t.double().sum()).hex() for t in found])
print([v.disk for v in fusegrad.explain(fast).variants], fusegrad.stats()["captures"])
"""


def in_a_process(folder: Path, **environment: str) -> list[str]:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "streams")]
    done = subprocess.run(
        [sys.executable, "-c", CALLS.format(folders=folders)], capture_output=True, text=True,
        env={**os.environ, "FUSEGRAD_CACHE_DIR": str(folder), "FUSEGRAD_STORE": "1", "FUSEGRAD_DISABLE": "streams",
             **environment},
    )  # fmt: skip
    return done.stdout.splitlines() or [done.stderr]


def test_of_a_process_and_on_disk(tmp_path: Path) -> None:
    """The environment says it; a plan that was kept walks as it did, and is another one for another bound."""
    first, second = (in_a_process(tmp_path, FUSEGRAD_SLAB_BYTES="12000") for _ in range(2))
    assert first[0] == second[0] and "from disk" in second[1] and "from disk" not in first[1]
    other = in_a_process(tmp_path, FUSEGRAD_SLAB_BYTES="1000000")
    assert other[0].startswith("0 0 ") and "from disk" not in other[1]
    assert "slab_bytes cannot be 'much'" in in_a_process(tmp_path, FUSEGRAD_SLAB_BYTES="much")[-1]


@pytest.mark.parametrize("name", ["IgnoreIndex", "SavedLogits"])
@pytest.mark.parametrize("suffix", ["py", "cpp"])
def test_exports_have_no_slabs(name: str, suffix: str) -> None:
    """A file has the library's steps, and saves what it saves, whatever the setting."""
    case = next(c for c in LOSSES if c.name == name)
    texts = []
    for limit in (12_000, 1 << 30):
        with fusegrad.config.patch(slab_bytes=limit, disable="streams"):
            texts.append(fusegrad.export(case.cls, *case.arguments(37, 16), format=suffix))
    assert texts[0] == texts[1] and "slab" not in texts[0]


def test_torch_export_keeps_the_class() -> None:
    """A program of torch.export runs the operator, which walks as the class does."""

    class Head(torch.nn.Module):
        def forward(self, x: Any, w: Any, target: Any) -> Any:
            return fast.apply(x, w, target)

    with fusegrad.config.patch(disable="streams"):
        fast = fusegrad.compile(IGNORE_INDEX.cls, backend="interpret", slab_bytes=12_000)
        arguments = tuple(a.detach() for a in IGNORE_INDEX.arguments(37, 16))
        program = torch.export.export(Head(), arguments)
        found = program.module()(*arguments)
    torch.testing.assert_close(found, IGNORE_INDEX.cls.apply(*arguments), rtol=1e-4, atol=1e-5)
