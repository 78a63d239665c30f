"""The goals that need no GPU, as data: what is measured, the limit, and where it is met or missed by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .kernels import TARGETS
from .plans import DIRECTIONS
from .streams import share

Results = Mapping[str, Any]
Measured = tuple[str, float]
"""Where, and how much."""

MOST_COLUMNS = 65536
NOT_MEMORY_BOUND = ("FusedLinearCrossEntropy",)


@dataclass(frozen=True)
class Goal:
    """`measure` gives (where, how much); met where that is at most `limit`, or at least, if `lowest`."""

    name: str
    part: str
    limit: float
    measure: Callable[[Any], Iterator[Measured]]
    lowest: bool = False
    unit: str = ""

    def verdict(self, results: Results) -> dict[str, Any] | None:
        """None where the part was not run."""
        if self.part not in results:
            return None
        found = list(self.measure(results[self.part]["rows"]))
        sign = -1 if self.lowest else 1
        missed = [(w, n) for w, n in found if sign * n > sign * self.limit]
        worst = max(found, key=lambda f: sign * f[1], default=("nothing", float("nan")))
        return {"goal": self.name, "of": len(found), "missed": len(missed), "worst": worst[1], "at": worst[0]}


def _per_direction(name: str, of: Callable[[Mapping[str, Any], int], float]) -> Callable[[Any], Iterator[Measured]]:
    def measure(rows: Any) -> Iterator[Measured]:
        for row in rows:
            if not row["case"].startswith(NOT_MEMORY_BOUND):
                yield row["case"], of(row, DIRECTIONS.index(name))

    return measure


def _saved(rows: Any) -> Iterator[Measured]:
    for row in rows:
        yield row["case"], row["saved"] - row["asked"]


def _needs(
    targets: tuple[str, ...], of: Callable[[Mapping[str, Any]], float | None]
) -> Callable[[Any], Iterator[Measured]]:
    """Of every kernel up to 64K columns that was generated for one of the targets."""

    def measure(rows: Any) -> Iterator[Measured]:
        for row in rows:
            if int(row["case"].rstrip("]").rpartition("[")[2].split(",")[-1].rpartition("x")[2]) > MOST_COLUMNS:
                continue
            for target in targets:
                for direction, needs in zip(DIRECTIONS, row["targets"].get(target, ()), strict=False):
                    if needs is not None and (value := of(needs)) is not None:
                        yield f"{row['case']} {direction} {target}", value

    return measure


def _over_null(what: str) -> Callable[[Any], Iterator[Measured]]:
    def measure(rows: Any) -> Iterator[Measured]:
        for row in (r for r in rows if "peers" in r):
            peers = row["peers"]
            yield row["function"], peers["triton"][what]["least"] / peers["null"][what]["least"]

    return measure


def _styles_over_eager(rows: Any) -> Iterator[Measured]:
    for row in rows:
        for style, peers in row.get("styles", {}).items():
            for what in ("forward", "both"):
                yield f"{style}, {what}", peers["triton"][what] / peers["eager"][what]


def _on_cpu(peer: str, over: str, *states: str) -> Callable[[Any], Iterator[Measured]]:
    """`peer` over `over`, wherever both were timed in one of these states."""

    def measure(rows: Any) -> Iterator[Measured]:
        for row in rows:
            peers = row.get("milliseconds", {})
            for what in (f"{w}{s}" for w in ("forward", "both") for s in states):
                if what in peers.get(peer, {}) and what in peers.get(over, {}):
                    yield f"{row['case']} {what}", peers[peer][what] / peers[over][what]

    return measure


def _large(measure: Callable[[Any], Iterator[Measured]]) -> Callable[[Any], Iterator[Measured]]:
    return lambda rows: measure([r for r in rows if not r["case"].endswith("[8,16]")])


def _first_call(state: str) -> Callable[[Any], Iterator[Measured]]:
    def measure(rows: Any) -> Iterator[Measured]:
        for row in rows:
            found = row["triton"][state]
            if "error" not in found:
                yield row["function"], found["forward"]

    return measure


def _compiles(rows: Any) -> Iterator[Measured]:
    for row in rows:
        yield row["function"], row["batches"].get("compiles", -1) + row["batches"].get("kernels", 0)


NVIDIA = tuple(t for t in TARGETS if t.startswith("cuda"))
AMD = tuple(t for t in TARGETS if t.startswith("hip"))
MOVED = [
    Goal(f"bytes moved, {d}, over the minimum traffic", "plans", 1.03,
         _per_direction(d, lambda r, i: r["bytes"][i] / max(1, r["minimal"][i])))
    for d in DIRECTIONS
]  # fmt: skip
GOALS: tuple[Goal, ...] = (
    *MOVED,
    *(Goal(f"launches, {d}", "plans", 1, _per_direction(d, lambda r, i: r["launches"][i])) for d in DIRECTIONS),
    Goal("bytes saved beyond what the class asks for", "plans", 0, _saved),
    Goal("spilled bytes, NVIDIA, to 64K columns", "kernels", 0, _needs(NVIDIA, lambda n: n["spills"])),
    Goal("spilled bytes, gfx942, to 64K columns", "kernels", 0, _needs(AMD, lambda n: n["spills"])),
    Goal("kernels without a binary", "kernels", 0, _needs(TARGETS, lambda n: len(n["errors"]))),
    *(Goal(f"16-byte {kind}s of what is streamed, share, NVIDIA", "kernels", 1.0,
           _needs(NVIDIA, lambda n, kind=kind: share(n["streams"][kind])), lowest=True) for kind in ("load", "store")),
    Goal("host time of forward over a null Function", "host", 1.6, _over_null("forward")),
    Goal("host time of forward+backward over a null Function", "host", 1.2, _over_null("both")),
    Goal("host time of a style of calling over eager, launches stubbed", "host", 1.0, _styles_over_eager),
    Goal("reference over eager, large tensors", "cpu", 1.05, _large(_on_cpu("reference", "eager", ""))),
    Goal("reference over eager, large tensors, recycling", "cpu", 1.05,
         _large(_on_cpu("reference", "eager", " recycling"))),
    Goal("inductor over torch.compile", "cpu", 1.05, _on_cpu("inductor", "compile", "", " recycling")),
    Goal("first call, empty caches, ms", "latency", 1000, _first_call("cold")),
    Goal("first call, filled disk caches, ms", "latency", 50, _first_call("warm")),
    Goal("compilations over 100 batch sizes", "latency", 0, _compiles),
)  # fmt: skip
