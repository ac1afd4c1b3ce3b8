"""Device settings: the owner restores its changes, and changes no setting that others need."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dra_kubelet import Claim, PodError
from harness import bundles
from harness.commands import Result, run, wait_until
from harness.device_plugin import device_plugin
from harness.dra import GPU_DRIVER, Node, result, slice_name
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config
from harness.metrics import GPUHOOK
from harness.mps import daemons
from harness.namespaces import Namespace
from harness.prefork import ONE
from pod_resources import PodResources

NVIDIA = "resource.nvidia.com/v1beta1"
GPU = "nvidia.com/gpu"
DEFAULT, PROHIBITED, EXCLUSIVE_PROCESS = 0, 2, 3
SHORT, LONG = 1, 3
MOST = 80  # limit of file changes for one claim, far above the real number
# Settings that the administrator has made by hand on GPU 0.
MODES, SLICES = {0: EXCLUSIVE_PROCESS}, {0: SHORT}


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    words = ("--gpus=2", "--model=H100", "--set=driver-version=615.10.01")
    made = simulate(installation, tmp_path / "root", *words)
    put(made, "compute", MODES)
    put(made, "timeslice", SLICES)
    return made


@pytest.fixture
def node(
    installation: Installation, workspace: Path, tmp_path: Path, driver: Driver
) -> Iterator[Node]:
    folder = workspace / f"s{hash(tmp_path) & 0xFFFFFFFF:x}"
    config = write_config(folder.with_suffix(".etc"), driver.root, ["runc"])
    made = Node(folder, installation, config, more={"killable": True})
    with made.kubelet:
        yield made


def put(driver: Driver, name: str, values: dict[int, int]) -> None:
    text = "".join(f"{gpu} {value}\n" for gpu, value in values.items())
    (driver.root / "simulate" / name).write_text(text)


def values(driver: Driver, name: str) -> dict[int, int]:
    """Return a setting of the GPUs where it isn't the default, as the driver stores it."""
    text = (driver.root / "simulate" / name).read_text()
    return {int(gpu): int(value) for gpu, value in map(str.split, text.splitlines())}


def state(driver: Driver) -> tuple[dict[int, int], dict[int, int]]:
    return values(driver, "compute"), values(driver, "timeslice")


def config(sharing: Any, *requests: str) -> Any:
    parameters = {"apiVersion": NVIDIA, "kind": "GpuConfig", "sharing": sharing}
    opaque = {"driver": GPU_DRIVER, "parameters": parameters}
    return {"source": "FromClaim", "requests": [*requests], "opaque": opaque}


def sliced(interval: str = "Default", *requests: str) -> Any:
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": interval}}
    return config(sharing, *requests)


def by_mps(*requests: str, **limits: Any) -> Any:
    return config({"strategy": "MPS", "mpsConfig": limits}, *requests)


def gpu(driver: Driver, number: int) -> str:
    return slice_name(driver.gpus[number].uuid)


def ask(node: Node, claim: Claim) -> str:
    """Return the error of preparing a claim, or "" on success."""
    found = node.kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
    return found if isinstance(found, str) else ""


def refusals(node: Node, driver: Driver) -> dict[str, tuple[Claim, str]]:
    """Return claims that are refused late, each with words of the error."""
    first, second = result(gpu(driver, 0), "a"), result(gpu(driver, 1), "b")
    greedy = by_mps("b", defaultPinnedDeviceMemoryLimit="900Gi")
    seventh = by_mps("b", defaultPerDevicePinnedMemoryLimit={"7": "1Gi"})
    return {
        "another device's limit": (
            node.claim("limit", first, second, config=[sliced("Default", "a"), greedy]),
            "The memory limit of GPU 1",
        ),
        "a limit of no device": (
            node.claim("none", first, second, config=[sliced("Default", "a"), seventh]),
            "has '7'",
        ),
        "a lost device": (
            node.claim("lost", first, result("gpu-0", "b"), config=[sliced("Long", "a")]),
            "isn't here",
        ),
    }


