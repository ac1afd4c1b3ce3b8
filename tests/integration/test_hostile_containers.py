"""Hostile namespaces, mounts and volumes, started for real by runc and crun."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.bundles import Bundle, GpuBundle, Spec
from harness.commands import run
from harness.driver import Driver
from harness.hostile import FOLDER, change_image, mount_volume, refused, start
from harness.inside import look, seen
from harness.installation import write_config
from harness.prefork import RUNTIMES
from harness.sandbox import contents
from harness.snapshot import nothing_left


@pytest.fixture
def stranger(bundle: Bundle) -> Iterator[int]:
    """A process in its own mount namespace that belongs to no container."""
    argv = bundle.namespace.enter("unshare", "--mount", "sh", "-c", "echo; exec sleep infinity")
    argv = ["setpriv", "--pdeathsig=KILL", *argv]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.protects(
    "mount-namespace",
    "a container that uses another one's mount namespace is refused before it is created",
    only="mount_namespace_of_another and crun",
)
@pytest.mark.protects(
    "namespace-path",
    "an existing mount namespace isn't accepted as the container's own",
    instead='return any(True for item in self._namespaces("mount"))',
)
@pytest.mark.parametrize("owner", ["the caller's", "a stranger's"])
@RUNTIMES
def test_sharing_the_mount_namespace_of_another_container_is_refused(
    bundle: GpuBundle, driver: Driver, stranger: int, tmp_path: Path, owner: str
) -> None:
    """The low-level runtime would mount in that namespace, so gpu-py refuses before it starts."""

    def mutate(spec: Spec) -> None:
        namespaces = spec["linux"]["namespaces"]
        [ours] = [item for item in namespaces if item["type"] == "mount"]
        namespaces.remove(ours)
        if owner == "a stranger's":
            namespaces.append({"type": "mount", "path": f"/proc/{stranger}/ns/mnt"})

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    started, runtime = tmp_path / "started", tmp_path / "low-level"
    runtime.write_text(f'#!/bin/sh\ntouch {started}\nexec {bundle.runtime} "$@"\n')
    runtime.chmod(0o755)
    config = write_config(tmp_path / "config", driver.root, [runtime])
    before = contents(driver.root / "etc"), mount_table(stranger)
    result = start(bundle, driver.root, config=config)
    assert "gpu-py: " in refused(result, "no mount namespace of its own")
    assert not started.exists()
    assert (contents(driver.root / "etc"), mount_table(stranger)) == before


def mount_table(pid: int) -> str:
    return Path(f"/proc/{pid}/mountinfo").read_text()


@pytest.mark.parametrize("stage", ["createContainer", "startContainer"])
@RUNTIMES
def test_a_hook_in_a_late_stage_is_refused(bundle: GpuBundle, driver: Driver, stage: str) -> None:
    bundle.by_hook(stage=stage)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    with nothing_left(driver.root, pid=bundle.namespace.pid):
        refused(bundle.run(bundle.runtime, bundle.env))


@pytest.mark.protects(
    "owner-mapped",
    "files created in a container with a user namespace belong to its root user",
    instead="if True or owner == (0, 0):",
    only="user_namespace and runc-host",
)
def test_files_made_in_a_user_namespace_belong_to_its_root(
    bundle: GpuBundle, driver: Driver
) -> None:
    """Files created in the image belong to the container's root user."""

    def mutate(spec: Spec) -> None:
        spec["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            spec["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]

    bundle.change(mutate)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=2")
    change_image(bundle, "chown -R 100000:100000 .; chmod 755 .")
    run(["chmod", "-R", "go+X", "/run/gpuhook-test"])
    bundle.command(*look(libraries=["libcuda.so.1", "libnvidia-ml.so.1"]))
    inside = seen(start(bundle, driver.root))
    assert inside.gpu_minors == {driver.gpus[2].minor}
    assert all(path != "-" for path, _ in inside.libraries.values())
    made = f"{FOLDER}/libcuda.so.1 etc/ld.so.cache {FOLDER}/libcuda.so.{driver.version}"
    owners = bundle.call("stat", "-c", "%u:%g", *made.split(), cwd=bundle.root).ok().stdout
    assert set(owners.split()) == {"100000:100000"}


@pytest.mark.parametrize("propagation", ["shared", "rshared", "slave", "rslave", "private"])
@RUNTIMES
def test_mounts_do_not_propagate_to_the_host(
    bundle: GpuBundle, driver: Driver, propagation: str
) -> None:
    bundle.change(lambda spec: spec["linux"].update(rootfsPropagation=propagation))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    result = start(bundle, driver.root)
    if result.status != 0:
        refused(result, "shared")


VOLUMES: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: None,
    "with a cache": lambda folder: (folder / "ld.so.cache").touch(),
    "with files": lambda folder: (folder / "libcuda.so.1").touch(),
}


@pytest.mark.parametrize("propagation", ["rprivate", "rshared"])
@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("destination", [f"/{FOLDER}/nvidia", "/etc", "/dev", "/run", "/usr/bin"])
@RUNTIMES
def test_volumes_stay_unchanged(
    bundle: GpuBundle, driver: Driver, tmp_path: Path, destination: str, kind: str, propagation: str
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    VOLUMES[kind](volume)
    mount_volume(bundle, volume, destination, "rw", propagation)
    bundle.change(lambda spec: spec["linux"].update(rootfsPropagation="rshared"))
    bundle.environ("NVIDIA_VISIBLE_DEVICES=all")
    before = run(["sh", "-c", f"cd {volume}; find . | sort"]).ok().stdout
    result = bundle.start()
    after = run(["sh", "-c", f"cd {volume}; find . | sort"]).ok().stdout
    if destination != "/dev":  # the runtime itself makes its nodes in /dev
        assert after == before
    assert "nvidia" not in after
    if result.status != 0:
        refused(result)


@RUNTIMES
def test_the_hosts_folders_can_be_mounted_as_volumes(bundle: GpuBundle, driver: Driver) -> None:
    for source, destination in (("usr/lib/x86_64-linux-gnu", "/opt/lib"), ("run", "/run")):
        mount_volume(bundle, driver.root / source, destination, "rw")
    bundle.environ("NVIDIA_VISIBLE_DEVICES=1")
    bundle.command(*look(libraries=["libcuda.so.1"]))
    inside = seen(start(bundle, driver.root))
    assert inside.gpu_minors == {driver.gpus[1].minor}
