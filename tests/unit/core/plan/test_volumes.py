"""Volumes that a config.json names, and the steps that are still needed with them."""

from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import VolumeError
from gpuhook.core.plan.operations import FILE_OPTIONS, BindFile, BindPart, Operation, Symlink
from gpuhook.core.plan.volumes import Volumes

LIB = "/usr/lib/x/libm.so.1"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with the driver's library, and with folders that may be volumes."""
    for name in ("driver", "has", "other", "lacks/deep", "image/usr/lib/x", "image/opt"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "driver/libm.so.1").write_text("driver")
    (tmp_path / "has/libm.so.1").hardlink_to(tmp_path / "driver/libm.so.1")
    (tmp_path / "other/libm.so.1").write_text("another")
    (tmp_path / "image/lib").symlink_to("usr/lib")
    return tmp_path


def mount(source: Path, place: str, **more: Any) -> dict[str, Any]:
    return {"source": str(source), "destination": place, "type": "bind", **more}


def fit(host: Path, op: Operation, *mounts: Any) -> tuple[bool, list[str]]:
    """Return whether a step is still needed, and the messages about it."""
    with Rootfs(str(host / "image")) as root:
        found, said = Volumes({"mounts": [*mounts]}, root).fit([op])
    return found == [op], said


def library(host: Path, place: str = LIB, kind: type[BindFile] = BindFile) -> BindFile:
    return kind(str(host / "driver"), "/libm.so.1", place, FILE_OPTIONS, "")


@pytest.mark.parametrize("place", ["/usr/lib/x", "/lib/x", "/usr/lib/x/", "/usr/lib/../lib/x"])
@pytest.mark.parametrize("at", [LIB, "/lib/x/libm.so.1"])
def test_a_file_a_volume_has_is_skipped_and_a_missing_one_refused(
    host: Path, place: str, at: str
) -> None:
    """The result is the same whichever path is written: /lib is a link to /usr/lib."""
    assert fit(host, library(host, at), mount(host / "has", place)) == (False, [])
    assert fit(host, library(host, at), mount(host / "other", place)) == (True, [])
    with pytest.raises(VolumeError, match=r"'libm\.so\.1' would have to be made in a volume"):
        fit(host, library(host, at), mount(host / "lacks", place))
    done, [said] = fit(host, library(host, at, BindPart), mount(host / "lacks", place))
    assert not done
    assert "would have to be made in a volume" in said


def test_a_link_below_a_volume_is_skipped(host: Path) -> None:
    link = Symlink("/usr/lib/x/libm.so", "libm.so.1", replace=True, reason="")
    assert fit(host, link, mount(host / "has", "/usr/lib/x"))[0] is False


def test_the_innermost_volume_decides(host: Path) -> None:
    near = [mount(host / "lacks", "/usr"), mount(host / "has", "/usr/lib/x")]
    assert fit(host, library(host), *near) == (False, [])
    assert fit(host, library(host), *near[::-1]) == (False, [])


@pytest.mark.parametrize(
    "other",
    [
        {"source": "tmpfs", "destination": "/usr/lib/x", "type": "tmpfs"},
        {"source": 7, "destination": "/usr/lib/x", "type": "bind"},
        {"source": "/", "destination": None, "type": "bind"},
        {"source": "relative", "destination": "/usr/lib/x", "type": "bind"},
        {"destination": "/usr/lib/x"},
        "no mount",
    ],
)
def test_config_json_mounts_that_are_no_volumes_are_ignored(host: Path, other: Any) -> None:
    assert fit(host, library(host), other) == (True, [])


def test_a_volume_beside_or_on_the_destination_changes_nothing(host: Path) -> None:
    for place in ("/usr/lib/xy", "/opt", LIB, "/usr/lib/x/deeper"):
        assert fit(host, library(host), mount(host / "lacks", place)) == (True, [])


def test_links_in_a_volume_are_resolved_within_it(host: Path) -> None:
    (host / "lacks/libm.so.1").symlink_to("/../../../has/libm.so.1")
    with pytest.raises(VolumeError):
        fit(host, library(host), mount(host / "lacks", "/usr/lib/x"))


@pytest.mark.parametrize("options", [["rbind", "ro"], ["bind"], ["rprivate", "rbind"]])
def test_volumes_are_recognised_by_their_bind_option_too(host: Path, options: list[str]) -> None:
    volume = mount(host / "lacks", "/usr/lib/x", type="none", options=options)
    with pytest.raises(VolumeError):
        fit(host, library(host), volume)
