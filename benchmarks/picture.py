"""The results as one picture (matplotlib): bytes moved, launches, host time, the first call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OURS, PEER, LIMIT = "#1f6f8b", "#e07a3f", "#777777"
MOST_LAUNCHES = 20
NAMES = {"null apply": "null Function", "null": "null Function, from C++", "compile": "torch.compile",
         "triton": "fusegrad", "reference": "fusegrad, reference"}  # fmt: skip
Results = Mapping[str, Any]


def draw(results: Results, path: Path) -> bool:
    """Write an SVG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fusegrad"  # the same results, the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplot_mosaic([["bytes", "launches"], ["bytes", "launches"], ["host", "latency"]],
                                         figsize=(12, 11), layout="constrained", width_ratios=[3, 2])  # fmt: skip
    for name, panel in (("bytes", _bytes), ("launches", _launches), ("host", _host), ("latency", _latency)):
        panel(axes[name], results)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _functions(results: Results) -> list[str]:
    return list(dict.fromkeys(_points(results.get("plans", {}).get("rows", ()), len)[1]))[::-1]


def _points(rows: Iterable[Mapping[str, Any]], of: Any) -> tuple[list[float], list[str]]:
    known = [r for r in rows if "error" not in r and sum(r["launches"]) <= MOST_LAUNCHES]
    return [of(r) for r in known], [r["case"].partition("[")[0] for r in known]


def _dots(axis: Any, results: Results, of: Any, title: str) -> None:
    """One dot a shape: ours above, Inductor's below the Function's line."""
    names = _functions(results)
    for part, colour, label, shift in (("plans", OURS, "fusegrad", 0.16), ("inductor", PEER, "Inductor", -0.16)):
        values, functions = _points(results.get(part, {}).get("rows", ()), of)
        heights = [names.index(f) + shift for f in functions if f in names]
        axis.scatter([v for v, f in zip(values, functions, strict=True) if f in names], heights,
                     color=colour, s=18, alpha=0.7, label=label, edgecolors="none")  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)


def _bytes(axis: Any, results: Results) -> None:
    _dots(axis, results, lambda r: sum(r["bytes"]) / max(1, sum(r["minimal"])),
          "bytes moved over the minimum traffic, forward and backward, a dot per shape")  # fmt: skip
    axis.axvline(1.03, color=LIMIT, linewidth=0.8, linestyle="--")


def _launches(axis: Any, results: Results) -> None:
    _dots(axis, results, lambda r: sum(r["launches"]), "launches, forward and backward")
    axis.axvline(2, color=LIMIT, linewidth=0.8, linestyle="--")
    axis.set_yticklabels([])


def _host(axis: Any, results: Results) -> None:
    peers = next(iter(results.get("host", {}).get("rows", ())), {"peers": {}})["peers"]
    names = list(peers)[::-1]
    for what, shift, colour in (("forward", 0.2, OURS), ("both", -0.2, PEER)):
        values = [peers[n][what]["least"] for n in names]
        label = "forward" if what == "forward" else "forward+backward"
        axis.barh([i + shift for i in range(len(names))], values, height=0.36, color=colour, label=label)
    axis.set_yticks(range(len(names)), [NAMES.get(n, n) for n in names])
    _finish(axis, "host microseconds per call, tiny RMSNorm, launches stubbed", bool(names))


def _latency(axis: Any, results: Results) -> None:
    rows = results.get("latency", {}).get("rows", ())
    pairs = [(r, peer) for r in rows for peer in ("triton", "compile")]
    bars = [(f"{r['function']}, {NAMES[peer]}", r[peer]["cold"], r[peer]["warm"]) for r, peer in pairs]
    bars = [b for b in bars if "error" not in b[1] and "error" not in b[2]][::-1]
    for state, shift, colour in ((1, 0.2, PEER), (2, -0.2, OURS)):
        label = ("empty caches", "filled disk caches")[state - 1]
        values = [b[state]["forward"] / 1000 for b in bars]  # type: ignore[index]
        axis.barh([i + shift for i in range(len(bars))], values, height=0.36, color=colour, label=label)
    axis.set_yticks(range(len(bars)), [b[0] for b in bars])
    axis.set_xscale("log")
    axis.set_xlim(left=0.1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("")
    _finish(axis, "seconds of the first forward in a fresh process", bool(bars))


def _finish(axis: Any, title: str, has_bars: bool) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)
    if has_bars:
        axis.legend(fontsize=8)
