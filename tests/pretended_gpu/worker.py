"""A process with the pretended GPU: reads scenes, a line of JSON each, and answers what came of them.

    {"scene": "suite", "arguments": {"name": "RMSNorm"}}
    {"found": [], "problems": [], "launches": {"RMSNorm_forward": 1, ...}, "error": ""}
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import sys
import traceback
import warnings
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a scene prints is no answer

import pretending  # noqa: F401, E402  # before torch
import scenes  # noqa: E402
from launches import launches, problems, refuses  # noqa: E402

import fusegrad  # noqa: E402


def played(scene: str, arguments: dict[str, Any], limit: float) -> dict[str, Any]:
    """What differs, by the scene's own comparison; what was wrong with launches; what was launched how often."""
    launches.clear(), problems.clear(), refuses.clear()
    found, error = [], ""
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", ".*internal error", fusegrad.FallbackWarning)
            found = list(scenes.SCENES[scene](**arguments))
    except Exception:
        error = traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    counts = collections.Counter(launch.kernel for launch in launches)
    return {"found": found, "problems": list(problems), "launches": counts, "error": error}


def main() -> None:
    print(json.dumps(sorted(scenes.SCENES)), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(played(asked["scene"], asked["arguments"], asked["limit"])), file=answers, flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the engine's hold what CUDA-graph trees gave them, and outlive Python
