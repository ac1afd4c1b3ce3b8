"""nvidia-ctk as scripts call it: CDI specs, their list, and nodes and links in /dev.

The settings that it writes for Docker are tested in test_install_docker.
"""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import yaml
from harness.cdi import generate
from harness.commands import Result, run
from harness.driver import Driver, simulate
from harness.installation import Installation, write_config

from gpuhook.core.cdi import folders

PROGRAM = "nvidia-ctk"
CONTROL = {"nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"}
# A kernel with the driver shows its own files. In this mount namespace, the simulated driver's
# files are in their place.
_KERNEL = (
    "for path in dev proc/devices proc/driver sys/bus/pci sys/devices; do "
    'mount --rbind "$1/$path" "/$path" || exit; done; shift; exec "$@"'
)


@pytest.fixture(scope="module")
def machine(workspace: Path, installation: Installation) -> Driver:
    """A driver whose folders these tests change."""
    words = ["--gpus=2", "--model=H100", "--mig=0:1g.10gb"]
    return simulate(installation, workspace / "ctk-driver", *words)


@pytest.fixture(scope="module")
def config(workspace: Path, machine: Driver) -> Path:
    return write_config(workspace / "ctk-config", machine.root, ["runc"])


@pytest.fixture(scope="module")
def program(workspace: Path, installation: Installation) -> Path:
    """The program's link, as gpuhook install --gpus creates it."""
    link = workspace / "ctk-names" / PROGRAM
    link.parent.mkdir()
    link.symlink_to(installation.bin / "gpuhook-ctk")
    return link


class Caller:
    """A function that calls the program with our configuration.

    ``in_kernel`` makes the simulated driver look like the kernel's.
    """

    def __init__(self, program: Path, config: Path, root: Path) -> None:
        self._program = program
        self._env = {"GPUHOOK_CONFIG": str(config)}
        self._root = root

    def __call__(self, *words: str, **environment: str) -> Result:
        return run([self._program, *words], env={**self._env, **environment})

    def in_kernel(self, *words: str) -> Result:
        unshared = ["unshare", "--mount", "--propagation=private", "sh", "-c", _KERNEL, "sh"]
        return run([*unshared, self._root, self._program, *words], env=self._env)


@pytest.fixture
def ctk(program: Path, config: Path, machine: Driver) -> Caller:
    return Caller(program, config, machine.root)


def test_generated_specs_equal_those_of_gpuhook(
    ctk: Caller, installation: Installation, config: Path, tmp_path: Path
) -> None:
    document = generate(installation, config, tmp_path / "ours", "--kind=nvidia.com/gpu")
    assert ctk("cdi", "generate").ok().stdout == document.read_text()
    done = ctk("cdi", "generate", f"--output={tmp_path}/nvidia").ok()
    assert done.stdout == ""
    assert "Generated CDI spec" in done.stderr
    assert (tmp_path / "nvidia.yaml").read_text() == document.read_text()
    path = str(tmp_path / "by-variable.json")
    ctk("cdi", "generate", NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=path).ok()
    assert json.loads(Path(path).read_text())["kind"] == "nvidia.com/gpu"


def test_specs_are_generated_with_the_options_that_scripts_use(
    ctk: Caller, installation: Installation, machine: Driver, tmp_path: Path
) -> None:
    hook = tmp_path / "nvidia-cdi-hook"
    hook.symlink_to(installation.bin / "gpuhook-cdi-hook")
    done = ctk(
        "--debug", "cdi", "generate", f"--output={tmp_path}/x.yaml", "--mode=NVML",
        f"--driver-root={machine.root}", f"--dev-root={machine.root}/",
        "--device-name-strategy=index,type-index", "--device-id=all", "--no-all-device",
        f"--nvidia-ctk-path={hook}", "--ldconfig-path=/sbin/ldconfig", "--cdi-vendor=example.com",
        "--cdi-class=accelerator", "--disable-hook=all", "--feature-flags=x",
    ).ok()  # fmt: skip
    assert done.stderr.count("has no effect") == 3
    found = folders.read_folders([str(tmp_path)])
    names = {name.partition("=")[2] for name in found.devices}
    assert {name.partition("=")[0] for name in found.devices} == {"example.com/accelerator"}
    assert names == {"0:0", "1", "mig0:0", "gpu1"}
    assert str(hook) in (tmp_path / "x.yaml").read_text()
    listed = ctk("--quiet", "cdi", "list", f"--spec-dir={tmp_path}").ok()
    assert listed.stdout.splitlines() == sorted(found.devices)
    assert listed.stderr == ""


def test_specs_are_generated_for_the_named_devices(ctk: Caller) -> None:
    done = ctk("cdi", "generate", "--device-id=1", "--device-name-strategy=index").ok()
    names = [each["name"] for each in yaml.safe_load(done.stdout)["devices"]]
    assert names == ["1", "all"]
    done = ctk("cdi", "generate", "--device-id=7").failed()
    assert "no GPU or MIG device '7'" in done.stderr


def test_cuda_compat_root_must_match_the_configuration(ctk: Caller) -> None:
    usual = "--cuda-compat-container-root=/usr/local/cuda/compat"
    assert ctk("cdi", "generate", usual).ok().stdout == ctk("cdi", "generate").ok().stdout
    done = ctk("cdi", "generate", "--cuda-compat-container-root=/opt/compat").failed()
    assert "gpuhook config set gpuhook.cuda-compat-root=/opt/compat" in done.stderr


