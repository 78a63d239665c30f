"""The versions of torch and triton that fusegrad was tried with. Importing this module refuses older ones.

A version that is newer than all of them is let in: `make matrix` and `fusegrad doctor` tell what it does.
"""

from __future__ import annotations

import importlib.metadata
import re

from .errors import FusegradError

LEAST = {"torch": "2.11", "triton": "3.6"}
TRIED = (("2.11.0", "3.6.0"), ("2.13.0", "3.7.1"), ("2.14.1", "3.8.0"))
"""Pairs of torch and triton that `make matrix` runs the tests with."""


class VersionError(FusegradError, ImportError):
    """An installed version that fusegrad does not work with."""

    message = (
        "fusegrad does not work with {name} {found}: {why}; it was tried with {tried}\n  at:   {where}\n"
        "  fix:  pip install '{name}>={least}', or a fusegrad of the time of that version"
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)"""
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


def installed_version(name: str) -> str | None:
    """The version of a package; None where it is not there, or does not say."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_error(name: str, why: str) -> VersionError:
    tried = " and ".join(f"torch {torch} with triton {triton}" for torch, triton in TRIED)
    place = f"{name} {installed_version(name)} of this environment"
    return VersionError(name=name, found=installed_version(name), why=why, tried=tried, least=LEAST[name], where=place)


def require_versions() -> None:
    """Raises VersionError where a package is older than what fusegrad needs."""
    for name, least in LEAST.items():
        version = installed_version(name)
        if version is not None and version_numbers(version)[:2] < version_numbers(least):
            raise version_error(name, f"it is older than {least}")


def explain_import_error(error: Exception) -> Exception:
    """An import that failed, told as what it is where this torch was never tried; the error itself elsewhere."""
    version = installed_version("torch") or ""
    if version.partition("+")[0] in dict(TRIED):
        return error
    return version_error("torch", f"this version was never tried, and the import failed: {error}")


require_versions()
