"""The Debian package gpuhook of scripts/release, installed into a copy of this Debian.

The copy is an overlay, whose upper layer has the installed and the remaining files. The
package is installed once; tests that need it installed have another layer above that one. The
additions have separate tests in test_debian_additions.
"""

import ast
import gzip
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.bundles import CGROUP_PARENT, GpuBundle
from harness.commands import daemon, run
from harness.docker import ALONE
from harness.driver import Driver, simulate
from harness.images import REPOSITORY
from harness.inside import look, seen
from harness.installation import Installation
from harness.packages import (
    ADDITIONS,
    ADDRESS,
    MAINTAINER,
    Debian,
    debs,
    layer,
    leave_stale_module,
    without_gpuhook,
)
from harness.podman import cdi_folder
from harness.prefork import ONE

from gpuhook import __version__

# A module that an addition imports -> the module's package, the addition, and the kind of their
# dependency.
OF_ADDITIONS = {
    "bcrypt": ("python3-bcrypt", "gpuhook-metrics", "Suggests"),
    "google": ("python3-protobuf", "gpuhook-kubernetes", "Depends"),
    "grpc": ("python3-grpcio", "gpuhook-kubernetes", "Depends"),
    "prometheus_client": ("python3-prometheus-client", "gpuhook-metrics", "Depends"),
}
README = "/usr/share/doc/gpuhook/README.md"
DAEMON_JSON = '{\n  "log-level": "warn"\n}\n'


@pytest.fixture(scope="session")
def packages() -> dict[str, Path]:
    return debs()


@pytest.fixture(scope="session")
def package(packages: dict[str, Path]) -> Path:
    return packages["gpuhook"]


@pytest.fixture(scope="session")
def without(workspace: Path, packages: dict[str, Path]) -> Path:
    """The layer with the package files in the root folder, without the host's gpuhook."""
    files = {f"{name}.deb": path for name, path in packages.items()}
    return without_gpuhook(workspace / "deb-without", files)


@pytest.fixture(scope="session")
def with_package(workspace: Path, without: Path) -> Path:
    """The layer with the package installed."""
    with layer(workspace / "deb-with", without) as made:
        made.call("dpkg", "-i", "/gpuhook.deb")
    return made.upper


@pytest.fixture
def bare(workspace: Path, without: Path) -> Iterator[Debian]:
    """A Debian with the package file in its root folder."""
    folder = workspace / "deb-root"
    with layer(folder, without) as made:
        yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


@pytest.fixture
def debian(workspace: Path, without: Path, with_package: Path) -> Iterator[Debian]:
    """A Debian with the package installed."""
    folder = workspace / "deb-root"
    with layer(folder, with_package, without) as made:
        yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


def test_lintian_reports_no_problem(packages: dict[str, Path]) -> None:
    options = ["--allow-root", "--fail-on", "error,warning"]
    done = run(["lintian", *options, *packages.values()], timeout=600.0).ok()
    assert done.stdout == ""


def test_the_simulator_is_a_separate_package(debian: Debian) -> None:
    missing = debian.call("gpuhook", "simulate", "/gpus", fails=True).stderr
    assert missing.endswith("or install the package gpuhook-simulate.\n")
    before = debian.changed()
    debian.call("dpkg", "-i", "/gpuhook-simulate.deb")
    files = debian.call("dpkg", "-L", "gpuhook-simulate").stdout.split()
    [page] = [path for path in files if path.endswith("gpuhook-simulate.1.gz")]
    assert wrong_in(debian.root / page.lstrip("/")) == []
    assert b"driver-files" in gzip.decompress((debian.root / page.lstrip("/")).read_bytes())
    modules = debian.root / "usr/lib/gpuhook/gpuhook_simulate"
    assert any(path.name.startswith("command.cpython-") for path in modules.rglob("*.pyc"))
    assert debian.call("gpuhook", "simulate", "/gpus", "--gpus", "2").stdout
    debian.call("gpuhook", "simulate", "/gpus", "--remove")
    debian.call("dpkg", "-r", "gpuhook-simulate")
    assert debian.changed() == before
    assert not modules.exists()


