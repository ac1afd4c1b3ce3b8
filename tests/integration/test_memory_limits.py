"""Memory limits for containers on GPUs, with real runtimes and cgroup v2.

The driver and its enforcement of limits are simulated, because NVIDIA's driver 615, which
enforces them, runs on no host of these tests.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from harness import bundles
from harness.bundles import Bundle, Spec
from harness.cdi import generate, give
from harness.commands import Result, path_of, wait_until
from harness.driver import Driver, simulate
from harness.images import CUDA_PROBE
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, host_cgroups, runtime_layouts
from harness.recorder import recorder

from gpuhook.core.records import records
from gpuhook.core.request.sources import SOURCE, memory_limit_place

GIB = 1 << 30
OPTIONS = ("--gpus=2", "--model=H100", "--set=driver-version=615.10.01")
V2 = [pair for pair in runtime_layouts() if pair[1] == "v2" or host_cgroups() == "v2"]
RUNTIMES = pytest.mark.parametrize("low_level", V2, ids="-".join, indirect=True)
ONE = pytest.mark.parametrize("low_level", V2[:1], ids="-".join, indirect=True)
OLD = pytest.mark.parametrize(
    "low_level", [pair for pair in runtime_layouts() if pair not in V2][:1], indirect=True
)
QUIET = ("sh", "-c", 'exec "$@" </dev/null >output 2>&1', "sh")
# How a container gets GPUs: by gpu-py in each mode, by only the hook (with the helper on or off),
# and by an engine that reads CDI with gpu-py as its runtime.
WAYS = ("hook", "spec", "cdi", "alone", "unhelped", "engine")
EIGHT = ["CUDA memory: 8192 MiB of 8192 MiB", "CUDA allocated: 8 GiB of 9 GiB"]
NINE = ["CUDA allocated: 9 GiB of 9 GiB"]


@pytest.fixture(scope="module")
def limited(workspace: Path, installation: Installation) -> Driver:
    """A simulated machine whose driver enforces limits."""
    return simulate(installation, workspace / "driver-615", *OPTIONS)


@dataclass
class Place:
    """A place to start containers with memory limits, each in its own bundle."""

    installation: Installation
    runtime: str
    namespace: Namespace
    folder: Path
    bundle: Callable[[], Bundle]
    driver: Driver

    def configured(self, mode: str = "hook", limits: str = "", own: str = "") -> Path:
        """Return a new configuration for the machine, with ``limits`` in [gpuhook.limits]."""
        folder = self.folder / f"etc-{len(list(self.folder.iterdir()))}"
        documents = f'[nvidia-container-runtime.modes.cdi]\nspec-dirs = ["{self.folder}/cdi"]\n'
        more = f'mode = "{mode}"\n{documents}[gpuhook.limits]\n{limits}'
        config = write_config(folder, self.driver.root, [self.runtime], more)
        config.write_text(config.read_text().replace("[gpuhook]\n", f"[gpuhook]\n{own}"))
        return config

    def made(self, *settings: str, command: str = f"{CUDA_PROBE} 9") -> Bundle:
        """Return a bundle that sees its cgroups as Docker's containers do."""
        made = self.bundle()

        def see_cgroups(spec: Spec) -> None:
            options = ["nosuid", "noexec", "nodev", "relatime", "ro"]
            mount = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
            spec["mounts"].append({**mount, "options": options})
            spec["linux"]["namespaces"].append({"type": "cgroup"})

        made.change(see_cgroups)
        made.environ(*settings)
        made.command("sh", "-c", command)
        return made

    def run(self, made: Bundle, way: str = "hook", limits: str = "") -> Result:
        """Run a bundle whose container gets GPU 0 in the given way."""
        mode = way if way in ("spec", "cdi") else "hook"
        config = self.configured(mode, limits, "helper = false\n" if way == "unhelped" else "")
        if way in ("cdi", "engine"):
            document = generate(self.installation, config, self.folder / "cdi")
        if way == "engine":
            give(made, document, "0")
        else:
            made.environ("NVIDIA_VISIBLE_DEVICES=0")
        if way == "alone":
            made.prestart(self.installation.hook, config)
        program = self.runtime if way == "alone" else self.installation.runtime
        return made.run(program, {"GPUHOOK_CONFIG": str(config)})


