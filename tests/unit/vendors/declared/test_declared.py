"""Devices of a declared vendor, on machines simulated without nodes."""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import declared_vendors
import machines
import own
import pytest
import second_vendor
from asking import of_kind, places, planned
from second_vendor import spec_with
from steps import resolve

from gpuhook.base.config.declared import FIELDS
from gpuhook.base.config.loader import loads
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import ConfigError, DriverError, RequestError, UnknownDeviceError
from gpuhook.base.loader import ldcache
from gpuhook.core import contract
from gpuhook.core.cdi import apply
from gpuhook.core.cdi.generate import GeneratedSpec, SpecSource, generate
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import DeviceNode, Inventory
from gpuhook.core.plan.operations import usable
from gpuhook.prefork import launcher_cache
from gpuhook.tools.cdi import refresh
from gpuhook.vendors import path_policy as given
from gpuhook.vendors import registry

TABLES = declared_vendors.tables()
TABLE = """\
[[gpuhook.vendors]]
name = "maker"
noun = "NPU"
kind = "maker.com/npu"
variable = "MAKER_VISIBLE_DEVICES"
present = "/proc/driver/maker"
nodes = ["/dev/maker{n}", "/dev/maker_dma{n}"]
optional-nodes = ["/dev/maker{n}c*", "/dev/maker_aux"]
control = ["/dev/maker_ctl"]
files = ["/usr/bin/maker-smi"]
folders = ["/opt/maker"]
environment = ["MAKER_HOME=/opt/maker", "MAKER_NUMBERS={n}"]
"""

