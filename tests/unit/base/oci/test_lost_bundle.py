"""The bundle of a container whose state has only "/" as its bundle."""

import json
from pathlib import Path

import pytest

from gpuhook.base.errors import StateError
from gpuhook.base.oci import lost_bundle
from gpuhook.base.oci.spec import ContainerState, parse_state, read_spec


def state(root: str | None) -> ContainerState:
    given = {"id": "c", "pid": 7, "bundle": "/", **({} if root is None else {"root": root})}
    return parse_state(json.dumps(given).encode())


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"root": {"path": "rootfs"}}')
    return tmp_path


@pytest.mark.parametrize("root", ["rootfs", None], ids=["crun's", "without a root"])
def test_the_bundle_given_by_gpu_py_is_used(bundle: Path, root: str | None) -> None:
    found, spec = lost_bundle.read(state(root), str(bundle))
    assert (found.bundle, found.root) == (str(bundle), f"{bundle}/rootfs")
    assert (found.container_id, found.pid, spec.path) == ("c", 7, f"{bundle}/config.json")


def test_a_bundle_with_an_absolute_root_is_found(bundle: Path) -> None:
    (bundle / "config.json").write_text('{"root": {"path": "/x/merged"}}')
    found, _ = lost_bundle.read(state("/x/merged"), str(bundle))
    assert (found.bundle, found.root) == (str(bundle), "/x/merged")


@pytest.mark.protects(
    "root-of-bundle", "a hook that receives no bundle path doesn't use another container's bundle"
)
@pytest.mark.parametrize("root", ["other", "/x/merged", "/rootfs2", "../rootfs"])
def test_the_bundle_of_another_container_is_refused(bundle: Path, root: str) -> None:
    with pytest.raises(StateError, match="has another root than the container"):
        lost_bundle.with_bundle(state(root), read_spec(f"{bundle}/config.json"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["create", "--bundle", "/b", "id"], "/b"),
        (["--root=/r", "--log=/l", "--log-format=json", "create", "-b", "/b c", "id"], "/b c"),
        (["--systemd-cgroup", "create", "--bundle=/b", "--pid-file", "/p", "id"], "/b"),
        (["run", "--bundle", "/b", "id"], "/b"),
        (["create", "--bundle", "b", "id"], ""),  # relative to an unknown folder
        (["create", "id"], ""),
        (["start", "--bundle", "/b", "id"], ""),
        (["create", "--bundle", "/b", "--unknown", "id"], ""),
        (["create", "--bundle", "/b"], ""),
        ([], ""),
    ],
)
def test_the_bundle_is_found_in_a_runtime_command_line(words: list[str], expected: str) -> None:
    assert lost_bundle.of_command_line(words) == expected


def test_without_a_known_bundle_the_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"no bundle but /.*absolute path with --bundle"):
        lost_bundle.read(state("rootfs"), "")
