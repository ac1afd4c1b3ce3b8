"""Configurations of claims: time slices, MPS, memory limits, shares."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dra_kubelet import Claim, PodError
from harness import bundles
from harness.bundles import Bundle
from harness.commands import run, wait_until
from harness.dra import GPU_DRIVER, Node, one_node, result, slice_name
from harness.driver import Driver, simulate
from harness.images import CUDA_PROBE
from harness.installation import Installation
from harness.mps import daemons
from harness.namespaces import Namespace, host_cgroups, runtime_layouts

from gpuhook.core.cdi import apply, folders

NVIDIA = "resource.nvidia.com/v1beta1"
EACH = "defaultPerDevicePinnedMemoryLimit"
V2 = [pair for pair in runtime_layouts() if pair[1] == "v2" or host_cgroups() == "v2"]
ONE = pytest.mark.parametrize("low_level", V2[:1], ids="-".join, indirect=True)
EIGHT = ["CUDA memory: 8192 MiB of 8192 MiB", "CUDA allocated: 8 GiB of 9 GiB"]
# Replaces nvidia-smi. NVIDIA's own program sets time slices, but can't run in the tests.
SMI = """#!{shell}
printf '%s\\n' "$*" >>{log}
! [ -e {log}.fails ]
"""


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    words = ("--gpus=3", "--model=H100", "--set=driver-version=615.10.01", "--set=mig=2:1g.10gb")
    return simulate(installation, tmp_path / "root", *words)


@pytest.fixture
def node(installation: Installation, workspace: Path, driver: Driver) -> Iterator[Node]:
    with one_node(workspace, installation, driver.root) as made:
        yield made


def config(parameters: Any, *requests: str, source: str = "FromClaim") -> Any:
    opaque = {"driver": GPU_DRIVER, "parameters": parameters}
    return {"source": source, "requests": [*requests], "opaque": opaque}


def gpu_config(**sharing: Any) -> Any:
    return {"apiVersion": NVIDIA, "kind": "GpuConfig", "sharing": sharing}


def sliced(interval: str) -> Any:
    return gpu_config(strategy="TimeSlicing", timeSlicingConfig={"interval": interval})


def ask(node: Node, claim: Claim) -> Any:
    return node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]


def gpu(driver: Driver, number: int) -> str:
    return slice_name(driver.gpus[number].uuid)


def modes(driver: Driver) -> list[int]:
    """Return the compute modes of the GPUs, as the driver stores them."""
    try:
        text = (driver.root / "simulate/compute").read_text()
    except FileNotFoundError:
        text = ""
    found = dict(line.split(" ") for line in text.splitlines())
    return [int(found.get(str(each.index), 0)) for each in driver.gpus]


REFUSED = {
    "an unknown field": ([config({**sliced("Short"), "color": "red"})], "knows no 'color'"),
    "an unknown field below": (
        [config(gpu_config(strategy="MPS", mpsConfig={"oneUser": None}))],
        "knows no 'oneUser' in mpsConfig",
    ),
    "several users": (
        [config(gpu_config(strategy="MPS", mpsConfig={"multiUser": True}))],
        "mpsConfig.multiUser is 'True'",
    ),
    "a limit of another device": (
        [config(gpu_config(strategy="MPS", mpsConfig={EACH: {"1": "8Gi"}}))],
        f"mpsConfig.{EACH} has '1', and the claim has GPU-",
    ),
    "a limit that is no size": (
        [config(gpu_config(strategy="MPS", mpsConfig={EACH: {"0": None}}))],
        f"mpsConfig.{EACH}[0] is 'None'",
    ),
    "an unknown kind": ([config({"apiVersion": NVIDIA, "kind": "VfioDeviceConfig"})], "VfioDevice"),
    "an unknown group": ([config({"apiVersion": "x.io/v1", "kind": "A"})], "'x.io/v1'"),
    "an unknown interval": ([config(sliced("Endless"))], "interval is 'Endless'"),
    "two strategies": (
        [config(gpu_config(strategy="MPS", timeSlicingConfig={}))],
        "sharing.strategy is 'MPS'",
    ),
    "other devices": (
        [config({"apiVersion": NVIDIA, "kind": "MigDeviceConfig"}, "gpu")],
        "another kind of device",
    ),
    "no size": (
        [config({"apiVersion": "gpuhook.io/v1", "kind": "DeviceConfig", "memory": "much"})],
        "memory is 'much'",
    ),
    "a field of ours": (
        [config({"apiVersion": "gpuhook.io/v1", "kind": "DeviceConfig", "cores": 3})],
        "knows no 'cores'",
    ),
    "no parameters": ([config(None)], "has no parameters"),
}


@pytest.mark.protects(
    "dra-unknown-fields", "unknown fields in a DRA claim's configuration are refused"
)
def test_an_invalid_claim_configuration_is_refused(node: Node, driver: Driver) -> None:
    with node.service():
        for name, (configs, words) in REFUSED.items():
            claim = node.claim("a", result(gpu(driver, 0)), config=configs)
            found = ask(node, claim)
            assert isinstance(found, str), name
            assert words in found.replace('"', "'"), (name, found)
            assert node.left() == [], name
        status = node.claims / "ns_a.status"
        wait_until(status.exists, "the claim's status says why")
        [device] = json.loads(status.read_text())["devices"]
        assert device["device"] == gpu(driver, 0)
        assert device["conditions"][0]["status"] == "False"


@pytest.mark.protects(
    "dra-admin-changes-nothing", "a DRA claim with adminAccess changes no setting of a device"
)
def test_an_admin_access_claim_changes_no_settings(node: Node, driver: Driver) -> None:
    """A claim with adminAccess may have devices that other claims use."""
    for parameters in (sliced("Short"), gpu_config(strategy="MPS")):
        looking = result(gpu(driver, 0), "look", adminAccess=True)
        claim = node.claim("a", looking, config=[config(parameters)])
        other = node.claim("b", looking, config=[config(parameters, "gpu")])
        with node.service():
            assert "has adminAccess to" in ask(node, claim)
            assert node.left() == []
            assert not isinstance(ask(node, other), str)
            node.kubelet.unprepare(GPU_DRIVER, other)
    assert modes(driver) == [0, 0, 0]


def put_smi(driver: Driver, shell: str, log: str) -> None:
    program = driver.root / "usr/bin/nvidia-smi"
    program.unlink()
    program.write_text(SMI.format(shell=shell, log=log))
    program.chmod(0o755)


@pytest.mark.parametrize("whole", [False, True], ids=["here", "in the driver root"])
def test_time_slices_follow_the_precedence_of_configurations(
    node: Node, driver: Driver, whole: bool
) -> None:
    """nvidia-smi runs in the driver root, because a pod may lack the driver's dependencies."""
    log = (driver.root if whole else node.folder) / "smi"
    shell = "/only/in/the/root/sh" if whole else "/bin/sh"
    put_smi(driver, shell, "/smi" if whole else str(log))
    if whole:
        (driver.root / shell[1:]).parent.mkdir(parents=True)
        shutil.copy("/bin/busybox", driver.root / shell[1:])
    uuids = [each.uuid for each in driver.gpus]
    configs = [
        config(sliced("Long"), source="FromClaim"),  # has priority over the class, which is later
        config(sliced("Medium"), "b/big", source="FromClaim"),  # for a subrequest, and later
        config(sliced("Short"), source="FromClass"),
        config({"apiVersion": NVIDIA, "kind": "MigDeviceConfig"}),  # for other devices
    ]
    names = (result(gpu(driver, 0), "a"), result(gpu(driver, 1), "b/big"))
    claim = node.claim("a", *names, config=configs)
    with node.service():
        assert not isinstance(ask(node, claim), str)
        set_to = [f"compute-policy -i {uuids[0]} --set-timeslice=3",
                  f"compute-policy -i {uuids[1]} --set-timeslice=2"]  # fmt: skip
        assert [line for line in log.read_text().splitlines() if "--set" in line] == set_to
        log.unlink()
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        # The earlier value can't be read from this program's output.
        assert [line for line in log.read_text().splitlines() if "--set" in line] == [
            f"compute-policy -i {uuid} --set-timeslice=0" for uuid in uuids[:2]
        ]
        failing = log.with_name("smi.fails")
        failing.touch()
        assert "can't set the time slice" in ask(node, claim)
        assert node.documents() == []
        failing.unlink()
        assert not isinstance(ask(node, claim), str)


