"""podman for an ordinary user, with gpuhook installed by that user."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness.cdi import KIND, generate, with_mounted_nodes
from harness.commands import Result, wait_until
from harness.driver import Driver, lines_of_nvidia_smi
from harness.installation import Installation, open_kinds, write_config
from harness.namespaces import Namespace, namespace

UID = 4242
NAME = "gpuhook-user"
PODMAN = ("podman", "--storage-driver=vfs", "--cgroup-manager=cgroupfs")


@dataclass(frozen=True)
class User:
    """An ordinary user with a home, in a separate namespace where crun runs."""

    home: Path
    namespace: Namespace
    config: Path

    def call(self, *argv: str | Path) -> Result:
        """Run a command as the user."""
        environ = [
            f"HOME={self.home}",
            f"XDG_RUNTIME_DIR={self.home}/run",
            f"GPUHOOK_CONFIG={self.config}",
            f"PATH={os.environ['PATH']}",
        ]
        identity = [f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
        words = ["setpriv", *identity, "env", "-i", *environ, *argv]
        return self.namespace.run(*words, cwd=self.home)

    def podman(
        self,
        runtime: str,
        *command: str,
        env: tuple[str, ...] = (),
        devices: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
    ) -> Result:
        """Run a command in a container whose root filesystem is below the user's home."""
        words = [*PODMAN, f"--runtime={runtime}", "run", "--rm", "--network=none", *options]
        words += ["--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"]
        words += [word for setting in env for word in ("--env", setting)]
        words += [f"--device={KIND}={device}" for device in devices]
        return self.call(*words, "--rootfs", str(self.home / "root"), *command)


@pytest.fixture(scope="module")
def user(
    workspace: Path,
    roots: dict[str, Path],
    driver: Driver,
    podman_config: Path,
    installation: Installation,
) -> Iterator[User]:
    """A user with only one id in the user namespace, because no subordinate ids exist."""
    for file, line in (
        ("/etc/passwd", f"{NAME}:x:{UID}:{UID}::{workspace}/home:/bin/sh\n"),
        ("/etc/group", f"{NAME}:x:{UID}:\n"),
    ):
        with Path(file).open("a") as table:  # the test session has an /etc of its own
            table.write(line)
    config = write_config(workspace / "rootless", driver.root, ["crun"])
    open_kinds(config, "maker.example/card")
    home = workspace / "home"
    (home / "run").mkdir(parents=True)
    layout = "v1" if Path("/sys/fs/cgroup/unified").is_dir() else "host"
    with namespace(layout) as entered:
        own = f"cp -a {roots['debian']} {home}/root && chown -R {UID}:{UID} {home}"
        entered.run("sh", "-c", own).ok()
        entered.run("mount", "--bind", config, podman_config).ok()  # only in this namespace
        _open_folders(entered, home, roots["debian"], installation.hook)
        yield User(home, entered, config)


def _open_folders(entered: Namespace, *also: Path) -> None:
    """Let the user reach the interpreter that gpuhook was installed with, wherever it is.

    An open copy covers each closed folder on the way.
    """
    python = Path(os.path.realpath("/proc/self/exe"))
    for path in (python, *also):
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                copy = Path("/run/gpuhook-open") / folder.name
                layers = f"lowerdir={folder},upperdir={copy}/upper,workdir={copy}/work"
                script = f"mkdir -p {copy}/upper {copy}/work && chmod 755 {copy}/upper"
                script += f" && mount -t overlay -o {layers} overlay {folder} && chmod 755 {folder}"
                entered.run("sh", "-c", script).ok()


@pytest.fixture(params=["prestart", "precreate"])
def installed(
    request: pytest.FixtureRequest, user: User, installation: Installation
) -> Iterator[User]:
    """The user, with gpuhook installed for that user as a runtime and as a hook of each stage."""
    command = installation.command
    done = user.call(command, "install", "--engine=podman", f"--hook={request.param}").ok()
    assert f"{user.home}/.config/containers/containers.conf.d/99-gpuhook.conf" in done.stdout
    yield user
    user.call(command, "uninstall").ok()
    assert not (user.home / ".config/containers").exists()
    assert not (user.home / ".local/state/gpuhook").exists()


@pytest.mark.parametrize("runtime", ["crun", "gpu-py"])
def test_requested_gpus_are_in_a_rootless_container(
    installed: User, driver: Driver, runtime: str
) -> None:
    done = installed.podman(runtime, "nvidia-smi", "-L", env=("NVIDIA_VISIBLE_DEVICES=0,2",)).ok()
    assert done.stdout.splitlines() == lines_of_nvidia_smi(driver.chosen(0, 2))
    nodes = installed.podman(
        runtime, "sh", "-c", "devopen /dev/nvidia*", env=("NVIDIA_VISIBLE_DEVICES=1",)
    )
    expected = f"/dev/nvidia{driver.gpus[1].minor} ENXIO"
    assert expected in nodes.ok().stdout.splitlines()


def test_gpus_are_given_without_cgroups(
    user: User, driver: Driver, installation: Installation
) -> None:
    """podman accepts --cgroups=disabled only for runtimes in its own list."""
    options, env = ("--cgroups=disabled",), ("NVIDIA_VISIBLE_DEVICES=0,2",)
    user.call(installation.command, "install", "--engine=podman").ok()
    try:
        for runtime in ("gpu-py", "crun"):
            words = ("nvidia-smi", "-L") if runtime == "gpu-py" else ("true",)
            done = user.podman(runtime, *words, env=env, options=options).ok()
            gpus = driver.chosen(0, 2) if runtime == "gpu-py" else []
            assert done.stdout.splitlines() == lines_of_nvidia_smi(gpus)
    finally:
        user.call(installation.command, "uninstall").ok()
    user.podman(str(installation.runtime), "true", options=options).failed()


