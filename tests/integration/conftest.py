"""The fixtures of the integration tests: one installation, driver and set of engines for all."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import bundles, cdi, distributions, images, namespaces, prometheus, root_folders
from harness import releases as other_releases
from harness.bundles import Bundle, GpuBundle
from harness.commands import path_of, run, served
from harness.containerd import Containerd, containerd
from harness.docker import Docker, dockerd
from harness.driver import MINORS, Driver, fetch_driver_files, simulate
from harness.engines import Engine
from harness.installation import Installation, install, write_config
from harness.manifests import build_image
from harness.namespaces import Namespace, namespace
from harness.podman import Podman, hooks_dir, podman
from harness.prefork import Site
from harness.root_folders import Folder
from harness.vendors import Devices
from harness.ways import Place

pytest.register_assert_rewrite("harness.vendor_contract", "harness.vendor_attach")

WORKSPACE = Path("/run/gpuhook-test")
RUNC, CRUN = "runc", "crun"
ENGINES = [
    "docker",
    "docker_v2",
    "containerd_runc",
    "containerd_crun",
    "podman_runtime",
    "podman_hook_runc",
    "podman_hook_crun",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder as an integration test, and skip it without root rights."""
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in ours:
        item.add_marker(pytest.mark.integration)
        if os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="starts real containers, which needs root"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate a test for each refusal in a vendor's contract."""
    if "refused" in metafunc.fixturenames:
        metafunc.parametrize("refused", metafunc.cls.case.refused)


def pytest_report_header() -> str:
    pairs = ", ".join(f"{runtime} on {layout}" for runtime, layout in namespaces.runtime_layouts())
    return f"cgroups: {namespaces.host_cgroups()}; bundles run by {pairs}"


@pytest.fixture(scope="session")
def installation() -> Installation:
    return install()


@pytest.fixture(scope="session")
def workspace(request: pytest.FixtureRequest, installation: Installation) -> Iterator[Path]:
    """A temporary folder for the session, in the session's own mount namespace.

    The folder and the mount namespace disappear at the end of the session.
    """
    # Downloads must be complete by now, because name resolution needs the host's /run and /etc.
    used = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    if "driver_files" in used:
        fetch_driver_files()
    if "releases" in used:
        distributions.fetch()
    if "node_image" in used:
        build_image()
    if "engine_roots" in used:
        other_releases.fetch()
    if "apptainer_root" in used:
        other_releases.fetch_apptainer()
    if "charliecloud_root" in used:
        other_releases.fetch_charliecloud()
    if "gvisor_root" in used:
        other_releases.fetch_gvisor()
    if "prometheus_programs" in used:
        prometheus.fetch()
    namespaces.isolate_session()
    bundles.remove_forgotten_cgroups()
    WORKSPACE.mkdir()
    with served(installation.command):
        yield WORKSPACE
    bundles.remove_cgroups()


@pytest.fixture
def reachable(workspace: Path, installation: Installation) -> Iterator[Path]:
    """The bin folder of the installation, at a path that no other user can change.

    The installation itself may be in any folder, so it is mounted at this path.
    """
    place = workspace / "reachable"
    place.mkdir()
    run(["mount", "--bind", installation.bin.parent, place]).ok()
    yield place / "bin"
    run(["umount", place]).ok()
    place.rmdir()


@pytest.fixture(scope="session")
def driver(workspace: Path, installation: Installation) -> Driver:
    minors = ",".join(str(minor) for minor in MINORS)
    return simulate(installation, workspace / "driver", "--gpus=8", f"--minors={minors}")


@pytest.fixture(scope="session")
def driver_files(workspace: Path) -> Path:
    """The real driver files of Debian's packages; they are shared, so change none."""
    return fetch_driver_files()


@pytest.fixture(scope="session")
def beside_driver_files(driver_files: Path) -> Iterator[Path]:
    """A folder for files that are hard links to the real driver files."""
    with tempfile.TemporaryDirectory(prefix="driver-", dir=driver_files.parent) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def real_driver(
    beside_driver_files: Path, driver_files: Path, installation: Installation
) -> Iterator[Driver]:
    """The real driver files of Debian's packages, with simulated GPUs."""
    root = beside_driver_files / "real"
    minors = ",".join(str(minor) for minor in MINORS)
    options = ["--gpus=8", f"--minors={minors}", f"--driver-files={driver_files}"]
    yield simulate(installation, root, *options)
    run([installation.command, "simulate", "--remove", root]).ok()


@pytest.fixture(scope="session")
def roots(workspace: Path) -> dict[str, Path]:
    probes = images.compile_probes(workspace / "probes")
    return images.build(workspace / "roots", probes)


@pytest.fixture(scope="session")
def releases(workspace: Path) -> dict[str, Path]:
    """The root filesystems of Debian's releases; they are shared, so change none."""
    return distributions.fetch()


