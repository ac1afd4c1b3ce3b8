"""Containers that real containerds start by the CRI from the device plugin's responses.

The tests have a simulated kubelet, which passes a plugin's response to containerd as the real
one does. The containerd of sid runs the strategies that need CDI, because this host's version
doesn't support it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from declared_vendors import tables
from harness import images, vendors
from harness.commands import wait_until
from harness.containerd import WITH_CDI, WITH_HANDLERS, Containerd, containerd
from harness.cri import Container, Cri, CriError
from harness.device_plugin import device_plugin, start
from harness.driver import Gpu, lines_of_nvidia_smi
from harness.driver_folder import NEW, OLD, SETTINGS, Machine
from harness.images import image
from harness.inside import look, seen
from harness.installation import Installation, harden
from harness.namespaces import Namespace
from harness.releases import Release, release
from harness.vendors import Devices, nodes_seen
from kubelet import AdmissionError, Answers, Kubelet
from samples import SAMPLES

from gpuhook.vendors import registry

DEBIAN = image("debian")
GPU, AMD_GPU = "nvidia.com/gpu", "amd.com/gpu"
PODS = "k8s.io"  # containerd's namespace for the CRI's images
SCRIPT = "nvidia-smi -L; gpuhook-cuda-probe; nvidia-smi | busybox grep -o 'Driver Version: [0-9.]*'"


@pytest.fixture(scope="module")
def pause_archive(workspace: Path, roots: dict[str, Path]) -> Path:
    """The image of the process that keeps a pod's namespaces open."""
    return images.save(
        {"pause": roots["busybox"]}, workspace / "pods-pause.tar", ("sleep", "infinity")
    )


@pytest.fixture(scope="module")
def amd(installation: Installation, workspace: Path) -> Iterator[Devices]:
    with vendors.devices(installation, workspace / "pods-amd", "amd", 3) as found:
        yield found


@pytest.fixture(scope="module")
def machine(installation: Installation, workspace: Path, amd: Devices) -> Iterator[Machine]:
    made = Machine(installation, workspace / "pods", "3,0,1,2")
    amd.configured(made.config)
    yield made
    made.destroy()


@pytest.fixture(scope="module")
def cri(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    pause_archive: Path,
    machine: Machine,
) -> Iterator[Cri]:
    """This host's containerd, with runc and gpu-py as handlers."""
    env = {"GPUHOOK_CONFIG": str(machine.config)}
    words = (workspace / "pods-1", host, installation.runtime, archive, env, WITH_HANDLERS)
    with containerd(*words) as engine, cri_of(engine, archive, pause_archive) as made:
        yield made


@contextmanager
def cri_of(engine: Containerd, *archives: Path) -> Iterator[Cri]:
    """Import images into a containerd, and connect to its CRI."""
    for archive in archives:
        engine.call("images", "import", archive, within=PODS).ok()
    made = Cri(engine.folder / "containerd.sock")
    try:
        wait_until(made.is_ready, "the CRI answers")
        yield made
    finally:
        made.close()


@pytest.fixture
def hardened(machine: Machine) -> Iterator[None]:
    """A configuration with which gpu-py gives GPUs only for a plugin's mounts."""
    before = machine.config.read_text()
    harden(machine.config)
    yield
    machine.config.write_text(before)


@pytest.fixture
def place(workspace: Path, tmp_path: Path) -> Path:
    """A new folder with a short name: a socket's path has at most 107 characters."""
    return workspace / f"p{hash(tmp_path) & 0xFFFFFFFF:x}"


Strategy = tuple[str, ...]
BY_RUNTIME = pytest.mark.parametrize(
    ("strategy", "handler"),
    [
        (("envvar",), "gpu-py"),
        (("envvar", "nodes"), "gpu-py"),
        (("volume-mounts",), "gpu-py"),
        (("volume-mounts", "nodes"), "gpu-py"),
        (("mounts",), "runc"),
    ],
    ids=str,
)


