"""gpuhook install and uninstall for containerd, and pods with gpuhook's RuntimeClass."""

import fnmatch
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import images
from harness.commands import Result, daemon, run, wait_until
from harness.containerd import CRI, runtimes_of, same_as_runc
from harness.cri import Cri, CriError
from harness.driver import Driver, lines_of_nvidia_smi
from harness.inside import look, seen
from harness.installation import Installation
from harness.snapshot import contents, contents_now

DEBIAN = images.image("debian")
PAUSE = images.image("pause")
TWO = ["NVIDIA_VISIBLE_DEVICES=0,2"]
COMMENTED = """\
# The admin's own words,
version = 2   # and more of them
root = "{folder}/root"
state = "{folder}/state"

[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"

[plugins]
  # Kubernetes
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "{pause}"
    restrict_oom_score_adj = true
    disable_apparmor = true
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
        NoNewKeyring = true
"""
OLD = """\
root = "{folder}/root"
[plugins.cri]
  sandbox_image = "{pause}" # one
  [plugins.cri.containerd]
    default_runtime_name = "runc"
    [plugins.cri.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


STOCK = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/containerd.sock"
[ttrpc]
  address = "{folder}/containerd.sock.ttrpc"
[plugins."{plugin}"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."{plugin}".cni]
    bin_dir = "/usr/lib/cni"
"""
STOCK_OLD = STOCK.replace("version = 2\n", "")


class Site:
    """A containerd to install to: its configuration, and the gpuhook command with its own state."""

    def __init__(self, command: Path, folder: Path) -> None:
        self.folder = folder / "containerd"
        self.config = self.folder / "config.toml"
        self.command = command
        self._state = folder / "state"
        self.folder.mkdir()

    def gpuhook(self, verb: str, *words: str) -> Result:
        options = ["--engine=containerd", f"--config={self.config}", f"--state-dir={self._state}"]
        return run([self.command, verb, *options, *words])

    def dump(self) -> dict[str, Any]:
        """Return the settings that containerd itself reads from its files."""
        text = run(["containerd", "--config", self.config, "config", "dump"]).ok().stdout
        return tomllib.loads(text)

    def runtimes(self) -> dict[str, Any]:
        """Return the runtimes that containerd itself reads from its files."""
        return runtimes_of(self.dump())

    def ignores_version_1(self) -> bool:
        """Return whether this containerd, 2.0 to 2.2, finds no CRI settings in version 1."""
        return int(self.dump()["version"]) == 3

    def call(self, *words: str | Path) -> Result:
        """Run ctr in the namespace of the CRI's images."""
        return run(["ctr", f"--address={self.folder}/containerd.sock", "-n", "k8s.io", *words])


@pytest.fixture
def site(workspace: Path, installation: Installation) -> Iterator[Site]:
    folder = workspace / "install-containerd"  # a socket's path has at most 107 characters
    folder.mkdir()
    made = Site(installation.command, folder)
    made.config.write_text(COMMENTED.format(folder=made.folder, pause=PAUSE))
    yield made
    run(["rm", "-rf", "--one-file-system", folder]).ok()


@pytest.fixture(scope="module")
def pause_archive(workspace: Path, roots: dict[str, Path]) -> Path:
    """The image of the process that holds a pod's namespaces."""
    command = ("sleep", "infinity")
    return images.save({"pause": roots["busybox"]}, workspace / "pause.tar", command)


@contextmanager
def running(site: Site, config: Path, *archives: Path) -> Iterator[Cri]:
    """Run containerd on the site's configuration."""
    cri = Cri(site.folder / "containerd.sock")
    argv = ["containerd", "--config", str(site.config)]
    env = {"GPUHOOK_CONFIG": str(config)}
    try:
        with daemon(argv, site.folder / "log", cri.is_ready, env):
            for archive in archives:
                site.call("images", "import", archive).ok()
            yield cri
    finally:
        cri.close()