@pytest.mark.protects(
    "dra-document-first",
    "DRA: a claim's CDI spec is checked before any device is changed",
    instead="pass",
)
@pytest.mark.protects(
    "dra-mps-asked",
    "DRA: a claim's MPS limits are checked before any device is changed",
    instead="pass",
)
@pytest.mark.protects(
    "setting-read",
    "a device setting that can't be read isn't changed",
    instead="for device, title in ():",
)
def test_a_refused_claim_changes_no_setting(node: Node, driver: Driver) -> None:
    """No setting changes even for a moment, because all conditions are checked first."""
    files = [driver.root / "simulate" / name for name in ("compute", "timeslice")]
    times = [path.stat().st_mtime_ns for path in files]
    with node.service():
        for name, (claim, words) in refusals(node, driver).items():
            assert words in ask(node, claim).replace('"', "'"), name
            assert state(driver) == (MODES, SLICES), name
            assert node.left() == [], name
        node_path = driver.root / f"dev/nvidia{driver.gpus[1].minor}"
        kept = node_path.with_name("kept")
        claim = node.claim("n", result(gpu(driver, 0)), result(gpu(driver, 1)), config=[sliced()])
        node_path.rename(kept)
        try:
            answer = ask(node, claim)  # the second message if the service has noticed it before
            assert "doesn't report the compute mode" in answer or "isn't here" in answer
        finally:
            kept.rename(node_path)
        assert state(driver) == (MODES, SLICES)
    for path in driver.root.glob("usr/lib/*/libcuda.so*"):
        path.unlink()  # gpuhook can't make a CDI spec for an incomplete driver
    claim = node.claim("part", result(gpu(driver, 0)), config=[sliced("Long")])
    with node.service():
        assert "asks for compute" in ask(node, claim)
        assert node.left() == []
    assert [path.stat().st_mtime_ns for path in files] == times


def no_room(node: Node) -> None:
    """Fill the filesystem of the CDI folder, so that no CDI spec can be written."""
    run(["mount", "-t", "tmpfs", "-o", "size=4k,mode=755", "gpuhook-test", node.cdi]).ok()
    (node.cdi / "full").write_bytes(bytes(4096))


def no_time_slices(driver: Driver) -> None:
    (driver.root / "simulate/timeslice").unlink()
    (driver.root / "simulate/timeslice").mkdir()


def no_daemon(driver: Driver, command: str) -> None:
    program = driver.root / "usr/bin/nvidia-cuda-mps-control"
    program.unlink()
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)


@pytest.mark.protects(
    "dra-refused-undone",
    "DRA: a preparation that fails after a device was changed is rolled back at once",
    instead="pass",
)
@pytest.mark.parametrize("what", ["the document", "the time slice", "the daemon"])
def test_settings_are_restored_at_once_after_a_failed_prepare(
    node: Node, driver: Driver, what: str
) -> None:
    """The kubelet may not try again for a minute, or never."""
    wanted, words, slices = sliced("Long"), "can't be written", SLICES
    if what == "the time slice":
        no_time_slices(driver)
        words, slices = "can't set the time slice", {}
    elif what == "the daemon":
        no_daemon(driver, "echo no luck >&2; exit 3")
        wanted, words = by_mps(), "no luck"
    claim = node.claim("a", result(gpu(driver, 0)), config=[wanted])
    with node.service():
        if what == "the document":
            no_room(node)
        try:
            assert words in ask(node, claim)
        finally:
            if what == "the document":
                run(["umount", node.cdi]).ok()
        assert values(driver, "compute") == MODES
        assert slices == {} or values(driver, "timeslice") == slices
        assert node.left() == []