REFUSING = {
    "no time slices": (sliced("Long"), "can't set the time slice", "smi.fails"),
    "no compute modes": (gpu_config(strategy="MPS"), "Insufficient", "simulate/compute"),
}


@pytest.mark.protects(
    "dra-slice-refused",
    "DRA: a GPU that refuses a time slice remains available to other claims",
    instead='if refused: failures.append(UnchangedSetting(device, SLICE, refused, ""))\nif False:',
)
@pytest.mark.parametrize("name", [*REFUSING])
def test_a_gpu_that_refuses_a_setting_is_usable_by_other_claims(
    node: Node, driver: Driver, name: str
) -> None:
    """Such a GPU is older than Volta, for example; a refused setting needs no restoration."""
    wanted, words, place = REFUSING[name]
    put_smi(driver, "/bin/sh", str(driver.root / "smi"))
    (driver.root / place).mkdir()  # a folder, so that writing to this path fails
    claim = node.claim("a", result(gpu(driver, 0)), config=[config(wanted)])
    other = node.claim("b", result(gpu(driver, 0)))
    with node.service():
        for _ in range(2):
            assert words in ask(node, claim)
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert not isinstance(ask(node, other), str)
        assert node.kubelet.unprepare(GPU_DRIVER, other) == {other.uid: ""}
        assert node.left() == []


