"""docs/world.md out of benchmarks/results/world.json: what was tried, captured, right, and every difference by name."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import comparison
from packages import DIFFERS
from surroundings import ROOT
from tried import Tried, found_in, named, tried

PAGE = ROOT / "docs" / "world.md"
Told = dict[str, Any]
WHOLE, SPLIT, PART, WRITTEN = "captured", "split", "in part", "as written"

HEAD = """# The outside world

`make world` installs published packages that have `torch.autograd.Function` classes, into an environment of its own,
and drives each class of `tests/world/table.txt` beside itself compiled: forward and backward, double backward,
`jvp`, `vmap`, `vmap` of `grad`, transposed and strided arguments, expanded gradients, float64 and bfloat16. On
`reference` values are compared bit for bit where eager repeats itself, on `interpret` within eager's own error beside
float64; dtypes, shapes, strides, flags and errors everywhere. What eager refuses and fusegrad derives is compared with
single calls of the class. Then the packages' own tests run under `--fusegrad=auto` beside a plain run.

This page is written from `benchmarks/results/world.json` by `make world`.
A run goes on where the one before it stopped; `--again` drives every row anew.
"""


WORDS = """`same`: as eager. `rounds`: other bits, no further from float64 than twice eager's error. `raises`: both do.
`derives`: eager refuses, and the result is that of single calls. `refuses`: both raise, by different names."""


TRIED = """`tests/world/tried.txt` names classes of public repositories that were tried once by hand. Most of the
repositories are no packages.

