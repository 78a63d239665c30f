"""A class of each of the best-known packages, beside eager: a slice of `make world`, from what is installed already.

It looks into the environment that `make world` made, if there is one, else into this one. A package that is in neither
is passed over by name: nothing is fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import world
import world_page
from supervised import Child
from surroundings import ROOT
from table import rows

HERE = Path(__file__).resolve().parent
OF_ITS_OWN = ROOT / "build" / "world" / "bin" / "python"
PYTHON = str(OF_ITS_OWN) if OF_ITS_OWN.exists() else sys.executable
BEST_KNOWN = {
    "snntorch": "snntorch.surrogate:ATan",
    "spikingjelly": "spikingjelly.activation_based.surrogate:sigmoid",
    "norse": "norse.torch.functional.adjoint.lif_adjoint:LIFAdjointFunction",
    "entmax": "entmax.activations:SparsemaxFunction",
    "brevitas": "brevitas.ops.autograd_ste_ops:RoundSteFn",
    "timm": "timm.layers.activations_me:SwishAutoFn",
    "transformers": "transformers.models.bloom.modeling_bloom:GeLUFunction",
    "botorch": "botorch.utils.rounding:RoundSTE",
    "pyro": "pyro.ops.special:_SafeLog",
    "e3nn": "e3nn.math._soft_unit_step:_SoftUnitStep",
    "kornia": "kornia.geometry.epipolar.essential:_NullSpaceBasis",
    "pytorch_wavelets": "pytorch_wavelets.dwt.lowlevel:AFB1D",
}
LOOK = "import importlib.util, json, sys; print(json.dumps([n for n in sys.argv[1:] if importlib.util.find_spec(n)]))"


@cache
def installed() -> frozenset[str]:
    done = subprocess.run([PYTHON, "-c", LOOK, *BEST_KNOWN], capture_output=True, text=True, check=True)
    return frozenset(json.loads(done.stdout))


@pytest.mark.parametrize("package", BEST_KNOWN)
def test_a_class_of_a_package_is_as_eager(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package not in installed():
        pytest.skip(f"{package} is not installed: `make world` installs it")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)) if PYTHON == sys.executable else "")
    row = next(row for row in rows() if row.name == BEST_KNOWN[package])
    child = Child([PYTHON, str(HERE / "worker.py")], 200)
    fact = world.merged({}, row, child, ["reference"])
    child.end()
    assert "absent" not in fact, fact["absent"]
    assert world_page.words(fact["backends"]["reference"]) == []


def test_the_slice_is_in_the_table() -> None:
    names = {row.name: row.package for row in rows()}
    assert [names.get(name) for name in BEST_KNOWN.values()] == list(BEST_KNOWN)