def test_settings_are_restored_after_a_killed_service_restarts(node: Node, driver: Driver) -> None:
    """Each claim then restores its own settings."""
    first = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    second = node.claim("b", result(gpu(driver, 1)), config=[by_mps()])
    with node.service() as process:
        assert ask(node, first) == ask(node, second) == ""
        assert state(driver) == ({1: EXCLUSIVE_PROCESS}, {0: LONG})
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with node.service():
        assert ask(node, first) == ""  # prepared again, which changes nothing
        assert state(driver) == ({1: EXCLUSIVE_PROCESS}, {0: LONG})
        assert node.kubelet.unprepare(GPU_DRIVER, second) == {second.uid: ""}
        assert state(driver) == ({}, {0: LONG})
        assert node.kubelet.unprepare(GPU_DRIVER, first) == {first.uid: ""}
        assert state(driver) == (MODES, SLICES)
        assert not daemons(driver)
        assert node.left() == []


@pytest.mark.protects(
    "anothers-change",
    "a setting that another program has changed meanwhile isn't overwritten by a restore",
    instead="return True",
)
def test_a_setting_changed_by_another_program_is_not_restored(node: Node, driver: Driver) -> None:
    claim = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    with node.service():
        assert ask(node, claim) == ""
        put(driver, "compute", {0: PROHIBITED})
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert state(driver) == ({0: PROHIBITED}, SLICES)


@pytest.mark.parametrize(("verb", "least"), [("prepare", 12), ("unprepare", 3)])
def test_settings_are_restored_after_a_kill_at_every_point(
    node: Node, driver: Driver, verb: str, least: int
) -> None:
    """The next request restores the settings, whichever step the killed one had reached."""
    claim = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    for point in range(1, MOST, 2):
        was_killed = True
        with node.service() as service:
            if verb == "unprepare":
                assert ask(node, claim) == ""
            with node.killed(verb, point), suppress(PodError):
                getattr(node.kubelet, verb)(GPU_DRIVER, claim)
                was_killed = False
            if was_killed:
                service.wait(timeout=300)
        with node.service():
            assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
            assert state(driver) == (MODES, SLICES), point
            assert node.left() == [], point
        if not was_killed:
            break
    assert least < point < MOST - 2


def test_after_a_reboot_no_setting_is_restored(node: Node, driver: Driver) -> None:
    """The driver was restarted, so later settings are another program's."""
    claim = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    with node.service():
        assert ask(node, claim) == ""
    [record] = node.written()
    written = json.loads(record.read_text())
    record.write_text(json.dumps({**written, "boot": "an earlier one"}))
    put(driver, "compute", {0: DEFAULT})
    put(driver, "timeslice", {0: LONG})
    with node.service():
        wait_until(lambda: not node.left(), "nothing is left of it")
        assert state(driver) == ({0: DEFAULT}, {0: LONG})
        assert ask(node, claim) == ""
        assert node.kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        assert state(driver)[1] == {0: LONG}


@pytest.mark.protects(
    "mode-prohibited",
    "DRA: a claim can't change a compute mode that the administrator set to prohibited",
)
def test_a_gpu_prohibited_by_the_administrator_is_refused_and_unchanged(
    node: Node, driver: Driver
) -> None:
    put(driver, "compute", {0: PROHIBITED})
    with node.service():
        for wanted in (sliced(), by_mps()):
            claim = node.claim("a", result(gpu(driver, 0)), config=[wanted])
            assert "has prohibited computing" in ask(node, claim)
            assert values(driver, "compute") == {0: PROHIBITED}
            assert node.left() == []


# Other owners -----------------------------------------------------------------------------------


def mps(node: Node, verb: str, devices: str = "0", *options: str | Path) -> Result:
    """Run gpuhook mps with a separate configuration, which shares those devices."""
    own = node.config.with_name("mps.toml")
    own.write_text(f'{node.config.read_text()}[gpuhook.mps]\ndevices = "{devices}"\n')
    env = {"GPUHOOK_CONFIG": str(own)}
    program = GPUHOOK if options else (node.installation.command,)  # the program there lacks gRPC
    return run([*program, "mps", verb, *options], env=env)


@pytest.fixture
def ended(node: Node) -> Iterator[None]:
    yield
    mps(node, "stop").ok()