@pytest.fixture
def place(
    workspace: Path,
    roots: dict[str, Path],
    installation: Installation,
    limited: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Place]:
    runtime, entered = low_level
    with ExitStack() as stack:

        def bundle() -> Bundle:
            made = bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime)
            return stack.enter_context(made)

        yield Place(installation, runtime, entered, tmp_path, bundle, limited)


def told(done: Result) -> list[str]:
    return [line for line in done.stdout.splitlines() if "memory" in line or "allocated" in line]


@pytest.mark.protects(
    "limit-set",
    "a container's program starts only after its memory limit is set",
    only="has_its_limit and hook and runc",
)
@RUNTIMES
@pytest.mark.parametrize("way", WAYS)
def test_a_container_has_its_limit(place: Place, way: str) -> None:
    done = place.run(place.made("GPUHOOK_DEVICE_MEMORY=8GiB"), way)
    assert told(done) == EIGHT, done
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in done.stderr
    assert told(place.run(place.made(), way))[1:] == NINE, "its neighbour has none"


@ONE
@pytest.mark.parametrize("way", WAYS)
def test_an_administrators_limit_applies_to_every_container(place: Place, way: str) -> None:
    done = place.run(place.made(), way, 'most-device-memory = "8GiB"\n')
    assert told(done) == EIGHT, done
    done = place.run(place.made("GPUHOOK_DEVICE_MEMORY=100%"), way, 'most-device-memory = "8GiB"\n')
    assert told(done) == EIGHT, "and none of it makes it wider"


@RUNTIMES
@pytest.mark.parametrize("way", WAYS)
def test_nvidias_own_variables_limit_a_container(place: Place, way: str) -> None:
    """NVIDIA's toolkit reads these variables from 1.20.1 on, in whole MiB."""
    limit, request = "NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST"
    done = place.run(place.made(f"{limit}=8192", f"{request}=1024"), way)
    assert told(done) == EIGHT, done
    done = place.run(place.made(f"{limit}=1024", f"{request}=2048", command="echo started"), way)
    assert (done.status != 0, "started" in done.stdout) == (True, False)
    is_said(place, done, f"{request} asks for 2048MiB, which is more than 1024MiB in {limit}")


@RUNTIMES
@pytest.mark.parametrize("way", WAYS)
def test_a_pods_annotations_limit_its_containers(place: Place, way: str) -> None:
    """The KAI scheduler writes these annotations, and the engine must pass them on."""
    note = "nvidia.com/container.{}.gpu-memory.{}"
    name = {"io.kubernetes.cri.container-name": "main"}
    given = {note.format("main", "limit"): "8Gi", note.format("other", "request"): "1Gi"}
    made = place.made()
    made.change(lambda spec: spec.update(annotations={**name, **given}))
    assert told(place.run(made, way)) == EIGHT
    made = place.made(command="echo started")
    given = {**given, note.format("main", "request"): "9Gi"}
    made.change(lambda spec: spec.update(annotations={**name, **given}))
    done = place.run(made, way)
    assert (done.status != 0, "started" in done.stdout) == (True, False)
    is_said(place, done, "asks for 9Gi, which is more than 8Gi")


def with_nvidias_hook(place: Place, own: str, *env: str, ids: tuple[str, ...]) -> Bundle:
    """Return a container that got GPU 0 from its engine, with hooks named as NVIDIA's toolkit."""
    link = place.folder / "nvidia-cdi-hook"
    if not link.is_symlink():
        link.symlink_to(place.installation.bin / "gpuhook-cdi-hook")
    config = place.configured(own=own)
    made = place.made(*env, command="sleep 999")
    give(made, generate(place.installation, config, place.folder / "cdi"), "0")
    words = ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root=/", "--gpu-id"]
    hook = {"path": str(link), "env": [f"GPUHOOK_CONFIG={config}"]}
    hooks = [{**hook, "args": [*words, each]} for each in ids]
    made.change(lambda spec: spec.update(hooks={"createRuntime": hooks}))
    return made


