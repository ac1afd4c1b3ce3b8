"""Vendors that config.toml declares, in real containers: the tables in docs/vendors/declared.md."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import declared_vendors
import pytest
from harness import vendors
from harness.bundles import Bundle, GpuBundle
from harness.commands import run
from harness.driver import Driver
from harness.images import image
from harness.installation import Installation, write_config
from harness.podman import Podman
from harness.prefork import ONE, RUNTIMES
from harness.snapshot import nothing_left
from harness.vendor_attach import attached
from harness.vendor_contract import ANY_MODES, given_any
from harness.vendors import MODES, USER, Devices, as_user, in_mode, nodes_seen

from gpuhook.base.config.loader import loads
from gpuhook.core.cdi import apply, folders

TABLES = declared_vendors.tables()
GROUP = 1234
# The page's own example, and every setting that a table can have.
MAKER = (
    TABLES["maker"]
    + """\
noun = "NPU"
present = "driver:maker_npu"
optional-nodes = ["/dev/maker{n}c*", "/dev/maker_aux"]
files = ["/usr/bin/maker-smi"]
folders = ["/opt/maker"]
libraries = ["/usr/lib/maker/libmaker.so*"]
environment = ["MAKER_HOME=/opt/maker", "MAKER_NUMBERS={n}"]
writable-folders = ["/dev/hugepages-1G"]
"""
)
PAGES = "/dev/hugepages-1G"
WRITE = f"""
echo maker > {PAGES}/$(busybox hostname)
busybox grep -c ' {PAGES} .*nosuid,nodev' /proc/mounts
"""


class Machine:
    """A simulated machine of a declared vendor, and the configuration that declares it."""

    def __init__(self, installation: Installation, folder: Path, text: str, *settings: str) -> None:
        self.text = text
        self.declared = loads(text).vendors[0]
        self.root = folder / f"{self.declared.name}-driver"
        self._config = folder / f"{self.declared.name}.toml"
        folder.mkdir(exist_ok=True)
        self._config.write_text(text)
        self.installation = installation
        words: list[str | Path] = [installation.command, "simulate", self.root]
        words += ["--config", self._config, f"--vendor={self.declared.name}", "--gpus=3"]
        made = run([*words, *(f"--set={each}" for each in settings)]).ok().stdout
        self.devices = Devices(installation, self.declared.name, self.root, made)

    def config(self, bundle: Bundle, driver: Driver, runtime: str, mode: str) -> Path:
        """Return a configuration that declares the vendor, for a bundle."""
        path = write_config(bundle.path / "etc", driver.root, [runtime])
        in_mode(self.devices.configured(path), mode)
        path.write_text(f"{path.read_text()}\n{self.text}")
        return path

    def nodes(self, *numbers: int) -> list[str]:
        """Return the paths of the nodes that a container gets with these devices."""
        table = self.declared
        optional = [path for path in table.optional_nodes if "{n}" not in path]
        own = [path for path in (*table.nodes, *table.optional_nodes) if path not in optional]
        given = [path.replace("{n}", str(n)).replace("*", "0") for path in own for n in numbers]
        return [*table.control, *optional, *given]

    def remove(self) -> None:
        run([self.installation.command, "simulate", "--remove", self.root]).ok()


@pytest.fixture(scope="module", params=[name for name in TABLES if name != "maker"])
def machine(
    request: pytest.FixtureRequest, installation: Installation, workspace: Path
) -> Iterator[Machine]:
    """A simulated machine for each documented vendor table."""
    made = Machine(installation, workspace, TABLES[request.param])
    yield made
    made.remove()


@pytest.fixture(scope="module")
def makers(
    installation: Installation, workspace: Path, roots: dict[str, Path]
) -> Iterator[Machine]:
    """A simulated machine whose table has every key; a group owns nodes, and node 1 is missing."""
    made = Machine(installation, workspace, MAKER, "numbers=0,2,10", "mode=660", f"group={GROUP}")
    library = made.root / "usr/lib/maker/libmaker.so.1"
    library.parent.mkdir(parents=True)
    source = workspace / "maker.c"
    source.write_text("int maker(void) { return 1; }\n")
    flags = ["-shared", "-nostdlib", "-Wl,-soname,libmaker.so.1"]
    run(["gcc", *flags, "-o", library, source]).ok()
    yield made
    made.remove()


@ONE
@MODES
def test_a_documented_vendor_table_gives_exactly_the_requested_nodes(
    bundle: Bundle, machine: Machine, driver: Driver, mode: str
) -> None:
    """The nodes are given in addition to NVIDIA's; no other node can be opened."""
    config = machine.config(bundle, driver, bundle.runtime, mode)
    bundle.environ(f"{machine.declared.variable}=2,0", "NVIDIA_VISIBLE_DEVICES=5")
    every = machine.nodes(0, 1, 2)
    patterns = sorted({re.sub(r"[0-9]+.*", "*", path) for path in every})
    bundle.command(*vendors.look(*patterns, driver=driver))
    with nothing_left(machine.root, driver.root, pid=bundle.namespace.pid):
        done = machine.devices.started(bundle, config)
    assert nodes_seen(done) == machine.devices.nodes(*machine.nodes(0, 2))
    assert vendors.gpus_seen(done, driver) == {5}
    inside = " ".join(vendors.variables_seen(done, f"{machine.declared.variable}="))
    assert inside.endswith("=2,0")