@pytest.mark.protects(
    "mps-not-a-claims",
    "MPS doesn't share a device that is allocated to a claim",
    instead="for ours, record in ():",
)
@pytest.mark.usefixtures("ended")
def test_mps_and_claims_refuse_each_others_gpus(node: Node, driver: Driver) -> None:
    """Each refuses GPUs of the other before any change; released GPUs are free again."""
    claims = {
        name: node.claim(name, result(gpu(driver, 0)), config=configs)
        for name, configs in {"plain": [], "sliced": [sliced()], "mps": [by_mps()]}.items()
    }
    other = node.claim("other", result(gpu(driver, 1)), config=[sliced("Long")])
    with node.service():
        assert ask(node, claims["sliced"]) == ""
        assert state(driver) == ({}, {})
        refused = mps(node, "start")
        assert "GPU 0 is claim ns/sliced's" in refused.stderr
        assert not daemons(driver)
        node.kubelet.unprepare(GPU_DRIVER, claims["sliced"])
        assert state(driver) == (MODES, SLICES)
        put(driver, "compute", {})
        mps(node, "start").ok()
        for name, claim in claims.items():
            assert "shared by MPS" in ask(node, claim), name
            assert state(driver) == ({0: EXCLUSIVE_PROCESS}, SLICES), name
        assert ask(node, other) == ""
        assert "GPU 1 is claim ns/other's" in mps(node, "start", "0,1").stderr
        assert len(daemons(driver)) == 1  # the serving daemon continues to run
        assert values(driver, "compute") == {0: EXCLUSIVE_PROCESS}
        mps(node, "stop").ok()
        assert values(driver, "compute") == {}
        assert ask(node, claims["sliced"]) == ""


def grow_old(node: Node) -> None:
    """Make the device plugin's records ten minutes older."""
    for path in node.records.glob("pod_*"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "at": record["at"] - 600}))


@pytest.mark.protects(
    "mps-not-a-pods", "MPS doesn't share a device that the device plugin allocated to a pod"
)
@pytest.mark.protects(
    "pods-device", "a device stays reserved for its pod while the kubelet lists it"
)
@pytest.mark.protects(
    "pods-unknown",
    "a device stays reserved for its pod while the kubelet doesn't answer",
    instead="if known is None and (known := frozenset()):",
)
@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("replicas", [1, 2])
def test_mps_refuses_a_gpu_that_the_device_plugin_gave_a_pod(
    node: Node, driver: Driver, tmp_path: Path, replicas: int
) -> None:
    """A daemon of another GPU keeps running; the GPU is free after its pod has ended."""
    put(driver, "compute", {})
    shared = f"sharing: {{timeSlicing: {{resources: [{{name: {GPU}, replicas: {replicas}}}]}}}}\n"
    file = tmp_path / "plugin.yaml"
    file.write_text(shared if replicas > 1 else "version: v1\n")
    socket = node.folder / "pods.sock"
    asked = ("--pod-resources", socket)
    words = (f"--config-file={file}",)
    with device_plugin(node.folder / "dp", node.installation, node.config, GPU, *words) as plugin:
        [name] = plugin.admit("one", {GPU: 1})["ids"][GPU]
        uuids = [gpu.uuid for gpu in driver.gpus]
        number = uuids.index(name.partition("::")[0])
        mps(node, "start", str(1 - number), *asked).ok()
        [daemon] = daemons(driver)
        said = mps(node, "start", "all", *asked).stderr
        assert f"GPU {number} is allocated to a pod that asked for {GPU}" in said
        grow_old(node)
        assert "doesn't report whether its pod ended" in mps(node, "start", "0,1", *asked).stderr
        with PodResources(socket, ("ns", "one", "main", GPU, (name,))) as kubelet:
            assert "so MPS can't share it" in mps(node, "start", "0,1", *asked).stderr
            assert values(driver, "compute") == {1 - number: EXCLUSIVE_PROCESS}
            assert daemons(driver) == [daemon]
            kubelet.given.clear()
            mps(node, "start", "0,1", *asked).ok()
        assert values(driver, "compute") == {0: EXCLUSIVE_PROCESS, 1: EXCLUSIVE_PROCESS}


