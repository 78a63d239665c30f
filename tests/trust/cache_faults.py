"""Damage a populated cache at random, use it, compare: nothing wrong, nothing raised, nothing foreign run, no hang.

    python tests/trust/cache_faults.py --count 10000 --seed 1 --json

Compiled kernels, captures, kernels' texts and tuned choices are used as a new process would use them. What a use must
give is known from before the damage, and eager's numbers for captures. Planted code would leave a mark behind.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import outcome
import torch
from kept_functions import CLASSES, results

import fusegrad
from fusegrad.runtime.cache import entry_files
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.kernels import autotune as tune
from fusegrad.runtime.kernels import triton_module
from fusegrad.runtime.kernels.cross_compile import pool as workers
from fusegrad.runtime.settings import config

PATIENCE = 30
"""Seconds after which a use counts as a hang."""
RESTORE_EVERY = 40
ONE_IN = {"capture": 16, "text": 8}
"""Kinds whose turn comes this seldom: a capture that is made again takes a hundred times as long as a kernel's read."""
MEMORY = Path("/dev/shm")
"""Files of a run are there where it is: a disk that is shared makes most of the time."""
IS_ROOT = os.getuid() == 0


# ------------------------------------------------------------------ what is in the cache
@dataclass
class Use:
    """Something that is kept: what it gives, where it is, and what is right."""

    kind: str
    run: Callable[[], Any]
    entries: set[str] = field(default_factory=set)
    right: Any = None


Answer = tuple[dict[str, bytes], dict[str, Any]]


class Compiled:
    """Stands in for the compiler processes, which take a second for each kernel: what they gave before."""

    def __init__(self, made: Callable[[dict[str, Any]], Answer]) -> None:
        self.known: dict[str, Answer] = {}
        self.made = made

    def compile(self, job: dict[str, Any]) -> Answer:
        name = json.dumps(job, sort_keys=True)
        if name not in self.known:
            self.known[name] = self.made(job)
        return self.known[name]


def invented(job: dict[str, Any]) -> Answer:
    """What looks like a binary, for the short run."""
    text = str(job["name"]).encode()
    metrics = {"registers": len(text), "spills": 0, "shared": 0, "accesses": {"16": 2}, "workspace": 0}
    return {"ptx": b".entry " + text, "cubin": text * 99}, {"metrics": metrics}


def capture_of(cls: Any) -> list[torch.Tensor]:
    """Forward and backward of the class, compiled as if for the first time in a process."""
    return results(fusegrad.compile(cls, backend="interpret", fullgraph=True))


def text_of(module: str) -> str:
    """Executes a kernel's text as a launch does."""
    triton_module.load.cache_clear()
    return str(sorted(name for name in vars(triton_module.load(module)) if "_forward" in name or "_backward" in name))


def uses(compilers: Compiled) -> Iterator[Use]:
    """All kinds of entries."""
    for cls in CLASSES:
        yield Use("capture", lambda cls=cls: capture_of(cls))
        found = fusegrad.explain(cls, "f32[5,8]", "f32[5,8]")
        yield Use("text", lambda text=found.module: text_of(text))
        for kernel in found.kernel_records:
            job = workers.job_of(kernel, found.module, "cuda:90")
            yield Use("kernel", lambda job=job: workers._binary(compilers, job))  # type: ignore[arg-type]
    yield Use("choice", lambda: tune.fastest("gpu", "k", "text", (8,), {"own": int, "wide": int}, lambda _: [2.0, 1.0]))


FILES = {"capture": "capture.json", "text": "fusegrad_kernels_*.py", "kernel": "metrics.json", "choice": "choice.json"}


def populated(root: Path, compilers: Compiled) -> list[Use]:
    """Use everything once, and note what each use gives and which entries of its kind it needs."""
    found = []
    for use in uses(compilers):
        shutil.rmtree(root, ignore_errors=True)
        use.right = use.run()
        use.entries = names_in(root, FILES[use.kind])
        found.append(use)
    for use in found:
        use.run()
    return found