def test_a_pod_gets_gpus_after_install_and_is_refused_after_uninstall(
    site: Site, driver: Driver, configs: dict[str, Path], archive: Path, pause_archive: Path
) -> None:
    before = contents(site.folder)
    site.gpuhook("install").ok()
    with running(site, configs["runc"], archive, pause_archive) as cri, cri.pod("gpu-py") as pod:
        container = pod.start(DEBIAN, "sleep", "1000", env=TWO)
        inside = seen(container.exec(*look(driver.minors)))
        minors = {gpu.minor for gpu in driver.chosen(0, 2)}
        assert inside.gpu_minors == minors
        assert {minor for minor, opened in inside.by_hand.items() if opened == "ENXIO"} == minors
        done = container.exec("nvidia-smi", "-L").ok()
        assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
        assert "hooks" not in bundle_of(site, pod.name)
        assert "hooks" in bundle_of(site, container.name)
        words = ("--config", configs["runc"], "--format", "json")
        listed = json.loads(run([site.command, "list", *words]).ok().stdout)["containers"]
        [known] = [each for each in listed if each["name"] == container.name]
        names = ("kubernetes", "default", "pod", "main", "record")
        keys = ("engine", "namespace", "pod", "container", "known_from")
        assert tuple(known[key] for key in keys) == names
        assert container.name in site.gpuhook("uninstall", "--dry-run").ok().stderr

    site.gpuhook("uninstall").ok()
    assert contents_now(before) == before
    assert not (site.folder / "conf.d").exists()
    unknown = pytest.raises(CriError, match='no runtime for "gpu-py" is configured')
    with running(site, configs["runc"]) as cri, unknown, cri.pod("gpu-py"):
        pass


def bundle_of(site: Site, container: str) -> dict[str, Any]:
    """Return the config.json from which a container was created."""
    tasks = site.folder / "state/io.containerd.runtime.v2.task/k8s.io"
    spec: dict[str, Any] = json.loads((tasks / container / "config.json").read_text())
    return spec


def test_default_runtime_gives_gpus_only_to_pods_that_ask(
    site: Site, driver: Driver, configs: dict[str, Path], archive: Path, pause_archive: Path
) -> None:
    """A pod without a RuntimeClass also gets the GPUs that it requests."""
    site.gpuhook("install", "--set-default").ok()
    assert "containerd: unchanged" in site.gpuhook("install").ok().stdout  # stays default
    with running(site, configs["runc"], archive, pause_archive) as cri, cri.pod("") as pod:
        container = pod.start(DEBIAN, "sleep", "1000", env=["NVIDIA_VISIBLE_DEVICES=1"])
        done = container.exec("nvidia-smi", "-L").ok()
        assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(1))
    with running(site, configs["runc"]) as cri, cri.pod("") as pod:
        container = pod.start(DEBIAN, "sleep", "1000")
        assert "nvidia" not in container.exec("busybox", "ls", "/dev").ok().stdout


def test_uninstall_is_refused_while_containerd_needs_the_runtime(
    site: Site, configs: dict[str, Path], archive: Path, pause_archive: Path
) -> None:
    site.gpuhook("install", "--set-default").ok()
    installed = contents(site.folder)
    with running(site, configs["runc"], archive, pause_archive) as cri:
        with cri.pod("") as pod:
            done = site.gpuhook("uninstall", "--unless-in-use").failed()
            assert pod.name[:12] in done.stderr
            assert "Run this first: kubectl drain" in done.stderr

        def is_in_nobodys_way() -> bool:
            nonlocal done
            done = site.gpuhook("uninstall", "--unless-in-use").failed()
            return pod.name[:12] not in done.stderr

        wait_until(is_in_nobodys_way, "the pod's shim has ended")
        assert "Run this first: gpuhook uninstall --engine containerd && systemctl" in done.stderr
        assert contents_now(installed) == installed
    site.gpuhook("uninstall", "--unless-in-use").ok()


def test_uninstall_is_refused_while_a_ctr_container_runs(
    site: Site, configs: dict[str, Path], archive: Path, installation: Installation
) -> None:
    with running(site, configs["runc"]):
        ctr = ["ctr", f"--address={site.folder}/containerd.sock", "-n", "mine"]
        run([*ctr, "images", "import", archive]).ok()
        words = ["run", "--detach", f"--runc-binary={installation.runtime}", DEBIAN, "one"]
        run([*ctr, *words, "sleep", "1000"]).ok()
        try:
            done = site.gpuhook("uninstall", "--unless-in-use").failed()
        finally:
            run([*ctr, "tasks", "delete", "--force", "one"]).ok()
        assert "Run this first: ctr -n mine tasks delete --force one." in done.stderr
        wait_until(lambda: site.gpuhook("uninstall", "--unless-in-use").status == 0, "it has ended")


