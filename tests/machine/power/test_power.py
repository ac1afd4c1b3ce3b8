"""The power goes off while install or a document's rewrite is under way: each file is whole.

A test cuts the power at first, and goes on judging on the machine that has booted again. The file
system doesn't write a file's content when it is renamed, as ext4 otherwise does: who renames must.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from booted import BUSYBOX, DRIVER, GIVEN, GPUS, REQUEST, call, wait_for_docker
from harness.commands import run

FOLDER = Path("/var/lib/power-cuts")
# Where install and refresh write what outlives a boot.
WRITTEN = ("/etc/docker", "/etc/cdi", "/var/lib/gpuhook")
UNITS = ("gpuhook-watch.service", "gpuhook-cdi-refresh.path", "gpuhook-cdi-refresh.service")
INSTALL = ("install", "--engine", "docker", "--cdi")
UNINSTALL = ("uninstall", "--engine", "docker")
REFRESH = ("cdi", "refresh")

# Run gpuhook, and restart without writing anything more: before the rename of that number, or after
# its end if that is 0. The names that the file system has so far are on disk then.
CUT = """
import os, runpy, sys, time
left = int(sys.argv[1])
sys.argv[:2] = []
def cut():
    with open("/var/lib/power-cuts/other", "wb") as file:
        os.fsync(file.fileno())
    with open("/proc/sysrq-trigger", "w") as file:
        file.write("b")
    time.sleep(60)
def hook(event, arguments):
    global left
    if event == "os.rename":
        left -= 1
        if left == 0:
            cut()
sys.addaudithook(hook)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    if left <= 0 and not sys.exc_info()[1].code:
        with open("/proc/sysrq-trigger", "w") as file:
            file.write("b")
        time.sleep(60)
"""


def contents() -> dict[str, bytes]:
    """Return every file that was written, by its path; what begins with a dot nobody reads."""
    return {
        os.path.join(folder, name): Path(folder, name).read_bytes()
        for top in WRITTEN
        for folder, _, names in os.walk(top)
        for name in names
        if not name.startswith(".")
    }


def gpuhook(*words: str) -> dict[str, bytes]:
    """Run gpuhook; return what there is now."""
    call("gpuhook", *words)
    return contents()


def before_install() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return what there is without and with an installation; the first is there at the end."""
    gpuhook(*UNINSTALL)
    new = gpuhook(*INSTALL)
    return gpuhook(*UNINSTALL), new


def before_refresh() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return what there is before and after a refresh because of a new GPU; the first is there."""
    old = gpuhook(*INSTALL)
    call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS + 1))
    new = gpuhook(*REFRESH)
    call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
    assert gpuhook(*REFRESH) == old
    call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS + 1))
    return old, new


def cut(
    outcome: Path,
    prepare: Callable[[], tuple[dict[str, bytes], dict[str, bytes]]],
    number: int,
    words: tuple[str, ...],
) -> None:
    """Cut the power in a command; this doesn't return."""
    old_new = prepare()
    assert old_new[0] != old_new[1]
    outcome.write_bytes(pickle.dumps(old_new))
    os.sync()
    call("mount", "-o", "remount,noauto_da_alloc", "/")
    done = run(["python3", "-I", "-B", "-c", CUT, str(number), "/usr/bin/gpuhook", *words])
    outcome.unlink()
    pytest.fail(f"the power is still on: {done}")


def judge(old: dict[str, bytes], new: dict[str, bytes], *, ended: bool) -> None:
    """See that each file is as before or as after, and that GPUs go on to containers."""
    found = contents()
    if ended:
        assert found == new
    for path in old.keys() | new.keys() | found.keys():
        assert found.get(path) in (old.get(path), new.get(path)), path
    call("gpuhook", *INSTALL)
    call("gpuhook", *REFRESH)
    call("systemctl", "restart", "docker")
    wait_for_docker()
    examined = run(["gpuhook", "doctor", "--quiet"])
    assert examined.status < 2, examined
    nodes = [f"/dev/nvidia{minor}" for minor in GIVEN]
    start = ["docker", "run", "--rm", "--network=none"]
    for asking in (["--runtime=gpu-py", "--env", REQUEST], ["--device=nvidia.com/gpu=all"]):
        said = call(*start, *asking, BUSYBOX, "devopen", *nodes)
        assert said.split()[1::2] == ["ENXIO", "ENXIO"]


@pytest.mark.parametrize(
    ("prepare", "words", "number"),
    [
        pytest.param(before_install, INSTALL, 2, id="in-install"),
        pytest.param(before_install, INSTALL, 0, id="after-install"),
        pytest.param(before_refresh, REFRESH, 1, id="in-refresh"),
        pytest.param(before_refresh, REFRESH, 0, id="after-refresh"),
    ],
)
def test_the_power_goes_off(
    prepare: Callable[[], tuple[dict[str, bytes], dict[str, bytes]]],
    words: tuple[str, ...],
    number: int,
    installed: None,
    request: pytest.FixtureRequest,
) -> None:
    outcome = FOLDER / f"{words[0]}-{number}"
    if not outcome.exists():
        request.getfixturevalue("docker")
        FOLDER.mkdir(exist_ok=True)
        for unit in UNITS:  # they would mend at boot what there is
            held = Path(f"/etc/systemd/system/{unit}.d/power.conf")
            held.parent.mkdir(parents=True, exist_ok=True)
            held.write_text(f"[Unit]\nConditionPathExists=!{FOLDER}\n")
        call("systemctl", "daemon-reload")
        call("systemctl", "stop", *UNITS)
        cut(outcome, prepare, number, words)
    old_new, said = outcome.read_bytes(), outcome.with_suffix(".said")
    if said.exists():  # some boots ago
        assert said.read_text() == "whole"
        return
    said.write_text("not whole")
    old, new = pickle.loads(old_new)  # noqa: S301 - our own
    judge(old, new, ended=number == 0)
    said.write_text("whole")
    call("gpuhook", "simulate", DRIVER, "--gpus", str(GPUS))
    call("gpuhook", *REFRESH)
