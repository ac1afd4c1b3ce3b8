"""The host's lists of files: paths that containers get, and paths that none gets."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from node_files import Machine

from gpuhook.base.container.rootfs import Rootfs
from gpuhook.vendors.ascend import lists
from gpuhook.vendors.ascend.model import DRIVER, FILE, LIBRARY, LISTS

Case = dict[str, Any]
BASE = f"{LISTS}/base.list"


@pytest.fixture
def made(tmp_path: Path) -> Machine:
    return Machine("ascend", tmp_path, 1)


def find(made: Machine) -> lists.ListContent:
    with Rootfs(str(made.place)) as root:
        return lists.find(root)


def given(found: lists.ListContent, name: str = "base") -> list[str]:
    """Return the paths in the container of a list's files."""
    files = [file for file in found.files if (file.kind, file.capability) == (FILE, name)]
    return [file.target for file in files if file.target not in lists.TOPOLOGY]


def refused(found: lists.ListContent) -> tuple[str, ...]:
    return tuple(sentence for each in found.lists for sentence in each.refused)


def test_a_list_gives_each_existing_path_once(made: Machine) -> None:
    made.write(BASE, f"# a comment\n\n  {DRIVER}/lib64/  \n/usr/local/dcmi\n/usr/local/dcmi\n/no\n")
    found = find(made)
    assert given(found) == [f"{DRIVER}/lib64", "/usr/local/dcmi"]
    assert refused(found) == ()
    assert "/no" in found.absent


def test_a_link_is_followed_below_the_driver_root(made: Machine) -> None:
    [file] = [each for each in find(made).files if each.target == "/usr/local/bin/npu-smi"]
    assert file.path == "/usr/local/sbin/npu-smi"


def test_a_machine_without_lists_gets_the_default_paths(tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 1, lists="no")
    found = find(made)
    assert given(found) == [path for path in lists.DEFAULT if path != "/no"]
    assert [each.name for each in found.lists] == ["base"]
    assert BASE in found.absent


def test_the_topology_file_belongs_to_every_list(made: Machine) -> None:
    made.write(f"{LISTS}/other.list", "/usr/local/dcmi\n")
    topology = [file for file in find(made).files if file.target == "/etc/hccl_rootinfo.json"]
    assert [file.capability for file in topology] == ["base", "other"]


@pytest.mark.parametrize("line", ["dcmi", "../dcmi", "/usr/../etc/shadow", "~/x"])
def test_list_lines_without_a_plain_absolute_path_are_refused(made: Machine, line: str) -> None:
    made.write(BASE, f"{line}\n/usr/local/dcmi\n")
    found = find(made)
    assert given(found) == ["/usr/local/dcmi"]
    assert refused(found)[0].startswith(f"The list base has {line}, which is not an absolute path")


ENGINES = [
    "/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock",
    "/run/containerd", "/run/crio/crio.sock", "/var/run/crio", "/run/podman/podman.sock",
    "/run/user/1000/docker.sock", "/var/lib/docker", "/var/lib/kubelet/device-plugins",
    "/run/isulad.sock", "/run/k3s/containerd",
]  # fmt: skip


@pytest.mark.protects("engines-files", "no container gets files or sockets of a container engine")
@pytest.mark.parametrize("path", ENGINES)
def test_engine_sockets_are_not_given(made: Machine, path: str) -> None:
    """A list may name a socket, a link to it, or a folder above it."""
    (made.place / "run").mkdir()
    (made.place / "var/run").symlink_to("../run")
    made.write(f"/{path.lstrip('/')}", "")
    made.link("/opt/innocent", path)
    above = path.rpartition("/")[0]
    made.write(BASE, f"{path}\n/opt/innocent\n{above}\n{above}/../run\n/\n/run\n/var/run/.\n")
    found = find(made)
    assert given(found) == []
    assert len(refused(found)) >= 4
    assert all(sentence.endswith("containers don't get it") for sentence in refused(found))


@pytest.mark.protects("engines-files", "no container gets files or sockets of a container engine")
def test_engine_sockets_below_a_real_var_run_are_not_given(made: Machine) -> None:
    made.write("/var/run/containerd/x", "")
    made.write(BASE, "/var/run/containerd/x\n/var/run/containerd\n/var/run\n")
    assert given(find(made)) == []