@pytest.fixture(scope="session")
def engine_roots(workspace: Path) -> dict[str, Path]:
    """The roots of Debian's releases with their engines; they are shared, so change none."""
    return other_releases.fetch()


@pytest.fixture(scope="session")
def apptainer_root(workspace: Path) -> Path:
    """The root of a Debian release with Apptainer; it is shared, so change nothing."""
    return other_releases.fetch_apptainer()


@pytest.fixture(scope="session")
def charliecloud_root(workspace: Path) -> Path:
    """The root of a Debian release with Charliecloud; it is shared, so change nothing."""
    return other_releases.fetch_charliecloud()


@pytest.fixture(scope="session")
def gvisor_root(workspace: Path) -> Path:
    """The root of a Debian release with gVisor's runsc; it is shared, so change nothing."""
    return other_releases.fetch_gvisor()


@pytest.fixture(scope="session")
def prometheus_programs(workspace: Path) -> Path:
    """The folder of the programs prometheus and promtool."""
    return prometheus.fetch()


@pytest.fixture(scope="session")
def node_image(workspace: Path) -> Path:
    """The image for Kubernetes' nodes, as an OCI archive."""
    return build_image()


@pytest.fixture(scope="session")
def archive(workspace: Path, roots: dict[str, Path]) -> Path:
    return images.save(roots, workspace / "images.tar")


@pytest.fixture(scope="session")
def configs(workspace: Path, driver: Driver) -> dict[str, Path]:
    """One config.toml for each low-level runtime."""
    folder = workspace / "configs"
    return {name: write_config(folder / name, driver.root, [name]) for name in (RUNC, CRUN)}


@pytest.fixture(
    scope="session",
    params=namespaces.runtime_layouts(),
    ids=lambda pair: f"{pair[0]}-{pair[1]}",
)
def low_level(request: pytest.FixtureRequest, workspace: Path) -> Iterator[tuple[str, Namespace]]:
    """A low-level runtime and a namespace with a cgroup layout that it can run in."""
    runtime, layout = request.param
    with namespace(layout) as entered:
        yield runtime, entered


@pytest.fixture(scope="session")
def document(workspace: Path, installation: Installation, configs: dict[str, Path]) -> str:
    """The CDI spec of the driver's GPUs, for the configuration of runc."""
    return cdi.generate(installation, configs[RUNC], workspace / "cdi-of-runc").read_text()


@pytest.fixture
def place(
    workspace: Path,
    roots: dict[str, Path],
    installation: Installation,
    driver: Driver,
    low_level: tuple[str, Namespace],
    document: str,
    configs: dict[str, Path],
    tmp_path: Path,
) -> Iterator[Place]:
    """A configuration, and containers that get GPUs with it in any of several ways."""
    runtime, entered = low_level
    config = write_config(tmp_path / "etc", driver.root, [runtime])
    with ExitStack() as stack:

        def bundle() -> Bundle:
            made = bundles.bundle(workspace / "bundles", roots["debian"], entered, runtime)
            return stack.enter_context(made)

        place = Place(installation, runtime, bundle, config, driver)
        place.documents.mkdir()
        text = document.replace(str(configs[RUNC]), str(config))
        (place.documents / "nvidia.com-gpu.yaml").write_text(text)
        yield place


@pytest.fixture(params=["debian"])
def bundle(
    request: pytest.FixtureRequest,
    workspace: Path,
    roots: dict[str, Path],
    low_level: tuple[str, Namespace],
    installation: Installation,
    configs: dict[str, Path],
) -> Iterator[GpuBundle]:
    """A fresh bundle; parametrize it with the kind of root."""
    runtime, entered = low_level
    with bundles.bundle(workspace / "bundles", roots[request.param], entered, runtime) as made:
        fields = (made.path, made.name, made.root, entered, runtime)
        yield GpuBundle(*fields, installation, configs[runtime])


@pytest.fixture(scope="session")
def v1(workspace: Path) -> Iterator[Namespace]:
    """A namespace in which crun runs; on a hybrid host, the cgroup v2 tree is hidden in it."""
    layout = "v1" if namespaces.host_cgroups() == "hybrid" else "host"
    with namespace(layout) as entered:
        yield entered


@pytest.fixture(scope="class")
def devices(
    request: pytest.FixtureRequest, installation: Installation, workspace: Path
) -> Iterator[Devices]:
    """The simulated devices of a vendor's contract (harness/vendor_contract.py)."""
    with request.cls.case.machine(installation, workspace) as found:
        yield found


@pytest.fixture
def config(
    bundle: Bundle, low_level: tuple[str, Namespace], driver: Driver, devices: Devices
) -> Path:
    """A configuration for the simulated devices, and for containers of the bundle."""
    return devices.configured(write_config(bundle.path / "etc", driver.root, [low_level[0]]))


@pytest.fixture(scope="session")
def host(workspace: Path) -> Namespace:
    return Namespace(namespaces.host_cgroups())