@pytest.mark.protects(
    "mps-clients-stay",
    "MPS can be started again while pods are its clients",
    instead="others = taken",
)
@pytest.mark.usefixtures("ended")
def test_mps_restarts_while_pods_are_its_clients(node: Node, driver: Driver) -> None:
    with device_plugin(node.folder / "dp", node.installation, node.config, GPU) as plugin:
        mps(node, "start", "0,1").ok()
        plugin.admit("one", {GPU: 2})
        for verb in ("start", "stop", "start"):
            mps(node, verb, "0,1").ok()
        assert len(daemons(driver)) == 1


@pytest.mark.usefixtures("ended")
def test_mps_start_sets_a_mode_again_that_another_program_changed(
    node: Node, driver: Driver
) -> None:
    put(driver, "compute", {0: PROHIBITED})
    mps(node, "start").ok()
    put(driver, "compute", {})
    mps(node, "start").ok()
    assert values(driver, "compute") == {0: EXCLUSIVE_PROCESS}
    mps(node, "stop").ok()
    assert values(driver, "compute") == {0: PROHIBITED}


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("seed", [1, 2])
def test_claims_mps_and_kills_in_any_order_leave_correct_settings(
    node: Node, driver: Driver, seed: int
) -> None:
    """After each step, every setting is its owner's or the original one."""
    chance = random.Random(seed)  # noqa: S311 - the same each time
    first = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    second = node.claim("b", result(gpu(driver, 1)), config=[by_mps()])
    claims = {"a": first, "b": second}
    owners = {0: "", 1: ""}

    def prepare(name: str) -> None:
        number = [*claims].index(name)
        refused = ask(node, claims[name])
        assert ("shared by MPS" in refused) == (owners[number] == "mps"), refused
        owners[number] = owners[number] or name

    def unprepare(name: str) -> None:
        assert node.kubelet.unprepare(GPU_DRIVER, claims[name]) == {claims[name].uid: ""}
        number = [*claims].index(name)
        owners[number] = "" if owners[number] == name else owners[number]

    def start() -> None:
        said = mps(node, "start", "1")
        assert ("is claim ns/b's" in said.stderr) == (owners[1] == "b"), said.stderr
        owners[1] = owners[1] or "mps"

    def stop() -> None:
        mps(node, "stop").ok()
        owners[1] = owners[1].replace("mps", "")

    steps: list[Callable[[], None]] = [
        lambda: prepare("a"),
        lambda: unprepare("a"),
        lambda: prepare("b"),
    ]
    steps += [lambda: unprepare("b"), start, stop]
    for _ in range(4):
        with node.service() as process:
            for step in chance.choices(steps, k=6):
                step()
                wanted = {0: EXCLUSIVE_PROCESS} if not owners[0] else {}
                wanted |= {1: EXCLUSIVE_PROCESS} if owners[1] else {}
                assert state(driver) == (wanted, {0: LONG if owners[0] else SHORT}), owners
            if chance.random() < 0.5:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def doctor(node: Node) -> str:
    said = run([node.installation.command, "doctor"], env={"GPUHOOK_CONFIG": str(node.config)})
    return "\n".join(line for line in said.stdout.splitlines() if "device-settings" in line)


@pytest.mark.usefixtures("ended")
def test_doctor_reports_settings_that_differ_from_the_drivers(node: Node, driver: Driver) -> None:
    claim = node.claim("a", result(gpu(driver, 0)), config=[sliced("Long")])
    uuids = [each.uuid for each in driver.gpus]
    with node.service():
        assert doctor(node) == ""
        assert ask(node, claim) == ""
        mps(node, "start", "1").ok()
        assert "changed: 3, all as set" in doctor(node)
        put(driver, "compute", {0: PROHIBITED})
        put(driver, "timeslice", {0: SHORT})
        said = doctor(node)
        assert (
            f"The compute mode of {uuids[0]} is Prohibited, and claim ns/a has set it to Default "
            "(before that it was Exclusive_Process)"
        ) in said
        assert (
            f"The time slice of {uuids[0]} is Short, and claim ns/a has set it to Long "
            "(before that it was Short)"
        ) in said
        assert (
            f"The compute mode of {uuids[1]} is Default, and gpuhook mps has set it to "
            "Exclusive_Process (before that it was Default)"
        ) in said
        mps(node, "start", "1").ok()
        assert uuids[1] not in doctor(node)
        node.kubelet.unprepare(GPU_DRIVER, claim)
        assert "changed: 1, all as set" in doctor(node)
    [record] = node.records.glob("mps.json")
    kept = record.read_text()
    record.write_text("{")
    try:
        assert f"{record} can't be read" in doctor(node)
    finally:
        record.write_text(kept)


