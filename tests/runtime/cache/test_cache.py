"""The disk cache: the damaged is made again, the unusable costs speed, and nothing foreign is ever returned."""

from __future__ import annotations

import errno
import json
import os
import pwd
import random
import resource
import shutil
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusegrad.runtime.cache import entry_files, eviction, location
from fusegrad.runtime.cache import private_folder as folder
from fusegrad.runtime.cache import store as cache
from fusegrad.runtime.cache.store import Cache, key_of

FILES = {"kernel.cubin": bytes(range(256)) * 4, "metrics.json": b"{}"}
KEY = key_of("a", 1)


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entry(store: Cache) -> Path:
    directory = store.directory(KEY)
    assert directory
    return directory


def test_what_was_put_is_got_by_another_process_s_cache(store: Cache, tmp_path: Path) -> None:
    assert store.get(KEY) is None
    store.put(KEY, FILES)
    assert store.get(KEY) == FILES
    assert Cache(tmp_path / "cache").get(KEY) == FILES
    assert not list((store.root or tmp_path).glob("tmp/*"))


def test_keys_do_not_collide_over_the_borders_of_parts() -> None:
    assert len({key_of("ab", "c"), key_of("a", "bc"), key_of("abc"), key_of("ab", "c", "")}) == 4
    assert key_of(b"x") == key_of("x") and len(key_of()) == 64


def test_directories_are_private(store: Cache) -> None:
    store.put(KEY, FILES)
    assert store.root
    for path in (store.root.parent, store.root, store.root / "entries", entry(store).parent, entry(store)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_second_put_of_a_key_changes_nothing(store: Cache) -> None:
    store.put(KEY, FILES)
    store.put(KEY, {"other": b""})
    assert store.get(KEY) == FILES


def truncate(directory: Path) -> None:
    (directory / "kernel.cubin").write_bytes(FILES["kernel.cubin"][:-1])


def flip(directory: Path) -> None:
    content = bytearray(FILES["kernel.cubin"])
    content[17] ^= 4
    (directory / "kernel.cubin").write_bytes(content)


def link(directory: Path) -> None:
    (directory / "kernel.cubin").rename(directory.parent / "elsewhere")
    (directory / "kernel.cubin").symlink_to(directory.parent / "elsewhere")


def link_directory(directory: Path) -> None:
    directory.rename(directory.parent / "moved")
    directory.symlink_to(directory.parent / "moved")


def pipe(directory: Path) -> None:
    (directory / "kernel.cubin").unlink()
    os.mkfifo(directory / "kernel.cubin")


def change_manifest(field: str, value: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    return damage


def cut_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:20])


