"""A cold start of a whole job: torchrun's processes on one empty cache compile each kernel, capture each method once.

    python tests/distributed/job.py --processes 8 [--json]

All ranks begin together, with the same classes and kernels, as every rank of a training job does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRUST = Path(__file__).resolve().parents[1] / "trust"
sys.path.insert(0, str(TRUST))
DIGITS = 2


def together(work: Any) -> list[dict[str, Any]]:
    """What each rank of the group did, on every rank."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    found = work()
    found["seconds"] = round(time.perf_counter() - began, DIGITS)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def judged(answers: Sequence[dict[str, Any]], kernels: int) -> dict[str, Any]:
    """How often each kernel was compiled and each entry written, over all ranks, and whether they agree."""
    compiled = Counter(name for a in answers for name in a["compiled"])
    written = Counter(key for a in answers for key in a["written"])
    first = answers[0]
    return {
        "processes": len(answers), "kernels": kernels, "compiled": dict(sorted(compiled.items())),
        "compiled_by_rank": [len(a["compiled"]) for a in answers],
        "captures_by_rank": [a["captures"] for a in answers], "entries": len(written),
        "written_twice": sorted(k for k, n in written.items() if n > 1),
        "differ": sum(a["tensors"] != first["tensors"] or a["binaries"] != first["binaries"] for a in answers),
        "warnings": sum(len(a["warnings"]) for a in answers), "seconds": [a["seconds"] for a in answers],
    }  # fmt: skip


def is_ok(found: dict[str, Any]) -> bool:
    """Each kernel and each entry once, everybody right."""
    once = all(n == 1 for n in found["compiled"].values()) and len(found["compiled"]) == found["kernels"]
    return once and not any(found[n] for n in ("written_twice", "differ", "warnings"))


def on_rank(answer: Path) -> None:
    import forked
    import torch
    import torch.distributed as dist

    from fusegrad.runtime.kernels.cross_compile import pool as workers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = forked.Work()
    answers = together(work)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(judged(answers, sum(len(records) for records, _ in work.modules))))
    if workers._pool.cache_info().currsize:
        workers.pool().close()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust/job.json")
    options = parser.parse_args()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        environment = {**os.environ, "FUSEGRAD_CACHE_DIR": str(Path(folder) / "cache"), "JOB_ANSWER": str(answer)}
        environment |= {"OMP_NUM_THREADS": "1", "FUSEGRAD_STORE": "1"}
        subprocess.run([sys.executable, *launcher, __file__], env=environment, check=True)
        found = json.loads(answer.read_text(encoding="utf-8"))
    for name, times in found["compiled"].items():
        print(f"{name:<40} compiled {times} time{'s' if times > 1 else ''}")
    print(json.dumps({k: v for k, v in found.items() if k != "compiled"}))
    if options.json:
        import outcome

        print(outcome.write("job", found))
    return 0 if is_ok(found) else 1


if __name__ == "__main__":
    if "JOB_ANSWER" in os.environ:
        on_rank(Path(os.environ["JOB_ANSWER"]))
    else:
        sys.exit(main())