@pytest.fixture(scope="session")
def docker(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    configs: dict[str, Path],
) -> Iterator[Docker]:
    runtimes = {"gpu-py": installation.runtime}
    env = {"GPUHOOK_CONFIG": str(configs[RUNC])}
    with dockerd(workspace / "docker", host, runtimes, archive, env) as engine:
        yield engine


@pytest.fixture(scope="session")
def docker_v2(
    workspace: Path, installation: Installation, archive: Path, configs: dict[str, Path]
) -> Iterator[Docker]:
    runtimes = {"gpu-py": installation.runtime}
    env = {"GPUHOOK_CONFIG": str(configs[RUNC])}
    with (
        namespace("v2") as entered,
        dockerd(workspace / "docker-v2", entered, runtimes, archive, env) as engine,
    ):
        yield engine


@pytest.fixture(scope="session")
def containerd_runc(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    configs: dict[str, Path],
) -> Iterator[Containerd]:
    env = {"GPUHOOK_CONFIG": str(configs[RUNC])}
    folder = workspace / "containerd-runc"
    with containerd(folder, host, installation.runtime, archive, env) as engine:
        yield engine


@pytest.fixture(scope="session")
def containerd_crun(
    workspace: Path,
    v1: Namespace,
    installation: Installation,
    archive: Path,
    configs: dict[str, Path],
) -> Iterator[Containerd]:
    env = {"GPUHOOK_CONFIG": str(configs[CRUN])}
    folder = workspace / "containerd-crun"
    with containerd(folder, v1, installation.runtime, archive, env) as engine:
        yield engine


@pytest.fixture(scope="session")
def podman_config(workspace: Path, configs: dict[str, Path]) -> Path:
    """The config.toml at the default path.

    podman needs it, because it doesn't pass GPUHOOK_CONFIG on.
    """
    config = Path("/etc/gpuhook/config.toml")  # the session has an /etc of its own
    config.parent.mkdir(exist_ok=True)  # podman_node may make it as a mount point
    config.symlink_to(configs[RUNC])
    return config


@pytest.fixture(scope="session")
def podman_runtime(
    workspace: Path,
    host: Namespace,
    installation: Installation,
    archive: Path,
    podman_config: Path,
) -> Iterator[Podman]:
    with podman(workspace / "podman-runtime", host, installation.runtime, archive) as engine:
        yield engine


@pytest.fixture(scope="session")
def hooks(workspace: Path, installation: Installation, configs: dict[str, Path]) -> Path:
    """A hooks-dir for engines that don't call gpu-py."""
    args = ("--config", str(configs[RUNC]), "prestart")
    return hooks_dir(workspace / "hooks", installation.hook, *args)


@pytest.fixture(scope="session")
def podman_hook_runc(
    workspace: Path, host: Namespace, archive: Path, hooks: Path
) -> Iterator[Podman]:
    folder = workspace / "podman-hook-runc"
    with podman(folder, host, path_of(RUNC), archive, hooks=hooks) as engine:
        yield engine


@pytest.fixture(scope="session")
def podman_hook_crun(
    workspace: Path, v1: Namespace, archive: Path, hooks: Path
) -> Iterator[Podman]:
    folder = workspace / "podman-hook-crun"
    with podman(folder, v1, path_of(CRUN), archive, hooks=hooks) as engine:
        yield engine


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """The engine; each test that uses it runs once with every engine."""
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def site(
    bundle: Bundle,
    installation: Installation,
    driver: Driver,
    low_level: tuple[str, Namespace],
    tmp_path: Path,
) -> Iterator[Site]:
    """A configuration with its own prefork server, and containers that use it."""
    made = Site(bundle, installation, driver, low_level[0], tmp_path)
    yield made
    made.clear()


@pytest.fixture
def own(site: Site, workspace: Path, tmp_path: Path) -> Iterator[Site]:
    """A site whose driver the test may change."""
    root = workspace / f"driver-{tmp_path.name}"
    text = site.config.read_text()
    minors = ",".join(map(str, MINORS[:4]))
    site.driver = simulate(site.installation, root, "--gpus=4", f"--minors={minors}")
    site.config.write_text(re.sub(r'root = ".*"', f'root = "{root}"', text, count=1))
    site.settle()
    yield site
    site.bundle.call(site.installation.command, "simulate", "--remove", root)


@pytest.fixture
def folder(
    tmp_path: Path,
    roots: dict[str, Path],
    driver: Driver,
    installation: Installation,
    workspace: Path,
) -> Iterator[Folder]:
    """A root folder for gpuhook apply, in a mount namespace of its own."""
    config = write_config(workspace / f"etc-{tmp_path.name}", driver.root, ["runc"])
    root, state = workspace / f"apply-{tmp_path.name}", tmp_path / "state"
    with root_folders.made(roots["debian"], root, state, config, installation.command) as found:
        yield found