def _twice(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 1, "format": 1'))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "bit flipped": flip,
    "deleted": lambda d: (d / "kernel.cubin").unlink(),
    "manifest deleted": lambda d: (d / "manifest.json").unlink(),
    "manifest cut": cut_manifest,
    "manifest of another shape": lambda d: (d / "manifest.json").write_text("[1]") and None,
    "manifest not text": lambda d: (d / "manifest.json").write_bytes(b"\xff\x00") and None,
    "file added": lambda d: (d / "extra.so").write_bytes(b"") and None,
    "swapped": lambda d: (d / "kernel.cubin").replace(d / "metrics.json") and None,
    "symlink": link,
    "directory symlink": link_directory,
    "pipe": pipe,
    "writable by others": lambda d: d.chmod(0o777),
    "a file instead": lambda d: shutil.rmtree(d) or (d.write_bytes(b"") and None),  # type: ignore[func-returns-value]
    "a name twice": lambda d: _twice(d / "manifest.json"),
    "nested without end": lambda d: (d / "manifest.json").write_text("[" * 100_000) and None,
    "a manifest without end": lambda d: os.truncate(d / "manifest.json", 1 << 40),
    "a file without end": lambda d: os.truncate(d / "kernel.cubin", 1 << 40),
    "a file others can write": lambda d: (d / "kernel.cubin").chmod(0o666),
    "bucket writable by others": lambda d: d.parent.chmod(0o777),
    "bucket a symlink": lambda d: link_directory(d.parent),
    "bucket a pipe": lambda d: shutil.rmtree(d.parent) or os.mkfifo(d.parent),
    "entries a file": lambda d: shutil.rmtree(d.parents[1]) or d.parents[1].touch(),
    "tmp a link": lambda d: (d.parents[2] / "tmp").rmdir() or (d.parents[2] / "tmp").symlink_to("/"),
    "tmp and entry": lambda d: (d.parents[2] / "tmp").rmdir() or truncate(d),
    "names out of the folder": change_manifest("files", {"../../../escaped": "0" * 64}),
    "another key": change_manifest("key", "0" * 64),
    "files of another type": change_manifest("files", 3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_misses_and_heal(store: Cache, damage: str) -> None:
    store.put(KEY, FILES)
    DAMAGES[damage](entry(store))
    if damage != "tmp a link":
        assert store.get(KEY) is None
        assert not os.path.lexists(entry(store)), "the damaged entry was left"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(KEY, FILES)
    assert store.get(KEY) == FILES and store.fault(KEY) is None
    assert not list((store.root or entry(store)).glob("tmp/*")) and os.path.isdir("/usr")


@pytest.mark.parametrize("change", [("format", 2), ("versions", {"triton": "99"})], ids=lambda c: str(c[0]))
def test_entries_of_other_versions_are_ignored_and_stay(store: Cache, change: tuple[str, object]) -> None:
    store.put(KEY, FILES)
    change_manifest(*change)(entry(store))
    found = {path.name: path.read_bytes() for path in entry(store).iterdir()}
    assert store.get(KEY) is None
    store.put(KEY, {"mine": b""})
    assert store.get(KEY) == {"mine": b""}, "in memory"
    assert {path.name: path.read_bytes() for path in entry(store).iterdir()} == found
    assert store.fault(KEY) == entry_files.OTHER_VERSION


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["", "kernel.cubin", "manifest.json"])
def test_entry_of_another_user_is_a_miss(store: Cache, part: str) -> None:
    store.put(KEY, FILES)
    os.chown(entry(store) / part, 12345, 12345)
    assert store.get(KEY) is None


def test_random_mutations_never_give_wrong_files(store: Cache) -> None:
    generator = random.Random(20)
    for _ in range(100):
        store.put(KEY, FILES)
        path = generator.choice(sorted(entry(store).iterdir()))
        content = bytearray(path.read_bytes())
        position = generator.randrange(len(content))
        content[position : position + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        path.write_bytes(content)
        assert store.get(KEY) in (None, FILES)


def unusable(tmp_path: Path) -> dict[str, Path | None]:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    return {"below a file": tmp_path / "file" / "cache", "open to others": tmp_path / "open", "no home": None}


@pytest.mark.parametrize("case", ["below a file", "open to others", "no home"])
def test_unusable_directories_mean_memory_and_one_warning(case: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="in memory only") as caught:
        store = Cache(unusable(tmp_path)[case])
        store.put(KEY, FILES)
        assert store.get(KEY) == FILES
    assert len(caught) == 1


CALLS = ("open", "mkdir", "write", "read", "rename", "stat", "fstat", "listdir", "chmod", "fchmod", "utime", "unlink")


class FailingAt:
    """While it is entered, the call of this number, of all that the cache makes to the system, fails, and no other."""

    def __init__(self, number: int, error: int) -> None:
        self.number, self.error, self.count = number, error, 0
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> FailingAt:
        for name in CALLS:
            self.patch.setattr(folder.os, name, self._counted(getattr(os, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.number:
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_whichever_call_fails_it_costs_speed_only(error: int, tmp_path: Path) -> None:
    known, more, number = key_of("known"), key_of("more"), 0
    while True:
        number += 1
        root = tmp_path / str(number)
        Cache(root).put(known, FILES)
        with warnings.catch_warnings(record=True) as told, FailingAt(number, error) as failing:
            warnings.simplefilter("always")
            store = Cache(root)
            assert store.get(known) in (FILES, None)
            assert store.get_or_make(KEY, lambda: FILES) == FILES
            store.put(more, FILES)
            store.sweep()
            store.drop(key_of("nothing"))
        assert len(told) <= 1
        assert store.get(more) == FILES == store.get_or_make(KEY, lambda: FILES)
        after = Cache(root)
        assert after.get(known) in ((FILES,) if error == errno.EMFILE else (FILES, None)), "destroyed for nothing"
        after.put(known, FILES)
        assert after.get(known) == FILES
        if failing.count < number:
            break
    assert number > 60, "the calls are no longer seen"


def test_full_disk_for_real(tmp_path: Path) -> None:
    """A limit on the size of files is what a process can set without mounting a full disk; it fails in the middle."""

    def full() -> None:
        store, files = Cache(tmp_path / "cache"), {"a": bytes(5000), "b": b"b"}
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for key in ("00" * 32, "11" * 32):
                store.put(key, files)
                assert store.get(key) == files
        assert [w.category for w in told] == [RuntimeWarning] and "File too large" in str(told[0].message)
        assert store.root and not list(store.root.glob("tmp/*")) and not list(store.root.glob("entries/*/*"))

    assert in_a_child(full) == 0


def in_a_child(act: Callable[[], object]) -> int:
    """The exit status of a forked process."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


PLACES: dict[str, str] = {
    "spaces and quotes": "a b'\"c",
    "unicode": "é漢🜁 \u202e",
    "a newline": "one\ntwo",
    "not text": os.fsdecode(b"\xff\xfe"),
    "long": "/".join(["x" * 100] * 4),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_wherever_it_is_and_whatever_the_umask(place: str, umask: int, tmp_path: Path) -> None:
    root = tmp_path / PLACES[place]
    old = os.umask(umask)
    try:
        Cache(root).put(KEY, FILES)
        assert Cache(root).get(KEY) == FILES
    finally:
        os.umask(old)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_too_long_a_path_costs_speed_only(tmp_path: Path) -> None:
    store = Cache(tmp_path / ("x" * 400))
    with pytest.warns(RuntimeWarning, match="File name too long"):
        assert store.get_or_make(KEY, lambda: FILES) == FILES


def test_deleted_while_it_is_used(store: Cache, tmp_path: Path) -> None:
    store.put(KEY, FILES)
    shutil.rmtree(tmp_path / "cache")
    assert store.get(KEY) is None
    assert store.get_or_make(KEY, lambda: FILES) == FILES and Cache(tmp_path / "cache").get(KEY) == FILES


def test_folders_around_it_are_made_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b").put(KEY, FILES)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "a", tmp_path / "a" / "b")} == {0o700}


def test_what_others_could_swap_is_checked_where_it_is_used(store: Cache, tmp_path: Path) -> None:
    """Where others can write to the folder around the cache, they can put another in its place, or a link."""
    store.put(KEY, FILES)
    tmp_path.chmod(0o777)
    assert store.get(KEY) == FILES, "they cannot change what is in it"
    (tmp_path / "cache").rename(tmp_path / "moved")
    (tmp_path / "cache").symlink_to(tmp_path / "moved")
    with pytest.warns(RuntimeWarning, match="in memory only"):
        assert store.get(KEY) is None
    store.put(KEY, {"mine": b""})
    assert store.get(KEY) == {"mine": b""}
    assert Cache(tmp_path / "moved").get(KEY) == FILES, "nothing is deleted through a link"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_not_used(mode: int, store: Cache, tmp_path: Path) -> None:
    store.put(KEY, FILES)
    for path in (tmp_path / "cache", tmp_path / "cache" / "v1"):
        path.chmod(mode)
        with pytest.warns(RuntimeWarning, match="not a private directory"):
            assert Cache(tmp_path / "cache").get(KEY) is None
        store.warned = True
        assert store.get(KEY) is None, "it is asked each time"
        path.chmod(0o700)
    assert store.get(KEY) == FILES


def test_what_others_can_read_is_closed(store: Cache) -> None:
    store.put(KEY, FILES)
    assert store.root
    store.root.chmod(0o755)
    assert store.get(KEY) == FILES and stat.S_IMODE(store.root.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_folders_of_another_user_are_left_alone(store: Cache, tmp_path: Path) -> None:
    store.put(KEY, FILES)
    os.chown(tmp_path / "cache" / "v1", 12345, 12345)
    with pytest.warns(RuntimeWarning, match="in memory only"):
        assert Cache(tmp_path / "cache").get_or_make(KEY, lambda: FILES) == FILES
    assert entry(store).is_dir()


def test_memory_keeps_the_newest() -> None:
    memory = cache.MemoryEntries(limit=2)
    for name in ("a", "b", "c"):
        memory.put(name, {})
    assert (memory.get("a"), memory.get("c")) == (None, {})


def test_sweep_deletes_what_was_used_longest_ago(store: Cache) -> None:
    keys = [key_of(i) for i in range(4)]
    for age, key in zip((30, 40, 10, 20), keys, strict=True):
        store.put(key, {"f": bytes(1000)})
        os.utime(store.directory(key) or "", (time.time() - age,) * 2)
    store.get(keys[1])  # now the newest
    store.limit = 2 * 2 * entry_files.BLOCK
    store.sweep()
    assert [store.get(key) is not None for key in keys] == [False, True, True, False]


def test_sweep_removes_what_killed_processes_left(store: Cache) -> None:
    assert store.root
    old, new = store.root / "tmp" / "old", store.root / "tmp" / "new"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (0, 0))
    store.sweep()
    assert not old.exists() and new.exists()


def test_claims_exclude_each_other(store: Cache) -> None:
    inside, most = [], 0

    def work() -> None:
        nonlocal most
        with store.claimed(KEY):
            inside.append(1)
            most = max(most, len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_claim_of_a_dead_process_is_free(store: Cache) -> None:
    assert store.root

    def claim_and_die() -> None:
        with store.claimed(KEY):
            os.kill(os.getpid(), 9)

    assert in_a_child(claim_and_die) == -9 and (store.root / "locks" / KEY).exists()
    began = time.monotonic()
    with store.claimed(KEY):
        assert time.monotonic() - began < 1


def test_a_lock_that_is_never_free_does_not_stop_work(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "IMPATIENT_SECONDS", 0.0)
    store.patience = 0.05
    with store.claimed(KEY), store.claimed(KEY):
        assert store.patience == 0, "not for so long each time"


def test_claims_leave_no_files_and_other_keys_alone(store: Cache) -> None:
    store.patience = 0.0
    with store.claimed(KEY), store.claimed(KEY[:2] + "0" * 62):
        assert store.patience == 0.0 and store.root and len(list(store.root.glob("locks/*"))) == 2
    assert not list(store.root.glob("locks/*"))


@pytest.mark.parametrize("litter", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/null", p)])
def test_what_stands_in_a_lock_s_place_does_not_stop_work(store: Cache, litter: Callable[[Path], None]) -> None:
    assert store.root
    litter(store.root / "locks" / KEY)
    for _ in range(2):
        with store.claimed(KEY):
            pass
    assert not list(store.root.glob("locks/*"))


def test_a_child_forked_meanwhile_holds_no_claim(store: Cache) -> None:
    """Also where its parent dies before it has let go."""
    ready = os.pipe()

    def claim_and_die() -> None:
        with store.claimed(KEY):
            if os.fork() == 0:
                os.write(ready[1], b".")
                time.sleep(5)  # longer than is waited for
                os._exit(0)
            os.read(ready[0], 1)
            os.kill(os.getpid(), 9)

    child = os.fork()
    if child == 0:
        claim_and_die()
    os.waitpid(child, 0)
    held = store.claim(KEY, 1.0)
    assert held is not None
    held.release()


def test_a_claim_that_is_forgotten_is_free(store: Cache) -> None:
    assert store.claim(KEY, 0.0) is not None
    found = store.claim(KEY, 0.0)
    assert found is not None and found.is_held


def test_stale_locks_are_removed_and_held_ones_stay(store: Cache) -> None:
    assert store.root
    with store.claimed(KEY):
        (store.root / "locks" / "left").touch()
        for name in (KEY, "left"):
            os.utime(store.root / "locks" / name, (0, 0))
        store.sweep()
        assert [path.name for path in store.root.glob("locks/*")] == [KEY]


def test_times_in_the_future_count_as_long_ago(store: Cache) -> None:
    keys = [key_of(i) for i in range(3)]
    for key in keys:
        store.put(key, {"f": bytes(1000)})
    later = time.time() + 10**8
    os.utime(store.directory(keys[1]) or "", (later, later))
    assert store.root
    left = store.root / "tmp" / "left"
    left.mkdir()
    os.utime(left, (later, later))
    store.sweep(2 * 2 * entry_files.BLOCK)
    assert [store.get(key) is not None for key in keys] == [True, False, True] and not left.exists()


def test_one_sweep_an_hour_for_all_processes(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []
    monkeypatch.setattr(Cache, "sweep", lambda self: swept.append(self))
    other = Cache(store.root.parent if store.root else None)
    for number, each in enumerate((store, other, store)):
        each.put(key_of(number), FILES)
    assert swept == [store]
    os.utime((store.root or Path()) / eviction.SWEPT, (0, 0))
    other.put(KEY, FILES)
    assert swept == [store, other]


@pytest.mark.parametrize(("asked", "limit"), [("", 2 << 30), ("500M", 500 << 20), ("10g", 10 << 30), ("0", 0)])
def test_limit(asked: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_LIMIT", asked)
    assert Cache(None).limit == limit


def test_a_limit_that_is_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAD_CACHE_LIMIT", "much")
    with pytest.warns(RuntimeWarning, match="no size such as"):
        assert Cache(None).limit == cache.LIMIT


def test_made_is_made_once_by_many_threads(store: Cache) -> None:
    made: list[int] = []
    found: list[object] = []

    def make() -> dict[str, bytes]:
        made.append(1)
        time.sleep(0.02)
        return FILES

    threads = [threading.Thread(target=lambda: found.append(store.get_or_make(KEY, make))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and found == [FILES] * 16


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"FUSEGRAD_CACHE_DIR": "/x y/z"}, "/x y/z"),
        ("linux", {"FUSEGRAD_CACHE_DIR": "here"}, "{here}/here"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/fusegrad"),
        ("linux", {"XDG_CACHE_HOME": "relative", "HOME": "{home}"}, "{home}/.cache/fusegrad"),
        ("linux", {"HOME": "{home}"}, "{home}/.cache/fusegrad"),
        ("linux", {"HOME": "/nonexistent"}, "None"),
        ("linux", {"HOME": "relative"}, "None"),
        ("darwin", {"HOME": "{home}"}, "{home}/Library/Caches/fusegrad"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/fusegrad"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/fusegrad/Cache"),
        ("win32", {}, "None"),
    ],
)
def test_place(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.chdir(tmp_path)
    for name in ("FUSEGRAD_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(home=tmp_path))
    assert str(location.default_root()) == expected.format(home=tmp_path, here=tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_without_home_it_is_the_user_s_of_the_system(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> Any:
        raise KeyError(user)

    for name in ("FUSEGRAD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    if not known:
        monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert location.default_root() == (home / ".cache" / "fusegrad" if known and home.is_dir() else None)