@RUNTIMES
@pytest.mark.parametrize("own", ["", 'exclusive = ["nvidia.com/gpu"]\n'])
def test_nvidias_limit_hook_sets_the_limit_once(place: Place, own: str) -> None:
    """NVIDIA's specs call the hook once for each GPU; a second call changes nothing."""
    uuid = place.driver.gpus[0].uuid
    made = with_nvidias_hook(place, own, "NVIDIA_GPU_MEMORY_LIMIT=8192", ids=(uuid, uuid))
    made.detach(place.runtime, place.folder / "none.toml")
    states = place.folder.glob("etc-*/state")
    [record] = [each for state in states for each in records.read_all(str(state))]
    assert [each["bytes"] for each in record["limits"]] == [8 * GIB]
    folder = f"/sys/fs/cgroup{record['cgroups']['2']}"
    there = f"import os; print(os.getxattr({folder!r}, 'user.gpuhook.limit.{uuid}').decode())"
    assert place.namespace.run(sys.executable, "-c", there).ok().stdout == f"0 {8 * GIB}\n"


@ONE
def test_nvidias_hook_without_a_limit_does_nothing(place: Place) -> None:
    made = with_nvidias_hook(place, "", ids=("GPU-of-another-spec",))
    made.detach(place.runtime, place.folder / "none.toml")


@pytest.mark.protects(
    "limit-named-gpu",
    "NVIDIA's hook for limits is refused for a GPU that the container doesn't have",
)
@RUNTIMES
def test_nvidias_hook_for_another_gpu_is_refused(place: Place) -> None:
    uuid = place.driver.gpus[1].uuid
    made = with_nvidias_hook(place, "", "NVIDIA_GPU_MEMORY_LIMIT=8192", ids=(uuid,))
    done = made.run(place.runtime)
    assert done.status != 0
    is_said(place, done, "isn't one of the container's devices")


REFUSED = {
    "old driver": (("--gpus=1", "--set=driver-version=610.10"), "", "since release 615"),
    "MIG": ((*OPTIONS, "--set=mig=0:1g.10gb"), "", "no limits for GPUs in MIG mode"),
    "no cgroups in the root": (OPTIONS, "sys/fs/cgroup", "The folder "),
    "no file systems in the root": (OPTIONS, "sys/fs", "The folder "),
}


@ONE
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("way", ["hook", "spec", "alone"])
def test_a_limit_that_the_driver_does_not_support_is_refused(
    place: Place, installation: Installation, name: str, way: str
) -> None:
    options, without, why = REFUSED[name]
    place.driver = simulate(installation, place.folder / "other", *options)
    if without:
        shutil.rmtree(place.driver.root / without)
        why += f"{place.driver.root}/sys/fs/cgroup"
    done = place.run(place.made("GPUHOOK_DEVICE_MEMORY=8GiB", command="echo started"), way)
    assert done.status != 0
    assert "started" not in done.stdout
    is_said(place, done, why)


def is_said(place: Place, done: Result, why: str) -> None:
    """Assert that an error is printed, or that it is in a log where crun doesn't print it."""
    kept = [path.read_text() for path in place.folder.glob("etc-*/state/errors.log")]
    assert why in done.stderr or any(why in text for text in kept), done


@ONE
@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("8G", "isn't a memory size"),
        ("0", "isn't a memory size"),
        ("90GiB", "which has"),
        ("1=8GiB", "isn't one of the container's devices"),
        ("0-1=8GiB", "isn't one of the container's devices"),
        ("amd.com/gpu=0=8GiB", "isn't one of the container's devices"),
        ("../0=8GiB", "isn't one of the container's devices"),
    ],
)
def test_an_invalid_memory_limit_is_refused(place: Place, word: str, why: str) -> None:
    done = place.run(place.made(f"GPUHOOK_DEVICE_MEMORY={word}", command="echo started"))
    assert done.status != 0
    assert "started" not in done.stdout
    is_said(place, done, why)