def _python_packages(package: Path, field: str) -> set[str]:
    named = run(["dpkg-deb", "--field", package, field]).ok().stdout
    return set(re.findall(r"python3-[a-z0-9-]+", named))


def test_every_imported_library_is_a_dependency(packages: dict[str, Path]) -> None:
    package = packages["gpuhook"]
    imported = set[str]()
    for path in (REPOSITORY / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"gpuhook", "gpuhook_simulate", "_imp"}
    assert OF_ADDITIONS.keys() <= foreign
    wanted = {f"python3-{name}" for name in foreign - {"pynvml"} - OF_ADDITIONS.keys()}
    assert wanted <= _python_packages(package, "Depends")
    for library, addition, field in OF_ADDITIONS.values():
        assert library in _python_packages(packages[addition], field)
    assert "./usr/lib/gpuhook/pynvml.py" in run(["dpkg-deb", "--contents", package]).ok().stdout


def test_the_default_configuration_is_the_one_of_the_repository(
    package: Path, tmp_path: Path
) -> None:
    run(["dpkg-deb", "--extract", package, tmp_path]).ok()
    shipped = tmp_path / "usr/lib/gpuhook/gpuhook/tools/config/config.toml"
    assert not shipped.is_symlink()
    assert shipped.read_bytes() == (REPOSITORY / "config/config.toml").read_bytes()


def test_package_maintainer_is_the_configured_builder(package: Path) -> None:
    found = run(["dpkg-deb", "--field", package, "Maintainer"]).ok().stdout
    assert found == f"{MAINTAINER} <{ADDRESS}>\n"


def test_the_installed_programs_run(debian: Debian) -> None:
    assert debian.call("gpu-py", "--version").stdout == run(["runc", "--version"]).ok().stdout
    for hook in ("gpuhook-prestart", "gpuhook-cdi-hook"):
        assert f"usage: {hook}" in debian.call(hook, "--help").stdout
    assert debian.call("gpuhook", "--version").stdout.startswith("gpuhook, version ")
    validated = debian.call("gpuhook", "config", "validate").stdout
    assert "/etc/gpuhook/config.toml is valid" in validated
    assert "no NVIDIA driver" in debian.call("gpuhook", "info", fails=True).stderr
    assert debian.call("gpuhook", "config", "set", "--dry-run", "disable-require").stdout
    findings = json.loads(debian.call("gpuhook", "doctor", "--format", "json", fails=True).stdout)
    status = {each["check"]: each["status"] for each in findings["findings"]}
    assert status["launchers"] == status["runtime-starts"] == status["configuration"] == "ok"
    assert "launcher-owner" not in status


def test_the_modules_are_compiled(debian: Debian) -> None:
    compiled = {path.name for path in (debian.root / "usr/lib/gpuhook").rglob("*.pyc")}
    for name in ("runtime_shim", "prestart_hook", "pynvml"):
        assert any(each.startswith(f"{name}.cpython-") for each in compiled), compiled


def test_an_upgrade_uses_no_stale_compiled_module(debian: Debian) -> None:
    """A start compiles the module after the old package's prerm removed compiled modules."""
    debian.call("dpkg", "--unpack", "/gpuhook.deb")
    leave_stale_module(debian)
    debian.call("dpkg", "--configure", "gpuhook")
    assert f"version {__version__}" in debian.call("gpuhook", "--version").stdout


