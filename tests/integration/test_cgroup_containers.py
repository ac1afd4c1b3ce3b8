"""A container whose runtime denied all devices gets devices from a hook without gpu-py."""

import json
import sys
from typing import Any

import pytest
from harness.bundles import Bundle
from harness.commands import wait_until
from harness.namespaces import Namespace

MAJOR, GIVEN, REFUSED = 195, (3, 255), (0, 4)

ALLOW = """
import os, sys
from gpuhook.base.cgroup import access
print(access.allow(os.open(f"/proc/{sys.argv[1]}", os.O_PATH), [(195, 3), (195, 255)]))
"""

SCRIPT = "; ".join(
    f"busybox mknod /dev/gpu{minor} c {MAJOR} {minor} && devopen /dev/gpu{minor}"
    for minor in GIVEN + REFUSED
)


def status(bundle: Bundle, runtime: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(bundle.call(runtime, "state", bundle.name).ok().stdout)
    return state


def opened(bundle: Bundle, runtime: str, *, allow: bool) -> tuple[dict[int, str], str]:
    """Run the container; with ``allow``, run the hook's step between create and start."""
    bundle.command("busybox", "sh", "-c", SCRIPT)
    log = bundle.path / "log"
    create = f"exec {runtime} create --bundle {bundle.path} {bundle.name} >{log} 2>&1"
    how = ""
    assert bundle.call("sh", "-c", create).status == 0, log.read_text()
    if allow:
        pid = str(status(bundle, runtime)["pid"])
        how = bundle.call(sys.executable, "-c", ALLOW, pid).ok().stdout.strip()
    bundle.call(runtime, "start", bundle.name).ok()
    wait_until(lambda: status(bundle, runtime)["status"] == "stopped", "the container stopped")
    lines = [line.split() for line in log.read_text().splitlines()]
    return {int(path.removeprefix("/dev/gpu")): result for path, result in lines}, how


@pytest.mark.parametrize("bundle", ["busybox"], indirect=True)
def test_a_created_container_gets_exactly_the_given_devices(
    bundle: Bundle, low_level: tuple[str, Namespace]
) -> None:
    runtime, entered = low_level
    found, how = opened(bundle, runtime, allow=True)
    assert how == ("v2" if entered.cgroups == "v2" else "v1")
    assert found == {minor: "ENXIO" if minor in GIVEN else "EPERM" for minor in GIVEN + REFUSED}


@pytest.mark.parametrize("bundle", ["busybox"], indirect=True)
def test_without_the_hook_a_container_has_no_devices(bundle: Bundle) -> None:
    found, _how = opened(bundle, bundle.runtime, allow=False)
    assert found == dict.fromkeys(GIVEN + REFUSED, "EPERM")
