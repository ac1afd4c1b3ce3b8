"""LXC containers, whose devices come from the lines that install --engine lxc includes."""

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import declared_vendors
import pytest
from harness import vendors
from harness.commands import Result, run, stop, wait_until
from harness.driver import Driver, lines_of_nvidia_smi, simulate
from harness.inside import look, seen
from harness.installation import Installation, write_config
from harness.namespaces import Namespace, allow_user_range, host_cgroups, namespace

from gpuhook.base.config.loader import loads

ASK = "NVIDIA_VISIBLE_DEVICES"
MINORS = (3, 0, 7)
FIRST_USER = 100_000  # the host's user id for root in a container with mapped users
USERS = 65_536
LXC = """
lxc.uts.name = box
lxc.rootfs.path = dir:ROOT
lxc.net.0.type = empty
lxc.apparmor.profile = unconfined
lxc.init.cmd = /bin/busybox sleep 1000
lxc.tty.max = 0
"""
PRIVILEGED = "lxc.include = /usr/share/lxc/config/common.conf\n"
MAPPED = f"""{PRIVILEGED}lxc.include = /usr/share/lxc/config/userns.conf
lxc.idmap = u 0 {FIRST_USER} {USERS}
lxc.idmap = g 0 {FIRST_USER} {USERS}
"""
_NODES = "busybox find /dev -type c -exec busybox stat -c %t:%T {} +"
_numbers = itertools.count()
LAYOUTS = ["host"] if host_cgroups() == "v2" else ["host", "v2"]