def test_a_purge_leaves_no_files(bare: Debian) -> None:
    before = bare.changed()
    said = bare.call("dpkg", "-i", "/gpuhook.deb").stdout
    assert f"run gpuhook install ({README})" in said
    assert (bare.root / README.lstrip("/")).is_file()
    assert README not in bare.call("dpkg", "-i", "/gpuhook.deb").stdout  # an upgrade
    bare.call("gpuhook", "--help")
    assert "usr/bin/gpu-py" in bare.changed()
    bare.call("dpkg", "-r", "gpuhook")
    settings = {"etc/gpuhook", "etc/gpuhook/config.toml"}  # kept until a purge, like a conffile
    assert "etc/gpuhook/config.toml" in bare.changed()
    assert bare.changed() - settings == before
    bare.call("dpkg", "-P", "gpuhook")
    assert bare.changed() == before
    assert not (bare.root / "usr/lib/gpuhook").exists()
    assert not (bare.root / "run/gpuhook").exists()


def test_a_purge_removes_links_to_simulated_nodes(bare: Debian) -> None:
    """The roots may exist or be removed already; links to other nodes stay."""
    bare.call("dpkg", "-i", "/gpuhook.deb")
    links = bare.root / "dev/char"
    links.mkdir()
    run(["mount", "-t", "tmpfs", "tmpfs", links]).ok()
    try:
        for folder in ("srv/gpus", "srv/driver"):
            node = bare.root / folder / "dev/nvidia-caps/nvidia-cap1"
            node.parent.mkdir(parents=True)
            node.touch()
        (bare.root / "srv/gpus/.gpuhook-simulated").touch()
        targets = {
            "195:0": "/srv/gpus/dev/nvidia-caps/nvidia-cap1",
            "195:1": "/srv/gone/dev/nvidia1",
            "195:2": "/srv/driver/dev/nvidia-caps/nvidia-cap1",
            "195:3": "/srv/driver/dev/nvidia3",
            "195:4": "/srv/gone/nvidia4",
            "1:3": "../null",
            "1:5": "../not there",
        }
        for name, target in targets.items():
            (links / name).symlink_to(target)
        bare.call("dpkg", "-P", "gpuhook")
        assert {path.name for path in links.iterdir()} == {
            "195:2",
            "195:3",
            "195:4",
            "1:3",
            "1:5",
        }
    finally:
        run(["umount", links])
        links.rmdir()


def test_the_units_are_well_formed_and_enabled_where_that_is_safe(debian: Debian) -> None:
    debian.call("dpkg", "-i", *(f"/{name}.deb" for name in ADDITIONS))
    names = sorted(unit.name for unit in (REPOSITORY / "packaging/systemd").iterdir())
    enabled = debian.root / "etc/systemd/system/multi-user.target.wants"
    expected = ["gpuhook-cdi-refresh.path", "gpuhook-cdi-refresh.service", "gpuhook-watch.service"]
    assert sorted(path.name for path in enabled.glob("gpuhook-*")) == expected
    for name in names:
        # The tool of Debian 12 links to /lib, that of Debian 13 to /usr/lib.
        place = str((enabled / name).readlink()) if name in expected else ""
        assert place.removeprefix("/usr") in ("", f"/lib/systemd/system/{name}")
        verified = debian.call("systemd-analyze", "verify", "--man=no", name)
        assert verified.stderr == ""


@pytest.fixture(scope="module")
def with_conffile(package: Path, workspace: Path) -> Path:
    """An older version of the package, with config.toml as a conffile and another default."""
    tree, old = workspace / "deb-tree", workspace / "deb-old.deb"
    run(["dpkg-deb", "--raw-extract", package, tree]).ok()
    config = tree / "etc/gpuhook/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("# Every key is here, and one more.\n#disable-require = false\n")
    (tree / "DEBIAN/conffiles").write_text("/etc/gpuhook/config.toml\n")
    control = tree / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*", "Version: 0.1.0", control.read_text()))
    run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, old]).ok()
    return old