@pytest.mark.protects(
    "mps-mode-there",
    "a compute mode that a GPU already has isn't set again, as some GPUs refuse that",
    instead="if True:",
)
def test_a_mode_that_a_gpu_has_already_is_not_set(node: Node, driver: Driver) -> None:
    """Some GPUs refuse every mode, even their current one."""
    put_smi(driver, "/bin/sh", str(driver.root / "smi"))
    (driver.root / "simulate/compute").mkdir()  # a folder, so that writing to this path fails
    claim = node.claim("a", result(gpu(driver, 0)), config=[config(sliced("Long"))])
    with node.service():
        assert not isinstance(ask(node, claim), str)
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert node.left() == []


@pytest.mark.protects(
    "dra-lost-holds-none",
    "DRA: a lost GPU of an MPS claim doesn't block the claim's healthy GPUs",
    instead="if not failure.final:",
)
@pytest.mark.protects("dra-shares-sum", "DRA shares of a device never exceed its memory in total")
def test_a_lost_gpu_does_not_hold_other_gpus_of_its_claim(
    node: Node, driver: Driver, installation: Installation
) -> None:
    """A lost GPU returns after a reboot at best, while the claim's other GPUs are healthy."""
    both = [result(gpu(driver, 0)), result(gpu(driver, 1))]
    claim = node.claim("a", *both, config=[config(gpu_config(strategy="MPS"))])
    other = node.claim("b", result(gpu(driver, 1)))
    with node.service():
        assert not isinstance(ask(node, claim), str)
        run([installation.command, "simulate", driver.root, "--lost=0"]).ok()
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert not isinstance(ask(node, other), str)
        assert node.kubelet.unprepare(GPU_DRIVER, other) == {other.uid: ""}
        assert node.left() == []


def test_a_setting_is_refused_early_if_its_program_cannot_run(node: Node, driver: Driver) -> None:
    put_smi(driver, "/nowhere/sh", "/smi")
    control = driver.root / "usr/bin/nvidia-cuda-mps-control"
    control.unlink()
    control.write_text("#!/only/in/the/root/sh\n")
    control.chmod(0o755)
    refusals = {
        "needs /nowhere/sh, which neither this system nor": sliced("Short"),
        "MPS programs don't run in this pod": gpu_config(strategy="MPS"),
    }
    with node.service():
        for said, wanted in refusals.items():
            claim = node.claim("a", result(gpu(driver, 0)), config=[config(wanted)])
            assert said in ask(node, claim)
            assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        put_smi(driver, "/bin/sh", str(node.folder / "smi"))
        claim = node.claim("b", result(gpu(driver, 0)), config=[config(sliced("Short"))])
        assert not isinstance(ask(node, claim), str)
        (driver.root / "usr/bin/nvidia-smi").unlink()  # the driver's package was removed
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}