@pytest.mark.protects(
    "mps-unreadable",
    "MPS: a start is refused if a damaged record hides the original compute mode",
    instead="self._records.check_readable(owners=(CLAIM,))",
)
@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("has_state", [True, False])
def test_a_damaged_mps_record_is_reported_and_removed_by_stop(
    node: Node, driver: Driver, has_state: bool
) -> None:
    """No start keeps the mode of the damaged record, and stop removes that record."""
    put(driver, "compute", {})
    claim = node.claim("a", result(gpu(driver, 1)))
    mps(node, "start").ok()
    [record] = node.records.glob("mps.json")
    record.write_text("{")
    if not has_state:
        for process in daemons(driver):
            os.kill(int(process), signal.SIGKILL)
        (node.records.parent / "mps.json").unlink()
    with node.service():
        assert f"{record} can't be read" in mps(node, "start").stderr
        assert f"{record} can't be read" in ask(node, claim)
        assert "GPUs keep their current mode" in mps(node, "stop").ok().stdout
        assert not record.exists()
        assert not daemons(driver)
        assert values(driver, "compute") == {0: EXCLUSIVE_PROCESS}
        assert ask(node, claim) == ""


def test_an_interrupted_mps_start_restores_the_compute_mode(node: Node, driver: Driver) -> None:
    """Ctrl-C interrupts the start."""
    put(driver, "compute", {})
    no_daemon(driver, "sleep 3")
    own = node.config.with_name("mps.toml")
    own.write_text(f'{node.config.read_text()}[gpuhook.mps]\ndevices = "0"\n')
    words = [str(node.installation.command), "mps", "start"]
    env = {**os.environ, "GPUHOOK_CONFIG": str(own)}
    with subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) as start:
        wait_until(lambda: bool(values(driver, "compute")), "the mode is set")
        start.send_signal(signal.SIGINT)
        start.wait(timeout=300)
    assert values(driver, "compute") == {}


@pytest.mark.protects(
    "dra-exclusive",
    "DRA: no claim changes a container's exclusive device",
    instead="pass",
)
@ONE
def test_an_exclusive_gpu_of_a_container_is_refused_to_a_claim(
    node: Node,
    driver: Driver,
    workspace: Path,
    roots: dict[str, Path],
    low_level: tuple[str, Namespace],
) -> None:
    runtime, entered = low_level
    text = node.config.read_text().replace('"runc"', f'"{runtime}"')
    exclusive = '[gpuhook]\nexclusive = ["nvidia.com/gpu"]\n'
    node.config.write_text(text.replace("[gpuhook]\n", exclusive))
    env = {"GPUHOOK_CONFIG": str(node.config)}
    with bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime) as made:
        made.command("sleep", "1000")
        made.environ(f"NVIDIA_VISIBLE_DEVICES={driver.gpus[0].uuid}")
        quiet = ("sh", "-c", 'exec "$@" </dev/null >output 2>&1', "sh")
        words = (node.installation.runtime, "create", "--bundle", made.path, made.name)
        assert made.call(*quiet, *words, env=env).status == 0, (made.path / "output").read_text()
        with node.service():
            for number, wanted in enumerate((sliced("Long"), by_mps())):
                claim = node.claim(f"a{number}", result(gpu(driver, 0)), config=[wanted])
                assert f"in use by the container {made.name}" in ask(node, claim)
                assert state(driver) == (MODES, SLICES)
            free = node.claim("b", result(gpu(driver, 1)), config=[sliced("Long")])
            assert ask(node, free) == ""