@pytest.mark.parametrize("edited", [False, True])
def test_no_upgrade_asks_about_the_configuration(
    bare: Debian, with_conffile: Path, edited: bool
) -> None:
    config = bare.root / "etc/gpuhook/config.toml"
    before = bare.changed()
    run(["cp", with_conffile, bare.root / "run/old.deb"]).ok()
    bare.call("dpkg", "-i", "/run/old.deb")
    if edited:
        bare.call("gpuhook", "config", "set", "disable-require=true")
    text = config.read_text()
    assert ("\ndisable-require = true" in text) == edited
    bare.call("dpkg", "-i", "/gpuhook.deb")  # dpkg has no terminal here
    assert config.read_text() == text
    shown = bare.call("gpuhook", "config", "show").stdout
    assert f"disable-require = {str(edited).lower()}\n" in shown
    assert {path.name for path in config.parent.iterdir()} == {"config.toml"}
    bare.call("dpkg", "-P", "gpuhook")
    assert bare.changed() == before
    assert not config.parent.exists()


def test_a_commented_configuration_is_installed(debian: Debian) -> None:
    config = debian.root / "etc/gpuhook/config.toml"
    text = config.read_text()
    assert text == (REPOSITORY / "config/config.toml").read_text()
    assert config.stat().st_mode & 0o7777 == 0o644
    assert all(line[:1] in ("", "#", "[") for line in text.splitlines())
    debian.call("gpuhook", "config", "set", "disable-require=true")
    changed = config.read_text()
    assert "\ndisable-require = true" in changed
    neighbour = config.with_name("of somebody's")
    neighbour.touch()
    for step in (["-i", "/gpuhook.deb"], ["-r", "gpuhook"]):
        debian.call("dpkg", *step)
        assert config.read_text() == changed
    config.unlink()
    debian.call("dpkg", "-i", "/gpuhook.deb")  # an administrator who removed it doesn't want it
    assert not config.exists()
    config.write_text(changed)
    debian.call("dpkg", "-r", "gpuhook")
    debian.call("dpkg", "-P", "gpuhook")
    assert [*config.parent.iterdir()] == [neighbour]


def test_removal_restores_the_engines_settings(debian: Debian) -> None:
    settings = debian.root / "etc/docker/daemon.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(DAEMON_JSON)
    debian.call("gpuhook", "install", "--engine", "docker")
    runtimes = json.loads(settings.read_text())["runtimes"]
    assert runtimes == {"gpu-py": {"path": "/usr/bin/gpu-py"}}
    debian.call("dpkg", "-r", "gpuhook")
    assert settings.read_text() == DAEMON_JSON


def document_of(debian: Debian) -> Path:
    """Return the path of the GPUs' CDI spec; /var/run is a link to /run."""
    folder = str(cdi_folder()).replace("/var/run", "/run")
    return debian.root / folder.lstrip("/") / "nvidia.com-gpu.yaml"


def test_cdi_specs_are_kept_by_the_packages_own_units(
    debian: Debian, installation: Installation
) -> None:
    simulate(installation, debian.root / "gpus", "--gpus=2")
    debian.call("gpuhook", "config", "set", "nvidia-container-cli.root=/gpus")
    before = debian.changed()
    done = debian.call("gpuhook", "install", "--cdi", "--engine", "podman")
    assert f"wrote {cdi_folder()}/nvidia.com-gpu.yaml" in done.stdout
    assert "systemctl" not in done.stdout
    changed = [path for path in debian.changed() - before if path.startswith("etc/")]
    assert [path for path in changed if not path.startswith("etc/cdi")] == [
        "etc/containers/containers.conf.d/99-gpuhook.conf"
    ]
    debian.call("gpuhook", "cdi", "refresh")
    debian.call("dpkg", "-r", "gpuhook")
    assert not document_of(debian).exists()
    assert not (debian.root / "var/lib/gpuhook").exists()


