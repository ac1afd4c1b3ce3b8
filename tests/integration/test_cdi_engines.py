"""gpuhook's CDI specs, read by the engines of other Debian releases; sid has current ones.

Each engine runs in the root of its release. It calls the hook of a gpuhook that is installed
there, for the Python of that release. The test of this host's podman is in test_cdi.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from harness import bundles, images
from harness.cdi import KERNEL, KIND, with_mounted_nodes, write_kernel
from harness.commands import Result, run
from harness.containerd import WITH_CDI, Containerd, containerd
from harness.content import LIST, Content, listed, of_bundle, unexplained
from harness.cri import Cri, CriError
from harness.docker import Docker, dockerd
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.engines import settings
from harness.images import PATH, image
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.loader import probed
from harness.namespaces import Namespace
from harness.podman import Podman, podman
from harness.releases import NAMES, PYTHON, Release, release

DEBIAN = image("debian")
MIG = "mig.example/gpu"  # kind in the CDI spec of another machine, whose GPU is in MIG mode
UID, USERS = 4242, "user.example/gpu"  # and kind in a CDI spec that has mounts for nodes
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
# The ctr of trixie doesn't know CDI. For CDI's nodes, buildah writes device rules without an
# access, which neither runc nor crun accepts with cgroup v1.
ENGINES = (
    "trixie-docker", "trixie-compose", "trixie-cri-field", "trixie-cri-annotations",
    "trixie-podman-runc", "trixie-podman-crun",
    "sid-docker", "sid-compose", "sid-cri-field", "sid-cri-annotations", "sid-ctr",
    "sid-podman-runc", "sid-podman-crun",
)  # fmt: skip
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


@pytest.fixture(scope="module")
def systems(
    workspace: Path,
    engine_roots: dict[str, Path],
    installation: Installation,
    driver: Driver,
    mig_driver: Driver,
) -> Iterator[dict[str, Release]]:
    """The releases, with CDI specs of two simulated machines and of a kernel with a driver."""
    with ExitStack() as stack:
        made = {}
        for name, lower in engine_roots.items():
            words = (name, lower, workspace / name, installation, driver)
            made[name] = stack.enter_context(release(*words))
            cdi = made[name].etc / "cdi"
            mig = write_config(workspace / f"{name}-mig", mig_driver.root, ["runc"])
            made[name].gpuhook("cdi", "generate", "--config", mig, "--output", "/etc/cdi/mig.yaml")
            text = (cdi / "mig.yaml").read_text()
            (cdi / "mig.yaml").write_text(re.sub("(?m)^kind: .*", f"kind: {MIG}", text))
            made[name].gpuhook("cdi", "generate", "--output", "/etc/cdi")
            write_kernel(driver, cdi, PYTHON)
        yield made


@pytest.fixture(scope="module")
def mig_driver(installation: Installation, workspace: Path) -> Driver:
    options = ("--gpus=2", "--model=H100", "--mig=0:1g.10gb,2g.20gb")
    return simulate(installation, workspace / "engines-mig", *options)


@pytest.fixture(scope="module")
def dockers(
    systems: dict[str, Release], workspace: Path, archive: Path
) -> Iterator[dict[str, Docker]]:
    """Docker daemons that find programs with NVIDIA's names, with CDI enabled."""
    with ExitStack() as stack:
        made = {}
        for name, system in systems.items():
            names = workspace / f"{name}-names"
            words = ["--engine=docker", f"--config={workspace}/{name}.json", "--gpus"]
            words += [f"--bin-dir={names}", f"--state-dir={workspace}/{name}-state"]
            system.gpuhook("install", *words)
            env = {"GPUHOOK_CONFIG": str(system.config), "PATH": f"{names}:{PATH}"}
            more = {"features": {"cdi": True}} if name == "trixie" else {}
            folder = workspace / f"{name}-docker"
            run = dockerd(folder, system.namespace, {}, archive, env, more)
            made[name] = stack.enter_context(run)
        yield made


@pytest.fixture(scope="module")
def containerds(
    systems: dict[str, Release], workspace: Path, roots: dict[str, Path], archive: Path
) -> Iterator[dict[str, Containerd]]:
    """containerd daemons with CDI enabled in their CRI plugins."""
    hold = {"pause": roots["busybox"]}
    hold_archive = images.save(hold, workspace / "hold.tar", ("sleep", "infinity"))
    with ExitStack() as stack:
        made = {}
        for name, system in systems.items():
            runc = Path(system.which("runc"))
            folder = workspace / f"{name}-containerd"
            run = containerd(folder, system.namespace, runc, archive, {}, WITH_CDI)
            made[name] = stack.enter_context(run)
            for each in (archive, hold_archive):
                made[name].call("images", "import", each, within="k8s.io").ok()
        yield made


Run = Callable[[str, Sequence[str], Sequence[str]], Result]  # an image, a command, CDI names