class Box:
    """A container with its root folder, and gpuhook's state."""

    def __init__(self, folder: Path, image: Path, config: Path, command: Path) -> None:
        self.name = f"box-{os.getpid()}-{next(_numbers)}"
        self.folder = folder / self.name
        self.root = self.folder / "rootfs"
        self.state = folder / f"{self.name}-state"
        self.file = self.folder / "config"
        self._config = config
        self._command = command
        self.namespace = Namespace(host_cgroups())
        shutil.copytree(image, self.root, symlinks=True)
        self.write(PRIVILEGED)

    def write(self, more: str) -> None:
        self.file.write_text(more + LXC.replace("ROOT", str(self.root)))

    def map_users(self) -> None:
        """Make the container unprivileged."""
        self.write(MAPPED)
        allow_user_range("root", FIRST_USER, USERS)
        for path in (self.root, *self.root.rglob("*")):
            os.chown(path, FIRST_USER, FIRST_USER, follow_symlinks=False)

    def call(self, *words: str | Path) -> Result:
        env = {"GPUHOOK_CONFIG": str(self._config)}
        return self.namespace.run(self._command, *words, f"--state-dir={self.state}", env=env)

    def install(self, *words: str) -> Result:
        base = ("install", "--engine=lxc", f"--container={self.name}", f"--config={self.file}")
        return self.call(*base, *words)

    def uninstall(self) -> Result:
        return self.call("uninstall", "--engine=lxc", f"--container={self.name}")

    @property
    def included(self) -> Path:
        return self.state / "lxc" / f"gpuhook-{self.name}.conf"

    def _lxc(self, verb: str, *words: str | Path) -> Result:
        return self.namespace.run(f"lxc-{verb}", "-P", self.folder.parent, "-n", self.name, *words)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run the container until the end of the block."""
        log = self.folder / "log"
        done = self._lxc("start", "-o", log, "-l", "INFO")
        assert done.status == 0, log.read_text()[-4000:]
        try:
            yield
        finally:
            self._lxc("stop", "-k").ok()

    def inside(self, *words: str) -> Result:
        return self._lxc(
            "attach", "--clear-env", "-v", "PATH=/usr/local/bin:/usr/bin:/bin", "--", *words
        )

    def remove(self) -> None:
        shutil.rmtree(self.folder)


@pytest.fixture(scope="module")
def spaced(workspace: Path, installation: Installation) -> Driver:
    """A driver whose path has to be escaped."""
    root = workspace / "a driver"
    return simulate(installation, root, "--gpus=3", f"--minors={','.join(map(str, MINORS))}")


@pytest.fixture
def box(
    workspace: Path,
    roots: dict[str, Path],
    spaced: Driver,
    installation: Installation,
    tmp_path: Path,
) -> Iterator[Box]:
    config = write_config(workspace / f"lxc-etc-{tmp_path.name}", spaced.root, ["runc"])
    made = Box(workspace, roots["debian"], config, installation.command)
    yield made
    made.remove()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_mapped", [False, True], ids=["privileged", "unprivileged"])
def test_a_container_gets_exactly_the_requested_gpus_until_uninstall(
    box: Box, spaced: Driver, layout: str, is_mapped: bool
) -> None:
    if is_mapped:
        box.map_users()
    before = box.file.read_bytes()
    with namespace(layout) as box.namespace:
        done = box.install("-e", f"{ASK}=1,2").ok()
        assert f"restart it: lxc-stop -r -n {box.name}" in done.stdout
        with box.started():
            assert box.inside("nvidia-smi", "-L").ok().stdout.splitlines() == (
                lines_of_nvidia_smi(spaced.chosen(1, 2))
            )
            by_hand = () if is_mapped else MINORS
            found = seen(box.inside(*look(by_hand, ["libcuda.so.1", "libnvidia-ml.so.1"])))
            assert found.gpu_minors == {*MINORS[1:]}
            assert {opened for opened, _ in found.nodes.values()} == {"ENXIO"}  # no such driver
            if not is_mapped:
                assert found.by_hand == {MINORS[0]: "EPERM", **dict.fromkeys(MINORS[1:], "ENXIO")}
            for path, _ in found.libraries.values():
                assert spaced.version in path or path.startswith("/"), path
            assert box.inside("sh", "-c", "echo >/usr/bin/nvidia-smi").status != 0
        box.uninstall().ok()
        assert box.file.read_bytes() == before
        assert not box.state.exists()
        with box.started():
            assert not box.inside("sh", "-c", "ls /dev/nvidia*").stdout


def test_without_the_rules_a_node_cannot_be_opened(box: Box) -> None:
    """Users who write the mounts by hand, without device rules, see this error."""
    box.install("-e", f"{ASK}=0").ok()
    lines = box.included.read_text().splitlines(keepends=True)
    box.included.write_text("".join(line for line in lines if ".devices." not in line))
    with box.started():
        assert {opened for opened, _ in seen(box.inside(*look())).nodes.values()} == {"EPERM"}
    box.uninstall().ok()


def test_lines_are_updated_with_the_driver(
    box: Box, spaced: Driver, installation: Installation
) -> None:
    box.install("-e", f"{ASK}=all").ok()
    before = box.file.read_bytes()
    tools = spaced.root / "dev/nvidia-uvm-tools"
    env = {**os.environ, "GPUHOOK_CONFIG": str(box._config)}
    words: list[str | Path] = [
        installation.command,
        "watch",
        "--interval=1",
        f"--state-dir={box.state}",
    ]
    watch = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)
    tools.rename(f"{tools}.away")
    try:
        wait_until(lambda: "nvidia-uvm-tools" not in box.included.read_text(), "it is written")
        assert box.file.read_bytes() == before
        with box.started():
            assert box.inside("nvidia-smi", "-L").ok().stdout
    finally:
        stop(watch)
        Path(f"{tools}.away").rename(tools)
    box.uninstall().ok()


def test_devices_of_several_vendors_are_given_together(
    box: Box, installation: Installation, spaced: Driver, workspace: Path
) -> None:
    table = declared_vendors.tables()["maker"]
    declares = box.folder / "maker.toml"
    declares.write_text(table)
    with (
        vendors.devices(installation, workspace / f"amd-{box.name}", "amd", 2) as amd,
        vendors.devices(
            installation, workspace / f"maker-{box.name}", "maker", 3, config=declares
        ) as maker,
    ):
        places = json.dumps([f"amd={amd.root}", f"maker={maker.root}"])
        text = box._config.read_text()
        text = text.replace("[gpuhook]\n", f"[gpuhook]\ndriver-roots = {places}\n")
        box._config.write_text(f"{text}\n{table}")
        variable = loads(table).vendors[0].variable
        asked = ("--device=nvidia.com/gpu=0", "-e", "AMD_VISIBLE_DEVICES=1", "-e")
        box.install(*asked, f"{variable}=0,2").ok()
        given = [amd.node("/dev/kfd"), amd.node("/dev/dri/renderD129")]
        given += [maker.node(f"/dev/maker{number}") for number in (0, 2)]
        with box.started():
            looked = box.inside("sh", "-c", _NODES).ok().stdout.splitlines()
            opened = box.inside(*vendors.look("/dev/kfd", "/dev/dri/*", "/dev/maker*"))
        assert {numbers for _, numbers, *_ in given} <= {*looked}
        assert {*given} <= {*vendors.nodes_seen(opened).values()}
        others = (amd.numbers("/dev/dri/renderD128"), maker.numbers("/dev/maker1"))
        assert not {*others} & {*looked}
        box.uninstall().ok()


def test_a_proxmox_file_is_edited_and_restored(box: Box, spaced: Driver) -> None:
    """Proxmox writes LXC's file from its own lines that begin with lxc., with = for the colon."""
    number = str(os.getpid())
    file = Path(f"/etc/pve/lxc/{number}.conf")  # the test session has an /etc of its own
    file.parent.mkdir(parents=True, exist_ok=True)
    snapshot = "\n[before]\narch: amd64\nlxc.cap.drop: sys_time\n"
    before = f"#a note\narch: amd64\nrootfs: local:vm-1-disk-0,size=8G\n{snapshot}"
    file.write_text(before)
    base = ("--engine=lxc", f"--container={number}")
    root = f"--rootfs={box.root}"
    done = box.call("install", *base, root, "-e", f"{ASK}=2").ok()
    assert f"restart it: pct reboot {number}" in done.stdout
    text = file.read_text()
    assert text.endswith(snapshot)
    head = text.removesuffix(snapshot)
    box.file.write_text(
        box.file.read_text() + re.sub(r"^(lxc\.[a-z.]+): ", r"\1 = ", head, flags=re.MULTILINE)
    )
    with box.started():
        found = box.inside("nvidia-smi", "-L").ok().stdout.splitlines()
    assert found == lines_of_nvidia_smi(spaced.chosen(2))
    box.call("uninstall", *base).ok()
    assert file.read_text() == before
    file.unlink()


def test_printed_lines_give_the_requested_gpu(
    box: Box, spaced: Driver, installation: Installation
) -> None:
    env = {"GPUHOOK_CONFIG": str(box._config)}
    words: list[str | Path] = [
        installation.command,
        "lxc-lines",
        "--rootfs",
        box.root,
        "-e",
        f"{ASK}=1",
    ]
    lines = run(words, env=env).ok().stdout
    with box.file.open("a") as file:
        file.write(lines)
    with box.started():
        found = box.inside("nvidia-smi", "-L").ok().stdout.splitlines()
    assert found == lines_of_nvidia_smi(spaced.chosen(1))


def test_a_memory_limit_is_refused_and_changes_nothing(box: Box) -> None:
    before = box.file.read_bytes()
    box._config.write_text(f"{box._config.read_text()}[gpuhook.limits]\nrequired = true\n")
    assert "limit" in box.install("-e", f"{ASK}=0").failed().stderr
    assert box.file.read_bytes() == before
    assert not box.state.exists()