def test_removal_is_refused_while_a_custom_cdi_spec_names_the_hook(
    debian: Debian, installation: Installation
) -> None:
    simulate(installation, debian.root / "gpus", "--gpus=2")
    debian.call("gpuhook", "config", "set", "nvidia-container-cli.root=/gpus")
    debian.call("gpuhook", "install", "--cdi", "--engine", "podman")
    debian.call("gpuhook", "cdi", "generate", "--output", "/etc/cdi/by hand.json")
    refused = debian.call("dpkg", "-r", "gpuhook", fails=True)
    assert "name /usr/bin/gpuhook-cdi-hook" in refused.stderr
    [command] = re.findall(r"Run this first: (.*)\.$", refused.stderr, re.MULTILINE)
    assert command == "rm '/etc/cdi/by hand.json'"
    assert (debian.root / "usr/bin/gpuhook-cdi-hook").exists()
    assert document_of(debian).exists()
    debian.call("sh", "-c", command)
    debian.call("dpkg", "-r", "gpuhook")
    assert not document_of(debian).exists()


@dataclass(frozen=True)
class Docker:
    """A dockerd in a Debian, with all its files at the usual paths."""

    debian: Debian
    pid: int

    def call(self, *words: str, fails: bool = False) -> str:
        done = self.debian.call("docker", *words, fails=fails)
        return (done.stderr if fails else done.stdout).strip()

    def default(self) -> str:
        return self.call("info", "--format", "{{.DefaultRuntime}}")


@contextmanager
def dockerd(debian: Debian, busybox: Path) -> Iterator[Docker]:
    """Run dockerd in a Debian, with an image named "busybox"."""
    sys_folder = debian.root / "sys"
    run(["mount", "--rbind", "/sys", sys_folder]).ok()
    run(["mount", "--make-rslave", sys_folder]).ok()
    options = ["--storage-driver=vfs", "--data-root=/run/docker-data", "--bridge=none"]
    options += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    options += [f"--cgroup-parent={CGROUP_PARENT}", "--exec-opt=native.cgroupdriver=cgroupfs"]
    inside = ["chroot", str(debian.root)]
    argv = [*ALONE, *inside, "dockerd", *options]
    log = debian.upper.parent / "log"
    env = {"DOCKER_RAMDISK": "yes"}  # runc can't pivot_root in a chroot
    try:
        with daemon(
            argv, log, lambda: run([*inside, "docker", "info"]).status == 0, env
        ) as process:
            docker = Docker(debian, process.pid)
            archive = debian.root / "run/busybox.tar"
            run(["tar", "-C", busybox, "-cf", archive, "."]).ok()
            docker.call("import", "/run/busybox.tar", "busybox")
            try:
                yield docker
            finally:
                program = debian.root / "usr/bin/gpu-py"
                if not program.exists():  # if the test fails, containers may still need it
                    program.symlink_to("/usr/sbin/runc")
                containers = docker.call("ps", "--all", "--quiet").split()
                run([*inside, "docker", "rm", "--force", *containers])
    finally:
        run(["umount", "--recursive", sys_folder]).ok()


@pytest.mark.protects(
    "containers-in-use", "removal: gpu-py isn't removed while a container needs it"
)
@pytest.mark.protects(
    "engines-in-use",
    "removal: gpu-py isn't removed while an engine needs it",
    instead="gpuhook uninstall --engine all --reload",
)
def test_removal_is_refused_while_a_docker_container_needs_gpu_py(
    debian: Debian, roots: dict[str, Path]
) -> None:
    """After the containers stop, removal succeeds, and Docker works on without a restart."""
    settings = debian.root / "etc/docker/daemon.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(DAEMON_JSON)
    debian.call("gpuhook", "install", "--engine", "docker", "--set-default")
    installed = settings.read_bytes()
    with dockerd(debian, roots["busybox"]) as docker:
        assert docker.default() == "gpu-py"
        words = ["run", "--network=none", "--stop-timeout=0"]
        name = docker.call(*words, "--detach", "busybox", "busybox", "sleep", "1000")

        refused = debian.call("dpkg", "-r", "gpuhook", fails=True)
        [command] = re.findall(r"Run this first: (.*)\.$", refused.stderr, re.MULTILINE)
        assert command == f"docker stop {name[:12]}"
        query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", "gpuhook"]
        assert debian.call(*query).stdout == "installed"
        assert settings.read_bytes() == installed
        assert docker.call("exec", name, "busybox", "echo", "in") == "in"

        debian.call(*command.split())
        debian.call("dpkg", "-r", "gpuhook")
        assert not (debian.root / "usr/bin/gpu-py").exists()
        assert settings.read_text() == DAEMON_JSON
        assert docker.default() == "runc"
        assert docker.call(*words, "--rm", "busybox", "busybox", "echo", "new") == "new"