@pytest.fixture(scope="module", params=ENGINES)
def start(
    request: pytest.FixtureRequest, systems: dict[str, Release], workspace: Path, archive: Path
) -> Iterator[Run]:
    """Yield a function that runs a command in an engine's container with the release's devices."""
    release_name, name, variant = (*request.param.split("-"), "")[:3]
    if name in ("docker", "compose"):
        docker = request.getfixturevalue("dockers")[release_name]
        yield partial(with_docker if name == "docker" else with_compose, docker)
    elif name == "ctr":
        yield partial(with_ctr, request.getfixturevalue("containerds")[release_name])
    elif name == "cri":
        folder = request.getfixturevalue("containerds")[release_name].folder
        cri = Cri(folder / "containerd.sock")
        yield partial(with_cri, cri, variant)
        cri.close()
    else:
        system = systems[release_name]
        runtime = Path(system.which(variant))
        folder = workspace / request.param
        with podman(folder, system.namespace, runtime, archive) as made:
            yield partial(with_podman, made)


def with_docker(docker: Docker, kind: str, command: Sequence[str], names: Sequence[str]) -> Result:
    return docker.run(kind, *command, options=settings("--device", names), runtime="runc")


def with_compose(docker: Docker, kind: str, command: Sequence[str], names: Sequence[str]) -> Result:
    wanted = [{"driver": "cdi", "device_ids": [name], "capabilities": ["gpu"]} for name in names]
    service = {
        "image": kind,
        "network_mode": "none",
        "deploy": {"resources": {"reservations": {"devices": wanted}}},
    }
    file = docker.folder / "compose.json"
    file.write_text(json.dumps({"name": "gpuhook-test", "services": {"one": service}}))
    words = ("compose", "--progress=quiet", "--file", file, "run", "--rm", "--no-TTY", "one")
    return docker.call(*words, *command)


def with_ctr(engine: Containerd, kind: str, command: Sequence[str], names: Sequence[str]) -> Result:
    return engine.run(kind, *command, options=settings("--device", names))


def with_cri(
    cri: Cri, variant: str, kind: str, command: Sequence[str], names: Sequence[str]
) -> Result:
    fields: Sequence[str] = names if variant == "field" else ()
    notes = {"cdi.k8s.io/test_1": ",".join(names)} if variant == "annotations" and names else {}
    with cri.pod("") as pod:
        try:
            container = pod.start(kind, "sleep", "1000", devices=fields, annotations=notes)
        except CriError as error:
            return Result(tuple(command), 1, "", str(error))
        return container.exec(*command)


def with_podman(engine: Podman, kind: str, command: Sequence[str], names: Sequence[str]) -> Result:
    return engine.run(kind, *command, options=settings("--device", names))


def names_of(*devices: str) -> list[str]:
    return [f"{KIND}={device}" for device in devices]


@pytest.mark.parametrize("indices", [(0, 2, 7), tuple(range(8))], ids=str)
def test_a_container_gets_exactly_the_named_gpus(
    start: Run, driver: Driver, indices: tuple[int, ...]
) -> None:
    devices = ["all"] if len(indices) == len(driver.gpus) else list(map(str, indices))
    inside = seen(start(DEBIAN, look(driver.minors), names_of(*devices)))
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    assert inside.gpu_minors == minors
    assert {opened for opened, _ in inside.nodes.values()} == {"ENXIO"}
    assert {path for path in inside.nodes if "/dri/" not in path} == CONTROL | {
        f"/dev/nvidia{minor}" for minor in minors
    }
    assert inside.by_hand == {
        minor: "ENXIO" if minor in minors else "EPERM" for minor in driver.minors
    }


def test_programs_and_libraries_of_the_driver_work(start: Run, driver: Driver) -> None:
    folder = driver.library("libcuda.so.1").parent
    links = [path for path in folder.rglob("lib*.so.*") if path.is_symlink()]
    files = {path.name: path for path in [*links, folder / "libcuda.so"]}
    assert len(files) > 20
    script = f"nvidia-smi -L; gpuhook-cuda-probe; dlprobe {' '.join(files)}"
    gpus = driver.chosen(3, 5)
    done = start(DEBIAN, ("sh", "-ec", script), names_of(*(gpu.uuid for gpu in gpus)))
    lines = done.ok().stdout.splitlines()
    assert lines[:3] == [*lines_of_nvidia_smi(gpus), "CUDA devices: 2"]
    assert probed(lines[5:]) == {
        name: f"{path.stat().st_dev}:{path.stat().st_ino}" for name, path in files.items()
    }


@pytest.fixture(scope="module")
def reference(
    workspace: Path,
    roots: dict[str, Path],
    host: Namespace,
    installation: Installation,
    driver: Driver,
    configs: dict[str, Path],
) -> Content:
    """The content that gpu-py adds in mode hook to a container of this host."""

    def content(runtime: str | Path, *env: str) -> Content:
        with bundles.bundle(workspace / "bundles", roots["debian"], host, "runc") as made:
            return of_bundle(made, runtime, driver, configs["runc"], env)

    ask = ("NVIDIA_VISIBLE_DEVICES=0,2", "NVIDIA_DRIVER_CAPABILITIES=all")
    return content(installation.runtime, *ask).beyond(content("runc"))


