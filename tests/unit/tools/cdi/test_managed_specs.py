"""Saved state of managed CDI specs, and of the last refresh that failed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpuhook.base.errors import CdiError
from gpuhook.tools.cdi.managed_specs import (
    ManagedSpecs,
    RefreshFailure,
    below,
    forget,
    kept,
    last_errors,
    save,
    save_errors,
)

KEPT = ManagedSpecs("/etc/cdi", None, "yaml", ("docker", "podman"), "/opt/bin/gpuhook-cdi-hook")
FAILURE = RefreshFailure(1_700_000_000.5, "nvidia.com/gpu", "NVML didn't answer", "Wait")


def test_a_new_state_folder_has_no_saved_state(tmp_path: Path) -> None:
    assert kept(str(tmp_path / "state")) is None
    assert last_errors(str(tmp_path / "state")) == []


def test_saved_cdi_state_is_read_back(tmp_path: Path) -> None:
    state = str(tmp_path / "new/state")
    save(state, KEPT)
    save_errors(state, [FAILURE])
    assert kept(state) == KEPT
    assert last_errors(state) == [FAILURE]
    names = json.loads((tmp_path / "new/state/cdi.json").read_text())
    assert {"folder", "config", "format", "engines"} <= set(names)
    [entry] = json.loads((tmp_path / "new/state/cdi-error.json").read_text())
    assert set(entry) == {"time", "kind", "error", "remedy"}


def test_a_successful_refresh_clears_the_saved_error(tmp_path: Path) -> None:
    save_errors(str(tmp_path), [FAILURE])
    save_errors(str(tmp_path), [])
    assert last_errors(str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_forgetting_removes_all_saved_files(tmp_path: Path) -> None:
    save(str(tmp_path), KEPT)
    save_errors(str(tmp_path), [FAILURE])
    for _ in range(2):
        forget(str(tmp_path))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"folder": "/x"}', '{"unknown": 1}', "[" * 99999])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    for name in ("cdi.json", "cdi-error.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(CdiError, match=r"cdi\.json is damaged"):
        kept(str(tmp_path))
    if text != "[]":
        with pytest.raises(CdiError, match=r"cdi-error\.json is damaged"):
            last_errors(str(tmp_path))


def test_a_var_run_link_does_not_lead_out_of_the_prefix(tmp_path: Path) -> None:
    prefix = str(tmp_path)
    assert below("", "/var/run/cdi") == "/var/run/cdi"
    assert below(prefix, "/var/run/cdi") == f"{prefix}/var/run/cdi"
    (tmp_path / "var").mkdir()
    (tmp_path / "var/run").symlink_to("/run")
    assert below(prefix, "/var/run/cdi") == f"{prefix}/run/cdi"
    assert below(f"{prefix}/", "/etc/cdi") == f"{prefix}/etc/cdi"
    assert replace(KEPT, folder="/var/run/cdi").below(prefix).folder == f"{prefix}/run/cdi"
    assert KEPT.below("") == KEPT