def test_a_claim_gets_its_own_mps_daemon(node: Node, driver: Driver) -> None:
    words = {"defaultActiveThreadPercentage": 40, "defaultPinnedDeviceMemoryLimit": "8Gi"}
    configs = [config(gpu_config(strategy="MPS", mpsConfig=words))]
    claim = node.claim("a", result(gpu(driver, 0)), result(gpu(driver, 1)), config=configs)
    with node.service() as process:
        found = ask(node, claim)
        assert not isinstance(found, str), found
        assert modes(driver)[:2] == [3, 3]
        [daemon] = daemons(driver)
        edits = node.document(claim)["devices"][0]["containerEdits"]
        assert "CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps" in edits["env"]
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40" in edits["env"]
        [place] = [each["hostPath"] for each in edits["mounts"]
                   if each["containerPath"] == "/run/nvidia-mps"]  # fmt: skip
        assert os.path.isdir(place)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert daemons(driver) == [daemon]  # containers keep running meanwhile
    os.kill(int(daemon), signal.SIGKILL)
    with node.service():
        wait_until(lambda: len(daemons(driver)) == 1, "it is started again")
        assert ask(node, claim) == found
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert daemons(driver) == []
        assert modes(driver) == [0, 0, 0]
        assert not [*node.config.parent.glob("state/dra/nvidia-*")]
        mig = node.claim("m", result(_mig(node)), config=configs)
        assert not isinstance(ask(node, mig), str)  # a GpuConfig doesn't apply to MIG devices


def test_mps_memory_limits_apply_to_each_device(node: Node, driver: Driver) -> None:
    """The MPS daemon has the limits, so a client's variable can't remove them."""
    first, second = sorted(each.uuid for each in driver.gpus[:2])
    words = {"defaultPinnedDeviceMemoryLimit": "8Gi", EACH: {"1": "4Gi"}}
    configs = [config(gpu_config(strategy="MPS", mpsConfig=words))]
    claim = node.claim("a", result(gpu(driver, 0)), result(gpu(driver, 1)), config=configs)
    by_name = {EACH: {first: "2Gi", "1": "2Gi"}}
    same = [config(gpu_config(strategy="MPS", mpsConfig=by_name))]
    with node.service():
        assert not isinstance(ask(node, claim), str)
        kept = json.loads(mps_state(node).partition("\n")[2])
        memory = {each["uuid"]: each["memory"] >> 20 for each in kept["devices"]}
        assert memory == {first: 8192, second: 4096}
        said = [told(node, driver, f"get_default_device_pinned_mem_limit {n}") for n in (0, 1)]
        assert said == [f"{memory[each['uuid']]}M\n" for each in kept["devices"]]
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        alike = node.claim("b", result(gpu(driver, 0)), result(gpu(driver, 1)), config=same)
        assert not isinstance(ask(node, alike), str)
        assert json.loads(mps_state(node).partition("\n")[2])["version"] == 3
        assert told(node, driver, "namespace list").split() == [
            "c00,gpuhook,,2048M",
            "c01,gpuhook,,2048M",
        ]
        assert node.kubelet.unprepare(GPU_DRIVER, alike) == {alike.uid: ""}


def mps_state(node: Node) -> str:
    """Return the recorded state of the only MPS daemon of claims."""
    [path] = node.config.parent.glob("state/dra/nvidia-*/mps.json")
    return path.read_text()


