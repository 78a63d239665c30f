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
    """Tests by package: from its source distribution, or (`inside`) as they are installed."""

    name: str
    paths: tuple[str, ...]
    distribution: str | None = None
    inside: str = ""
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    seconds: int = 1200


SUITES = (
    Suite("linear_operator", ("test/functions", "test/utils"), distribution="linear_operator"),
    Suite("gpytorch", ("test/functions", "test/kernels/test_rbf_kernel.py"), distribution="gpytorch"),
    Suite("entmax", ("test_losses.py", "test_mask.py", "test_root_finding.py", "test_topk.py"), inside="entmax"),
    Suite("e3nn", ("tests/math",), distribution="e3nn"),
    Suite("torchsde", ("tests",), distribution="torchsde", seconds=2400),
)
