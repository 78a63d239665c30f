"""A stand-in for the work of a process of `run.py`: it dies at seed 1 and hangs at seed 2."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any


def work(pipe: Connection, options: Any) -> None:
    for seed in iter(pipe.recv, None):
        if seed == 1:
            os._exit(3)
        if seed == 2:
            time.sleep(1000)
        pipe.send({"seed": seed, "faults": [], "memory": 0})