def told(node: Node, driver: Driver, line: str) -> str:
    """Return the MPS daemon's response to a line."""
    [pipe] = node.config.parent.glob("state/dra/nvidia-*/mps/pipe")
    program = driver.root / "usr/bin/nvidia-cuda-mps-control"
    done = subprocess.run(
        [program], input=f"{line}\n", capture_output=True, text=True, check=True, timeout=60,
        env={"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    return done.stdout


@pytest.mark.protects(
    "dra-started-first", "changes for a DRA claim are recorded before they are made", instead="pass"
)
@pytest.mark.parametrize("point", [14, 22, 30, 38, 46])
def test_an_mps_start_that_was_killed_is_undone(point: int, node: Node, driver: Driver) -> None:
    """Processes that were started until then are stopped, and the compute mode is restored."""
    configs = [config(gpu_config(strategy="MPS"))]
    claim = node.claim("a", result(gpu(driver, 0)), config=configs)
    with node.killed("prepare", point), node.service(killable=True), suppress(PodError):
        ask(node, claim)
    with node.service():
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert node.left() == []
        assert daemons(driver) == []
        assert modes(driver) == [0, 0, 0]


def _mig(node: Node) -> str:
    plugin = node.kubelet.wait(GPU_DRIVER)
    node.kubelet.wait_until(lambda: plugin.lists > 0, "health is said")
    return next(name for _, name in plugin.devices if "-mig-" in name)


@pytest.mark.protects("dra-shares", "a DRA claim to a share of a device has a memory limit")
@pytest.mark.protects(
    "dra-limit-holds", "a DRA claim with an unenforceable memory limit is refused"
)
def test_an_unenforceable_memory_limit_is_refused(node: Node, driver: Driver) -> None:
    """This host has no cgroup v2, so neither shares nor memory limits are possible."""
    if host_cgroups() == "v2":
        pytest.skip("this machine has cgroup v2")
    ours = config({"apiVersion": "gpuhook.io/v1", "kind": "DeviceConfig", "memory": "8Gi"})
    claim = node.claim("a", result(gpu(driver, 0)), config=[ours])
    share = {"shareID": "671a50c0-5b3a-4f4c-8b1f-4f2d5a3b1c2d"}
    consumed = {"consumedCapacity": {"memory": "8Gi"}}
    shared = node.claim("b", {**result(gpu(driver, 1)), **share, **consumed})
    bare = node.claim("c", result(gpu(driver, 1), **share))
    with node.service():
        assert "need cgroup v2" in ask(node, claim)
        assert "need cgroup v2" in ask(node, shared)
        assert "only shares with a memory limit" in ask(node, bare)
        assert node.left() == []


def run_claimed(node: Node, made: Bundle, installation: Installation, *names: str) -> list[str]:
    """Run a bundle with CDI names, as an engine does; return CUDA's output about memory."""
    found = folders.read_folders([str(node.cdi)])
    edits = apply.resolve(found, names)
    made.change(lambda spec: spec.update(apply.apply(spec, edits)))
    done = made.run(installation.runtime, {"GPUHOOK_CONFIG": str(node.config)})
    assert done.status == 0 or "OUT_OF_MEMORY" in done.stderr, done
    return [line for line in done.stdout.splitlines() if "memory" in line or "allocated" in line]


def limited(made: Bundle, *settings: str) -> Bundle:
    """Return a bundle with the cgroups that engines mount; its program allocates 9 GiB."""

    def see_cgroups(spec: Any) -> None:
        options = ["nosuid", "noexec", "nodev", "relatime", "ro"]
        mount = {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
        spec["mounts"].append({**mount, "options": options})
        spec["linux"]["namespaces"].append({"type": "cgroup"})

    made.change(see_cgroups)
    made.environ(*settings)
    made.command("sh", "-c", f"{CUDA_PROBE} 9")
    return made


@pytest.mark.protects("dra-shares-sum", "DRA shares of a device never exceed its memory in total")
@ONE
def test_memory_limits_and_shares_of_claims_hold_in_containers(
    node: Node,
    driver: Driver,
    installation: Installation,
    workspace: Path,
    roots: dict[str, Path],
    low_level: tuple[str, Namespace],
) -> None:
    runtime, node.namespace = low_level
    node.config.write_text(node.config.read_text().replace('"runc"', f'"{runtime}"'))
    ours = config({"apiVersion": "gpuhook.io/v1", "kind": "DeviceConfig", "memory": "8Gi"})
    claim = node.claim("a", result(gpu(driver, 0)), config=[ours])
    shares = [
        node.claim(
            f"s{number}",
            result(gpu(driver, 1), shareID=f"share-{number}", consumedCapacity={"memory": size}),
        )
        for number, size in enumerate(("8Gi", "16Gi", "500Gi", "60Gi"))
    ]
    whole = node.claim("whole", result(gpu(driver, 1)))
    place = (workspace / "bundles", roots["debian"], node.namespace, runtime)
    with node.service():
        [device] = ask(node, claim)
        with bundles.bundle(*place) as made:
            env = "GPUHOOK_DEVICE_MEMORY=100%"  # a pod's own variable doesn't raise the limit
            assert run_claimed(node, limited(made, env), installation, *device.cdi) == EIGHT
        [one], [two] = (ask(node, each) for each in shares[:2])
        assert {one.share, two.share} == {"share-0", "share-1"}
        assert "and it has" in ask(node, shares[2])
        assert "of memory together" in ask(node, shares[3])
        assert "is claim ns/s" in ask(node, whole)
        for share, gib in ((one, 8), (two, 16)):
            with bundles.bundle(*place) as made:
                first = f"CUDA memory: {gib << 10} MiB of {gib << 10} MiB"
                assert run_claimed(node, limited(made), installation, *share.cdi)[0] == first
        names = (*device.cdi, *two.cdi)
        for number, gib in ((0, 8), (1, 16)):  # two claims in one container
            with bundles.bundle(*place) as made:
                one_of_them = limited(made, f"CUDA_VISIBLE_DEVICES={number}")
                first = f"CUDA memory: {gib << 10} MiB of {gib << 10} MiB"
                assert run_claimed(node, one_of_them, installation, *names)[0] == first