@contextmanager
def plugin(
    place: Path,
    installation: Installation,
    machine: Machine,
    strategy: Strategy,
    resource: str = GPU,
    *more: str,
) -> Iterator[Kubelet]:
    """Run the plugin with these strategies; "nodes" stands for --pass-device-specs."""
    words = [f"--device-list-strategy={each}" for each in strategy if each != "nodes"]
    words += [f"--pass-device-specs={str('nodes' in strategy).lower()}"]
    words += [f"--driver-folder={machine.folder}", *more]
    with device_plugin(place, installation, machine.config, resource, *words) as kubelet:
        yield kubelet


def granted(answers: Answers, machine: Machine) -> list[Gpu]:
    """Return the GPUs that were allocated to a pod, in the driver's order."""
    return [gpu for gpu in machine.driver.gpus if gpu.uuid in answers["ids"][GPU]]


def seen_by(container: Container) -> list[str]:
    """Return the GPUs, the CUDA device count and the driver version that a container sees."""
    lines = container.exec("sh", "-ec", SCRIPT).ok().stdout.splitlines()
    return [line for line in lines if not line.startswith("CUDA device ")]


def expected(gpus: Sequence[Gpu], version: str) -> list[str]:
    counted = f"CUDA devices: {len(gpus)}"
    return [*lines_of_nvidia_smi(gpus), counted, f"Driver Version: {version}"]


def check(container: Container, machine: Machine, gpus: Sequence[Gpu], version: str = OLD) -> None:
    """Check that a container has these GPUs, and can open no other."""
    assert seen_by(container) == expected(gpus, version)
    minors = {gpu.minor for gpu in gpus}
    inside = seen(container.exec(*look(machine.driver.minors)))
    assert inside.gpu_minors == minors
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in machine.driver.minors
    }


@BY_RUNTIME
def test_a_container_gets_exactly_the_granted_gpus(
    strategy: Strategy,
    handler: str,
    cri: Cri,
    machine: Machine,
    installation: Installation,
    place: Path,
    request: pytest.FixtureRequest,
) -> None:
    if strategy[0] == "volume-mounts":
        request.getfixturevalue("hardened")
    with plugin(place, installation, machine, strategy) as kubelet:
        both = [kubelet.admit(name, {GPU: count}) for name, count in (("one", 1), ("two", 2))]
        with cri.pod(handler, "one") as one, cri.pod(handler, "two") as two:
            for pod, answers in zip((one, two), both, strict=True):
                container = start(pod, DEBIAN, answers, SETTINGS)
                check(container, machine, granted(answers, machine))
    assert not {*both[0]["ids"][GPU]} & {*both[1]["ids"][GPU]}


def test_volume_mounts_without_their_setting_are_refused(
    cri: Cri, machine: Machine, installation: Installation, place: Path
) -> None:
    """The engine's error names the setting and not a missing device."""
    with plugin(place, installation, machine, ("volume-mounts",)) as kubelet:
        answers = kubelet.admit("one", {GPU: 1})
        with (
            cri.pod("gpu-py") as pod,
            pytest.raises(CriError, match="as-volume-mounts is off on this node"),
        ):
            start(pod, DEBIAN, answers)


def test_a_pod_without_granted_gpus_gets_none(
    cri: Cri, machine: Machine, installation: Installation, place: Path, hardened: None
) -> None:
    """The image's variable and the devices of other pods don't matter."""
    with plugin(place, installation, machine, ("volume-mounts",)) as kubelet:
        answers = kubelet.admit("one", {GPU: 1})
        with cri.pod("gpu-py", "one") as one, cri.pod("gpu-py", "none") as none:
            answers["envs"]["NVIDIA_VISIBLE_DEVICES"] = "all"  # the pod's own value has priority
            container = start(one, DEBIAN, answers)
            words = ("sleep", "1000")
            without = none.start(DEBIAN, *words, env=["NVIDIA_VISIBLE_DEVICES=all"])
            assert "nvidia" not in without.exec("ls", "/dev").ok().stdout
            check(container, machine, granted(answers, machine))


# Devices of other vendors: a vendor, its variable and one of its resources.
OTHERS = [
    *(
        (name, next(iter(registry.BUILT_IN[name].VARIABLES)), sample.claim.resource)
        for name, sample in SAMPLES.items()
    ),
    ("rebellions", "REBELLIONS_VISIBLE_DEVICES", "rebellions.ai/npu"),
]