@OLD
@pytest.mark.parametrize("way", ["hook", "spec", "alone"])
def test_a_limit_on_cgroup_v1_is_refused(place: Place, way: str) -> None:
    made = place.bundle()
    made.environ("GPUHOOK_DEVICE_MEMORY=8GiB")
    made.command("echo", "started")
    done = place.run(made, way)
    assert done.status != 0
    assert "started" not in done.stdout
    is_said(place, done, "limits memory by cgroup v2 at /sys/fs/cgroup, and here it is at")


@ONE
def test_a_device_without_a_limit_is_refused_where_one_is_required(place: Place) -> None:
    required = "required = true\n"
    for way in ("hook", "engine"):
        done = place.run(place.made(command="echo started"), way, required)
        assert done.status != 0
        is_said(place, done, "gives no device without a memory limit")
    assert told(place.run(place.made("GPUHOOK_DEVICE_MEMORY=8GiB"), "hook", required)) == EIGHT


@pytest.mark.protects(
    "limits-launcher",
    "the launcher doesn't bypass gpu-py for containers with an administrator's memory limit",
    instead="pass",
)
@ONE
@pytest.mark.parametrize(
    ("limits", "env"),
    [('device-memory = "8GiB"\n', ()), ("", ("GPUHOOK_DEVICE_MEMORY=8GiB",))],
)
def test_a_plain_device_node_gets_the_limit_too(
    place: Place, limits: str, env: tuple[str, ...]
) -> None:
    """An engine's --device names no vendor.

    The launcher already knows the configuration when the container starts.
    """
    config = place.configured(limits=limits)
    past = time.time() - 10  # as if the configuration wasn't just written
    for each in (config, config.parent):
        os.utime(each, (past, past))
    words = {"GPUHOOK_CONFIG": str(config)}
    warm = place.made(command="true")
    warm.run(place.installation.runtime, words).ok()
    made = place.made(*env, command="sleep 999")
    node = place.driver.root / f"dev/nvidia{place.driver.gpus[1].minor}"
    mount = {"source": str(node), "destination": "/dev/nvidia0", "options": ["bind"]}
    made.change(lambda spec: spec["mounts"].append(mount))
    made.detach(place.installation.runtime, config)
    [record] = records.read_all(str(config.parent / "state"))
    assert [(each["device"], each["bytes"]) for each in record["limits"]] == [("1", 8 * GIB)]


@ONE
def test_a_limit_with_a_cdi_spec_alone_is_refused(place: Place) -> None:
    """The spec's hook is in the container's cgroup namespace, and can't see the cgroup's path."""
    config = place.configured()
    document = generate(place.installation, config, place.folder / "cdi")
    made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", command="echo started")
    give(made, document, "0")
    done = made.run(place.runtime)
    assert done.status != 0
    assert "started" not in done.stdout
    is_said(place, done, "A memory limit needs cgroup v2")


@pytest.mark.protects(
    "cgroup-alone",
    "a memory limit isn't set in a cgroup with other processes in it",
    instead="pass",
)
@ONE
@pytest.mark.parametrize("way", ["hook", "spec", "alone"])
def test_a_limit_in_a_cgroup_with_other_processes_is_refused(place: Place, way: str) -> None:
    """A limit would apply to all containers there, and the next one's would replace it."""
    name = f"gpuhook-{os.getpid()}-{place.folder.name}"
    folder = f"/sys/fs/cgroup/{name}"
    stays = f"mkdir {folder} && echo $$ >{folder}/cgroup.procs && echo in && exec sleep 999"
    with subprocess.Popen(
        place.namespace.enter("sh", "-ec", stays), stdout=subprocess.PIPE
    ) as neighbour:
        try:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == b"in\n"
            made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", command="echo started")
            made.change(lambda spec: spec["linux"].update(cgroupsPath=f"/{name}"))
            done = place.run(made, way)
        finally:
            neighbour.kill()
            neighbour.wait()
            wait_until(lambda: place.namespace.run("rmdir", folder).status == 0, "it is removed")
    assert done.status != 0
    assert "started" not in done.stdout
    # From 1.2 on, at the latest, runc itself refuses such a cgroup.
    if "cgroup is not empty" not in done.stderr:
        is_said(place, done, "has other processes")