@ONE
def test_nodes_of_devices_not_requested_cannot_be_opened(
    bundle: Bundle, machine: Machine, driver: Driver
) -> None:
    config = machine.config(bundle, driver, bundle.runtime, "hook")
    bundle.environ(f"{machine.declared.variable}=1")
    paths = machine.nodes(0, 1, 2)
    bundle.command(*vendors.make_and_open(machine.devices, paths))
    given = machine.nodes(1)
    expected = {path: "ENXIO" if path in given else "EPERM" for path in paths}
    for _ in range(2):  # Python answers first, then the launcher, which knows the settings by now
        assert vendors.opened(machine.devices.started(bundle, config), paths) == expected
        bundle.call("rm", "-f", *(bundle.root / f"by-hand-{n}" for n in range(len(paths)))).ok()


@MODES
@RUNTIMES
def test_every_key_of_a_vendor_table_takes_effect(
    bundle: Bundle, makers: Machine, driver: Driver, mode: str
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, mode)
    bundle.change(as_user)
    bundle.environ("MAKER_VISIBLE_DEVICES=10,0")
    look = vendors.look("/dev/maker*")[-1]
    script = "cat /usr/bin/maker-smi /opt/maker/content; dlprobe libmaker.so.1"
    bundle.command("sh", "-c", f"{look}\n{script}")
    with nothing_left(makers.root, pid=bundle.namespace.pid):
        done = makers.devices.started(bundle, config)
    assert nodes_seen(done) == makers.devices.nodes(*makers.nodes(0, 10))
    assert vendors.groups_seen(done) == {USER, GROUP}
    variables = vendors.variables_seen(done, "MAKER_HOME", "MAKER_NUM")
    assert sorted(variables) == ["MAKER_HOME=/opt/maker", "MAKER_NUMBERS=10,0"]
    lines = done.stdout.splitlines()
    assert {"/usr/bin/maker-smi", "/opt/maker"} <= set(lines)
    assert [line for line in lines if line.startswith("libmaker.so.1 /")], lines[-1]


@RUNTIMES
@ANY_MODES
def test_a_request_for_any_device_is_served(
    bundle: Bundle, makers: Machine, driver: Driver, mode: str
) -> None:
    config = write_config(bundle.path / "etc", driver.root, [bundle.runtime])
    makers.devices.configured(config, tail=f"\n{makers.text}")
    asked, look = ("MAKER_VISIBLE_DEVICES", "any"), vendors.look("/dev/maker*")
    given_any(bundle, config, makers.devices, mode, asked, "maker.com/npu", look)