@pytest.fixture(scope="module")
def others(
    installation: Installation, workspace: Path, amd: Devices
) -> Iterator[dict[str, Devices]]:
    """Three devices of every vendor."""
    with ExitStack() as stack:
        made = {"amd": amd}
        for vendor in [vendor for vendor, _, _ in OTHERS if vendor != "amd"]:
            place = workspace / f"pods-{vendor}"
            text, settings = tables().get(vendor), {}
            if text is not None:
                settings["config"] = workspace / "pods-declared.toml"
                settings["config"].write_text(text)
            devices = vendors.devices(installation, place, vendor, 3, **settings)
            made[vendor] = stack.enter_context(devices)
        yield made


@pytest.fixture
def every_vendor(machine: Machine, hardened: None, others: dict[str, Devices]) -> None:
    roots = ", ".join(f'"{name}={found.root}"' for name, found in others.items())
    text = machine.config.read_text()
    [line] = [line for line in text.splitlines() if line.startswith("driver-roots")]
    declared = tables()["rebellions"]
    machine.config.write_text(f"{text.replace(line, f'driver-roots = [{roots}]')}\n{declared}")


@pytest.mark.parametrize(("vendor", "variable", "resource"), OTHERS)
def test_a_pods_own_variable_gives_no_further_devices(
    vendor: str,
    variable: str,
    resource: str,
    cri: Cri,
    machine: Machine,
    others: dict[str, Devices],
    installation: Installation,
    place: Path,
    every_vendor: None,
) -> None:
    """The kubelet puts a pod's own variables last, so they could replace the plugin's."""
    info = others[vendor].ask(machine.config, "info")
    [known] = [each for each in info["others"] if each["vendor"] == vendor]
    devices = [{*each["nodes"]} for each in known["devices"]]
    own = [nodes - set.union(*(each for each in devices if each != nodes)) for nodes in devices]
    assert len(own) == 3
    assert all(own)

    def given(container: Container) -> list[set[str]]:
        seen = {*container.exec("busybox", "find", "/dev", "-type", "c").ok().stdout.split()}
        return [nodes for nodes in own if nodes & seen]

    with plugin(place, installation, machine, ("volume-mounts",), resource) as kubelet:
        answers = kubelet.admit("one", {resource: 1})
        answers["envs"][variable] = "all"
        with cri.pod("gpu-py", "one") as one, cri.pod("gpu-py", "none") as none:
            with_one = given(start(one, DEBIAN, answers))
            words = ("sleep", "1000")
            assert given(none.start(DEBIAN, *words, env=[f"{variable}=all"])) == []
        assert len(with_one) == 1
        others_answer = kubelet.admit("two", {resource: 2})
        with cri.pod("gpu-py", "two") as two:
            rest = given(start(two, DEBIAN, others_answer))
        assert [nodes for nodes in own if nodes not in rest] == with_one


@pytest.fixture
def updated(machine: Machine) -> Iterator[None]:
    """Restore the old driver at the end."""
    yield
    machine.install(OLD)


UPDATES = pytest.mark.parametrize(
    ("strategy", "handler"), [(("mounts",), "runc"), (("envvar",), "gpu-py")], ids=str
)


def wait_for_folder(machine: Machine, version: str) -> None:
    library = machine.folder / f"lib64/libcuda.so.{version}"
    wait_until(library.exists, "the folder is of the new driver")


def admitted_again(kubelet: Kubelet) -> Answers:
    """Return the checkpoint's content once the pod's devices are present and healthy."""
    found: list[Answers] = []

    def is_admitted() -> bool:
        try:
            found.append(kubelet.admit("one", {GPU: 2}))
        except AdmissionError:
            return False
        return True

    wait_until(is_admitted, "the pod's devices are well")
    return found[-1]