@RUNTIMES
def test_a_lost_limit_is_restored_by_repair(place: Place) -> None:
    config = place.configured()
    made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", "NVIDIA_VISIBLE_DEVICES=0", command="sleep 999")
    made.detach(place.installation.runtime, config)
    [record] = [
        each for each in records.read_all(str(config.parent / "state")) if each["id"] == made.name
    ]
    assert [each["bytes"] for each in record["limits"]] == [8 * GIB]
    folder = Path(f"/sys/fs/cgroup{record['cgroups']['2']}")
    name = f"user.gpuhook.limit.{place.driver.gpus[0].uuid}"
    call = place.namespace.run
    gone = f"import os; os.removexattr({str(folder)!r}, {name!r})"
    there = f"import os; print(os.getxattr({str(folder)!r}, {name!r}).decode())"
    python = sys.executable
    assert call(python, "-c", there).ok().stdout == f"0 {8 * GIB}\n"
    call(python, "-c", gone).ok()
    said = call(place.installation.command, "repair", "--all", "--config", config).ok()
    assert "the memory limit" in said.stdout, said
    assert call(python, "-c", there).ok().stdout == f"0 {8 * GIB}\n"


# A hook that sets a soft limit of 4 GiB on a container's cgroup, as other software does.
SOFT = """#!{python}
import json, os, sys
pid = json.load(sys.stdin)["pid"]
[path] = [line[3:-1] for line in open(f"/proc/{{pid}}/cgroup") if line.startswith("0::")]
os.setxattr(f"/sys/fs/cgroup{{path}}", "user.gpuhook.limit.{uuid}", b"{soft} {hard}")
"""
LIMITS = """
import os, sys
folder = sys.argv[1]
while folder.startswith("/sys/fs/cgroup"):
    if os.path.isdir(folder):
        names = [name for name in os.listxattr(folder) if "gpuhook.limit" in name]
        print(folder, *(os.getxattr(folder, name).decode() for name in names), sep="|")
    folder = os.path.dirname(folder)
"""


@RUNTIMES
@pytest.mark.parametrize("is_set_before", [False, True])
@pytest.mark.parametrize("way", ["hook", "spec", "alone"])
def test_no_soft_limit_remains(place: Place, way: str, is_set_before: bool) -> None:
    """This applies to the container's cgroup, and after its end to the cgroups above it."""
    config = place.configured(way if way == "spec" else "hook")
    uuid = place.driver.gpus[0].uuid
    settings = ("NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_GPU_MEMORY_REQUEST=8192")
    made = place.made(*settings, command="sleep 999")
    if way == "alone":
        made.prestart(place.installation.hook, config)
    if is_set_before:
        other = made.path / "other-hook"
        sizes = {"soft": 4 * GIB, "hard": 16 * GIB}
        other.write_text(SOFT.format(python=sys.executable, uuid=uuid, **sizes))
        other.chmod(0o755)
        first = {"path": str(other)}
        made.change(
            lambda spec: spec.setdefault("hooks", {}).setdefault("prestart", []).insert(0, first)
        )
    made.detach(place.runtime if way == "alone" else place.installation.runtime, config)
    [record] = records.read_all(str(config.parent / "state"))
    folder = f"/sys/fs/cgroup{record['cgroups']['2']}"

    def limits() -> list[str]:
        done = place.namespace.run(sys.executable, "-c", LIMITS, folder).ok()
        return [line for line in done.stdout.splitlines() if line.count("|")]

    assert limits() == [f"{folder}|0 {8 * GIB}"]
    made.call(place.runtime, "kill", made.name, "KILL")
    delete = (place.runtime, "delete", "--force", made.name)
    wait_until(lambda: made.call(*delete).status == 0, "it is gone")
    wait_until(lambda: limits() == [], "its cgroup is gone")