def test_a_user_installs_podman_parts_and_others_are_named_as_needing_root(
    user: User, installation: Installation
) -> None:
    command, home = installation.command, user.home
    done = user.call(command, "install", "--engine=all").ok()
    assert f"podman: wrote {home}/.config/containers/containers.conf.d/" in done.stdout
    for engine in ("docker", "containerd"):
        [line] = [each for each in done.stdout.splitlines() if each.startswith(engine)]
        assert f"run gpuhook install --engine {engine} as root" in line
    refused = user.call(command, "install", "--engine=containerd").failed()
    assert "Run this as root: gpuhook install --engine containerd" in refused.stderr
    settings = home / ".config/docker/daemon.json"
    settings.parent.mkdir()
    settings.write_text("{}")
    own = f"{UID}:{UID}"
    try:
        user.namespace.run("chown", "-R", own, str(settings.parent)).ok()
        assert (
            f"docker: changed {settings}"
            in user.call(command, "install", "--engine=all").ok().stdout
        )
        found = json.loads(user.call(command, "doctor", "--format=json").stdout)["findings"]
        said = {each["check"]: each for each in found if each["status"] not in ("ok", "note")}
        for each in said.values():
            assert "gpuhook install" not in each["remedy"], each
        # The finding is about this Docker, or about root's if one runs here. Only test_doctor_order
        # checks its content.
        assert "docker-registered" in {each["check"] for each in found}
        user.call(command, "uninstall").ok()
        assert settings.read_text() == "{}"
    finally:
        shutil.rmtree(settings.parent)


def test_refresh_fails_if_the_inventory_cannot_be_saved(
    user: User, installation: Installation
) -> None:
    """After root has saved an inventory, the folder exists and is writable only by root."""
    command = installation.command
    user.namespace.run(command, "refresh", "--config", user.config).ok()
    done = user.call(command, "refresh").failed()
    assert "nothing was saved" in done.stderr
    assert "Run this as root" in done.stderr
    assert done.stdout == ""
    user.call(command, "refresh", "--if-stale").ok()


def test_a_rootless_container_without_a_request_has_no_gpu(installed: User) -> None:
    assert "nvidia" not in installed.podman("gpu-py", "busybox", "ls", "/dev").ok().stdout


@pytest.mark.parametrize("runtime", ["crun", "gpu-py"])
def test_an_exclusive_device_is_refused_to_a_second_container_of_the_user(
    installed: User, installation: Installation, runtime: str
) -> None:
    """The containers of a user know of each other through the user's own records."""
    before = installed.config.read_text()
    own = Path(f"/run/user/{UID}")  # the test session has a /run of its own
    own.mkdir(parents=True)
    os.chown(own, UID, UID)
    env = ("NVIDIA_VISIBLE_DEVICES=1",)
    first = ("--detach", "--name=first")
    try:
        setting = '[gpuhook]\nexclusive = ["nvidia.com/gpu"]\n'
        installed.config.write_text(before.replace("[gpuhook]\n", setting))
        name = (
            installed.podman(runtime, "sleep", "1000", env=env, options=first).ok().stdout.strip()
        )
        listed = installed.call(installation.command, "list", "--format", "json").ok().stdout
        holders = {gpu["index"]: gpu["containers"] for gpu in json.loads(listed)["gpus"]}
        assert holders[1] == [name]
        assert holders[0] == []
        installed.podman(runtime, "true", env=env).failed()
        installed.podman(runtime, "true", env=("NVIDIA_VISIBLE_DEVICES=0",)).ok()
        installed.call(*PODMAN, "kill", "first").ok()
        wait_until(lambda: installed.podman(runtime, "true", env=env).status == 0, "it is free")
        assert (own / "gpuhook/containers").stat().st_uid == UID
    finally:
        installed.call(*PODMAN, "rm", "--force", "--time=0", "first")
        installed.config.write_text(before)
        shutil.rmtree(own)


@pytest.fixture
def cdi(user: User, installation: Installation, tmp_path: Path) -> Iterator[User]:
    """The user, and a CDI spec that root has made with the user's configuration."""
    made = generate(installation, user.config, tmp_path)
    document = Path("/etc/cdi/nvidia.json")  # the test session has an /etc of its own
    document.parent.mkdir(exist_ok=True)
    document.write_text(with_mounted_nodes(made))
    yield user
    document.unlink()


def test_gpus_requested_by_cdi_name_are_in_a_rootless_container(cdi: User, driver: Driver) -> None:
    for devices in (("0", "2"), ("all",)):
        done = cdi.podman("crun", "nvidia-smi", "-L", devices=devices).ok()
        gpus = driver.gpus if devices == ("all",) else driver.chosen(0, 2)
        assert done.stdout.splitlines() == lines_of_nvidia_smi(gpus)


def test_a_cdi_spec_of_root_is_used_unless_world_writable(installed: User) -> None:
    """In the user's namespaces, the owner of root's CDI spec has no number."""
    device = {"name": "a", "containerEdits": {"env": ["MAKER_A=1"]}}
    whole = {"cdiVersion": "0.5.0", "kind": "maker.example/card", "devices": [device]}
    document = Path("/etc/cdi/maker.json")
    document.parent.mkdir(exist_ok=True)
    document.write_text(json.dumps(whole))
    env = ("NVIDIA_VISIBLE_DEVICES=maker.example/card=a",)
    try:
        done = installed.podman("gpu-py", "busybox", "env", env=env).ok()
        assert "MAKER_A=1" in done.stdout.splitlines()
        document.chmod(0o666)
        refused = installed.podman("gpu-py", "busybox", "env", env=env).failed()
        assert "MAKER_A" not in refused.stdout
    finally:
        document.unlink()