def test_the_container_is_the_same_as_in_hook_mode(start: Run, reference: Content) -> None:
    base = listed(start(DEBIAN, LIST, [KERNEL]))
    made = listed(start(DEBIAN, LIST, [KERNEL, *names_of("0", "2")]))
    assert unexplained(reference, made.beyond(base), "debian") == {}


@pytest.mark.parametrize(("device", "gpus", "migs"), [("0:1", 1, 1), ("all", 2, 2)])
def test_mig_devices_are_given_by_name(start: Run, device: str, gpus: int, migs: int) -> None:
    script = "nvidia-smi -L; busybox find /dev/nvidia-caps -type c"
    lines = start(DEBIAN, ("sh", "-c", script), [f"{MIG}={device}"]).ok().stdout.splitlines()
    assert len([line for line in lines if line.startswith("GPU ")]) == gpus
    assert len([line for line in lines if line.startswith("  MIG")]) == migs
    assert len([line for line in lines if line.startswith("/dev/nvidia-caps/")]) == 2 * migs


def test_an_unknown_device_name_is_refused(start: Run) -> None:
    said = start(DEBIAN, ("true",), names_of("0", "8")).failed().stderr
    assert f"{KIND}=8" in said
    assert f"{KIND}=0" not in said.replace("--device=", "")


def test_a_container_without_a_request_gets_no_gpus(start: Run) -> None:
    assert "nvidia" not in start(DEBIAN, ("ls", "/dev"), []).ok().stdout


ON_BOTH = pytest.mark.parametrize("name", NAMES)


@ON_BOTH
def test_docker_reads_the_specs_without_warnings(name: str, dockers: dict[str, Docker]) -> None:
    docker = dockers[name]
    info = json.loads(docker.call("info", "--format", "{{json .}}").ok().stdout)
    assert info["CDISpecDirs"] == ["/etc/cdi", "/var/run/cdi"]
    assert [line for line in info["Warnings"] or [] if "cdi" in line.lower()] == []
    if name == "sid":  # Docker 26 lists no devices
        found = {device["ID"] for device in info["DiscoveredDevices"]}
        assert {f"{KIND}=all", f"{KIND}=7", f"{MIG}=0:1", KERNEL} < found
    log = (docker.folder / "log").read_text()
    assert [line for line in log.splitlines() if "level=err" in line and "cdi" in line] == []


@ON_BOTH
@pytest.mark.parametrize(("gpus", "indices"), [('"device=0,2"', (0, 2)), ("all", range(8))])
def test_the_gpus_option_of_docker_gives_the_named_gpus(
    name: str, dockers: dict[str, Docker], driver: Driver, gpus: str, indices: Sequence[int]
) -> None:
    """Docker calls programs by NVIDIA's names, which ``gpuhook install --gpus`` creates."""
    docker = dockers[name]
    options = ["--gpus", gpus]
    inside = seen(docker.run(DEBIAN, *look(driver.minors), options=options, runtime="runc"))
    minors = {gpu.minor for gpu in driver.chosen(*indices)}
    assert inside.gpu_minors == minors
    assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors
    done = docker.run(DEBIAN, "nvidia-smi", "-L", options=options, runtime="runc").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(*indices))


@ON_BOTH
def test_rootless_podman_gives_the_named_gpus(
    name: str,
    systems: dict[str, Release],
    workspace: Path,
    roots: dict[str, Path],
    driver: Driver,
) -> None:
    """The user has only one id in the user namespace, without subordinate ids."""
    system = systems[name]
    for file, line in (("passwd", f"user:x:{UID}:{UID}::/:/bin/sh"), ("group", f"user:x:{UID}:")):
        with (system.etc / file).open("a") as table:
            table.write(f"{line}\n")
    cdi = system.etc / "cdi"
    (cdi / "user.json").write_text(with_mounted_nodes(cdi / "nvidia.com-gpu.yaml", USERS))
    home = workspace / f"{system.name}-home"
    (home / "run").mkdir(parents=True)
    run(["cp", "-a", roots["debian"], home / "root"]).ok()
    run(["chown", "-R", f"{UID}:{UID}", home]).ok()
    words = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", "-i"]
    words += [f"HOME={home}", f"XDG_RUNTIME_DIR={home}/run", f"PATH={PATH}"]
    words += ["podman", "--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--runtime=crun"]
    words += [
        "run",
        "--rm",
        "--network=none",
        *LIMITS,
        f"--device={USERS}=1",
        f"--device={USERS}=6",
    ]
    done = system.namespace.run(*words, "--rootfs", str(home / "root"), "nvidia-smi", "-L").ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1, 6))