@ONE
def test_list_and_stats_show_memory_use_and_limit(place: Place) -> None:
    """The driver's own list of processes shows 2 GiB for the container's first process."""
    config = place.configured()
    made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", "NVIDIA_VISIBLE_DEVICES=0", command="sleep 999")
    made.detach(place.installation.runtime, config)
    [record] = records.read_all(str(config.parent / "state"))
    root, command = place.driver.root, place.installation.command
    made.call(command, "simulate", root, "--process", f"0,{record['pid']},2G,50").ok()
    words = ("--config", config)
    listed = json.loads(made.call(command, "list", *words, "--format", "json").ok().stdout)
    [container] = listed["containers"]
    uuid = place.driver.gpus[0].uuid
    used, limit = {"memory_used_bytes": 2 * GIB}, {"memory_limit_bytes": 8 * GIB}
    old = {"used": 2 * GIB, "limit": 8 * GIB, "source": "nvml"}  # keys of earlier releases
    expected = {"device": uuid, **used, **limit, "memory_source": "nvml", **old}
    assert container["memory"] == [expected]
    shown = made.call(command, "list", *words).ok().stdout
    assert "2048MiB" in shown
    assert "8GiB" in shown
    looking = ("stats", "--no-stream", *words, "--format", "json")
    stats = json.loads(made.call(command, *looking).ok().stdout)
    [use] = [each for one in stats["containers"] for each in one["devices"]]
    keys = ("memory_used_bytes", "memory_limit_bytes", "memory_source")
    assert [use[key] for key in keys] == [2 * GIB, 8 * GIB, "nvml"]


@ONE
def test_a_limit_of_a_cdi_spec_cannot_be_raised(place: Place) -> None:
    """Specs of a DRA driver for claims have the limit in a mount, in addition to the device."""
    config = place.configured()
    document = generate(place.installation, config, place.folder / "cdi")
    wider = "GPUHOOK_DEVICE_MEMORY=70GiB"
    folder = "/var/run/nvidia-container-devices"
    limit = memory_limit_place(folder, place.driver.gpus[0].uuid, "8GiB")

    def mount(spec: Spec) -> None:
        spec["mounts"].append({"source": SOURCE, "destination": limit, "options": ["bind"]})

    for env in ((), (wider,), (wider, "NVIDIA_VISIBLE_DEVICES=0")):
        made = place.made()
        give(made, document, "0")
        made.environ(*env)
        made.change(mount)
        done = made.run(place.installation.runtime, {"GPUHOOK_CONFIG": str(config)})
        assert told(done) == EIGHT, (env, done)


@ONE
def test_explain_shows_a_limit_with_its_reason(place: Place) -> None:
    config = place.configured()
    words = ("explain", "--config", config, "--format", "json", "--bundle")
    made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", "NVIDIA_VISIBLE_DEVICES=0")
    done = made.call(place.installation.command, *words, made.path).ok()
    found: list[dict[str, Any]] = json.loads(done.stdout)["operations"]
    [operation] = [each for each in found if each["kind"] == "limit-memory"]
    assert (operation["bytes"], operation["device"]) == (8 * GIB, "0")
    assert operation["reason"] == "GPUHOOK_DEVICE_MEMORY says 8GiB"


# Mounts by which a container reaches the host's cgroups: the source, and the options.
REACHING = {
    "above, read-only at the top alone": ("/sys", ["rbind", "ro"]),
    "all of the host": ("/", ["rbind", "rslave", "ro"]),
    "a link to above": ("LINK", ["rbind"]),
    "a link to above, read-only at the top alone": ("LINK", ["rbind", "ro"]),
    "a name below the bundle": ("RELATIVE", ["rbind"]),
    "read-only taken back": ("/sys/fs/cgroup", ["rbind", "ro", "rrw"]),
}
LEAVES = (
    "for f in /host /host/fs/cgroup /host/sys/fs/cgroup; do "
    "test ! -e $f/cgroup.procs || { echo 0 >$f/cgroup.procs && echo left; }; done"
)