On 2026-11-23 (2 x86_64 cores, torch 2.13.0+cpu, `reference` alone) those that the table does not reach, 265
rows, were taken out of their repositories by a script and driven, with nothing of them kept here: 176 of them on
arguments that `tests/world/proposals.py` guessed or that were made by hand, the rest by hand alone, with stand-ins for
what an extract lacked, a process group of one, `.cuda()` left out. 262 rows ran (some are one class): 168 captured, 66
split, 18 in part, 10 as written; 3 were not found. With the 152 of the table's 157 that is 386 of 421, 92 %, captured
or split. Two classes differed from eager when they were driven,
`FocalSigmoidLossFuncV2` (CoinCheung/pytorch-loss) and `PenalizeNegentropyFunction` (k2-fsa/icefall); both agree
since their mechanisms were mended (a backward that writes to what it is given, lines that leave a gradient on what
they are given)."""


# ------------------------------------------------------------------ what became of a class
def words(told: Told) -> list[str]:
    """What is wrong on one backend, scene by scene."""
    found = [f"{scene}: {word}" for scene, (word, _) in told["scenes"].items() if word not in comparison.RIGHT]
    return [*found, *([f"lost: {told['lost']}"] if "lost" in told else [])]


def capture_of(told: Told) -> str:
    """Whether forward and backward were captured: whole, split, one of them, neither."""
    records = told.get("records", {})
    status = [records.get(method, ["absent"])[0] for method in ("forward", "backward")]
    if "opaque" not in status:
        return SPLIT if told.get("split") else WHOLE
    return PART if any(s != "opaque" for s in status) else WRITTEN


def reasons(told: Told) -> Iterator[tuple[str, str]]:
    """(code, reason) of each method that runs as written."""
    for status, reason, code in told.get("records", {}).values():
        if status == "opaque":
            yield code, reason


def driven(told: Told) -> dict[str, Told]:
    return {name: fact for name, fact in sorted(told["classes"].items()) if fact.get("backends")}


def best(fact: Told) -> Told:
    """Of the backends, the one that tells of captures: reference where it ran."""
    backends = fact["backends"]
    return backends.get("reference") or next(iter(backends.values()))


# ------------------------------------------------------------------ tables
def summary(told: Told) -> list[str]:
    facts = driven(told).values()
    found = sum(len(s.get("classes", [])) for s in told["surveys"].values())
    captures = Counter(capture_of(best(f)) for f in facts)
    lines = ["| | classes |", "|---|---|", f"| found in {len(told['surveys'])} packages | {found} |"]
    lines += [f"| driven | {len(facts)} |"]
    lines += [f"| {word} | {captures[word]} |" for word in (WHOLE, SPLIT, PART, WRITTEN)]
    for backend in backends_of(facts):
        mine = [f["backends"][backend] for f in facts if backend in f["backends"]]
        lines.append(f"| right in every scene on `{backend}` | {sum(not words(m) for m in mine)} of {len(mine)} |")
    return lines


def backends_of(facts: Any) -> list[str]:
    return sorted({backend for f in facts for backend in f["backends"]}, reverse=True)


def by_package(told: Told) -> list[str]:
    lines = ["| package | found | driven | captured | split | in part | as written | right |", "|" + "---|" * 8]
    for package, survey in sorted(told["surveys"].items()):
        facts = [f for f in driven(told).values() if f["package"] == package]
        captures = Counter(capture_of(best(f)) for f in facts)
        right = sum(not any(words(b) for b in f["backends"].values()) for f in facts)
        how = [captures[w] for w in (WHOLE, SPLIT, PART, WRITTEN)]
        counts = [len(survey.get("classes", [])), len(facts), *how, right]
        lines.append(f"| {package} | {' | '.join(map(str, counts))} |")
    return lines


def by_scene(told: Told) -> list[str]:
    facts = driven(told).values()
    counts: dict[tuple[str, str], Counter[str]] = {}
    for fact in facts:
        for backend, found in fact["backends"].items():
            for scene, (word, _) in found["scenes"].items():
                counts.setdefault((scene, backend), Counter())[word] += 1
    names = list(dict.fromkeys(word for count in counts.values() for word in count))
    columns = [w for w in (*comparison.RIGHT, *names) if w in names]
    columns = list(dict.fromkeys(columns))
    lines = [f"| scene | backend | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    return lines + [f"| {s} | {b} | {' | '.join(str(c[w]) for w in columns)} |" for (s, b), c in counts.items()]


def written(told: Told) -> list[str]:
    """The reasons of what runs as written, by count."""
    found: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for name, fact in driven(told).items():
        for code, reason in reasons(best(fact)):
            key = code or "", general(reason)
            found[key] += 1
            examples.setdefault(key, name)
    lines = ["| methods | code | reason | for example |", "|---|---|---|---|"]
    return lines + [f"| {n} | {c} | {escaped(r)} | `{examples[c, r]}` |" for (c, r), n in found.most_common()]


def general(reason: str) -> str:
    """A reason without the names of one class."""
    return reason.partition(" (")[0][:120]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def differences(told: Told) -> list[str]:
    """Every scene of every class that is not right, by name."""
    lines = []
    for name, fact in driven(told).items():
        for backend, found in fact["backends"].items():
            lines += [f"- `{name}`, {scene}, `{backend}`: {word}; {escaped(detail)}"
                      for scene, (word, detail) in found["scenes"].items() if word not in comparison.RIGHT]  # fmt: skip
            lines += [f"- `{name}`, `{backend}`: {found['lost']}"] if "lost" in found else []
    return lines or ["none."]


def refused(told: Told) -> list[str]:
    """Where eager and fusegrad both raise, by different names."""
    return [f"- `{name}`, {scene}, `{backend}`: {escaped(detail)}" for name, fact in driven(told).items()
            for backend, found in fact["backends"].items() for scene, (word, detail) in found["scenes"].items()
            if word == "refuses"] or ["none."]  # fmt: skip


def by_hand(told: Told, classes: list[Tried]) -> list[str]:
    """Of classes that were tried before there was a table: what the table reaches, and what became of it."""
    facts, installed = driven(told), found_in(told["surveys"])
    names = [named(one, facts) for one in classes]
    reached = [name for name in names if name is not None]
    captures = Counter(capture_of(best(facts[name])) for name in reached)
    whole = captures[WHOLE] + captures[SPLIT]
    missing = [one for one, name in zip(classes, names, strict=True) if name is None]
    here = [one for one in missing if named(one, installed) is not None]
    lines = ["| | classes |", "|---|---|", f"| tried | {len(classes)} |", f"| reached by the table | {len(reached)} |"]
    lines += [f"| {word} | {captures[word]} |" for word in (WHOLE, SPLIT, PART, WRITTEN)]
    lines += [f"| in a package that is installed, not driven | {len(here)} |"]
    lines += [f"| in no package that is installed | {len(missing) - len(here)} |", ""]
    share = f"{100 * whole / len(reached):.0f} %" if reached else "none"
    lines += [f"Captured or split: {share} of those that are reached. The others: see above.", ""]
    left = sorted({n for n in reached if capture_of(best(facts[n])) in (PART, WRITTEN)})
    return lines + [f"- `{name}`: {capture_of(best(facts[name]))}" for name in left]


def not_driven(told: Told) -> list[str]:
    facts = sorted(told["classes"].items())
    return [f"- `{name}`: {escaped(fact['absent'])}" for name, fact in facts if "absent" in fact] or ["none."]


def suites(told: Told) -> list[str]:
    lines = ["| suite | tests | plain | with the plugin | differ | seconds |", "|---|---|---|---|---|---|"]
    for name, fact in sorted(told["suites"].items()):
        if "absent" in fact:
            lines.append(f"| {name} | | {escaped(fact['absent'])} | | | |")
            continue
        runs = fact["plain"], fact["fusegrad"]
        plain, fast = (", ".join(filter(None, (counted(run["outcomes"]), escaped(run["ended"])))) for run in runs)
        seconds = f"{fact['plain']['seconds']:.0f} -> {fact['fusegrad']['seconds']:.0f}"
        lines.append(f"| {name} | {fact['tests']} | {plain} | {fast} | {len(fact['differ'])} | {seconds} |")
    return lines


def counted(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items()))


def suite_differences(told: Told) -> list[str]:
    lines = [
        f"- {name}: `{test}`: {before} -> {after}; {explained(test) or escaped(why)}"
        for name, fact in sorted(told["suites"].items())
        for test, before, after, why in fact.get("differ", [])
    ]
    return lines or ["none."]


def explained(test: str) -> str:
    """Why an outcome differs, where that is known."""
    method = test.rpartition("::")[2]
    return next((why for name, why in DIFFERS.items() if fnmatch.fnmatchcase(method, name)), "")


def absent(told: Told, reasons_: Mapping[str, str]) -> list[str]:
    """What is not driven for want of something: packages, and modules that cannot be imported."""
    lines = [f"- {name}: {why}" for name, why in reasons_.items()]
    for package, survey in sorted(told["surveys"].items()):
        found = Counter(survey.get("failed", {}).values())
        lines += [f"- {package}: {count} modules: {escaped(why)}" for why, count in found.most_common(3)]
    return lines or ["none."]


def page(told: Told, unavailable: Mapping[str, str]) -> str:
    runs = told.get("runs", {})
    where = "Last run: " + "; ".join(runs.get(key, "") for key in ("date", "commit", "versions", "machine")) + "."
    parts = [
        [HEAD.rstrip()], [where], summary(told),
        ["## Packages", "", *by_package(told)],
        ["## Scenes", "", WORDS, "", *by_scene(told)],
        ["## As written", "", *written(told)],
        ["## Classes that were tried before", "", TRIED, "", *by_hand(told, tried())],
        ["## Differences", "", *differences(told)],
        ["## Refused by another name", "", *refused(told)],
        ["## Suites", "", *suites(told)],
        ["Outcomes that differ:", "", *suite_differences(told)],
        ["## Not driven", "", *not_driven(told)],
        ["## Not to be had here", "", *absent(told, unavailable)],
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def write(told: Told, unavailable: Mapping[str, str]) -> None:
    PAGE.write_text(page(told, unavailable), encoding="utf-8")
