"""Data about packages: what cannot be had and why, and the suites that are run."""

from __future__ import annotations

from dataclasses import dataclass

UNAVAILABLE = {
    "torchvision": "its wheels belong to CUDA builds of torch; deepinv and timm's models cannot be imported without it",
    "liger_kernel, fla, parts of torchao, trl and megatron": "classes that launch kernels on a GPU",
    "lava-dl": "no version for Python 3.11 or newer",
    "norse's multi-compartment and refractory adjoints": "they call what torch and norse no longer have",
}


@dataclass(frozen=True)
class Suite:
    """Tests by package: from its source distribution, of a commit of a repository, or (`inside`) as they are installed.

    under: the folder of the repository in which the tests run. further: what else of it they need.
    lacking: what their imports want besides, by file.
    beside: folders of other repositories that have it (repository, commit, folder).
    """

    name: str
    paths: tuple[str, ...]
    distribution: str | None = None
    inside: str = ""
    repository: str = ""
    commit: str = ""
    under: str = ""
    further: tuple[str, ...] = ()
    lacking: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[str, str, str], ...] = ()
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    seconds: int = 1200


FUNCTORCH_HELPERS = """
import unittest

def expectedFailureIf(condition):
    return unittest.expectedFailure if condition else lambda test: test

def skip(*args, **kwargs):
    return None

decorate = xfail = skip

def saved_tensors_hooks_to_gm(*args, **kwargs):
    raise unittest.SkipTest("needs a helper of torch's own tests")
"""
"""Stands for `common_utils` of torch's functorch tests."""
BELOW = """
import importlib.util
import sys
from pathlib import Path

folders = [Path(folder) for folder in sys.path if folder and Path(folder).resolve() != Path(__file__).resolve().parent]
found = next(folder for folder in folders if (folder / "common_utils.py").exists() and folder.name == "functorch")
spec = importlib.util.spec_from_file_location("common_utils_of_torch", found / "common_utils.py")
below = importlib.util.module_from_spec(spec)
spec.loader.exec_module(below)
globals().update({name: value for name, value in vars(below).items() if not name.startswith("__")})

def xfailIf(op_name, condition, variant_name="", *, device_type=None, dtypes=None):
    return below.decorate(op_name=op_name, variant_name=variant_name, decorator=lambda test: test,
                          device_type=device_type, dtypes=dtypes)
"""
"""`common_utils` of an older torch's functorch tests, with what the newer ones want of it."""
ON_CPU = """
from torch.testing._internal import common_device_type as devices

made = devices.instantiate_device_type_tests
devices.instantiate_device_type_tests = lambda test, scope, **which: made(test, scope, only_for="cpu")
"""
"""A pytest plugin: tests by device, of which a copy for another device has only that one, run on the CPU."""
NO_NPU = """
import types
import torch

torch.npu = npu = types.SimpleNamespace(
    is_available=lambda: False, device_count=lambda: 0, get_device_name=lambda *index: "",
    is_bf16_supported=lambda: False, amp=torch.cuda.amp, FloatTensor=None,
)
"""
"""Stands for torch_npu, on a machine without such a device."""
NPU = (("torch_npu/__init__.py", NO_NPU), ("torch_npu/testing.py", ""), ("autograd/__init__.py", ""),
       ("autograd/test_complex.py", "class TestAutogradComplex: pass"),
       ("autograd/test_functional.py", "class TestAutogradFunctional: pass"))  # fmt: skip
