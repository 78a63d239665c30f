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
    beside: str = ""  # another part, whose rows are joined to those of the same cases as row[beside]

    def verdict(self, results: Results) -> dict[str, Any] | None:
        """None where the part was not run, or has no row that the goal is about."""
        if self.part not in results:
            return None
        found = list(self.measure(joined(results, self.part, self.beside)))
        sign = -1 if self.lowest else 1
        missed = [(w, n) for w, n in found if sign * n > sign * self.limit]
        if not found:
            return None
        worst = max(found, key=lambda f: sign * f[1])
        return {"goal": self.name, "of": len(found), "missed": len(missed), "worst": worst[1], "at": worst[0]}


def joined(results: Results, part: str, beside: str) -> list[Mapping[str, Any]]:
    """The rows of a part, each with the other part's row for the same case, if there is one."""
    others = {row["case"]: row for row in results.get(beside, {}).get("rows", ())}
    return [row | {beside: others.get(row["case"])} if beside else row for row in results[part]["rows"]]


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


def _above_small(measure: Callable[[Any], Iterator[Measured]]) -> Callable[[Any], Iterator[Measured]]:
    return lambda rows: measure([r for r in rows if not r["case"].endswith(f"[{SMALL}]")])


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


OTHER_NUMBERS = ("DropoutBiasResidual",)
"""A peer draws its random numbers by another generator, whose instructions are not comparable."""
SMALL, PEER_MARGIN = "512,1024", 1.05
TIME, TIME_SMALL = 1.1, 1.25
"""Of a copy's of as many bytes, from 4096x4096 on and at 512x1024."""


def least_of_peers(row: Mapping[str, Any], direction: str) -> float | None:
    """Warp instructions for 32 elements of the peer that issues the fewest; None where none was counted.

    A peer that computes its gradients in forward already is left out: neither of its directions is one of ours.
    """
    if row["case"].startswith(OTHER_NUMBERS):
        return None
    peers, elements = row.get("peers") or {}, row[direction]["elements"]
    counted = [
        p[direction] for p in (peers.get("inductor"), peers.get("liger")) if p and all(p.get(d) for d in DIRECTIONS)
    ]
    return min(counted) * 32 / elements if counted else None


def _issued(rows: Any) -> Iterator[Measured]:
    for row, direction in modelled(rows):
        yield f"{row['case']} {direction}", issued_over(row, direction)


def issued_over(row: Mapping[str, Any], direction: str) -> float:
    """Instructions over the budget, or over 1.05 of the best peer's, whichever is less."""
    peer, found = least_of_peers(row, direction), row[direction]
    shares = [found["share"], *([found["per_32"] / (PEER_MARGIN * peer)] if peer else [])]
    return float(min(shares))


def is_small(row: Mapping[str, Any]) -> bool:
    return str(row["case"]).endswith(f"[{SMALL}]")


def keeps_time(row: Mapping[str, Any], direction: str) -> bool:
    """Whether the model's time is at most the goal's times a copy's."""
    return float(row[direction]["over_copy"]) <= (TIME_SMALL if is_small(row) else TIME)


def modelled(rows: Any) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The directions of memory-bound cases that were modelled."""
    for row in rows:
        if not row["case"].startswith(NOT_MEMORY_BOUND):
            yield from ((row, d) for d in DIRECTIONS if row.get(d))


def _modelled_figure(name: str, small: bool | None = None) -> Callable[[Any], Iterator[Measured]]:
    """A figure of every direction that is modelled: at 512x1024, above it, or everywhere."""

    def measure(rows: Any) -> Iterator[Measured]:
        for row, direction in modelled(rows):
            if small is None or small == is_small(row):
                yield f"{row['case']} {direction}", row[direction][name]

    return measure


NVIDIA = tuple(t for t in TARGETS if t.startswith("cuda"))
AMD = tuple(t for t in TARGETS if t.startswith("hip"))
MOVED = [
    Goal(f"bytes moved, {d}, over the minimum traffic, from 4096x4096", "plans", 1.03,
         _above_small(_per_direction(d, lambda r, i: r["bytes"][i] / max(1, r["minimal"][i]))))
    for d in DIRECTIONS
]  # fmt: skip
"""512x1024 apart: all of it stays in L2, where idle multiprocessors cost more than partial sums; its goal is time."""
GOALS: tuple[Goal, ...] = (
    *MOVED,
    *(Goal(f"launches, {d}", "plans", 1, _per_direction(d, lambda r, i: r["launches"][i])) for d in DIRECTIONS),
    Goal("bytes saved beyond what the class asks for", "plans", 0, _saved),
    Goal("spilled bytes, NVIDIA, to 64K columns", "kernels", 0, _needs(NVIDIA, lambda n: n["spills"])),
    Goal("spilled bytes, gfx942, to 64K columns", "kernels", 0, _needs(AMD, lambda n: n["spills"])),
    Goal("kernels without a binary", "kernels", 0, _needs(TARGETS, lambda n: len(n["errors"]))),
    *(Goal(f"16-byte {kind}s of what is streamed, share, NVIDIA", "kernels", 1.0,
           _needs(NVIDIA, lambda n, kind=kind: share(n["streams"][kind])), lowest=True) for kind in ("load", "store")),
    Goal("model: instructions over the budget, or over 1.05 of a peer's", "instructions", 1.0, _issued, beside="peers"),
    Goal("model: time over a copy's, from 4096x4096", "instructions", TIME, _modelled_figure("over_copy", small=False)),
    Goal("model: time over a copy's, 512x1024", "instructions", TIME_SMALL, _modelled_figure("over_copy", small=True)),
    Goal("model: multiprocessors without a program, share", "instructions", 0.0, _modelled_figure("idle")),
    Goal("model: bytes on their way, per multiprocessor", "instructions", 40 << 10,
         _modelled_figure("flight", small=False), lowest=True),
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
