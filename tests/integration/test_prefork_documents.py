"""CDI specs with a prefork server: no interpreter is started for their hook."""

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness.cdi import generate, give
from harness.commands import Result, wait_until
from harness.inside import look, seen
from harness.installation import copied
from harness.prefork import ONE, Site, ended_in_a_container
from timeouts import in_time

from gpuhook.base.names import CDI_HOOK, HELPER_OPTION
from gpuhook.core.cdi.hook_args import MOUNTS_OPTION
from gpuhook.prefork.slots import REQUEST_PIPE, SLOTS

NAMES = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"]


class Place:
    """A site whose containers get GPUs 0 and 2 by a CDI spec, and a log of Python's starts."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.log = folder / "python.log"
        self.log.touch()
        site.installation = copied(site.installation, folder / "programs", self.log)
        self.document = generate(site.installation, site.config, folder / "cdi")
        self.plain = site.plain

    def by_gpu_py(self) -> None:
        """Let gpu-py apply the CDI spec, with a container that names its devices."""
        text = self.site.config.read_text()
        folder = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{self.document.parent}"]\n'
        text = text.replace(
            "[nvidia-container-runtime]\n", '[nvidia-container-runtime]\nmode = "cdi"\n'
        )
        self.site.config.write_text(f"{text}\n{folder}")
        self.site.settle()
        self.site.bundle.environ("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0,nvidia.com/gpu=2")
        self.site.bundle.command(*look(self.site.driver.minors, NAMES))
        self.plain = self.site.plain = self.site.bundle.config.read_bytes()

    def stand(self) -> None:
        """Start containers by gpu-py until a prefork server runs."""
        changed, self.site.plain = self.site.plain, self.plain
        self.site.stand_again(())
        self.site.plain = changed

    def by_engine(self) -> None:
        """Let the engine apply the CDI spec, without gpu-py."""
        bundle = self.site.bundle
        bundle.config.write_bytes(self.plain)
        give(bundle, self.document, "0", "2")
        bundle.command(*look(self.site.driver.minors, NAMES))
        self.site.plain = bundle.config.read_bytes()

    def hooks(self) -> int:
        """Return how often an interpreter was started as the CDI spec's hook."""
        return self.log.read_text().count(f"/{CDI_HOOK} ")

    def engine_starts(self, *prefix: str) -> Result:
        """Start a container by runc or crun, like an engine that has applied the CDI spec."""
        site = self.site
        site.bundle.config.write_bytes(site.plain)
        runtime = site.low_level
        create: list[str | Path] = [
            *prefix,
            runtime,
            "create",
            "--bundle",
            site.bundle.path,
            site.bundle.name,
        ]
        return site.bundle.live(create, [runtime], site.bundle.name)

    def works(self, result: Result) -> None:
        self.site.sees_its_gpus(result)
        libraries = seen(result).libraries
        assert set(libraries) == set(NAMES)


@pytest.fixture
def place(site: Site, tmp_path: Path) -> Place:
    return Place(site, tmp_path)


def test_prefork_server_serves_cdi_specs_applied_by_an_engine(place: Place) -> None:
    """Any program may apply the spec, as soon as another container has left a server running."""
    place.by_engine()
    place.works(place.engine_starts())
    assert place.hooks() == 1
    place.stand()
    for _ in range(2):
        place.works(place.engine_starts())
    assert place.hooks() == 1


def test_prefork_server_serves_cdi_specs_applied_by_gpu_py(place: Place) -> None:
    """A helper serves the first container and stays; its child serves the next one."""
    place.by_gpu_py()
    place.stand()
    for _ in range(2):
        place.works(place.site.run())
        assert place.site.served
    assert place.hooks() == 0


def mounts(result: Result) -> list[str]:
    """Return the mounts of a container with their places and options, without ids."""
    lines = [line.partition(" - ") for line in result.ok().stdout.splitlines()]
    return sorted(f"{' '.join(way.split()[3:6])} {source}" for way, _, source in lines)


@pytest.mark.parametrize("volume", ["", "/usr/share"])
def test_the_worker_makes_the_same_mounts_as_the_runtime(place: Place, volume: str) -> None:
    """Files, places and options are the same; the runtime mounts where a volume is in the way."""
    place.by_gpu_py()
    site, bundle = place.site, place.site.bundle
    bundle.command("busybox", "cat", "/proc/self/mountinfo")
    if volume:
        source = place.log.parent / "volume"
        source.mkdir()
        entry = {"destination": volume, "source": str(source), "options": ["rbind", "rw"]}
        bundle.change(lambda spec: spec["mounts"].append(entry))
    site.plain = bundle.config.read_bytes()
    configuration = site.config.read_text()
    found = []
    for helper in ("false", "true"):
        site.config.write_text(configuration)
        site.configure(f"helper = {helper}")
        found.append(mounts(site.run()))
        [hook] = bundle.spec()["hooks"]["createContainer"]
        assert (MOUNTS_OPTION in hook["args"]) == (helper == "true")
    places = {mount["destination"] for mount in bundle.spec()["mounts"]}
    assert ("/usr/share/nvidia/nvoptix.bin" in places) == bool(volume)
    assert found[0] == found[1]


