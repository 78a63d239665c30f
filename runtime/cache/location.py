"""The place of this user's cache on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_root() -> Path | None:
    """FUSEGRAD_CACHE_DIR, else a folder of this user by the platform's rules; None without a home directory.

    Linux: `$XDG_CACHE_HOME/fusegrad`, else `~/.cache/fusegrad`. macOS: the same where XDG_CACHE_HOME is set, else
    `~/Library/Caches/fusegrad`. Windows: `%LOCALAPPDATA%\\fusegrad\\Cache`. Never a temporary folder.
    """
    configured = os.environ.get("FUSEGRAD_CACHE_DIR")
    if configured:
        return Path(os.path.abspath(configured))
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA", "")
        return Path(local, "fusegrad", "Cache") if os.path.isabs(local) else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "fusegrad"
    home = _home()
    below = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    return home.joinpath(*below, "fusegrad") if home else None


def _home() -> Path | None:
    """The home directory if there is one: it is not for us to make."""
    home = os.environ.get("HOME") or _home_of_user()
    return Path(home) if os.path.isabs(home) and os.path.isdir(home) else None


def _home_of_user() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""