@RUNTIMES
def test_declared_devices_are_attached_to_a_running_container(
    bundle: Bundle, makers: Machine, driver: Driver
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    bundle.command("sleep", "1000")
    bundle.detach(bundle.runtime, config)
    look, every = vendors.look("/dev/maker*"), makers.nodes(0, 2, 10)
    with attached(bundle, config, makers.devices, ["maker.com/npu=2"]) as running:
        expected = makers.devices.nodes(*makers.nodes(2))
        assert nodes_seen(running.call(*look)) == expected
        running.opens(every, {numbers for _, numbers, *_ in expected.values()})
        files = "cat /usr/bin/maker-smi /opt/maker/content; dlprobe libmaker.so.1"
        lines = running.call("sh", "-c", files).ok().stdout.splitlines()
        assert {"/usr/bin/maker-smi", "/opt/maker"} <= {*lines}
        assert [line for line in lines if line.startswith("libmaker.so.1 /")]
    assert nodes_seen(running.call(*look)) == {}
    running.opens(every, set())


@contextmanager
def written(makers: Machine) -> Iterator[None]:
    """Check that a container writes to the host's folder, and remove the written files."""
    folder = makers.root / PAGES.lstrip("/")
    try:
        yield
        assert [each.read_text() for each in folder.iterdir()] == ["maker\n"]
    finally:
        for each in folder.iterdir():
            each.unlink()


@MODES
@RUNTIMES
def test_a_writable_folder_can_be_written_to(
    bundle: Bundle, makers: Machine, driver: Driver, mode: str
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, mode)
    bundle.environ("MAKER_VISIBLE_DEVICES=0")
    bundle.command("sh", "-c", WRITE)
    with nothing_left(makers.root, pid=bundle.namespace.pid), written(makers):
        assert makers.devices.started(bundle, config).ok().stdout == "1\n"


@RUNTIMES
def test_a_writable_folder_by_a_cdi_spec_can_be_written_to(
    bundle: Bundle, makers: Machine, driver: Driver
) -> None:
    """The container has two devices, and variables that depend on both are unset."""
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    folder = bundle.path / "cdi"
    folder.mkdir()
    words: list[str | Path] = [makers.installation.command, "cdi", "generate", "--config", config]
    run([*words, "--kind=maker.com/npu", "--output", folder]).ok()
    found = apply.resolve(
        folders.read_folders([str(folder)]), ["maker.com/npu=0", "maker.com/npu=2"]
    )
    bundle.change(lambda spec: spec.update(apply.apply(spec, found)))
    bundle.command("sh", "-c", f"{WRITE}busybox env")
    with nothing_left(makers.root, pid=bundle.namespace.pid), written(makers):
        done = bundle.run(bundle.runtime).ok().stdout.splitlines()
    assert done[0] == "1"
    assert [line for line in done if "MAKER" in line] == [
        "MAKER_HOME=/opt/maker",
        "MAKER_VISIBLE_DEVICES=void",
    ]


@ONE
def test_a_writable_folder_is_given_by_apply_and_fstab_lines(
    bundle: Bundle, makers: Machine, driver: Driver, tmp_path: Path
) -> None:
    """apply mounts it; the fstab and unit lines are for programs that mount by themselves."""
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    root, command = tmp_path / "root", makers.installation.command
    root.mkdir()
    asked: list[str | Path] = ["--config", config, "-e", "MAKER_VISIBLE_DEVICES=0"]
    apply_words = [command, "apply", "--rootfs", root, "--state-dir", tmp_path / "state", *asked]
    source = f"{makers.root}{PAGES}"
    lines = run([*apply_words, "--fstab=-"]).ok().stdout.splitlines()
    assert f"{source} {PAGES} none x-create=dir,bind,nosuid,nodev 0 0" in lines
    lines = run([command, "unit-lines", "--rootfs", root, *asked]).ok().stdout.splitlines()
    assert f"BindPaths={source}:{PAGES}" in lines
    script = f'"$@" && echo maker > {root}{PAGES}/by-hand'
    with written(makers):
        run(["unshare", "-m", "sh", "-ec", script, "sh", *apply_words]).ok()


@ONE
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("1", r"no NPU '1': it has 0 \(npu0\), 2 \(npu2\), 10 \(npu10\)"),
        ("0-2", "1 doesn't exist"),
        ("maker", "no NPU 'maker'"),
    ],
)
def test_unknown_declared_devices_are_refused(
    bundle: Bundle, makers: Machine, driver: Driver, asked: str, words: str
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    bundle.environ(f"MAKER_VISIBLE_DEVICES={asked}")
    assert re.search(words, makers.devices.refused(bundle, config))


@ONE
def test_a_mistake_in_a_vendor_table_is_refused_with_its_line(
    bundle: Bundle, makers: Machine, driver: Driver
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    config.write_text(config.read_text().replace('noun = "NPU"', 'none = "NPU"'))
    bundle.environ("MAKER_VISIBLE_DEVICES=0")
    number = config.read_text().splitlines().index('none = "NPU"') + 1
    said = makers.devices.refused(bundle, config)
    assert f"{config}, line {number}: gpuhook.vendors.none isn't a key of a vendor" in said


@ONE
def test_commands_show_declared_devices(bundle: GpuBundle, makers: Machine, driver: Driver) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    bundle.environ("MAKER_VISIBLE_DEVICES=2")
    makers.devices.start(bundle, config)
    listed = makers.devices.ask(config, "list")
    theirs = [each for each in listed["devices"] if each["vendor"] == "maker"]
    assert {each["label"]: each["containers"] for each in theirs} == {
        "0": [], "2": [bundle.name], "10": [],
    }  # fmt: skip
    explained = makers.devices.ask(config, "explain", "-e", "MAKER_VISIBLE_DEVICES=all")
    assert explained["selected"] == ["npu0", "npu2", "npu10"]
    diagnosis = makers.devices.ask(config, "doctor")["findings"]
    [found] = [each for each in diagnosis if each["check"] == "maker-devices"]
    assert (found["status"], found["message"].rpartition(": ")[2]) == ("ok", "0, 2, 10")
    command = makers.installation.command
    assert "npu10" in run([command, "info", "--config", config]).ok().stdout
    run([command, "config", "validate", config]).ok()


@ONE
def test_hook_alone_gives_declared_device_nodes_without_variables(
    bundle: Bundle, makers: Machine, driver: Driver
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    makers.devices.hook(bundle, config)
    bundle.environ("MAKER_VISIBLE_DEVICES=2")
    bundle.command(*vendors.look("/dev/maker*"))
    done = bundle.run(bundle.runtime)
    assert nodes_seen(done) == makers.devices.nodes(*makers.nodes(2))
    assert vendors.variables_seen(done, "MAKER_HOME") == []
    assert "set MAKER_NUMBERS=2" in vendors.logged(config)["undone"]


@contextmanager
def in_podmans_configuration(machine: Machine, config: Path) -> Iterator[None]:
    """Declare a simulated machine's vendor in the configuration of podman's containers."""
    before = config.read_text()
    try:
        text = machine.devices.configured(config).read_text()
        config.write_text(f"{text}\n{machine.text}")
        yield
    finally:
        config.write_text(before)


def test_podman_gives_declared_devices_by_the_runtime(
    podman_runtime: Podman, makers: Machine, podman_config: Path
) -> None:
    with in_podmans_configuration(makers, podman_config):
        env = ["MAKER_VISIBLE_DEVICES=2"]
        done = podman_runtime.run(image("debian"), *vendors.look("/dev/maker*"), env=env)
    assert nodes_seen(done) == makers.devices.nodes(*makers.nodes(2))


def test_podman_gives_declared_devices_by_a_cdi_spec(
    podman_hook_runc: Podman, installation: Installation, workspace: Path, podman_config: Path
) -> None:
    """gpu-py isn't used. Debian 12's podman rejects CDI specs with groups (CDI 0.7)."""
    text = TABLES["cambricon"] + 'environment = ["MLU_NUMBERS={n}"]\n'
    machine = Machine(installation, workspace / "podman-cdi-declared", text)
    document = Path("/etc/cdi/cambricon.com-mlu.yaml")  # the session has an /etc of its own
    document.parent.mkdir(exist_ok=True)
    try:
        with in_podmans_configuration(machine, podman_config):
            words: list[str | Path] = [installation.command, "cdi", "generate", "--config"]
            words += [podman_config, "--kind=cambricon.com/mlu", "--output", document.parent]
            run(words).ok()
            look, options = vendors.look("/dev/c*"), ["--device=cambricon.com/mlu=2"]
            done = podman_hook_runc.run(image("debian"), *look, options=options)
        given = machine.devices.nodes(*machine.nodes(2))
        assert {path: seen for path, seen in nodes_seen(done).items() if "cam" in path} == {
            path: seen for path, seen in given.items() if "cam" in path
        }
        assert given.keys() <= nodes_seen(done).keys()
        seen = vendors.variables_seen(done, "MLU_NUMBERS", "CAMBRICON_VISIBLE_DEVICES")
        assert seen == ["CAMBRICON_VISIBLE_DEVICES=void"], "engines keep one value of a variable"
    finally:
        document.unlink(missing_ok=True)
        machine.remove()


@ONE
def test_an_absent_declared_driver_is_refused_unless_ignored(
    bundle: Bundle, makers: Machine, driver: Driver
) -> None:
    config = makers.config(bundle, driver, bundle.runtime, "hook")
    config.write_text(config.read_text().replace(f"maker={makers.root}", f"maker={driver.root}"))
    bundle.environ("MAKER_VISIBLE_DEVICES=all")
    said = makers.devices.refused(bundle, config)
    assert "Maker's driver isn't loaded: there is no driver:maker_npu" in said
    ignoring = config.read_text().replace("[gpuhook]\n", '[gpuhook]\nmissing-driver = "ignore"\n')
    config.write_text(ignoring)
    bundle.environ("NVIDIA_VISIBLE_DEVICES=5")
    bundle.command(*vendors.look("/dev/maker*", driver=driver))
    done = makers.devices.started(bundle, config)
    assert nodes_seen(done) == {}
    assert vendors.gpus_seen(done, driver) == {5}