XPU_OPS = "21172da81103fd54a94ebc39260a03627ddceb0d"
"""release/2.13 of torch-xpu-ops, which has copies of torch's own tests of that version."""
ASCEND = "a63ae3a1f37388423bc762c50b1a543ea7053df1"
"""v2.12.0 of Ascend's torch_npu, which has copies of torch's own tests of several versions."""
WITH_FUNCTIONS = (
    "(steals_view or resize_down_and_set or autograd_function or test_backward_mutation or no_functionalization"
    " or mem_leak or test_custom_autograd or saved_tensors_hooks or getitem_of_banned or mutations_in_bw"
    " or mutation_of_input_in) and not WithDynamo and not Export and not Cache and not dynamic"
)
HELPERS = (("common_utils.py", FUNCTORCH_HELPERS),)
ON_A_CPU = (("common_utils.py", BELOW), ("on_cpu.py", ON_CPU))
OLDER = (("yakov-helm/pytorch_exp", "c5e2a7738220d39b8602869406a76e2787ac5c6b", "test/functorch"),)
"""A copy of torch 2.1's tests."""
EACH = ("--timeout=600",)

SUITES = (
    Suite("linear_operator", ("test/functions", "test/utils"), distribution="linear_operator"),
    Suite(
        "linear_operator, three operators",
        tuple(f"test/operators/test_{name}_linear_operator.py" for name in ("dense", "toeplitz", "kronecker_product")),
        distribution="linear_operator",
    ),
    Suite("gpytorch", ("test/functions", "test/variational", "test/kernels/test_rbf_kernel.py",
          "test/examples/test_simple_gp_regression.py", "test/examples/test_simple_gp_classification.py"),
          distribution="gpytorch", options=EACH),
    Suite("entmax", ("test_losses.py", "test_mask.py", "test_root_finding.py", "test_topk.py"), inside="entmax"),
    Suite("e3nn", ("tests/math",), distribution="e3nn"),
    Suite("torchsde test_adjoint.py", ("tests/test_adjoint.py",), repository="google-research/torchsde",
          commit="eb3a00e31cbd56176270066ed2f62c394cf6acb7", options=("-k", "basic", *EACH)),
    Suite("brevitas scaling, stats", ("tests/brevitas/core/test_scaling_quant.py", "tests/brevitas/core/test_stats.py",
          "tests/brevitas/core/test_runtime_scaling.py"), repository="Xilinx/brevitas",
          commit="b106358c4169d8a9b68cb2a531aa795417d74887", options=("-o", "addopts=", *EACH)),
    Suite("snntorch", ("tests",), repository="jeshraghian/snntorch", commit="634fc22385ec5581998e62787bbe39b53662140f",
          options=("--ignore=tests/test_spikegen.py", *EACH)),
    Suite("norse, functional", ("norse/torch/functional",), repository="norse/norse",
          commit="065a3b45cf13bc8156d18987380f6d26c09f08a2", options=EACH),
    Suite("sinabs, activations and layers", ("tests/test_activations.py", "tests/test_layers"),
          repository="synsense/sinabs", commit="904eb89398cc4006af4a8ec2d5b7e48fc17b4ba1", options=EACH),
    Suite("zuko, transforms", tuple(f"tests/test_{part}.py" for part in ("transforms", "utils", "mixtures")),
          repository="probabilists/zuko", commit="1063ae415bcd53bfad1da3a27b5519491365afdd", options=EACH),
    Suite("kornia, losses", ("tests/losses", "tests/geometry/epipolar/test_essential.py"), repository="kornia/kornia",
          commit="b4f5a78a13891c7ac4c1cd9695941380273e981d", further=("conftest.py", "testing"),
          options=("-k", "focal or essential", *EACH)),
    Suite("pypose, Lie tensors and splines", ("tests/lietensor/test_lietensor.py", "tests/basics",
          "tests/function/test_spline.py", "tests/function/test_checking.py"), repository="pypose/pypose",
          commit="2b684b00857edae2c2a125a58f806ada95dfa72c", options=EACH),
    Suite("memcnn, models", tuple(f"memcnn/models/tests/test_{part}.py" for part in
          ("revop", "couplings", "is_invertible_module", "memory_saving", "multi")),
          repository="silvandeleemput/memcnn", commit="439ac2673093d6e226c4f45927c50b7210036e18", options=EACH),
    Suite("torch-harmonics, convolutions", ("tests/test_convolution.py",), repository="NVIDIA/torch-harmonics",
          commit="9e9fa5373bc66add241638ef7a481da2e5c80d32", options=("-k", "cpu or not cuda", *EACH)),
    Suite("pyro, OMT", ("tests/distributions/test_omt_mvn.py",), repository="pyro-ppl/pyro",
          commit="ff6ae1c9572591791aae8842bcd702fcf0b46fd6", further=("tests/common.py", "tests/conftest.py"),
          options=EACH),
    Suite("fairscale, checkpoint and mevo", ("tests/nn/checkpoint", "tests/experimental/nn/test_mevo.py",
          "tests/experimental/nn/test_offload.py"), repository="facebookresearch/fairscale",
          commit="146f160241651e1211c4247979f159a4ef43b54a", options=EACH),
    Suite("torch test_autograd.py", ("test_autograd.py",), repository="Ascend/pytorch", commit=ASCEND, under="test",
          lacking=NPU, options=EACH, seconds=1800),
    Suite("torch dynamo/test_autograd_function.py", ("dynamo/test_autograd_function.py",),
          repository="Ascend/pytorch", commit=ASCEND, under="test", lacking=NPU, options=EACH),
    Suite("torch functorch/test_eager_transforms.py", ("test_eager_transforms_xpu.py",),
          repository="intel/torch-xpu-ops", commit=XPU_OPS, under="test/xpu/functorch", lacking=HELPERS, options=EACH),
    Suite("torch functorch/test_aotdispatch.py, Functions", ("test_aotdispatch_xpu.py",),
          repository="intel/torch-xpu-ops", commit=XPU_OPS, under="test/xpu/functorch", lacking=HELPERS,
          options=("-k", WITH_FUNCTIONS, *EACH)),
    Suite("torch functorch/test_vmap.py, less OpInfo", ("test_vmap_xpu.py",), repository="intel/torch-xpu-ops",
          commit=XPU_OPS, under="test/xpu/functorch", lacking=ON_A_CPU, beside=OLDER, options=("-p", "on_cpu", "-k",
          "AutogradFunction or autograd_function or (not OpInfo and not NestedTensor)", *EACH)),
    Suite("torch functorch/test_ops.py, Functions", ("test_ops_xpu.py",), repository="intel/torch-xpu-ops",
          commit=XPU_OPS, under="test/xpu/functorch", lacking=ON_A_CPU, beside=OLDER,
          options=("-p", "on_cpu", "-k", "AutogradFunction", *EACH)),
)  # fmt: skip