Made = Callable[..., tuple[Config, Inventory]]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A function that declares a vendor and returns its devices on a simulated machine."""

    def make(
        text: str = TABLE, count: int = 2, change: Callable[[Path], object] = bool, **settings: str
    ) -> tuple[Config, Inventory]:
        config = loads(text)
        config.state_dir = str(tmp_path / "state")
        name = config.vendors[0].name
        root = tmp_path / "driver"
        nodes = declared_vendors.simulated(root, config, name, count, **settings).nodes
        change(root)

        def of(path: str, status: object, inside: str = "") -> DeviceNode | None:
            del inside
            return nodes.get(path) if status is not None else None

        monkeypatch.setattr(DeviceNode, "of", of)
        return config, declared_vendors.looked_at(root, config, name)

    return make


def test_declared_devices_are_found_with_nodes_and_groups(made: Made) -> None:
    _, found = made(numbers="0,2,10", mode="660", group="44")
    assert [device.label for device in found.devices] == ["0", "2", "10"]
    assert found.devices[1].nodes == ("/dev/maker2", "/dev/maker_dma2", "/dev/maker2c0")
    assert found.missing() == []
    assert {node.group for node in found.nodes} == {44}
    assert Inventory.from_json(found.to_json()) == found


def test_a_container_gets_declared_nodes_files_and_variables(made: Made) -> None:
    config, found = made(count=3)
    plan = planned(found, "MAKER_VISIBLE_DEVICES=2,0", config=config)
    assert places(plan) == [
        "/dev/maker_ctl",
        *("/dev/maker2", "/dev/maker_dma2", "/dev/maker2c0"),
        *("/dev/maker0", "/dev/maker_dma0", "/dev/maker0c0"),
        "/dev/maker_aux",
    ]
    assert places(plan, "bind") == ["/usr/bin/maker-smi", "/opt/maker"]
    settings = [op.describe() for op in plan.operations if op.kind == "environment"]
    assert settings == ["set MAKER_HOME=/opt/maker", "set MAKER_NUMBERS=2,0"]


@pytest.mark.parametrize("word", ["all", "ALL", "0-2", "maker.com/npu=all", "npu0,npu1,npu2"])
def test_device_words_select_devices_of_a_declared_vendor(made: Made, word: str) -> None:
    config, found = made(count=3)
    plan = planned(found, f"MAKER_VISIBLE_DEVICES={word}", config=config)
    assert {"/dev/maker0", "/dev/maker1", "/dev/maker2"} <= set(places(plan))


@pytest.mark.parametrize("word", ["3", "npu3", "0-3"])
def test_an_unknown_declared_device_error_lists_existing_ones(made: Made, word: str) -> None:
    config, found = made(count=2)
    with pytest.raises(UnknownDeviceError, match=r"no NPU '.*it has 0 \(npu0\), 1 \(npu1\)"):
        planned(found, f"MAKER_VISIBLE_DEVICES={word}", config=config)


def test_an_unprivileged_container_gets_no_device_by_variable_if_forbidden(made: Made) -> None:
    config, found = made()
    config.accept_envvar_unprivileged = False
    inventories = {"maker": found}
    assert resolve(spec_with("MAKER_VISIBLE_DEVICES=all"), config, inventories=inventories) is None


def test_a_declared_vendor_works_beside_nvidia(made: Made) -> None:
    config, found = made()
    gpus = machines.machine(machines.gpu(0, 3))
    env = ("MAKER_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=0")
    given = places(planned(found, *env, beside=[gpus], config=config))
    assert {"/dev/maker1", "/dev/nvidia3"} <= set(given)


@pytest.mark.parametrize(
    ("missing", "asked", "refused"),
    [
        ("/dev/maker_dma1", "1", True),
        ("/dev/maker_dma1", "0", False),
        ("/dev/maker_ctl", "0", True),
        ("/dev/maker1c0", "1", False),
        ("/dev/maker_aux", "0", False),
    ],
)
def test_only_a_missing_required_node_is_refused(
    made: Made, missing: str, asked: str, refused: bool
) -> None:
    config, found = made(change=lambda root: (root / missing.lstrip("/")).unlink())
    if refused:
        with pytest.raises(DriverError, match=f"Maker's driver has no node {missing}"):
            planned(found, f"MAKER_VISIBLE_DEVICES={asked}", config=config)
    else:
        assert missing not in places(
            planned(found, f"MAKER_VISIBLE_DEVICES={asked}", config=config)
        )


def test_a_missing_file_is_left_out_with_a_warning(made: Made) -> None:
    config, found = made(change=lambda root: (root / "usr/bin/maker-smi").unlink())
    assert places(planned(found, "MAKER_VISIBLE_DEVICES=0", config=config), "bind") == [
        "/opt/maker"
    ]
    answer = resolve(spec_with("MAKER_VISIBLE_DEVICES=0"), config, inventories={"maker": found})
    assert answer is not None
    assert answer.warnings() == ["Maker's /usr/bin/maker-smi doesn't exist"]


@pytest.mark.parametrize(
    ("proof", "path"),
    [
        ("/proc/driver/maker", "proc/driver/maker"),
        ("driver:maker_npu", "sys/module/maker_npu"),
        ("pci:ab12", "sys/bus/pci/devices/0000:01:00.0/vendor"),
    ],
)
def test_the_declared_proof_decides_if_the_driver_is_loaded(
    made: Made, proof: str, path: str
) -> None:
    text = TABLE.replace("/proc/driver/maker", proof)
    _, found = made(text, count=0)
    assert found.devices == ()

    def remove(root: Path) -> None:
        place = root / path
        place.rmdir() if place.is_dir() else place.unlink()

    with pytest.raises(DriverError, match=f"Maker's driver isn't loaded: there is no {proof}"):
        made(text, change=remove)


def test_without_a_presence_rule_the_nodes_show_the_driver(made: Made) -> None:
    text = TABLE.replace('present = "/proc/driver/maker"\n', "")
    assert len(made(text)[1].devices) == 2
    with pytest.raises(DriverError, match=r"there is no /dev/maker\{n\}"):
        made(
            text,
            count=0,
            change=lambda root: [each.unlink() for each in (root / "dev").glob("maker[0-9]*")],
        )


@pytest.mark.parametrize("proof", ["driver:maker_npu", "pci:ab12"])
def test_nodes_of_other_drivers_are_ignored(made: Made, proof: str) -> None:
    """The kernel reports a driver for some nodes; a node without a report is accepted."""

    def others(root: Path) -> None:
        majors = (root / "proc/devices").read_text().splitlines()
        [major] = [line.split()[0] for line in majors if line.endswith(" maker")]
        for minor in range(12):
            device = root / f"sys/dev/char/{major}:{minor}/device"
            device.mkdir(parents=True)
            theirs = minor in (2, 3, 4)  # the nodes of device 0, after the control nodes
            (device / "vendor").write_text("0x8086\n" if theirs else "0xab12\n")
            driver = "other" if theirs else "maker_npu"
            (device / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
            (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)

    _, found = made(TABLE.replace("/proc/driver/maker", proof), change=others)
    assert [device.label for device in found.devices] == ["1"]


def test_node_names_with_malformed_numbers_are_ignored(made: Made) -> None:
    def more(root: Path) -> None:
        for name in ("maker", "makerx", "maker01", "maker1x", "maker-1", "maker9999999999"):
            (root / "dev" / name).touch()

    assert [device.label for device in made(change=more)[1].devices] == ["0", "1"]


def test_declared_devices_can_be_numbered_by_position(made: Made) -> None:
    config, found = made(f'{TABLE}numbers = "position"\n', numbers="128,130")
    assert [device.label for device in found.devices] == ["0", "1"]
    given = places(planned(found, "MAKER_VISIBLE_DEVICES=1", config=config))
    assert "/dev/maker130" in given
    assert "/dev/maker128" not in given
    with pytest.raises(UnknownDeviceError):
        planned(found, "MAKER_VISIBLE_DEVICES=130", config=config)


@pytest.mark.parametrize(
    "wanted", ["libmaker.so.1", "libmaker*.so*", "/usr/lib/maker/libmaker.so.*"]
)
def test_declared_libraries_are_mounted_and_added_to_the_loader_cache(
    made: Made, library: Callable[..., bytes], wanted: str
) -> None:
    folder = "usr/lib/maker"

    def install(root: Path) -> None:
        (root / folder).mkdir(parents=True)
        (root / folder / "libmaker.so.1.2").write_bytes(library("libmaker.so.1"))
        (root / folder / "libmaker.so.1").symlink_to("libmaker.so.1.2")
        (root / folder / "libmaker.so.9").write_text("not a library")
        entry = ("libmaker.so.1", f"/{folder}/libmaker.so.1", own.FLAGS)
        (root / "etc").mkdir()
        (root / "etc/ld.so.cache").write_bytes(ldcache.merge(None, [entry]))

    config, found = made(f'{TABLE}libraries = ["{wanted}"]\n', change=install)
    plan = planned(found, "MAKER_VISIBLE_DEVICES=0", config=config)
    [place] = [place for place in places(plan, "bind") if "libmaker" in place]
    assert place.endswith("/libmaker.so.1.2")
    assert places(plan, "symlink") == [place.removesuffix(".2")]
    [step] = [op.to_json() for op in plan.operations if op.kind == "ldcache"]
    assert step["libraries"] == ["libmaker.so.1"]


# What is saved -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "dev/maker7").touch(),
        lambda root: (root / "dev/maker1c5").touch(),
        lambda root: (root / "usr/bin/maker-smi").unlink(),
        lambda root: (root / "proc/driver/maker").unlink(),
    ],
    ids=["a device", "a node", "a file", "the driver"],
)
def test_changed_devices_or_files_invalidate_the_saved_inventory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    config, _ = made()
    monkeypatch.setattr("gpuhook.core.inventory.fingerprint.same_nodes", lambda *_: True)
    vendor = contract.load(registry.all_vendors(config)["maker"])
    cache.get_inventory(config, vendor)
    (tmp_path / "driver/dev/tty7").touch()
    assert cache.saved(config, vendor) is not None
    change(tmp_path / "driver")
    assert cache.saved(config, vendor) is None


def test_a_removed_pci_device_invalidates_the_saved_inventory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes of a removed device may remain, so they prove nothing."""
    monkeypatch.setattr("gpuhook.core.inventory.fingerprint.same_nodes", lambda *_: True)
    config, _ = made(TABLE.replace("/proc/driver/maker", "pci:ab12"))
    vendor = contract.load(registry.all_vendors(config)["maker"])
    cache.get_inventory(config, vendor)
    assert cache.saved(config, vendor) is not None
    (tmp_path / "driver/sys/bus/pci/devices/0000:01:00.0").rename(tmp_path / "pulled-out")
    assert cache.saved(config, vendor) is None
    with pytest.raises(DriverError, match="there is no pci:ab12"):
        cache.get_inventory(config, vendor)