@pytest.mark.protects(
    "engines-in-use",
    "removal: gpu-py isn't removed while an engine needs it",
    instead="gpuhook uninstall --engine all --reload",
)
def test_removal_is_refused_while_gpu_py_is_dockers_default_by_hand(
    debian: Debian, roots: dict[str, Path]
) -> None:
    settings = debian.root / "etc/docker/daemon.json"
    settings.parent.mkdir(exist_ok=True)
    runtimes = {"gpus": {"path": "/usr/bin/gpu-py"}}
    settings.write_text(json.dumps({"runtimes": runtimes, "default-runtime": "gpus"}))
    with dockerd(debian, roots["busybox"]) as docker:
        refused = debian.call("dpkg", "-r", "gpuhook", fails=True)
        assert f"The running dockerd {docker.pid} has gpus (/usr/bin/gpu-py)" in refused.stderr
        assert "run this first: systemctl restart docker" in refused.stderr
        assert (debian.root / "usr/bin/gpu-py").exists()
    debian.call("dpkg", "-r", "gpuhook")


def test_removal_succeeds_where_gpuhook_does_not_start(debian: Debian) -> None:
    """A package that can't be removed would be worse than a skipped uninstall."""
    (debian.root / "usr/lib/gpuhook/gpuhook/tools/cli/__init__.py").write_text("broken = \n")
    assert "gpuhook doesn't start" in debian.call("dpkg", "-r", "gpuhook").stderr


def test_bash_completion_completes_a_command(debian: Debian) -> None:
    script = (
        ". /usr/share/bash-completion/completions/gpuhook; "
        "COMP_WORDS=(gpuhook do); COMP_CWORD=1; _gpuhook_completion gpuhook; "
        'echo "${COMPREPLY[@]}"'
    )
    assert debian.call("bash", "-c", script).stdout == "doctor\n"


def wrong_in(page: Path) -> list[str]:
    """Return mandoc's complaints about a manual page, except those about missing other pages."""
    said = run(["mandoc", "-Tlint"], stdin=gzip.decompress(page.read_bytes())).stdout
    return [line for line in said.splitlines() if "referenced manual not found" not in line]


def test_the_manual_pages_are_well_formed(debian: Debian) -> None:
    files = debian.call("dpkg", "-L", "gpuhook").stdout.split()
    pages = [debian.root / path[1:] for path in files if re.match("/usr/share/man/.*[.]gz", path)]
    names = {page.name for page in pages}
    assert {"gpuhook.1.gz", "gpuhook-explain.1.gz", "gpuhook.toml.5.gz", "gpu-py.8.gz"} <= names
    for page in pages:
        assert wrong_in(page) == [], page.name


@ONE
def test_the_packaged_runtime_gives_gpus(
    package: Path, workspace: Path, bundle: GpuBundle, driver: Driver
) -> None:
    unpacked = workspace / f"deb-unpacked-{bundle.name}"
    run(["dpkg-deb", "--extract", package, unpacked]).ok()
    bundle.environ("NVIDIA_VISIBLE_DEVICES=0,2")
    bundle.command(*look(driver.minors))
    inside = seen(bundle.run(unpacked / "usr/bin/gpu-py", bundle.env))
    assert inside.gpu_minors == {gpu.minor for gpu in driver.chosen(0, 2)}
