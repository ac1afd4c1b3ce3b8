"""gpuhook install --cdi and cdi refresh: CDI specs that are kept up to date with the devices."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.commands import Result, run, wait_until
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.engines import settings
from harness.images import image
from harness.installation import Installation, write_config
from harness.namespaces import Namespace
from harness.podman import Podman, cdi_folder, podman

from gpuhook.core.cdi import folders
from gpuhook.core.cdi.document import read
from gpuhook.tools.cdi import refresh as refreshing

FOLDER = cdi_folder()  # the session has a /run and an /etc of its own
DOCUMENT = FOLDER / "nvidia.com-gpu.yaml"
IN_RUN = Path("/var/run/cdi", DOCUMENT.name)  # used if a test specifies engines' versions
RULE = Path("/etc/udev/rules.d/70-gpuhook-cdi-refresh.rules")


class Site:
    """A separate simulated driver, and a gpuhook that keeps CDI specs for podman up to date."""

    def __init__(self, installation: Installation, folder: Path) -> None:
        self._installation = installation
        self.folder = folder
        self.state = folder / "state"
        self.config = write_config(folder / "config", folder / "driver", ["runc"])

    def simulate(self, *options: str) -> Driver:
        return simulate(self._installation, self.folder / "driver", *options)

    def command(self, *words: str) -> list[str]:
        return [str(self._installation.command), *words, f"--state-dir={self.state}"]

    def gpuhook(self, *words: str) -> Result:
        return run(self.command(*words), {"GPUHOOK_CONFIG": str(self.config)})

    def install(self) -> Result:
        return self.gpuhook("install", "--cdi", "--engine=podman")

    def refresh(self) -> Result:
        return self.gpuhook("cdi", "refresh")

    def errors(self) -> list[dict[str, str]]:
        path = self.state / "cdi-error.json"
        found: list[dict[str, str]] = json.loads(path.read_text()) if path.exists() else []
        return found


@pytest.fixture
def site(workspace: Path, installation: Installation) -> Iterator[Site]:
    folder = workspace / "kept"
    folder.mkdir()
    made = Site(installation, folder)
    made.simulate("--gpus=2")
    yield made
    made.gpuhook("uninstall")
    run(["rm", "-rf", folder, FOLDER, IN_RUN.parent, *FOLDER.parent.glob("cdi-*")]).ok()


@pytest.fixture(scope="module")
def engine(workspace: Path, archive: Path, host: Namespace) -> Iterator[Podman]:
    runtime = Path(run(["sh", "-c", "command -v runc"]).ok().stdout.strip())
    with podman(workspace / "podman-kept", host, runtime, archive) as made:
        yield made


def names() -> set[str]:
    """Return the device names that engines know."""
    return {name.partition("=")[2] for name in folders.read_folders([str(FOLDER)]).devices}


# Run a command with its own /dev, and print the content of /dev/char afterwards.
IN_A_DEV = """
mkdir -p "$1/char"
cp -a /dev/null /dev/zero /dev/urandom "$1"
mount --bind "$1" /dev
shift
"$@" >/dev/null
ls /dev/char
"""


@pytest.mark.parametrize("verb", [("install", "--cdi", "--engine=podman"), ("cdi", "refresh")])
def test_links_for_systemd_are_made_to_the_nodes_of_cdi_specs(
    site: Site, verb: tuple[str, ...]
) -> None:
    """gpu-py usually makes them in /dev/char, but an engine may start containers without it."""
    site.install().ok()

    def links(*words: str) -> set[str]:
        begin = ["unshare", "--mount", "sh", "-euc", IN_A_DEV, "sh", f"{site.folder}/dev"]
        env = {"GPUHOOK_CONFIG": str(site.config)}
        return {*run([*begin, *site.command(*words)], env).ok().stdout.split()}

    nodes = [path.stat().st_rdev for path in (site.folder / "driver/dev").glob("nvidia?")]
    assert len(nodes) == 2
    if verb[0] == "install":
        assert links(*verb, "--dry-run") == set()
    assert {f"{os.major(node)}:{os.minor(node)}" for node in nodes} <= links(*verb)


def smi(engine: Podman, device: str) -> Result:
    options = ("--device", f"nvidia.com/gpu={device}")
    return engine.run(image("debian"), "nvidia-smi", "-L", options=options)


def test_podman_gets_the_devices_of_the_refreshed_spec(site: Site, engine: Podman) -> None:
    site.install().ok()
    driver = site.simulate("--gpus=8")
    site.refresh().ok()
    assert smi(engine, "7").ok().stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(7))
    driver = site.simulate("--gpus=4", "--driver-version=570.1.2")
    assert site.refresh().ok().stdout == f"wrote {DOCUMENT} (version 0.5.0, 9 names)\n"
    assert smi(engine, "3").ok().stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(3))
    assert "nvidia.com/gpu=7" in smi(engine, "7").failed().stderr
    assert "libcuda.so.570.1.2" in DOCUMENT.read_text()
    site.simulate("--gpus=1", "--model=H100", "--mig=0:1g.10gb,1g.10gb")
    site.refresh().ok()
    assert {"0:0", "0:1", "all"} <= names()
    assert smi(engine, "0:1").ok().stdout.count("\n  MIG ") == 1


@pytest.mark.parametrize(
    ("option", "reason"), [("--fail=not-loaded", "Driver Not Loaded"), ("--gpus=0", "has no GPU")]
)
def test_a_spec_is_removed_with_its_driver_or_last_device(
    site: Site, option: str, reason: str
) -> None:
    site.install().ok()
    assert names() > {"0", "1", "all"}
    site.simulate(option)
    done = site.refresh().ok()
    assert done.stdout.startswith(f"removed {DOCUMENT}: ")
    assert reason in done.stdout
    assert list(FOLDER.iterdir()) == []
    assert reason in site.refresh().ok().stdout
    assert site.errors() == []
    site.simulate("--gpus=1")
    site.refresh().ok()
    assert names() > {"0", "all"}


def test_a_spec_is_written_once_there_is_a_driver(site: Site) -> None:
    run(["rm", "-rf", site.folder / "driver"]).ok()
    done = site.install().ok()
    assert "CDI specs are written once there is a driver" in done.stdout
    assert not DOCUMENT.exists()
    site.simulate("--gpus=1")
    site.refresh().ok()
    assert names() > {"0", "all"}


def test_a_failing_driver_keeps_the_old_spec_and_records_the_error(site: Site) -> None:
    site.install().ok()
    before = DOCUMENT.stat().st_ino, DOCUMENT.read_bytes()
    site.simulate("--fail=version-mismatch")
    done = site.refresh().failed()
    assert "nvidia.com/gpu: NVML failed: " in done.stderr
    assert "the old CDI spec stays" in done.stderr
    assert (DOCUMENT.stat().st_ino, DOCUMENT.read_bytes()) == before
    [error] = site.errors()
    assert error["kind"] == "nvidia.com/gpu"
    assert error["error"] in done.stderr
    assert abs(float(error["time"]) - time.time()) < 600
    site.simulate("--gpus=2")
    site.refresh().ok()
    assert site.errors() == []


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    run(["mount", "--bind", folder, folder]).ok()
    try:
        run(["mount", "-o", "remount,bind,ro", folder]).ok()
        yield
    finally:
        run(["umount", folder]).ok()


def test_a_read_only_folder_keeps_the_old_spec_and_records_the_error(site: Site) -> None:
    site.install().ok()
    before = DOCUMENT.read_bytes()
    for options in (["--gpus=1"], ["--fail=not-loaded"]):
        site.simulate(*options)
        with read_only(FOLDER):
            assert "Read-only file system" in site.refresh().failed().stderr
        assert DOCUMENT.read_bytes() == before
        assert "Read-only file system" in site.errors()[0]["error"]
    site.refresh().ok()
    assert not DOCUMENT.exists()
    assert site.errors() == []


def test_a_broken_configuration_keeps_the_spec_and_records_the_error(site: Site) -> None:
    site.install().ok()
    text = site.config.read_text()
    site.config.write_text("= broken\n")
    site.refresh().failed()
    assert DOCUMENT.exists()
    assert site.errors()[0]["kind"] == ""
    site.config.write_text(text)
    site.refresh().ok()
    assert site.errors() == []


def change(site: Site, number: int) -> None:
    """Change the configuration so that the next CDI spec differs, without a new driver."""
    words = "compute,utility" if number % 2 else "utility"
    text = site.config.read_text().partition("supported")[2].partition("\n")[2]
    rest = text or site.config.read_text()
    site.config.write_text(f'supported-driver-capabilities = "{words}"\n{rest}')


def test_concurrent_refreshes_write_one_valid_spec(site: Site) -> None:
    site.install().ok()
    for number in range(3):
        change(site, number)
        env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
        words = site.command("cdi", "refresh")
        running = [
            subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        said = [process.communicate(timeout=120)[0] for process in running]
        assert [process.returncode for process in running] == [0] * 4
        assert sum(line.startswith("wrote ") for line in said) == 1, said
        assert read(DOCUMENT.read_bytes()).problems == ()
    kept = {path.name for path in site.state.iterdir()}
    assert kept - {"engines", "folders.json"} == {"cdi.json"}
    assert list(FOLDER.iterdir()) == [DOCUMENT]


def test_a_refresh_waits_for_the_lock_of_another_process(site: Site) -> None:
    """Without the lock, a process that read an older state could write later."""
    site.install().ok()
    before = DOCUMENT.read_bytes()
    change(site, 0)
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    with refreshing.locked(str(site.state)):
        process = subprocess.Popen(site.command("cdi", "refresh"), env=env)
        wait_until(lambda: has_open(process, site.state / "cdi/lock"), "it waits")
        assert DOCUMENT.read_bytes() == before
    assert process.wait(60) == 0
    assert DOCUMENT.read_bytes() != before


def has_open(process: subprocess.Popen[bytes], path: Path) -> bool:
    try:
        return path in [each.readlink() for each in Path(f"/proc/{process.pid}/fd").iterdir()]
    except FileNotFoundError:  # closed meanwhile
        return False


def test_a_refresh_killed_at_any_moment_leaves_a_valid_spec(site: Site) -> None:
    site.install().ok()
    env = {**os.environ, "GPUHOOK_CONFIG": str(site.config)}
    good = {DOCUMENT.read_bytes()}
    for number in range(2):
        change(site, number)
        site.refresh().ok()
        good.add(DOCUMENT.read_bytes())
    assert len(good) == 3
    for number in range(10):
        change(site, number)
        process = subprocess.Popen(
            site.command("cdi", "refresh"), env=env, stdout=subprocess.DEVNULL
        )
        time.sleep(0.06 * number)  # each run is killed at another moment
        process.kill()
        process.wait()
        assert DOCUMENT.read_bytes() in good
        found = folders.read_folders([str(FOLDER)])
        assert {device.file for device in found.devices.values()} == {str(DOCUMENT)}
        assert found.errors == []
    change(site, 0)
    site.refresh().ok()
    assert DOCUMENT.read_bytes() in good


@pytest.mark.protects(
    "anothers-document", "a CDI spec of another generator is never replaced or removed"
)
def test_a_spec_of_another_generator_is_never_changed(site: Site) -> None:
    theirs = (
        b'{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": ['
        b'{"name": "0", "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"],'
        b' "hooks": [{"hookName": "createContainer", "path": "/usr/bin/theirs"}]}}]}\n'
    )
    FOLDER.mkdir()
    DOCUMENT.write_bytes(theirs)
    done = site.install().failed()
    assert f"{DOCUMENT} exists and isn't a file of gpuhook" in done.stderr
    assert DOCUMENT.read_bytes() == theirs
    site.simulate("--fail=not-loaded")
    site.refresh().ok()
    site.gpuhook("uninstall").ok()
    assert DOCUMENT.read_bytes() == theirs


@pytest.mark.protects(
    "kept-writers",
    "CDI specs are removed only by a record that only root can have written",
    instead="found = host_files.read(self.path)",
)
@pytest.mark.parametrize("name", ["state", "state/cdi.json"])
def test_state_owned_by_another_user_is_ignored(site: Site, name: str) -> None:
    site.install().ok()
    path = site.folder / name
    os.chown(path, 1000, 1000)
    try:
        site.simulate("--fail=not-loaded")
        site.refresh().failed()
        site.gpuhook("uninstall").failed()
        assert DOCUMENT.exists()
    finally:
        os.chown(path, 0, 0)


def test_a_runtime_path_by_a_link_gives_the_installed_hook_path(
    site: Site, installation: Installation
) -> None:
    link = site.folder / "gpu-py"
    link.symlink_to(installation.runtime)
    site.gpuhook("install", "--cdi", "--engine=podman", f"--runtime-path={link}").ok()
    hook = installation.bin / "gpuhook-cdi-hook"
    assert f"path: {hook}\n" in DOCUMENT.read_text()


def test_a_spec_of_an_unknown_kind_is_removed(site: Site) -> None:
    site.install().ok()
    text = DOCUMENT.read_text()
    old = FOLDER / "acme.example-npu.yaml"
    old.write_text(text.replace("kind: nvidia.com/gpu", "kind: acme.example/npu"))
    theirs = FOLDER / "acme.yaml"
    theirs.write_text(old.read_text())
    assert f"removed {old}: " in site.refresh().ok().stdout
    assert {*FOLDER.iterdir()} == {DOCUMENT, theirs}


def test_another_generators_spec_for_the_same_devices_causes_a_warning(site: Site) -> None:
    site.install().ok()
    (FOLDER / "nvidia.yaml").write_bytes(DOCUMENT.read_bytes())
    assert f"{FOLDER}/nvidia.yaml names the same devices" in site.refresh().ok().stderr


def test_refresh_without_an_installation_writes_nothing(site: Site) -> None:
    done = site.refresh().ok()
    assert "gpuhook install --cdi manages no CDI specs here" in done.stdout
    assert not site.state.exists()
    assert not FOLDER.exists()


def test_uninstall_restores_all_files_after_installing_twice(site: Site) -> None:
    def seen() -> dict[str, bytes]:
        places = [Path("/etc/systemd"), Path("/etc/udev"), FOLDER, site.state]
        files = [path for place in places for path in place.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in files if not path.is_symlink()}

    before = seen()
    site.install().ok()
    installed = seen()
    assert str(DOCUMENT) in installed
    assert str(RULE) in installed
    site.install().ok()
    assert seen() == installed
    site.gpuhook("install", "--engine=podman").ok()
    assert seen() == installed
    shown = site.gpuhook("uninstall", "--dry-run").ok().stdout
    assert f"--- {DOCUMENT}\n+++ /dev/null\n" in shown
    assert f"--- {RULE}\n+++ /dev/null\n" in shown
    assert seen() == installed
    site.gpuhook("uninstall").ok()
    assert seen() == before
    assert not FOLDER.exists()
    shown = site.gpuhook("install", "--cdi", "--engine=podman", "--dry-run").ok().stdout
    assert f"--- /dev/null\n+++ {DOCUMENT}\n" in shown
    assert f"--- /dev/null\n+++ {RULE}\n" in shown
    assert seen() == before


class Programs:
    """Engines in versions that this host lacks, as programs that print only a version."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._site = site
        self._folder = folder
        folder.mkdir()

    def install(self, *engines: str, **says: str) -> Result:
        """Run gpuhook install for engines; ``says`` are the lines that their programs print."""
        for name, line in says.items():
            path = self._folder / name
            path.write_text(f"#!/bin/sh\necho '{line}'\n")
            path.chmod(0o755)
        env = {
            "GPUHOOK_CONFIG": str(self._site.config),
            "PATH": f"{self._folder}:/usr/sbin:/usr/bin:/sbin:/bin",
        }
        words = settings("--engine", engines)
        return run(self._site.command("install", "--cdi", *words), env)