def test_a_changed_table_invalidates_the_saved_inventory(made: Made) -> None:
    config, _ = made()
    cache.get_inventory(config, contract.load(registry.all_vendors(config)["maker"]))
    changed = loads(TABLE.replace('noun = "NPU"', 'noun = "card"'))
    changed.state_dir, changed.root = config.state_dir, config.root
    assert cache.saved(changed, contract.load(registry.all_vendors(changed)["maker"])) is None


# How it is known -----------------------------------------------------------------------------


def test_a_declared_vendor_has_the_same_constants_as_nvidia(made: Made) -> None:
    config, _ = made()
    sets = [
        {
            word: type(value)
            for word, value in vars(registry.all_vendors(config)[name]).items()
            if word.isupper() and word not in contract.OPTIONAL_NAMES
        }
        for name in ("maker", "nvidia")
    ]
    assert sets[0].pop("TABLE")
    assert sets[0] == sets[1]


def test_the_launcher_knows_the_declared_variable(made: Made) -> None:
    config, _ = made()
    assert "MAKER_VISIBLE_DEVICES" in (launcher_cache.words(config) or ())
    assert "MAKER_VISIBLE_DEVICES" not in (launcher_cache.words(Config()) or ())


def test_without_a_table_the_variable_is_ignored() -> None:
    assert registry.all_vendors(Config()) is registry.BUILT_IN
    assert resolve(spec_with("MAKER_VISIBLE_DEVICES=0"), Config()) is None