def test_containerd_reads_the_new_runtime_and_the_rest_unchanged(site: Site) -> None:
    """The other settings keep their meaning, and the new runtime has runc's settings."""
    before = site.dump()
    site.gpuhook("install", "--set-default").ok()
    after = site.dump()
    imports = after.pop("imports")
    before.pop("imports")
    # containerd 2 prints the pattern, older ones the files that it covers.
    drop_in = f"{site.folder}/conf.d/99-gpuhook.toml"
    assert any(fnmatch.fnmatch(drop_in, pattern) for pattern in imports)
    containerd = runtimes_of(after)
    same_as_runc(containerd["runtimes"].pop("gpu-py"), runtimes_of(before)["runtimes"]["runc"])
    assert containerd.pop("default_runtime_name") == "gpu-py"
    assert runtimes_of(before).pop("default_runtime_name") == "runc"
    assert after == before


def test_a_version_1_configuration_is_edited_and_restored(site: Site) -> None:
    text = OLD.format(folder=site.folder, pause=PAUSE)
    site.config.write_text(text)
    said = site.gpuhook("install", "--set-default").ok().stderr
    assert "# one" in site.config.read_text()
    assert ("ignores the CRI settings" in said) == site.ignores_version_1()
    if site.ignores_version_1():
        assert set(site.runtimes()["runtimes"]) == {"runc"}
    else:
        assert site.runtimes()["default_runtime_name"] == "gpu-py"
        ours = site.runtimes()["runtimes"]["gpu-py"]
        assert ours["options"]["BinaryName"].endswith("/gpu-py")
    site.gpuhook("uninstall").ok()
    assert site.config.read_text() == text


def test_install_creates_a_missing_configuration_and_uninstall_removes_it(site: Site) -> None:
    site.config.unlink()
    site.gpuhook("install").ok()
    assert "gpu-py" in site.runtimes()["runtimes"]
    site.gpuhook("uninstall").ok()
    assert list(site.folder.iterdir()) == []


@pytest.mark.parametrize("stock", [STOCK, STOCK_OLD])
def test_the_built_in_runtime_works_after_install(
    site: Site, configs: dict[str, Path], pause_archive: Path, stock: str
) -> None:
    """Debian's own file names no runtime; containerd forgets runc as soon as a file names one."""
    plugin = CRI if stock is STOCK else "cri"
    text = stock.format(folder=site.folder, pause=PAUSE, plugin=plugin)
    site.config.write_text(text)
    site.gpuhook("install").ok()
    if stock is STOCK_OLD and site.ignores_version_1():
        assert set(site.runtimes()["runtimes"]) == {"runc"}
    else:
        every_runtime_works(site, configs["runc"], pause_archive)
    site.gpuhook("uninstall").ok()
    assert site.config.read_text() == text
    assert not (site.folder / "conf.d").exists()


def every_runtime_works(site: Site, config: Path, pause_archive: Path) -> None:
    with running(site, config, pause_archive) as cri:
        [line] = [
            line.split()
            for line in site.call("plugins", "ls").ok().stdout.splitlines()
            if line.split()[:2] == ["io.containerd.grpc.v1", "cri"]
        ]
        assert line[-1] == "ok"
        for handler in ("", "runc", "gpu-py"):
            with cri.pod(handler):
                pass


def test_uninstall_keeps_later_changes_of_the_administrator(site: Site) -> None:
    text = site.config.read_text()
    site.gpuhook("install").ok()
    site.config.write_text(site.config.read_text().replace("# Kubernetes", "# k8s"))
    site.gpuhook("uninstall").ok()
    assert site.config.read_text() == text.replace("# Kubernetes", "# k8s")


@pytest.mark.parametrize("text", ["version = ", "[plugins", 'version = "two"', "version = 2\n\xff"])
def test_an_unparsable_config_is_refused_and_unchanged(site: Site, text: str) -> None:
    site.config.write_text(text, encoding="latin-1")
    before = contents(site.folder)
    done = site.gpuhook("install")
    assert done.status == 1
    assert str(site.config) in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert contents(site.folder) == before