DERIVED = "eager refuses, and the test asserts that; fusegrad derives it"
DIFFERS = {
    "test_autograd_function_no_setup_context_transform*":
        f"an old-style class under torch.func: {DERIVED} (contract, 21)",
    "test_fails_with_autograd_function_transform*": f"an old-style class under torch.func: {DERIVED} (contract, 21)",
    "test_custom_function_error": f"a class without jvp in forward mode: {DERIVED} (contract, 18)",
    "test_checkpointing_without_reentrant_custom_function_works":
        "asserts that `ctx.saved_tensors` raises when read again in a checkpoint; here what was unpacked once serves",
    "test_return_leaf_inplace":
        "asks whether the class of `grad_fn` is the private `_backward_cls`; it is a subclass of it",
    "test_autograd_function_has_graph_break":
        "asserts that torch.compile breaks the graph at the class; here it does not",
    "test_smoke_from_test_autograd": "torch.compile by itself gives zeros for None; here backward has its None",
    "test_fw_bw_mutation_no_functionalization*": "compares the text of a graph; here the class is one operator in it",
    "test_function":
        "compares the names of a graph's nodes; a differentiated backward is one node here, no chain of them",
}  # fmt: skip
"""Outcomes that differ, by the test's name (a pattern of the shell), and why they do."""