def test_the_hook_makes_the_mounts_where_the_worker_is_gone(place: Place) -> None:
    """The hook's arguments contain the files that the worker was to mount."""
    place.by_gpu_py()
    site = place.site
    site.configure("standby = 0")
    place.works(site.run())
    assert site.helper
    before = place.hooks()
    text = site.bundle.config.read_text()
    site.bundle.config.write_text(text.replace(f'"{site.helper}"', '"4194305"'))
    site.plain = site.bundle.config.read_bytes()
    place.works(place.engine_starts())
    assert place.hooks() == before + 1


@ONE
def test_a_changed_spec_applies_to_the_next_container(place: Place) -> None:
    """The server has already read the spec, and it follows the change."""
    place.by_gpu_py()
    place.stand()
    place.works(place.site.run())
    text = place.document.read_text()
    place.document.write_text(re.sub(r"( *- )(.*=void)", r"\1\2\n\1SEEN=1", text))
    assert place.document.read_text() != text
    place.works(place.site.run())
    assert place.site.served
    assert "SEEN=1" in place.site.bundle.spec()["process"]["env"]


@ONE
def test_a_restarted_bundle_is_served_again(place: Place) -> None:
    """config.json still has arguments for the first start's helper, which no longer exists."""
    place.by_gpu_py()
    place.stand()
    site = place.site
    asked = {"cdi.k8s.io/test": "nvidia.com/gpu=0,nvidia.com/gpu=2"}
    site.bundle.config.write_bytes(site.plain)
    site.bundle.change(lambda spec: spec.update(annotations=asked))
    site.plain = site.bundle.config.read_bytes()
    for _ in range(2):
        place.works(site.run())
        [hook] = site.bundle.spec()["hooks"]["createContainer"]
        assert hook["args"].count(HELPER_OPTION) == 1
        site.plain = site.bundle.config.read_bytes()
    place.works(place.engine_starts())
    assert place.hooks() == 0


@pytest.mark.protects(
    "hooks-runtime",
    "a CDI spec's hook is served only if the engine shares the prefork server's namespaces",
)
@ONE
def test_an_engine_in_another_mount_namespace_is_not_served(place: Place) -> None:
    """That namespace may have another bundle or driver, so the hook works without the server."""
    place.by_engine()
    place.stand()
    place.works(place.engine_starts("unshare", "-m", "--propagation", "unchanged"))
    assert place.hooks() == 1


@pytest.mark.protects(
    "asking-hook",
    "the prefork server answers a CDI hook only if that hook waits for the answer",
    instead="if False:",
)
@ONE
def test_a_request_for_another_process_is_refused(place: Place) -> None:
    """The server answers the process that waits for it, or it does nothing."""
    place.by_engine()
    place.stand()
    site = place.site
    with subprocess.Popen(["unshare", "-m", "sleep", "1000"]) as other:
        try:
            host = os.stat("/proc/self/ns/mnt").st_ino
            inside = Path(f"/proc/{other.pid}/ns/mnt")
            wait_until(lambda: inside.stat().st_ino != host, "it is in its namespace")
            slot = os.open(f"/proc/{site.server}/fd/{SLOTS}", os.O_RDONLY)
            Path(f"/proc/{site.server}/fd/{REQUEST_PIPE}").write_text(
                f"0 {other.pid} nvidia.com/gpu\n"
            )
            with open(slot) as answer:
                assert answer.read() == "no\n"
        finally:
            other.kill()


@ONE
def test_a_killed_worker_refuses_the_container_with_a_reason(place: Place) -> None:
    """The container isn't started, and the log contains the reason."""
    place.by_engine()
    place.stand()
    site = place.site
    site.bundle.config.write_bytes(site.plain)
    with in_time(120):
        while True:
            ending = KillsChild(site.ahead)
            ending.start()
            result = place.engine_starts()
            ending.join()
            if result.status != 0:
                break
            place.works(result)
            wait_until(site.is_standing, "its child is gone")
    kept = (site.config.parent / "state/errors.log").read_text()
    assert "gpuhook-cdi-hook: The helper was killed. Start the container again." in kept


@ONE
def test_a_container_outlives_a_killed_prefork_server(place: Place, tmp_path: Path) -> None:
    def end(server: int) -> None:
        os.kill(server, signal.SIGKILL)

    place.by_engine()
    place.stand()
    log = tmp_path / "strace"
    place.works(ended_in_a_container(place.site, place.engine_starts, log, end))


class KillsChild(threading.Thread):
    """A thread that kills a worker of a prefork server as soon as it is in a container."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def run(self) -> None:
        host = os.stat("/proc/self/ns/mnt").st_ino
        end = time.monotonic() + 10
        with suppress(OSError):  # the process has ended in between
            while os.stat(f"/proc/{self._pid}/ns/mnt").st_ino == host:
                if time.monotonic() > end:
                    return
            os.kill(self._pid, signal.SIGKILL)