def names_in(root: Path, file: str = entry_files.MANIFEST) -> set[str]:
    return {path.parent.name for path in root.glob(f"v1/entries/*/*/{file}")}


def require_eager(found: list[Use]) -> None:
    """What counts as right for captures agrees with the classes, uncompiled."""
    for cls, use in zip(CLASSES, (u for u in found if u.kind == "capture"), strict=True):
        for mine, users in zip(use.right, results(cls), strict=True):
            torch.testing.assert_close(mine, users, rtol=2e-6, atol=2e-6)
        assert len(use.entries) == 2, "forward and backward are kept"


def is_right(given: Any, right: Any) -> bool:
    if isinstance(right, list):
        return len(given) == len(right) and all(map(torch.equal, given, right))
    return bool(given == right)


# ------------------------------------------------------------------ damage
class Vandal:
    """Changes files as chance has it. The first argument of each change is an entry's directory."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.chance = root / "v1", random.Random(seed)
        self.mark = root.parent / "mark"
        self.planted = root.parent / "planted"
        self.planted.mkdir()
        self.weapons = list(planted_files(self.planted, self.mark))
        self.is_huge = False  # then the next change must not copy it

    def entry(self) -> Path:
        """One that can be copied: what links to /dev/zero, or is a pipe, has no end."""
        return self.chance.choice(sorted(filter(is_whole, self.root.glob("entries/*/*"))))

    def file(self, entry: Path) -> Path:
        return self.chance.choice(sorted(p for p in entry.iterdir() if p.is_file() and not p.is_symlink()))

    def folder(self, entry: Path) -> Path:
        """The entry itself, more often than what is around it."""
        around = [self.root / name for name in ("entries", "tmp", "locks")]
        return self.chance.choice([entry] * 6 + [entry.parent] * 2 + around)

    # -------------------------------------------------------------- contents
    def truncate(self, entry: Path) -> None:
        path = self.file(entry)
        os.truncate(path, self.chance.randrange(path.stat().st_size or 1))

    def empty(self, entry: Path) -> None:
        self.file(entry).write_bytes(b"")

    def flip(self, entry: Path) -> None:
        path = self.file(entry)
        content = bytearray(path.read_bytes())
        for _ in range(self.chance.choice((1, 1, 1, 8))):
            content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
        path.write_bytes(content)

    def append(self, entry: Path) -> None:
        with self.file(entry).open("ab") as file:
            file.write(self.chance.randbytes(self.chance.choice((1, 4096))))

    def zeros(self, entry: Path) -> None:
        path = self.file(entry)
        path.write_bytes(bytes(path.stat().st_size))

    def code(self, entry: Path) -> None:
        self.file(entry).write_bytes(self.chance.choice(self.weapons).read_bytes())

    def code_beside(self, entry: Path) -> None:
        weapon = self.chance.choice(self.weapons)
        where = self.chance.choice((entry, entry.parent, self.root, self.root / "tmp", self.root / "locks"))
        names = (weapon.name, "kernel.cubin", "capture.json", "__init__.py", "sitecustomize.py", "torch.py")
        shutil.copy(weapon, where / self.chance.choice(names))

    # -------------------------------------------------------------- names
    def delete(self, entry: Path) -> None:
        self.file(entry).unlink()

    def delete_folder(self, entry: Path) -> None:
        shutil.rmtree(self.folder(entry))

    def delete_all(self, entry: Path) -> None:
        shutil.rmtree(self.chance.choice((self.root, self.root.parent)))

    def swap_files(self, entry: Path) -> None:
        a, b = self.file(entry), self.file(self.entry())
        content = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(content)

    def swap_entries(self, entry: Path) -> None:
        other = self.entry()
        if other != entry:
            aside = self.root / "aside"
            entry.rename(aside)
            other.rename(entry)
            aside.rename(other)

    def entry_of_another_key(self, entry: Path) -> None:
        """Files and manifest match; they are another's."""
        other = self.entry()
        if other != entry:
            shutil.rmtree(entry)
            shutil.copytree(other, entry)

    def files_of_another_key(self, entry: Path) -> None:
        other = self.entry()
        for path in other.iterdir() if other != entry else ():
            if path.name != entry_files.MANIFEST:
                shutil.copy(path, entry)

    def rename_file(self, entry: Path) -> None:
        path = self.file(entry)
        path.rename(path.with_name(self.chance.choice(("x", "..x", path.name.upper() + "_", "a\nb"))))

    # -------------------------------------------------------------- kinds of files
    def _in_place_of(self, entry: Path) -> Path:
        """A free name where a file or folder was."""
        if self.chance.random() < 0.6:
            path = self.file(entry)
            path.unlink()
        else:
            path = self.folder(entry)
            shutil.rmtree(path)
        return path

    def symlink(self, entry: Path) -> None:
        targets = ["/", "/dev/zero", "/dev/stdin", "/nonexistent", self.entry(), *self.weapons, self.planted]
        path = self._in_place_of(entry)
        path.symlink_to(self.chance.choice([*targets, path]))

    def hardlink(self, entry: Path) -> None:
        source = self.chance.choice([*self.weapons, self.file(self.entry())])
        path = self.file(entry)
        if not os.path.samefile(path, source):
            path.unlink()
            os.link(source, path)

    def moved_and_linked(self, entry: Path) -> None:
        path = self.chance.choice((entry, self.file(entry)))
        aside = self.planted / f"moved{self.chance.randrange(10**9)}"
        path.rename(aside)
        path.symlink_to(aside)

    def pipe(self, entry: Path) -> None:
        os.mkfifo(self._in_place_of(entry))

    def socket(self, entry: Path) -> None:
        path = self._in_place_of(entry)
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(here)

    def directory(self, entry: Path) -> None:
        path = self.file(entry)
        path.unlink()
        path.mkdir()
        (path / "below").write_bytes(b"")

    def file_in_place(self, entry: Path) -> None:
        path = self.folder(entry)
        shutil.rmtree(path)
        path.write_bytes(self.chance.choice((b"", self.weapons[0].read_bytes())))

    # -------------------------------------------------------------- owners, modes, times
    def owner(self, entry: Path) -> None:
        if IS_ROOT:
            path = self.chance.choice((self.folder(entry), self.file(entry), self.root, self.root.parent))
            os.chown(path, 12345, 12345)

    def mode(self, entry: Path) -> None:
        path = self.chance.choice((self.folder(entry), self.file(entry), self.root, self.root.parent))
        path.chmod(self.chance.choice((0o777, 0o770, 0o702, 0o666, 0o000, 0o444, 0o1777)))

    def time(self, entry: Path) -> None:
        path = self.chance.choice((self.folder(entry), self.file(entry), self.root))
        when = self.chance.choice((0, 2**31, 2**33, time.time() + 10**7))
        os.utime(path, (when, when))

    # -------------------------------------------------------------- manifests
    def _manifest(self, entry: Path, change: Callable[[dict[str, Any]], object]) -> None:
        path = entry / entry_files.MANIFEST
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    def future_format(self, entry: Path) -> None:
        self._manifest(entry, lambda m: m.update(format=self.chance.choice((2, 99, "1", None, True, 1e300))))

    def future_version(self, entry: Path) -> None:
        self._manifest(entry, lambda m: m["versions"].update(torch="99.0"))

    def another_key(self, entry: Path) -> None:
        self._manifest(entry, lambda m: m.update(key=self.chance.choice((self.entry().name, "", None, 7))))

    def other_names(self, entry: Path) -> None:
        names = ("../../../../planted/evil.py", "/etc/passwd", "..", "", ".", "a/b", "\0", "x" * 5000)
        name = self.chance.choice(names)
        self._manifest(entry, lambda m: m["files"].update({name: "0" * 64}))

    def other_types(self, entry: Path) -> None:
        field = self.chance.choice(("format", "key", "versions", "files"))
        self._manifest(entry, lambda m: m.update({field: self.chance.choice((None, 3, [], "x", {}, {"a": {}}, [[]]))}))

    def sums_of_another(self, entry: Path) -> None:
        other = json.loads((self.entry() / entry_files.MANIFEST).read_text())["files"]
        self._manifest(entry, lambda m: m.update(files=other))

    def no_manifest(self, entry: Path) -> None:
        texts = (b"", b"{}", b"[1]", b"null", b"\xff\xfe", b"{" * 50_000, b"[" * 200_000, b"9" * 6000, b'"\\ud800"')
        (entry / entry_files.MANIFEST).write_bytes(self.chance.choice(texts))

    def huge(self, entry: Path) -> None:
        path = self.chance.choice((entry / entry_files.MANIFEST, self.file(entry)))
        if self.chance.random() < 0.5:
            os.truncate(path, 1 << 40)  # takes no room
            self.is_huge = True
        else:
            path.write_bytes(b" " * (3 << 20))

    def names_twice(self, entry: Path) -> None:
        path = entry / entry_files.MANIFEST
        text = path.read_text()
        doubled = self.chance.choice(('"format": 1,', f'"key": "{self.entry().name}",', '"files": {},'))
        path.write_text(text.replace("{", "{" + doubled, 1))