MOST = 'most-device-memory = "8GiB"\n'


@ONE
@pytest.mark.parametrize("way", ["hook", "spec", "engine"])  # each uses another hook of gpuhook
def test_a_volume_changed_to_cgroups_after_the_check_is_refused(place: Place, way: str) -> None:
    """A user who may change the target of a volume's source changes it before the mount."""
    harmless, link = place.folder / "harmless", place.folder / "link"
    harmless.mkdir()
    link.symlink_to(harmless)
    changing = place.folder / "runc"
    changing.write_text(
        f'#!/bin/sh\ncase " $* " in *" create "*|*" run "*) ln -sfn /sys {link};; esac\n'
        f'exec {path_of(place.runtime)} "$@"\n'
    )
    changing.chmod(0o755)
    made = place.made(command=f"{LEAVES}; echo began")
    mount = {"destination": "/host", "type": "bind", "source": str(link), "options": ["rbind"]}
    made.change(lambda spec: spec["mounts"].append(mount))
    done = replace(place, runtime=str(changing)).run(made, way, MOST)
    assert link.readlink() == Path("/sys")
    assert "began" not in done.stdout, done
    is_said(place, done, "may write to cgroups, which are mounted at '/host/fs/cgroup")


@ONE
@pytest.mark.parametrize("way", ["hook", "spec", "engine"])
def test_no_container_makes_a_cgroup_below_its_own(place: Place, way: str) -> None:
    """Root in a new user namespace may mount its cgroup, and NVIDIA's driver counts each cgroup."""
    made = place.made(command="owncgroup")
    every = {name: [*bundles.CAPABILITIES, "CAP_SETFCAP"] for name in ("bounding", "permitted")}
    every["effective"] = every["bounding"]  # as Docker sets them
    made.change(lambda spec: spec["process"].update(capabilities=every))
    assert "mount OK\nbelow EAGAIN\n" in place.run(made, way, MOST).ok().stdout
    assert "below OK" in place.run(made, "alone", "").ok().stdout, "as it is without"


@ONE
def test_cgroups_covered_by_another_mount_are_refused(place: Place) -> None:
    """With podman's -v /sys:/sys:ro, for example, its own mount of cgroups comes on top.

    If a mount in a volume covers the cgroups, another user of the volume can move it by
    renaming a folder.
    """
    made = place.made(command=f"mkdir /sys/fs/cgroup/away; {CUDA_PROBE} 9")
    mount = {"destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"]}

    def cover(spec: Spec) -> None:
        at = [each["destination"] for each in spec["mounts"]].index("/sys/fs/cgroup")
        spec["mounts"].insert(at, mount)

    made.change(cover)
    done = place.run(made, "hook", MOST)
    is_said(place, done, "may write to cgroups, which are mounted at '/sys/fs/cgroup")


@ONE
def test_a_mount_at_the_path_of_cgroups_is_checked(place: Place) -> None:
    """Paths in config.json don't show where links lead."""
    out, root, empty = (place.folder / name for name in ("out", "root", "empty"))
    for folder in (out, root, empty / "own"):
        folder.mkdir(parents=True)
    (out / "own").symlink_to("/tmp")
    (root / "up").symlink_to("/")
    made = place.made(command="mkdir /v/own/away && echo left")

    def lead(spec: Spec) -> None:
        [own] = [each for each in spec["mounts"] if each["destination"] == "/sys/fs/cgroup"]
        spec["mounts"].remove(own)
        spec["mounts"] += [
            bound("/v", out),
            bound("/x", root),
            {**own, "destination": "/v/own"},  # read-only, and mounted at /tmp by the link
            bound("/x/up/v", empty),  # to /v
            bound("/x/up/v/own", Path("/sys/fs/cgroup")),
        ]

    made.change(lead)
    done = place.run(made, "hook", MOST)
    assert "left" not in done.stdout, done
    is_said(place, done, "may write to cgroups, which are mounted at '/v/own'")


