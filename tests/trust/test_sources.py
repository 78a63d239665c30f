"""A slice of `make environments`: where source comes from and how classes are written, in this process."""

from __future__ import annotations

import os

import environments
import pytest

HERE = {name: row for name, row in environments.ENVIRONMENTS.items() if not row.alone}


@pytest.mark.parametrize("name", HERE)
@pytest.mark.filterwarnings("ignore::fusegrad.FallbackWarning")
def test_scripts(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(HERE[name].script, os.fspath(tmp_path / "script.py"), "exec"), {"__name__": "users_script"})
    assert capsys.readouterr().out.strip() == "right"