CHANGES = sorted(name for name in vars(Vandal) if name[0] != "_" and name not in ("entry", "file", "folder"))


def planted_files(folder: Path, mark: Path) -> Iterator[Path]:
    """Code that leaves a mark when it is run: Python, JSON that asks for it, a library, a pickle, a cubin."""
    call = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    guarded = json.dumps({"format": 1, "forward": {"guard": [call], "outline": {}}, "backward": {"guards": [call]}})
    contents = {
        "evil.py": f"{call}\n".encode(), "evil.json": guarded.encode(), "evil.cubin": b"\x7fELF" + bytes(500),
        "evil.pkl": f"cbuiltins\neval\n(V{call}\ntR.".encode(),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name
    source = folder / "evil.c"
    act = f'open("{mark}", O_CREAT | O_RDWR, 0600);'
    source.write_text(f"#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ {act} }}")
    compiler = shutil.which("cc") or shutil.which("gcc")
    library = folder / "evil.so"
    if compiler and subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)]).returncode == 0:
        yield library


# ------------------------------------------------------------------ the run
class Hang(BaseException):
    """A use did not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise Hang, or where even that does not help print every thread's stack and end."""

    def ring(*_: object) -> None:
        raise Hang

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    try:
        yield
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, old)


def restore(root: Path, pristine: Path) -> None:
    """The populated cache again."""
    remove(root)
    shutil.copytree(pristine, root)
    for path in (root, *root.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def remove(root: Path) -> None:
    for path in (root, *root.rglob("*")) if root.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)


