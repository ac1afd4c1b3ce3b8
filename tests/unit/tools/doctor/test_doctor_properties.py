"""Robustness of the doctor's checks against any content of the engines' files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from fabricated import Tree
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpuhook.tools.doctor import examine
from gpuhook.tools.doctor.checks import STEPS

NAMES = st.sampled_from(
    ["runtimes", "gpu-py", "path", "hosts", "engine", "hooks_dir", "imports", "plugins", "options",
     "BinaryName", "runtime_path", "hook", "crio", "runtime", "hostPath", "x"]
)  # fmt: skip
LEAVES = st.sampled_from(["/opt/gpuhook/bin/gpu-py", "/gone", "", "\x00", "*", "unix://x"])
SCALARS = st.one_of(st.booleans(), st.integers(-9, 9), LEAVES)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=4)
# The checks that need no driver and start no program.
FILES_ALONE = [
    step.check for step in STEPS if step.check.__module__.endswith(("engines", "docker", "host"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine")


def _machine(folder: Path, text_json: str, text_toml: str) -> Tree:
    shutil.rmtree(folder, ignore_errors=True)
    tree = Tree(folder, lambda *_: b"")
    for name in ("dockerd", "containerd", "crio", "podman", "kubelet"):
        tree.program(f"/usr/bin/{name}")
        tree.process(100 + len(name), f"/usr/bin/{name}")
    for path in (
        "/etc/docker/daemon.json",
        "/etc/containers/oci/hooks.d/x.json",
        "/etc/cdi/x.json",
    ):
        tree.write(path, text_json)
    for path in (
        "/etc/containerd/config.toml",
        "/etc/crio/crio.conf",
        "/etc/containers/containers.conf",
    ):
        tree.write(path, text_toml)
    return tree


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES | VALUES, TABLES)
@example({}, {"BinaryName": "\x00"})
def test_no_check_breaks_on_any_content_of_engine_files(
    folder: Path, value: Any, table: dict[str, Any]
) -> None:
    tree = _machine(folder, json.dumps(value), tomlkit.dumps(table))
    broken = [found for found in examine(tree.case, FILES_ALONE) if "itself" in found.message]
    assert broken == []


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60))
def test_malformed_engine_files_break_no_check(folder: Path, text: str) -> None:
    tree = _machine(folder, text, text)
    broken = [found for found in examine(tree.case, FILES_ALONE) if "itself" in found.message]
    assert broken == []