def bound(destination: str, source: Path) -> Spec:
    """Return a volume in the form that config.json has."""
    return {"destination": destination, "source": str(source), "type": "bind", "options": ["rbind"]}


@ONE
@pytest.mark.parametrize("name", REACHING)
def test_a_mount_that_lets_a_container_leave_its_cgroup_is_refused(place: Place, name: str) -> None:
    source, options = REACHING[name]
    link = place.folder / "link"
    link.symlink_to("/sys")
    made = place.made(command=LEAVES)
    source = {"LINK": str(link), "RELATIVE": os.path.relpath("/sys", made.path)}.get(source, source)
    mount = {"destination": "/host", "type": "bind", "source": source, "options": options}
    made.change(lambda spec: spec["mounts"].append(mount))
    done = place.run(made, "hook", MOST)
    assert "left" not in done.stdout, done
    is_said(place, done, "may write to cgroups, which are mounted at '/host")


@pytest.mark.protects(
    "cgroup-owners",
    "a memory limit isn't set in a cgroup that another user can move processes out of",
)
@ONE
@pytest.mark.parametrize("way", ["hook", "spec", "alone"])
def test_a_limit_below_a_cgroup_of_another_user_is_refused(place: Place, way: str) -> None:
    """That user could move the container's processes out of the container's cgroup."""
    name = f"gpuhook-{os.getpid()}-{place.folder.name}"
    folder = f"/sys/fs/cgroup/{name}"
    made = place.made("GPUHOOK_DEVICE_MEMORY=8GiB", command="echo started")
    made.change(lambda spec: spec["linux"].update(cgroupsPath=f"/{name}/own"))
    place.namespace.run("sh", "-ec", f"mkdir {folder}; chown -R 1000:1000 {folder}").ok()
    try:
        done = place.run(made, way)
    finally:
        wait_until(lambda: place.namespace.run("rmdir", folder).status == 0, "it is removed")
    assert done.status != 0
    assert "started" not in done.stdout
    is_said(place, done, "other users may write to")


RESTORING = {
    "limits": (True, 'most-device-memory = "8GiB"\n', "", ()),
    "an exclusive device": (True, "", 'exclusive = ["nvidia.com/gpu"]\n', ()),
    "its own limit": (True, "", "", ("GPUHOOK_DEVICE_MEMORY=8GiB",)),
    "neither": (False, "", "", ()),
}


@pytest.mark.protects(
    "restored-limits",
    "a container restored from a checkpoint can't bypass memory limits or exclusive devices",
)
@ONE
@pytest.mark.parametrize("bundle", ["--bundle=BUNDLE", "--bundle BUNDLE", "-bBUNDLE", ""])
@pytest.mark.parametrize("name", RESTORING)
def test_a_checkpoint_restore_with_a_limit_or_a_lease_is_refused(
    place: Place, name: str, bundle: str
) -> None:
    """A runtime that restores a container creates a new one, on which our hooks don't run.

    The runtime here is a program that only records its calls, because the host has no CRIU.
    """
    refused, limits, own, env = RESTORING[name]
    recording = recorder(place.folder / "recorder", "exit 7")
    place.runtime = str(recording.path)
    config = place.configured(limits=limits, own=own)
    made = place.made(*env)
    node = place.driver.root / f"dev/nvidia{place.driver.gpus[0].minor}"
    mount = {"source": str(node), "destination": "/dev/nvidia0", "options": ["bind"]}
    made.change(lambda spec: spec["mounts"].append(mount))
    words = ["restore", "--image-path=/x", *bundle.replace("BUNDLE", str(made.path)).split(), "ID"]
    done = made.call(place.installation.runtime, *words, env={"GPUHOOK_CONFIG": str(config)})
    assert done.status == (1 if refused else 7), done
    assert len(recording.calls()) == (0 if refused else 1)
    if refused:
        is_said(place, done, "restored from a checkpoint")