FAULTS = ("wrong", "raised", "executed", "hung", "talkative", "unhealed")


@dataclass
class Found:
    """What became of the mutations."""

    mutations: Counter[str] = field(default_factory=Counter)
    uses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    talkative: list[str] = field(default_factory=list)
    unhealed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(getattr(self, name) for name in FAULTS)


def is_whole(entry: Path) -> bool:
    """Whether it is a folder of files, none of them long."""
    if not stat.S_ISDIR(entry.lstat().st_mode):
        return False
    facts = [path.lstat() for path in entry.iterdir()]
    return bool(facts) and all(stat.S_ISREG(f.st_mode) and f.st_size < 1 << 22 for f in facts)


def changed(vandal: Vandal, use: Use, change: str) -> bool:
    """Damage one of the entries of a use; False where an earlier change took away what this one was to change."""
    name = vandal.chance.choice(sorted(use.entries))
    entry = vandal.root / "entries" / name[:2] / name
    try:
        if not is_whole(entry):
            return False
        getattr(vandal, change)(entry)
    except (OSError, IndexError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return True


def once(vandal: Vandal, found: Found, each: list[Use], label: str) -> bool:
    """One mutation of one of the entries of a use, and the use."""
    use, change = vandal.chance.choice(each), vandal.chance.choice(CHANGES)
    if not changed(vandal, use, change):
        return False
    label = f"{label}: {change} of {use.kind}"
    found.mutations[change] += 1
    found.uses[use.kind] += 1
    cache._caches.clear()  # as a new process
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        judge(use, vandal, found, label)
    mine = [w for w in told if "fusegrad" in str(w.message)]
    if len(mine) > 1:
        found.talkative.append(f"{label}: {[str(w.message) for w in mine]}")
    if not healed(use, mine):
        found.unhealed.append(label)
    return True


def judge(use: Use, vandal: Vandal, found: Found, label: str) -> None:
    """Two uses: the second finds what the first left."""
    try:
        with limited():
            for _ in range(2):
                if not is_right(use.run(), use.right):
                    found.wrong.append(label)
    except Hang:
        found.hung.append(label)
    except Exception as error:
        found.raised.append(f"{label}: {type(error).__name__}: {error}"[:300])
    if vandal.mark.exists():
        found.executed.append(label)
        vandal.mark.unlink()


def healed(use: Use, told: list[Any]) -> bool:
    """Whether the entries are whole again, where a warning does not say that they cannot be."""
    faults = [cache.default().fault(name) for name in use.entries]
    return bool(told) or set(faults) <= {None, entry_files.OTHER_VERSION}


def run(
    count: int, seed: int, folder: Path, made: Callable[[dict[str, Any]], Answer], kinds: Collection[str] = tuple(FILES)
) -> tuple[Found, dict[str, Any]]:
    """`count` mutations in `folder`. made: compiles a kernel. kinds: of entries that are damaged."""
    root, pristine, found = folder / "cache", folder / "pristine", Found()
    os.environ["FUSEGRAD_CACHE_DIR"] = str(root)
    cache._caches.clear()
    with config.patch(store=True):
        everything = populated(root, Compiled(made))
        require_eager(everything)
        shutil.copytree(root, pristine)
        vandal, began = Vandal(root, seed), time.perf_counter()
        chosen = [u for u in everything if u.kind in kinds]
        attempt = 0
        while found.mutations.total() < count:
            if attempt % RESTORE_EVERY == 0 or vandal.is_huge:
                restore(root, pristine)
                vandal.is_huge = False
            attempt += 1
            label = f"seed {seed}, {attempt}"
            if not once(vandal, found, in_turn(chosen, attempt), label):
                restore(root, pristine)
    return found, {"entries": len(names_in(pristine)), "seconds": round(time.perf_counter() - began, 1)}


def in_turn(chosen: list[Use], attempt: int) -> list[Use]:
    """The uses of the kind whose turn it is; else of all that are quick."""
    kind = next((k for k, n in ONE_IN.items() if attempt % n == 0), None)
    return [u for u in chosen if (u.kind == kind if kind else u.kind not in ONE_IN)] or chosen


def numbers(found: Found, seed: int, more: dict[str, Any]) -> dict[str, Any]:
    counts = {name: len(getattr(found, name)) for name in FAULTS}
    return {"mutations": found.mutations.total(), "seed": seed, **counts, **more, "as_root": IS_ROOT,
            "by_kind_of_entry": dict(found.uses), "by_mutation": dict(sorted(found.mutations.items()))}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/trust/cache_faults.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        found, more = run(options.count, options.seed, Path(folder), workers.pool().compile)
    told = numbers(found, options.seed, more)
    print(json.dumps(told, indent=1))
    for name in FAULTS:
        for line in getattr(found, name)[:20]:
            print(f"{name}: {line}")
    if options.json:
        print(outcome.write("cache_faults", told))
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
