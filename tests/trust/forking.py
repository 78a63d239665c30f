"""Whether torch runs a backward in a child that was forked after one: its 2.14.1 for CUDA without a GPU does not.

Entering FakeTensorMode, as every capture and torch.compile do, is enough for that.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x
    @staticmethod
    def backward(ctx, g):
        return 2 * g
def use():
    Twice.apply(torch.ones(3, requires_grad=True)).sum().backward()
with FakeTensorMode():
    torch.empty(1)
use()
child = os.fork()
if child == 0:
    try:
        use()
        os._exit(0)
    except RuntimeError:
        os._exit(1)
print("goes on" if os.waitpid(child, 0)[1] == 0 else "ends")
"""


@functools.cache
def torch_goes_on_in_a_fork() -> bool:
    told = subprocess.run([sys.executable, "-c", SCRIPT], timeout=120, check=True, stdout=subprocess.PIPE, text=True)
    return told.stdout.split()[-1] == "on"


def needs_torch_to_go_on() -> None:
    """Skip the test where eager fails as well."""
    if not torch_goes_on_in_a_fork():
        pytest.skip("this torch runs no backward in a child forked after one, once there was a fake tensor")
