"""Compiled classes and modules that hold them: copied, pickled, and sent to processes that were started anew."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pickled_functions as functions
import pytest
import torch

import fusegrad
from fusegrad.runtime.dispatch.pickling import again

HERE = str(Path(__file__).parent)
NAMED = {"alias": functions.Fast, "options": functions.Options, "decorated": functions.Decorated,
         "in a class": functions.Outer.Inner}  # fmt: skip
EXPECTED = [8.0] * 3 + [64.0] * 3 + [1.0]


@pytest.mark.parametrize("name", NAMED)
def test_a_class_comes_back_as_itself_and_keeps_what_compile_was_told(name: str) -> None:
    fast = NAMED[name]
    assert copy.deepcopy(fast) is copy.copy(fast) is fast
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(fast, protocol)) is fast
    assert pickle.loads(pickle.dumps(fast.apply)).__self__ is fast


@pytest.mark.parametrize("name", NAMED)
def test_modules_that_hold_it(name: str) -> None:
    layer, file = functions.Layer(NAMED[name]), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for made in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert made.function is layer.function and functions.gradients(made) == pytest.approx(EXPECTED)


def test_a_class_that_no_name_finds_has_pickles_own_error() -> None:
    plain = functions.make()._fusegrad_user_class
    errors = []
    for cls in (functions.make(), plain):
        with pytest.raises((pickle.PicklingError, AttributeError)) as error:
            pickle.dumps(cls)
        errors.append((error.type, str(error.value).replace(" ", "")))
    assert errors[0] == errors[1]


def test_a_name_that_finds_another_class_by_now_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that defines the class again: what is pickled is never another class than what is sent."""
    monkeypatch.setattr(functions, "Scaled", type("Scaled", (functions.Scaled,), {"__module__": functions.__name__}))
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(functions.Fast)


def test_what_is_compiled_again_is_the_same_class_while_anyone_has_it() -> None:
    *before, _, slab_bytes = functions.Fast._fusegrad_options
    options = (*before, "fast", slab_bytes)
    made = again(functions.Scaled, options)
    assert made is again(functions.Scaled, options) is not functions.Fast
    assert made._fusegrad.options.numerics == "fast" and pickle.loads(pickle.dumps(made)) is made


def test_a_patched_class_is_not_sent_as_what_it_was() -> None:
    fast = fusegrad.compile(functions.Scaled, derive_jvp=False)
    assert pickle.loads(pickle.dumps(fast)) is fast
    fast.backward = staticmethod(lambda ctx, g: g)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(fast)
    del fast.backward
    assert pickle.loads(pickle.dumps(fast)) is fast


# ------------------------------------------------------------------ another process
READ = """
import sys, pickle
sys.path.insert(0, {here!r})
made = [pickle.loads(bytes.fromhex(line)) for line in sys.stdin.read().split()]
from pickled_functions import gradients
for layer in made:
    print(layer.function.__name__, layer.function._fusegrad.options.backend, *gradients(layer))
"""


def sent(layers: list[Any], dumps: Any, program: str) -> list[str]:
    """What a process says that was started anew and got the modules."""
    told = subprocess.run(
        [sys.executable, "-c", program.format(here=HERE)], input="\n".join(dumps(layer).hex() for layer in layers),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    return told.stdout.splitlines()


def test_a_process_that_was_started_anew_compiles_them_again() -> None:
    lines = sent([functions.Layer(fast) for fast in NAMED.values()], pickle.dumps, READ)
    assert [line.split()[:2] for line in lines] == [[f.__name__, f._fusegrad.options.backend] for f in NAMED.values()]
    for line in lines:
        assert [float(word) for word in line.split()[2:]] == pytest.approx(EXPECTED)


def test_by_contents_a_class_that_the_other_process_cannot_import() -> None:
    """cloudpickle sends what no name finds: the class is compiled again where it arrives, and runs compiled."""
    cloudpickle = pytest.importorskip("cloudpickle")
    names = {"fusegrad": fusegrad, "torch": torch, "Function": torch.autograd.Function, "__name__": "__main__"}
    source = Path(functions.__file__).read_text(encoding="utf-8").replace("from __future__ import annotations", "")
    exec(compile(source, "<cell>", "exec"), names)
    layers = [names["Layer"](names[n]) for n in ("Fast", "Decorated")] + [names["Layer"](names["make"]())]
    assert [cloudpickle.loads(cloudpickle.dumps(layer)).function is layer.function for layer in layers] == [True] * 3
    lines = sent(layers, cloudpickle.dumps, READ)
    assert [line.split()[0] for line in lines] == ["Scaled", "Decorated", "Local"]
    for line in lines:
        assert [float(word) for word in line.split()[2:]] == pytest.approx(EXPECTED)