@UPDATES
def test_a_driver_update_leaves_running_pods_and_applies_to_new_containers(
    strategy: Strategy,
    handler: str,
    cri: Cri,
    machine: Machine,
    installation: Installation,
    place: Path,
    updated: None,
) -> None:
    with plugin(place, installation, machine, strategy) as kubelet, cri.pod(handler) as pod:
        answers = kubelet.admit("one", {GPU: 2})
        gpus = granted(answers, machine)
        container = start(pod, DEBIAN, answers, SETTINGS)
        check(container, machine, gpus)
        machine.install(NEW)
        if strategy == ("mounts",):
            wait_for_folder(machine, NEW)
        assert seen_by(container) == expected(gpus, OLD)
        # The pod's next container gets the devices in the kubelet's checkpoint.
        again = admitted_again(kubelet)
        assert again == answers
        check(start(pod, DEBIAN, again, SETTINGS, attempt=1), machine, gpus, NEW)
        assert seen_by(container) == expected(gpus, OLD)


@pytest.mark.parametrize(("strategy", "handler"), [("mounts", "runc"), ("envvar", "gpu-py")])
def test_gpus_of_a_driver_without_files_get_only_nodes(
    strategy: str,
    handler: str,
    cri: Cri,
    machine: Machine,
    amd: Devices,
    installation: Installation,
    place: Path,
) -> None:
    with plugin(place, installation, machine, (strategy,), AMD_GPU) as kubelet:
        answers = kubelet.admit("one", {AMD_GPU: 2})
        assert answers["mounts"] == []
        with cri.pod(handler) as pod:
            container = start(pod, DEBIAN, answers)
            found = nodes_seen(container.exec(*vendors.look("/dev/kfd", "/dev/dri/*")))
    assert found == amd.nodes("/dev/kfd", *nodes_of(amd, machine, answers["ids"][AMD_GPU]))


def nodes_of(amd: Devices, machine: Machine, ids: Sequence[str]) -> list[str]:
    """Return the nodes of the AMD GPUs with these ids."""
    info = amd.ask(machine.config, "info")
    [known] = [each for each in info["others"] if each["vendor"] == "amd"]
    return [path for each in known["devices"] if each["id"] in ids for path in each["nodes"]]


# Engines that give devices themselves ---------------------------------------------------------


@pytest.fixture(scope="module")
def sid(
    workspace: Path, engine_roots: dict[str, Path], installation: Installation, machine: Machine
) -> Iterator[Release]:
    words = ("sid", engine_roots["sid"], workspace / "pods-sid", installation, machine.driver)
    with release(*words) as made:
        yield made


@pytest.fixture(scope="module")
def documents(workspace: Path) -> Path:
    """A folder of CDI specs that no other engine reads."""
    made = workspace / "pods-cdi"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def cri_of_sid(
    workspace: Path, sid: Release, archive: Path, pause_archive: Path, documents: Path
) -> Iterator[Cri]:
    """A containerd that supports CDI, with plain runc."""
    text = WITH_CDI.replace('["/etc/cdi", "/var/run/cdi"]', f'["{documents}"]')
    words = (workspace / "pods-2", sid.namespace, Path(sid.which("runc")), archive)
    with containerd(*words, {}, text) as engine, cri_of(engine, archive, pause_archive) as made:
        yield made


BY_ENGINE = pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations", "mounts"])


@BY_ENGINE
def test_the_engine_gives_the_granted_gpus_and_the_updated_driver(
    strategy: str,
    cri_of_sid: Cri,
    sid: Release,
    machine: Machine,
    documents: Path,
    place: Path,
    updated: None,
) -> None:
    """After a driver update, the same response gives the new driver."""
    option = f"--cdi-folder={documents}"
    with plugin(place, sid.installation, machine, (strategy,), GPU, option) as kubelet:
        answers = kubelet.admit("one", {GPU: 2})
        assert bool(answers["cdi_devices"]) == (strategy == "cdi-cri")
        assert bool(answers["annotations"]) == (strategy == "cdi-annotations")
        gpus = granted(answers, machine)
        with cri_of_sid.pod("") as pod:
            container = start(pod, DEBIAN, answers, SETTINGS)
            check(container, machine, gpus)
            machine.install(NEW)
            if strategy == "mounts":
                wait_for_folder(machine, NEW)
            else:
                [document] = documents.glob("nvidia.com-gpu.*")
                wait_until(lambda: NEW in document.read_text(), "the names are of the new driver")
            assert seen_by(container) == expected(gpus, OLD)
            again = start(pod, DEBIAN, admitted_again(kubelet), SETTINGS, attempt=1)
            check(again, machine, gpus, NEW)