@pytest.fixture
def programs(site: Site, tmp_path: Path) -> Iterator[Programs]:
    made = Programs(site, tmp_path / "programs")
    yield made
    site.gpuhook("uninstall").ok()
    assert not Path("/etc/cdi/nvidia.com-gpu.yaml").exists()
    assert not DOCUMENT.exists()


@pytest.mark.parametrize(
    ("version", "is_written", "is_told"),
    [("20.10.24+dfsg1", False, True), ("26.1.5+dfsg1", True, False), ("28.5.2", False, False)],
)
def test_docker_cdi_is_enabled_where_the_version_supports_it(
    programs: Programs, version: str, is_written: bool, is_told: bool
) -> None:
    path = Path("/etc/docker/daemon.json")
    path.parent.mkdir(exist_ok=True)
    done = programs.install("docker", dockerd=f"Docker version {version}, build 5d6db84").ok()
    assert (json.loads(path.read_text()).get("features") == {"cdi": True}) == is_written
    assert (f"docker {version} doesn't support CDI" in done.stderr) == is_told
    assert IN_RUN.exists()


def test_a_disabled_docker_cdi_is_enabled_and_restored_by_uninstall(
    site: Site, programs: Programs
) -> None:
    path = Path("/etc/docker/daemon.json")
    path.parent.mkdir(exist_ok=True)
    text = '{"features": {"cdi": false, "buildkit": true}}\n'
    path.write_text(text)
    try:
        programs.install("docker", dockerd="Docker version 28.5.2, build ecc6942").ok()
        assert json.loads(path.read_text())["features"] == {"cdi": True, "buildkit": True}
        site.gpuhook("uninstall").ok()
        assert path.read_text() == text
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("version", "is_written"), [("1.6.20~ds1", False), ("1.7.24~ds1", True), ("v2.1.3", False)]
)
def test_containerd_cdi_is_enabled_where_the_version_needs_it(
    site: Site, programs: Programs, version: str, is_written: bool
) -> None:
    line = f"containerd github.com/containerd/containerd {version} 1234567"
    for again in ("--cdi", "--engine=containerd"):  # the later installation lacks --cdi
        if again == "--cdi":
            programs.install("containerd", containerd=line).ok()
        else:
            env = {"PATH": f"{programs._folder}:/usr/sbin:/usr/bin:/sbin:/bin"}
            run(site.command("install", again), env).ok()
        text = Path("/etc/containerd/conf.d/99-gpuhook.toml").read_text()
        assert ("enable_cdi = true" in text) == is_written


