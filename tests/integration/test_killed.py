"""A hook or runtime, killed at any moment: nothing is left, and the next start works."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.bundles import Bundle, base_config
from harness.commands import run
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import host_cgroups, namespace
from harness.sandbox import Sandbox, contents, sandbox
from harness.snapshot import mount_table

from gpuhook.core.records import records

KILLS = int(os.environ.get("GPUHOOK_TEST_KILLS", "60"))
RUNTIME_KILLS = 20
FOLDER = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True)
class Hook:
    """Arguments that run the hook on a sandbox as a runtime would."""

    argv: list[str]
    bundle: Path
    state: Path

    def start(self, box: Sandbox) -> subprocess.Popen[bytes]:
        """Start the hook for a container."""
        state = {"ociVersion": "1.0.2", "id": "killed", "pid": box.pid, "bundle": str(self.bundle)}
        process = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(state).encode())
            process.stdin.close()
        return process


@pytest.fixture
def hook(
    workspace: Path, tmp_path: Path, installation: Installation, driver: Driver, image: Path
) -> Hook:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    spec = base_config(image)
    spec["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=all")
    (bundle / "config.json").write_text(json.dumps(spec))
    more = "[nvidia-container-cli]\nno-cgroups = true\n"
    config = write_config(tmp_path / "config", driver.root, ["runc"])
    config.write_text(config.read_text().replace("[nvidia-container-cli]\n", more))
    argv = [str(installation.hook), "--config", str(config), "prestart"]
    return Hook(argv, bundle, tmp_path / "config/state")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A root in which the hook must create and replace files, links and folders."""
    root = tmp_path / "rootfs"
    for folder in ("dev", "proc", "etc", FOLDER):
        (root / folder).mkdir(parents=True)
    (root / "etc/debian_version").write_text("12")
    (root / "etc/ld.so.cache").touch()
    (root / FOLDER / "libcuda.so.1").symlink_to("libcuda.so.0")
    (root / FOLDER / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.0")
    return root


def whole(hook: Hook, image: Path) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Run the hook until it exits; return its changes in the image's layer."""
    with sandbox(image) as box:
        process = hook.start(box)
        assert process.stderr is not None
        with process.stderr:
            said = process.stderr.read()
        assert process.wait() == 0, said.decode()
        assert "libcuda" in box.mounts()
    return contents(image)


def saved(hook: Hook) -> dict[str, tuple[int, int, int, int, bytes]]:
    """Return the content of the state folder after the records were deleted."""
    assert records.read_all(str(hook.state)) == [], "no container of this test runs now"
    return contents(hook.state)


@pytest.mark.protects("leftover-file", "temporary files of a killed run are removed")
def test_a_hook_killed_at_any_moment_leaves_nothing(
    hook: Hook, image: Path, tmp_path: Path
) -> None:
    pristine = tmp_path / "pristine"
    run(["cp", "-a", image, pristine]).ok()
    expected = whole(hook, image)
    begun = time.monotonic()
    assert whole(hook, image) == expected, "a second run changes nothing"
    duration = time.monotonic() - begun
    before = mount_table(), saved(hook), contents(hook.bundle)
    chance = random.Random(4711)  # noqa: S311 - any moment will do
    unfinished = 0
    for number in range(KILLS):
        if number % 5 == 0:
            run(["rm", "-rf", image]).ok()
            run(["cp", "-a", pristine, image]).ok()
        with sandbox(image) as box:
            process = hook.start(box)
            time.sleep(chance.uniform(0, duration))
            running = process.poll() is None
            unfinished += running
            duration *= 1.05 if running else 0.9  # adapts to how busy the machine is
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            assert process.stderr is not None
            process.stderr.close()
            process.wait()
        assert mount_table() == before[0]
        if number % 5 == 4:
            assert whole(hook, image) == expected, f"kill {number} left something"
    assert (mount_table(), saved(hook), contents(hook.bundle)) == before
    assert unfinished > KILLS // 5


@pytest.fixture(params=["runc", "crun"])
def killable(
    request: pytest.FixtureRequest, workspace: Path, roots: dict[str, Path]
) -> Iterator[tuple[str, Bundle]]:
    from harness import bundles  # noqa: PLC0415 - its fixture of the same name is in the way

    layout = "v1" if request.param == "crun" and host_cgroups() == "hybrid" else "host"
    with (
        namespace(layout) as entered,
        bundles.bundle(workspace / "bundles", roots["debian"], entered, request.param) as made,
    ):
        yield request.param, made


def test_a_runtime_killed_at_any_moment_leaves_nothing(
    killable: tuple[str, Bundle],
    installation: Installation,
    configs: dict[str, Path],
    driver: Driver,
) -> None:
    runtime, bundle = killable
    env = {**os.environ, "GPUHOOK_CONFIG": str(configs[runtime])}
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    bundle.command(*look(libraries=["libcuda.so.1"]))
    before = mount_table()
    chance = random.Random(4712)  # noqa: S311 - any moment will do
    argv = bundle.namespace.enter(installation.runtime, "run", "--bundle", bundle.path, bundle.name)
    for _ in range(RUNTIME_KILLS):
        with subprocess.Popen(
            argv, env=env, cwd=bundle.path, start_new_session=True, stderr=subprocess.DEVNULL
        ) as process:
            time.sleep(chance.uniform(0, 0.25))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        bundle.call(runtime, "delete", "--force", bundle.name)
        assert mount_table() == before
    inside = seen(bundle.run(installation.runtime, {"GPUHOOK_CONFIG": env["GPUHOOK_CONFIG"]}))
    assert inside.gpu_minors == {driver.gpus[1].minor}
    assert inside.libraries["libcuda.so.1"][0] != "-"
    left = bundle.call("find", bundle.path, "-xdev", "-name", "*.gpuhook*").ok().stdout
    assert left == ""
