"""Docker with AppArmor and crun: containers keep their GPUs and can't open other GPUs."""

from collections.abc import Iterator

import pytest
from booted import (
    CRUN_IS_OLD,
    GIVEN,
    Container,
    call,
    disturb,
    running,
    set_config,
    survived_by,
)


@pytest.fixture(scope="module")
def container(docker: tuple[str]) -> Iterator[Container]:
    """A container with two GPUs, created by crun."""
    set_config("nvidia-container-runtime.runtimes=crun")
    with running("gpus-crun", docker, ["--runtime=gpu-py"]) as started:
        yield started
    set_config("nvidia-container-runtime.runtimes=runc,crun")


def test_runc_gives_gpus_under_dockers_apparmor_profile(docker: tuple[str]) -> None:
    with running("gpus-runc", docker, ["--runtime=gpu-py"]) as container:
        assert container.has_what_it_asked_for()
        assert profile(container) == "docker-default (enforce)"


def test_crun_gives_gpus_under_dockers_apparmor_profile(container: Container) -> None:
    assert container.has_what_it_asked_for()
    assert profile(container) == "docker-default (enforce)"


def profile(container: Container) -> str:
    """Return the AppArmor profile of a container's first process."""
    return container.exec("busybox", "cat", "/proc/1/attr/current").ok().stdout.strip()


def test_newer_crun_tells_systemd_to_allow_the_whole_device_major(container: Container) -> None:
    """For minor 0 crun makes systemd allow the major; crun's own program denies other minors."""
    rules = call("systemctl", "show", "--property=DeviceAllow", "--value", container.scope())
    assert ("char-195 rw" in rules) == (not CRUN_IS_OLD)
    assert container.has_what_it_asked_for()


@pytest.mark.parametrize("what", survived_by("docker", "crun"))
def test_device_access_survives_cgroup_changes(what: str, container: Container) -> None:
    assert disturb(container, what)


def test_access_lost_without_recorded_rules_is_restored_by_repair(container: Container) -> None:
    """systemd keeps the rules from gpu-py's config.json; clearing them there removes access."""
    rules = ("DeviceAllow=", "DevicePolicy=strict")
    call("systemctl", "set-property", "--runtime", container.scope(), *rules)
    assert not container.has_what_it_asked_for()
    assert f"{len(GIVEN)}" in call("gpuhook", "repair", container.name)
    assert container.has_what_it_asked_for()


def test_nothing_was_denied_by_apparmor(container: Container) -> None:
    messages = call("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat")
    assert [line for line in messages.splitlines() if 'apparmor="DENIED"' in line] == []
