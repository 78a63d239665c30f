"""The choice among some versions of a group's kernels: timed once per bucket of sizes, stored.

Off unless asked for (`config.patch(tune=True)`, FUSEGRAD_TUNE=1, `tune_function`): a timing costs two more compilations
per kernel, six where a stream is walked. The candidates are the schedule's own choice and its nearest neighbours in
loads in flight, block width, rows per program and warps (`codegen.schedule.tuning_candidates`). A stored answer that
names none of them is ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...codegen.schedule.tuning_candidates import OWN
from ...tracer.locks import INNER, lock_of
from ..cache import entry_files
from ..cache import store as cache
from ..settings import logs

Launch = Callable[[], object]
Clock = Callable[[Sequence[Launch]], list[float]]
"""Milliseconds of each; all are correct, so that it does not matter how often each runs, or which runs last."""

ROUNDS = 12
MOST, MOST_OF_STREAMS = 3, 7
"""Candidates, the scheduled one included; of kernels that walk a stream, whose rows, blocks, warps and loads differ."""


# ------------------------------------------------------------------ one group of kernels
@dataclass(frozen=True)
class Trial:
    """One group at one bucket of sizes. milliseconds: None for an answer that was stored; infinite where refused."""

    kernel: str
    sizes: tuple[int, ...]
    candidates: tuple[str, ...]
    milliseconds: tuple[float, ...] | None
    chosen: str


def bucket(numbers: Sequence[int]) -> tuple[int, ...]:
    """Sizes that share an answer: those of the same powers of two."""
    return tuple(max(n, 0).bit_length() for n in numbers)


def fastest(
    device: str,
    name: str,
    text: str,
    numbers: Sequence[int],
    launches: Mapping[str, Launch],
    clock: Clock | None = None,
) -> str:
    """One of these candidates: as stored for the device, the text and the sizes' bucket, else as the clock says.

    The first candidate is the schedule's own: it wins ties.
    """
    key = cache.key_of("tuned", *entry_files.versions().items(), device, name, text, bucket(numbers), *launches)
    choice, times = _stored_choice(key), None
    # No answer, or one that names none of the candidates: they are timed.
    if choice is None or choice not in launches:
        times = (clock or time_by_events)(list(launches.values()))
        choice = list(launches)[min(range(len(times)), key=times.__getitem__)]
        cache.put(key, {"choice.json": json.dumps(choice).encode()})
    record_trial(Trial(name, tuple(numbers), tuple(launches), tuple(times) if times else None, choice))
    return choice


def _stored_choice(key: str) -> str | None:
    """The answer on disk; None where there is none that can be read."""
    try:
        choice = json.loads((cache.get(key) or {})["choice.json"])
    except (KeyError, ValueError):
        return None
    return choice if isinstance(choice, str) else None


def time_by_events(launches: Sequence[Launch]) -> list[float]:
    """The least milliseconds of each by events of the current stream, taken in turns; infinite where one is refused."""
    accepted = {i: launch for i, launch in enumerate(launches) if i == 0 or _is_accepted(launch)}
    times = [[event_milliseconds(launch) for launch in accepted.values()] for _ in range(ROUNDS)]
    best = dict(zip(accepted, map(min, zip(*times[1:], strict=True)), strict=True))  # the first round compiles
    return [best.get(i, float("inf")) for i in range(len(launches))]


def _is_accepted(launch: Launch) -> bool:
    """True where Triton takes the neighbour: it may need more registers or shared memory than there are."""
    try:
        launch()
    except Exception as error:
        if not type(error).__module__.startswith("triton."):
            raise
        return False
    return True


def event_milliseconds(launch: Launch) -> float:
    """One call by events of the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


# ------------------------------------------------------------------ a whole Function
_records: list[list[Trial]] = []
_lock = lock_of(INNER)


def is_tuning() -> bool:
    """True while any thread tunes a Function: its backward may run on a thread of autograd's."""
    return bool(_records)


def record_trial(trial: Trial) -> None:
    log_trial(trial)
    for record in list(_records):
        record.append(trial)


@contextmanager
def record_trials() -> Iterator[list[Trial]]:
    """Within the block, of any thread, kernels are tuned and the trials listed."""
    record: list[Trial] = []
    with _lock:
        _records.append(record)
    try:
        yield record
    finally:
        with _lock:
            _records[:] = [r for r in _records if r is not record]


def log_trial(trial: Trial) -> None:
    """A group was timed, or its choice was found again."""
    if logs.autotune.isEnabledFor(logging.INFO):
        times = trial.milliseconds or [None] * len(trial.candidates)
        timings = (f"{c} {'' if t is None else f'{t * 1e3:.1f} us'}".rstrip()
                 for c, t in zip(trial.candidates, times, strict=True))  # fmt: skip
        how = "found again" if trial.milliseconds is None else "timed"
        facts = trial.kernel, list(trial.sizes), how, ", ".join(timings), trial.chosen
        logs.autotune.info("%s %s: %s; %s; chosen: %s", *facts)


__all__ = ["OWN", "Trial", "bucket", "fastest", "is_tuning", "record_trials", "time_by_events"]