def test_nvidias_variable_names_the_configuration(
    program: Path, installation: Installation, config: Path
) -> None:
    words: list[str | Path] = [program, "cdi", "generate"]
    named = run(words, env={"NVIDIA_CTK_CONFIG_FILE_PATH": str(config)}).ok()
    assert named.stdout == run(words, env={"GPUHOOK_CONFIG": str(config)}).ok().stdout
    env = {"NVIDIA_CTK_CONFIG_FILE_PATH": str(config)}
    assert "H100" in run([installation.command, "info"], env=env).ok().stdout


def test_a_hook_path_of_another_program_is_ignored_with_a_warning(
    ctk: Caller, installation: Installation
) -> None:
    done = ctk("cdi", "generate", "--nvidia-cdi-hook-path=/usr/bin/true").ok()
    assert "warning: /usr/bin/true isn't a link to gpuhook-cdi-hook" in done.stderr
    assert f"{installation.bin}/gpuhook-cdi-hook" in done.stdout


def test_links_are_made_to_existing_nodes(ctk: Caller, tmp_path: Path) -> None:
    words = ["system", "create-dev-char-symlinks", f"--dev-char-path={tmp_path}/char"]
    done = ctk.in_kernel(*words, "--dry-run").ok()
    assert "would link" in done.stderr
    assert not (tmp_path / "char").exists()
    done = ctk.in_kernel(*words, "--load-kernel-modules").ok()
    assert "only with --create-all" in done.stderr
    links = {os.path.basename(os.readlink(path)) for path in (tmp_path / "char").iterdir()}
    assert CONTROL | {"nvidia0", "nvidia1"} < links
    assert any(name.startswith("nvidia-cap") for name in links)
    again = ctk.in_kernel(*words).ok()
    assert again.stderr == ""


def test_links_are_named_by_the_numbers_of_their_nodes(ctk: Caller, machine: Driver) -> None:
    """The links are in /dev/char itself, where systemd looks for them."""
    ctk.in_kernel("system", "create-dev-char-symlinks").ok()
    folder = machine.root / "dev/char"
    for link in folder.iterdir():
        node = machine.root / os.readlink(link).lstrip("/")
        device = node.stat().st_rdev
        assert link.name == f"{os.major(device)}:{os.minor(device)}"


def test_links_are_made_for_all_possible_nodes(
    ctk: Caller, machine: Driver, tmp_path: Path
) -> None:
    words = [f"--dev-char-path={tmp_path}", "--create-all", "--create-device-nodes"]
    ctk.in_kernel("system", "create-dev-char-symlinks", *words).ok()
    links = {os.path.basename(os.readlink(path)) for path in tmp_path.iterdir()}
    assert CONTROL | {"nvidia0", "nvidia1", "nvidia-cap1", "nvidia-cap2"} <= links
    caps = {name for name in links if name.startswith("nvidia-cap")}
    assert len(caps) > len([*(machine.root / "dev/nvidia-caps").iterdir()])


def test_control_nodes_are_created(ctk: Caller, machine: Driver, tmp_path: Path) -> None:
    words = ["system", "create-device-nodes", f"--dev-root={tmp_path}", "--control-devices"]
    ctk.in_kernel(*words, "--dry-run").ok()
    assert not (tmp_path / "dev").exists()
    ctk.in_kernel(*words).ok()
    nodes = {path.name: path.stat() for path in (tmp_path / "dev").iterdir()}
    assert set(nodes) == CONTROL
    for name, status in nodes.items():
        assert stat.S_IMODE(status.st_mode) == 0o666
        assert status.st_rdev == (machine.root / "dev" / name).stat().st_rdev
    assert ctk.in_kernel(*words).ok().stderr == ""


def test_a_failed_module_load_is_an_error(ctk: Caller) -> None:
    words = ["system", "create-device-nodes", "--load-kernel-modules", "--root=/nonexistent"]
    done = ctk(*words).failed()
    assert done.status == 1
    assert "chroot /nonexistent /sbin/modprobe nvidia failed" in done.stderr


@pytest.mark.protects(
    "ctk-modprobe", "root never runs another user's modprobe to load kernel modules"
)
def test_a_modprobe_owned_by_another_user_is_not_run(ctk: Caller, tmp_path: Path) -> None:
    program = tmp_path / "sbin/modprobe"
    program.parent.mkdir()
    shutil.copy2("/bin/busybox", tmp_path / "sbin/sh")
    program.write_text("#!/sbin/sh\necho >/seen\n")
    program.chmod(0o755)
    words = ["system", "create-device-nodes", "--load-kernel-modules", f"--root={tmp_path}"]
    ctk(*words).ok()
    (tmp_path / "seen").unlink()
    for owned in (program, program.parent, tmp_path):
        os.chown(owned, 4401, -1)
        assert ctk(*words).failed().stderr.startswith("nvidia-ctk: ")
        assert not (tmp_path / "seen").exists()
        os.chown(owned, 0, -1)
    # On the host, the link leads to another folder than for modprobe, which is started below
    # the root.
    program.parent.rename(tmp_path / "programs")
    program.parent.symlink_to("/programs")
    (tmp_path / "programs/modprobe").write_text("#!/programs/sh\necho >/seen\n")
    os.chown(tmp_path / "programs", 4401, -1)
    assert ctk(*words).failed().stderr.startswith("nvidia-ctk: ")
    assert not (tmp_path / "seen").exists()