def test_sockets_are_not_given(made: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.place / "srv/engine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind("own.sock")
        made.write(BASE, "/srv/engine\n/srv/engine/own.sock\n/usr/local/dcmi\n")
        found = find(made)
    assert given(found) == ["/usr/local/dcmi"]
    assert "which contains the socket own.sock" in refused(found)[0]
    assert "which is neither a file nor a folder" in refused(found)[1]


@pytest.mark.parametrize("path", ["/dev", "/dev/davinci0", "/proc/devices", "/sys", "/sys/class"])
def test_listed_paths_in_dev_proc_and_sys_are_not_given(made: Machine, path: str) -> None:
    made.write(BASE, f"{path}\n")
    assert given(find(made)) == []


def test_a_list_writable_by_others_is_ignored(made: Machine) -> None:
    made.write(BASE, "/usr/local/dcmi\n").chmod(0o666)
    [found] = find(made).lists
    assert found.problem == "non-root users may write to it"
    assert given(find(made)) == []
    (made.place / BASE.lstrip("/")).chmod(0o644)
    (made.place / LISTS.lstrip("/")).chmod(0o777)
    assert find(made).lists[0].problem == "non-root users may write to it"


def test_a_list_of_another_user_is_ignored(made: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpuhook accepts only lists of root and of the user that it runs as."""
    owner = made.write(BASE, "/usr/local/dcmi\n").stat().st_uid
    if owner == 0:
        owner = 4321
        os.chown(made.place / BASE.lstrip("/"), owner, owner)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert find(made).lists[0].problem == "non-root users may write to it"
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert find(made).lists[0].problem == ""


def test_a_list_of_an_unmapped_root_user_is_accepted(
    made: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a rootless engine, the host's root appears as user nobody."""
    monkeypatch.setattr(os, "geteuid", lambda: made.place.stat().st_uid + 1)
    monkeypatch.setattr(lists, "is_roots", lambda _: True)
    assert find(made).lists[0].problem == ""


def test_malformed_lists_are_reported_and_other_files_ignored(made: Machine) -> None:
    (made.place / LISTS.lstrip("/") / "odd.list").mkdir()
    made.write(f"{LISTS}/bytes.list", "x").write_bytes(b"\xff\n")
    made.write(f"{LISTS}/.list", "/usr/local/dcmi\n")
    made.write(f"{LISTS}/readme", "/usr/local/dcmi\n")
    problems = {each.name: each.problem for each in find(made).lists}
    assert problems == {
        "base": "",
        "bytes": "it can't be read (UnicodeDecodeError)",
        "odd": "it isn't a file",
    }


# Libraries -----------------------------------------------------------------------------------


def libraries(found: lists.ListContent) -> dict[str | None, str]:
    return {file.soname: file.target for file in found.files if file.kind == LIBRARY}


def test_libraries_are_found_by_soname(made: Machine) -> None:
    assert libraries(find(made)) == {
        "libc_sec.so": f"{DRIVER}/lib64/common/libc_sec.so",
        "libascend_hal.so": f"{DRIVER}/lib64/driver/libascend_hal.so",
    }


def test_files_that_are_not_usable_libraries_are_ignored(made: Machine, library: Any) -> None:
    folder = made.place / DRIVER.lstrip("/") / "lib64/driver"
    (folder / "libtext.so").write_text("not a library")
    (folder / "libsmall.so").write_bytes(library("libsmall.so", bits=32))
    (folder / "plugin.so").write_bytes(library("plugin.so"))
    (folder / "libfolder.so").mkdir()
    (folder / "libaway.so").symlink_to("/nowhere")
    made.data("/opt/other/libout.so", library("libout.so"))
    (folder / "libout.so").symlink_to("/opt/other/libout.so")
    (folder / "libplain.so.1").write_bytes(library(None))
    (folder / "libversioned.so.1.2").write_bytes(library("libversioned.so.1"))
    (folder / "libversioned.so.1").symlink_to("libversioned.so.1.2")
    found = libraries(find(made))
    assert found["libplain.so.1"] == f"{DRIVER}/lib64/driver/libplain.so.1"
    assert found["libversioned.so.1"] == f"{DRIVER}/lib64/driver/libversioned.so.1.2"
    assert {*found} - {"libplain.so.1", "libversioned.so.1"} == {"libc_sec.so", "libascend_hal.so"}


def test_the_first_library_folder_takes_precedence(made: Machine, library: Any) -> None:
    path = f"{DRIVER}/lib64/libascend_hal.so"
    made.data(path, library("libascend_hal.so"))
    assert libraries(find(made))["libascend_hal.so"] != path
    (made.place / DRIVER.lstrip("/") / "lib64/driver/libascend_hal.so").unlink()
    assert libraries(find(made))["libascend_hal.so"] == path
