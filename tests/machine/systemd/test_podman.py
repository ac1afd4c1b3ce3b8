"""podman containers, which keep their GPUs where the pages promise it.

Elsewhere gpuhook repair restores the access.
"""

import os
from pathlib import Path

import pytest
from booted import (
    ALLOWED,
    BUSYBOX,
    CARRIED,
    CONTROLLERS,
    DISTURBANCES,
    GIVEN,
    REQUEST,
    Container,
    call,
    disturb,
    set_config,
)
from harness.commands import run

CDI = (Path("/etc/cdi"), Path("/run/cdi"))
RUNTIMES = ("runc", "crun")
# podman update needs the cgroup controller of the limit that it changes.
WHAT = [each for each in DISTURBANCES if each != "update" or CONTROLLERS is None]
CASES = [
    ((way, name), what)
    for way in ("runtime", "precreate", "prestart")
    for name in RUNTIMES
    for what in WHAT
]
# Cases in which access to the devices is lost and then restored.
if CONTROLLERS is None:
    LOST = {(("prestart", "runc"), what) for what in DISTURBANCES}
else:
    LOST = {(("prestart", name), "set-property") for name in RUNTIMES}


@pytest.mark.parametrize(
    ("way", "what"),
    CASES,
    indirect=["way"],
    scope="module",
    ids=["-".join((*way, what)) for way, what in CASES],
)
def test_device_access_survives_or_is_lost_and_restored_where_expected(
    way: tuple[str, str], what: str, of_podman: Container
) -> None:
    assert disturb(of_podman, what) == ((way, what) not in LOST)


@pytest.mark.parametrize("way", [("runtime", name) for name in RUNTIMES], indirect=True)
def test_a_container_survives_a_change_of_the_configured_runtime(
    way: tuple[str, str], of_podman: Container
) -> None:
    [other] = {*RUNTIMES} - {way[1]}
    set_config(f"nvidia-container-runtime.runtimes={other}")
    assert of_podman.has_what_it_asked_for()
    call("podman", "stop", "--time=0", of_podman.name)
    assert of_podman.property("{{.State.Status}}") == "exited"
    set_config(f"nvidia-container-runtime.runtimes={way[1]}")


def test_a_rootless_podman_container_has_only_the_requested_gpus(
    podman: tuple[str], user: tuple[str, ...]
) -> None:
    os.chdir("/")
    call(*user, "podman", "load", "--input", CARRIED / "images.tar")
    call(*user, "gpuhook", "install", "--engine", "podman")
    words = [*user, "podman", "run", "--rm", "--network=none", "--runtime=gpu-py", "--env", REQUEST]
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    said = run([*words, BUSYBOX, "devopen", *nodes, "/dev/nvidia1"]).ok().stdout.splitlines()
    assert said == [*(f"{node} {ALLOWED}" for node in nodes), "/dev/nvidia1 ENOENT"]


def test_files_installed_under_umask_077_are_readable_by_all_users(
    podman: tuple[str], user: tuple[str, ...]
) -> None:
    os.chdir("/")
    call("sh", "-c", "umask 077; gpuhook install --engine podman --hook precreate --cdi")
    try:
        call(*user, "podman", "info")
        call(*user, "find", "/etc/containers", *(one for one in CDI if one.exists()))
    finally:
        call("gpuhook", "install", "--engine", "podman", "--hook", "none", "--no-cdi")