def test_declaring_a_built_in_vendor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    second_vendor.know(monkeypatch)
    with pytest.raises(ConfigError, match="acme is ACME's already"):
        registry.all_vendors(loads(TABLE.replace('"maker"', '"acme"')))


def test_a_declared_vendor_can_take_over_nvidias_variable(made: Made) -> None:
    """Then only CDI names request NVIDIA devices, not the variable or an old CUDA image."""
    config, found = made(TABLE.replace("MAKER_VISIBLE", "NVIDIA_VISIBLE"))
    gpus = machines.machine(machines.gpu(0, 3))
    for env, asked in (
        (("NVIDIA_VISIBLE_DEVICES=1", "CUDA_VERSION=12.2"), {"maker"}),
        (("CUDA_VERSION=12.2",), set()),
        (("NVIDIA_VISIBLE_DEVICES=1,nvidia.com/gpu=0",), {"maker", "nvidia"}),
    ):
        inventories = {"maker": found, "nvidia": gpus}
        answer = resolve(spec_with(*env), config, inventories=inventories)
        assert {each.vendor for each in (answer.requests if answer else ())} == asked
    assert registry.BUILT_IN["nvidia"].VARIABLES.keys() == {"NVIDIA_VISIBLE_DEVICES"}


def test_a_variable_another_vendor_sets_is_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rule applies to vendors that have code of their own."""
    second_vendor.know(monkeypatch)
    config, found = made(TABLE.replace("MAKER_HOME=", "ACME_DEVICES="))
    npus = second_vendor.machine(Path(config.state_dir).parent / "acme")
    env = ("MAKER_VISIBLE_DEVICES=0", "ACME_VISIBLE_DEVICES=0")
    with pytest.raises(RequestError, match="ACME_DEVICES"):
        planned(found, *env, beside=[npus], config=config)


# CDI documents -------------------------------------------------------------------------------


def document(config: Config, found: Inventory) -> GeneratedSpec:
    vendor = contract.load(registry.all_vendors(config)[found.vendor])
    return generate(SpecSource(vendor, found, config, "/usr/bin/gpuhook-cdi-hook"))


def merged(made: GeneratedSpec, *names: str) -> Any:
    """Return the edits that an engine makes for a container with these devices of a CDI spec."""
    devices = {each["name"]: each["containerEdits"] for each in made.document["devices"]}
    return apply.merge([made.document["containerEdits"], *(devices[name] for name in names)])


@pytest.mark.parametrize("names", [("0",), ("0", "1"), ("1", "0"), ("all",), ("all", "2")])
def test_cdi_specs_leave_out_variables_that_depend_on_all_devices(
    made: Made, names: tuple[str, ...]
) -> None:
    """An engine keeps only one value of a variable, whichever devices it adds."""
    text = TABLE.replace('RS={n}"]', 'RS={n}", "MAKER_LIST=[{n}]", "MAKER_HOST=a"]')
    found = document(*made(text, count=3))
    env = dict(entry.split("=", 1) for entry in merged(found, *names)["env"])
    assert env == {
        "MAKER_HOME": "/opt/maker",
        "MAKER_HOST": "a",
        "MAKER_VISIBLE_DEVICES": "void",
    }
    assert [text for text in found.warnings if "Only gpu-py sets MAKER_" in text] == [
        f"Only gpu-py sets {name}, whose value depends on all devices of a container "
        "(declared for Maker)"
        for name in ("MAKER_NUMBERS", "MAKER_LIST")
    ]


def test_cdi_specs_do_not_set_a_variable_whose_void_value_is_none(made: Made) -> None:
    found = document(*made(f'{TABLE}void = "none"\n'))
    assert not any("MAKER_VISIBLE" in entry for entry in merged(found, "0")["env"])
    assert refresh.is_ours(found.document)


# Folders to write to -------------------------------------------------------------------------

PAGES = "/dev/hugepages-1G"
WRITES = f'{TABLE}writable-folders = ["{PAGES}", "/var/cache/maker"]\n'


def test_writable_folders_are_mounted_writable(made: Made) -> None:
    """The folder is world-writable, and files that containers create there have no effect."""

    def use(root: Path) -> None:
        folder = root / PAGES.lstrip("/")
        folder.chmod(0o1777)
        os.mkfifo(folder / "fifo")
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(folder):
            one.bind("socket")

    config, found = made(WRITES, change=use)
    plan = planned(found, "MAKER_VISIBLE_DEVICES=0", config=config)
    binds = {op["destination"]: op for op in of_kind(plan, "bind")}
    for path in (PAGES, "/var/cache/maker"):
        assert binds[path]["source"] == f"{found.root}{path}"
        assert binds[path]["options"] == ["nosuid", "nodev"]
    assert binds["/opt/maker"]["options"] == ["ro", "nosuid", "nodev"]
    assert usable(plan.operations)[1] == []
    mounts = {
        each["containerPath"]: each for each in merged(document(config, found), "0")["mounts"]
    }
    assert mounts[PAGES]["options"] == ["nosuid", "nodev", "rbind", "rprivate"]


def test_a_missing_writable_folder_gives_a_warning(made: Made) -> None:
    config, found = made(WRITES, change=lambda root: (root / PAGES.lstrip("/")).rmdir())
    answer = resolve(spec_with("MAKER_VISIBLE_DEVICES=0"), config, inventories={"maker": found})
    assert answer is not None
    assert answer.warnings() == [f"Maker's {PAGES} doesn't exist"]


@pytest.mark.protects(
    "written-folders", "a system folder can't be mounted writable into a container"
)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/dri", "which belongs to /dev/dri"),
        ("/dev/shm/maker", ""),
        ("/dev/mqueue", "which belongs to /dev/mqueue"),
        ("/dev/bus/usb", "which belongs to /dev/bus"),
        ("/etc/maker", "which belongs to /etc"),
        ("/usr/lib/maker", "which belongs to /usr"),
        ("/usr/local/share/maker", "which belongs to /usr"),
        ("/var/run/maker", "which belongs to /var/run"),
        ("/var/lib/docker/x", "which belongs to /var/lib/docker"),
        ("/var/lib", "which contains /var/lib/containerd"),
        ("/srv/link", "which belongs to /etc"),
        ("/srv/open/maker", "which non-root users may change"),
        ("/root/maker", "which belongs to /root"),
        ("/sys/fs/bpf", "which belongs to /sys"),
    ],
)
def test_system_folders_are_refused_as_writable_folders(made: Made, path: str, why: str) -> None:
    """A container could change the host through them, whichever vendor declares them."""

    def make(root: Path) -> None:
        (root / "var/run").parent.mkdir(exist_ok=True)
        (root / "var/run").symlink_to("../run")
        (root / "etc/maker").mkdir(parents=True, exist_ok=True)
        (root / "srv/open").mkdir(parents=True)
        (root / "srv/open").chmod(0o1777)
        (root / "srv/link").symlink_to("../etc/maker")
        for each in ("run/maker", path.lstrip("/")):
            (root / each).mkdir(parents=True, exist_ok=True)

    text = f'{TABLE}writable-folders = ["{path}"]\n'
    if not why:
        with pytest.raises(ConfigError, match="writable-folders contains"):
            loads(text)
        return
    assert loads(text).vendors[0].writable_folders == (path,)
    _, found = made(TABLE)
    make(Path(found.root))
    with Rootfs(found.root) as host:
        listed = given.ListedPath(host, path, writable=True)
    assert (listed.refusal, listed.is_given) == (why, False)


# The tables of the page ----------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_every_documented_table_gives_the_declared_nodes_and_files(made: Made, name: str) -> None:
    config, found = made(TABLES[name], count=3)
    assert [device.label for device in found.devices] == ["0", "1", "2"]
    table = config.vendors[0]
    plan = planned(found, f"{table.variable}=1", config=config)
    own = [path.replace("{n}", "1") for path in table.nodes]
    assert {*own, *table.control} <= set(places(plan))
    assert table.nodes[0].replace("{n}", "0") not in places(plan)
    assert places(plan, "bind") == [*table.files, *table.folders, *table.writable_folders]


def test_the_documentation_has_every_key_and_every_vendor() -> None:
    text = declared_vendors.PAGE.read_text()
    for key in FIELDS:
        assert f"`{key}`" in text
    assert {"cambricon", "mthreads", "metax", "iluvatar", "thead", "rebellions"} <= TABLES.keys()
    assert {"furiosa", "tpu", "kunlun", "maker", "tenstorrent"} <= TABLES.keys()
    assert {"tpu-vfio", "hygon", "enflame", "biren", "hailo", "coral"} <= TABLES.keys()
    assert {"rockchip", "rocket", "spyre"} <= TABLES.keys()


@pytest.mark.parametrize("name", [name for name in TABLES if "/dev/vfio/" in TABLES[name]])
def test_vfio_groups_of_other_vendors_are_ignored(made: Made, name: str) -> None:
    """A host's network cards may also have groups in /dev/vfio."""

    def change(root: Path) -> None:
        groups = root / "sys/kernel/iommu_groups"
        (groups / "1/devices/0000:01:00.0/vendor").write_text("0x15b3\n")
        shutil.rmtree(groups / "3")
        bridge = groups / "2/devices/0000:00:01.0/vendor"  # a bridge may share its device's group
        bridge.parent.mkdir()
        bridge.write_text("0x8086\n")

    _, found = made(TABLES[name], numbers="0,1,2,3", change=change)
    given = [path for device in found.devices for path in device.nodes]
    assert given == ["/dev/vfio/0", "/dev/vfio/2"]


def test_a_driver_on_the_platform_bus_is_found(made: Made) -> None:
    """A driver that is linked into the kernel may be missing in /sys/module."""

    def change(root: Path) -> None:
        (root / "sys/module/RKNPU").rmdir()
        (root / "sys/bus/platform/drivers/RKNPU").mkdir(parents=True)

    _, found = made(TABLES["rockchip"], change=change)
    assert len(found.devices) == 2