def test_one_cdi_folder_is_used_that_all_installed_engines_read(
    site: Site, programs: Programs
) -> None:
    programs.install("docker", dockerd="Docker version 26.1.5, build 411e817").ok()
    assert IN_RUN.exists()
    both = Path("/etc/cdi/nvidia.com-gpu.yaml")
    done = programs.install("podman", podman="podman version 5.4.2").ok()
    assert f"removed {IN_RUN}" in done.stdout
    assert both.exists()
    assert not IN_RUN.exists()
    programs.install("podman", podman="podman version 5.8.0").ok()
    assert IN_RUN.exists()
    assert not both.exists()


def test_a_spec_for_an_old_engine_avoids_newer_fields_or_warns(
    site: Site, programs: Programs
) -> None:
    for node in (site.folder / "driver/dev/dri").glob("renderD*"):
        os.chown(node, 0, 44)
        node.chmod(0o660)
    said = programs.install("podman", podman="podman version 5.4.2").ok().stderr
    assert "additionalGids" in Path("/etc/cdi/nvidia.com-gpu.yaml").read_text()
    assert "CDI specs" not in said
    said = programs.install("podman", podman="podman version 4.9.3").ok().stderr
    assert "podman 4.9.3 supports CDI specs up to version 0.6.0" in said
    assert "additionalGids" not in IN_RUN.read_text()
    assert 'cdiVersion: "0.5.0"' in IN_RUN.read_text()
    said = programs.install("podman", podman="podman version 4.1.1").ok().stderr
    assert f"podman 4.1.1 supports CDI specs up to version 0.4.0 and refuses {IN_RUN}" in said


def test_specs_are_kept_until_the_last_engine_is_uninstalled(site: Site) -> None:
    options = ("--prefix", str(site.folder / "system"))
    system = site.folder / "system"
    system.mkdir()
    site.gpuhook("install", "--cdi", "--engine=podman", "--engine=crio", *options).ok()
    document = Path(f"{system}{IN_RUN}")
    assert document.exists()
    done = site.gpuhook("uninstall", "--engine=crio", *options).ok()
    assert "kept for podman: the CDI specs" in done.stdout
    assert document.exists()
    site.gpuhook("uninstall", "--engine=podman", *options).ok()
    assert not document.exists()
    assert not site.state.exists()
