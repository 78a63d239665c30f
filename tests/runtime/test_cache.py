"""The disk cache: the damaged is made again, the unusable costs speed, and nothing foreign is ever returned."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fusegrad.runtime import cache
from fusegrad.runtime.cache import Cache, key_of

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
    "future format": change_manifest("format", 2),
    "future version": change_manifest("versions", {"triton": "99"}),
    "another key": change_manifest("key", "0" * 64),
    "files of another type": change_manifest("files", 3),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_misses_and_heal(store: Cache, damage: str) -> None:
    store.put(KEY, FILES)
    DAMAGES[damage](entry(store))
    assert store.get(KEY) is None
    assert not os.path.lexists(entry(store)), "the damaged entry was left"
    store.put(KEY, FILES)
    assert store.get(KEY) == FILES


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["", "kernel.cubin", "manifest.json"])
def test_entry_of_another_user_is_a_miss(store: Cache, part: str) -> None:
    store.put(KEY, FILES)
    os.chown(entry(store) / part, 12345, 12345)
    assert store.get(KEY) is None


def test_random_mutations_never_give_wrong_files(store: Cache) -> None:
    generator = random.Random(20)
    for _ in range(300):
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


@pytest.mark.parametrize("call", ["mkdir", "write_bytes", "rename"])
def test_read_only_or_full_disk_costs_speed_only(store: Cache, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    known = key_of("known")
    store.put(known, FILES)
    monkeypatch.setattr(os if call == "rename" else Path, call, refuse)
    with pytest.warns(RuntimeWarning, match="No space left"):
        store.put(KEY, FILES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put(key_of("more"), FILES)
    assert store.get(KEY) == FILES and store.get(known) == FILES


def test_memory_keeps_the_newest() -> None:
    memory = cache.Memory(limit=2)
    for name in ("a", "b", "c"):
        memory.put(name, {})
    assert (memory.get("a"), memory.get("c")) == (None, {})


def test_sweep_deletes_what_was_used_longest_ago(store: Cache) -> None:
    keys = [key_of(i) for i in range(4)]
    for age, key in zip((30, 40, 10, 20), keys, strict=True):
        store.put(key, {"f": bytes(1000)})
        os.utime(store.directory(key) or "", (time.time() - age,) * 2)
    store.get(keys[1])  # now the newest
    store.limit = 3000
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


def test_claim_of_a_dead_process_is_free(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 5.0)
    assert store.root
    lock = str(store.root / "locks" / KEY[:2])
    script = f"import fcntl, os; fcntl.flock(os.open({lock!r}, 66), 2); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script], timeout=20)
    began = time.monotonic()
    with store.claimed(KEY):
        assert time.monotonic() - began < 1


def test_a_lock_that_is_never_free_does_not_stop_work(store: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    with store.claimed(KEY), store.claimed(KEY):
        pass


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FUSEGRAD_CACHE_DIR": "/x y/z"}, "/x y/z"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/fusegrad"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/fusegrad"),
        ({"HOME": "/home/me"}, "/home/me/.cache/fusegrad"),
    ],
)
def test_place(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSEGRAD_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache.default_root()) == expected
