"""Names of folders and cgroups from other users, with characters that end a line elsewhere."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import bundles
from harness.bundles import Bundle, GpuBundle
from harness.cdi import generate, give
from harness.driver import Driver
from harness.inside import look, seen
from harness.installation import Installation
from harness.metrics import exporter, of_container, scrape
from harness.namespaces import Namespace, host_cgroups
from harness.prefork import RUNTIMES

# Bytes in names at which Python cuts text or bytes into lines or fields, escapes of the kernel,
# and text that looks like a line of a mount table.
CUTTING = [
    b"\r", b"\r\r", b"\v", b"\f", b"\x1c", b"\x1d", b"\x1e", b"\x1f", b"\x85", b"\xff",
    b"\xc2\x85", b"\xc2\xa0", b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\n\n", b" - ", b"\t", b"\\", b"#",
    b"\r1 1 0:1", b"\n7 7",
]  # fmt: skip


@contextmanager
def odd_mounts(namespace: Namespace, folder: Path) -> Iterator[list[Path]]:
    """Mount a filesystem on each folder with such a name, and also on a folder next to it."""
    made = []
    try:
        for number, cut in enumerate(CUTTING):
            place = folder / f"{number}" / os.fsdecode(b"a" + cut + b"b")
            place.mkdir(parents=True)
            namespace.run("mount", "-t", "tmpfs", "none", place).ok()
            made.append(place)
            (place / "sub").mkdir()
            inner = place.parent / "inner"
            inner.mkdir()
            namespace.run("mount", "--bind", place, inner).ok()
            made.append(inner)
        yield made
    finally:
        for place in reversed(made):
            namespace.run("umount", place).ok()


@pytest.fixture(scope="module")
def document(
    workspace: Path, installation: Installation, driver: Driver, configs: dict[str, Path]
) -> Path:
    return generate(installation, configs["runc"], workspace / "cdi-names")


@RUNTIMES
def test_mounts_with_line_ends_in_their_names_are_handled(
    bundle: GpuBundle,
    document: Path,
    installation: Installation,
    configs: dict[str, Path],
    driver: Driver,
    tmp_path: Path,
) -> None:
    """Containers with our CDI specs start, and the commands find them."""
    config = configs[bundle.runtime]
    give(bundle, document, "2")
    bundle.command(*look(driver.minors, ["libcuda.so.1"]))
    volume = {"type": "bind", "options": ["rbind"], "destination": "/data"}
    with odd_mounts(bundle.namespace, tmp_path / "odd") as places:
        source = str(places[0].parent.parent)
        bundle.change(lambda spec: spec["mounts"].append({**volume, "source": source}))
        inside = seen(bundle.run(bundle.runtime))
        assert inside.gpu_minors == {driver.gpus[2].minor}
        start(bundle, bundle.runtime, config)
        words = ("list", "--config", config, "--format", "json")
        answer = json.loads(bundle.call(installation.command, *words).ok().stdout)
        assert [gpu["index"] for gpu in answer["gpus"] if bundle.name in gpu["containers"]] == [2]
        bundle.call(installation.command, "repair", "--config", config, bundle.name).ok()
        with exporter(config) as port:
            found = of_container(scrape(port), bundle.name)
        assert found["assigned", driver.gpus[2].uuid] == 1


def start(bundle: Bundle, program: str | Path, config: Path) -> None:
    """Start the bundle's container, which keeps running."""
    bundle.command("sleep", "1000")
    bundle.detach(program, config)


def _opens(bundle: Bundle, runtime: str, node: str) -> str:
    return bundle.call(runtime, "exec", bundle.name, "devopen", node).ok().stdout.split()[1]


@pytest.mark.parametrize("cut", ["\r", "\u2028"])
def test_repair_is_not_misled_by_a_cgroup_name_with_a_line_end(
    bundle: Bundle,
    low_level: tuple[str, Namespace],
    installation: Installation,
    configs: dict[str, Path],
    driver: Driver,
    roots: dict[str, Path],
    workspace: Path,
    cut: str,
) -> None:
    """A user who may create cgroups can't get another container's GPU through their names."""
    runtime, namespace = low_level
    node = f"/dev/nvidia{driver.gpus[3].minor}"
    bundle.environ("NVIDIA_VISIBLE_DEVICES=3")
    with bundles.bundle(workspace, roots["debian"], namespace, runtime) as victim:
        for each, program in ((bundle, installation.runtime), (victim, runtime)):
            start(each, program, configs[runtime])
        minor = str(driver.gpus[3].minor)
        make = ("busybox", "mknod", node, "c", "195", minor)
        victim.call(runtime, "exec", victim.name, *make).ok()
        assert (_opens(bundle, runtime, node), _opens(victim, runtime, node)) == ("ENXIO", "EPERM")
        v2 = namespace.cgroups == "v2" or host_cgroups() == "v2"
        tree = f"/sys/fs/cgroup{'' if v2 else '/devices'}"
        own, theirs = (each.spec()["linux"]["cgroupsPath"] for each in (bundle, victim))
        line = f"x{cut}{'0::' if v2 else '5:devices:'}{theirs}"
        state = json.loads(bundle.call(runtime, "state", bundle.name).ok().stdout)
        move = 'mkdir -p "$1" && echo "$2" >"$1/cgroup.procs"'
        if v2:  # v2 allows no process in a cgroup with both children and controllers
            move = 'mkdir -p "$1" && echo "$2" >"$1/cgroup.procs" || exit 7'
        folder = f"{tree}{own}/{line}"
        moved = bundle.call("sh", "-c", move, "sh", folder, str(state["pid"])).ok()
        assert moved.status == 0
        try:
            words = ("repair", "--config", configs[runtime], bundle.name)
            done = bundle.call(installation.command, *words)
            assert done.status == 0, done
            assert _opens(victim, runtime, node) == "EPERM"
            listed = bundle.call(installation.command, "list", "--config", configs[runtime]).ok()
            assert bundle.name in listed.stdout
        finally:
            back = f'echo {state["pid"]} >"$1/cgroup.procs"; cd "$1"; find . -depth -mindepth 1 '
            bundle.call("sh", "-c", f"{back} -type d -exec rmdir {{}} +", "sh", f"{tree}{own}")


def test_repair_of_a_container_that_left_its_cgroup_is_refused(
    bundle: Bundle,
    low_level: tuple[str, Namespace],
    installation: Installation,
    configs: dict[str, Path],
) -> None:
    runtime, namespace = low_level
    bundle.environ("NVIDIA_VISIBLE_DEVICES=3")
    start(bundle, installation.runtime, configs[runtime])
    v2 = namespace.cgroups == "v2" or host_cgroups() == "v2"
    tree = f"/sys/fs/cgroup{'' if v2 else '/devices'}"
    own = bundle.spec()["linux"]["cgroupsPath"]
    pid = json.loads(bundle.call(runtime, "state", bundle.name).ok().stdout)["pid"]
    move = 'mkdir -p "$1" && echo "$2" >"$1/cgroup.procs"'
    try:
        bundle.call("sh", "-ec", move, "sh", f"{tree}{own}-other", str(pid)).ok()
        words = ("repair", "--config", configs[runtime], bundle.name)
        failed = bundle.call(installation.command, *words).failed()
        assert "container's first process is in the cgroup" in failed.stderr
        assert "but its devices were allowed in" in failed.stderr
    finally:
        back = 'echo "$2" >"$1/cgroup.procs"; rmdir "$1-other"'
        bundle.call("sh", "-c", back, "sh", f"{tree}{own}", str(pid))
