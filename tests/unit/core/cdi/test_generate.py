"""CDI specs generated from made-up inventories, and the shared cases about generated specs."""

from pathlib import Path
from typing import Any

import own
import pytest
import second_vendor
from click.testing import CliRunner
from machines import VERSION, asked, gpu, granted, machine, mig, planned

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import CdiError, UnknownDeviceError
from gpuhook.core.cdi import versions
from gpuhook.core.cdi.document import read
from gpuhook.core.cdi.generate import (
    ALL,
    STRATEGIES,
    CdiReader,
    CdiWriter,
    SpecSource,
    generate,
    tidy,
)
from gpuhook.core.inventory.model import EVERYBODY, DeviceNode
from gpuhook.core.inventory.model import Inventory as AnyInventory
from gpuhook.core.inventory.selection import select
from gpuhook.core.plan.operations import BindDevice, BindFile
from gpuhook.tools.cdi.write import to_text
from gpuhook.tools.cli import cli
from gpuhook.vendors.nvidia import driver_files, names
from gpuhook.vendors.nvidia.model import Gpu, NvidiaInventory
from gpuhook.vendors.nvidia.vendor import VENDOR

HOOK = "/opt/gpuhook/bin/gpuhook-cdi-hook"
MIGS = (mig(0, 1, 12, 13), mig(1, 2, 21, 22))
NODE_FIELDS = {"path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "gid"}
Case = dict[str, Any]
Edits = dict[str, Any]


def source(
    inventory: NvidiaInventory, config: Config | None = None, path: str | None = None
) -> SpecSource:
    return SpecSource(VENDOR, inventory, config or Config(), HOOK, path)


def document(inventory: NvidiaInventory, *strategies: str, config: Config | None = None) -> Case:
    return generate(source(inventory, config), strategies or ("index",)).document


def edits(made: Case) -> dict[str, Edits]:
    return {device["name"]: device["containerEdits"] for device in made["devices"]}


def paths(found: Edits) -> list[str]:
    return [node["path"] for node in found.get("deviceNodes", ())]


def rooted(inventory: NvidiaInventory, root: str) -> NvidiaInventory:
    return NvidiaInventory(root, *(getattr(inventory, name) for name in (
        "driver_version", "cuda_version", "gpus", "nodes", "files", "lost", "mig_minors",
    )))  # fmt: skip


# Devices ------------------------------------------------------------------------------------


def test_each_device_has_its_own_nodes_and_the_rest_is_common() -> None:
    made = document(machine(gpu(0, 1), gpu(1, 0)))
    found = edits(made)
    assert list(found) == ["0", "1", ALL]
    assert paths(found["0"]) == ["/dev/nvidia1", "/dev/dri/card1", "/dev/dri/renderD129"]
    assert paths(found["1"]) == ["/dev/nvidia0", "/dev/dri/card0", "/dev/dri/renderD128"]
    assert sorted(paths(found[ALL])) == sorted(paths(found["0"]) + paths(found["1"]))
    control = ["/dev/nvidia-modeset", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"]
    assert paths(made["containerEdits"]) == control


def test_a_single_gpu_is_also_a_device_of_its_own() -> None:
    found = edits(document(machine(gpu(0, 0))))
    assert found["0"] == found[ALL]
    assert "/dev/nvidia0" in paths(found["0"])


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("index", ["1", "0:0", "0:1"]),
        ("uuid", ["GPU-00000001-0000-0000-0000-000000000000", MIGS[0].uuid, MIGS[1].uuid]),
        ("type-index", ["gpu1", "mig0:0", "mig0:1"]),
    ],
)
def test_device_names_follow_the_strategy(strategy: str, expected: list[str]) -> None:
    made = document(machine(gpu(0, 3, MIGS), gpu(1, 0)), strategy)
    assert {device["name"] for device in made["devices"]} == {*expected, ALL}


def test_each_strategy_names_every_device() -> None:
    every = document(machine(gpu(0, 0), gpu(1, 1)), *STRATEGIES)
    assert len(every["devices"]) == 2 * 3 + 1
    found = edits(every)
    assert found["1"] == found["gpu1"] == found["GPU-00000001-0000-0000-0000-000000000000"]


def test_a_mig_device_has_only_its_gpus_nodes() -> None:
    found = edits(document(machine(gpu(0, 3, MIGS), gpu(1, 0))))
    assert paths(found["0:1"]) == [
        "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22",
    ]  # fmt: skip
    assert "0" not in found
    assert {"/dev/nvidia0", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap12"} <= set(
        paths(found[ALL])
    )


def in_mig_mode(index: int) -> Gpu:
    one = gpu(index, index)
    facts = vars(one)
    return Gpu(**{**facts, "mig_enabled": True})


def test_a_gpu_in_mig_mode_without_mig_devices_is_left_out_with_warning() -> None:
    made = generate(source(machine(in_mig_mode(0), gpu(1, 1))), ("index",))
    assert list(edits(made.document)) == ["1", ALL]
    assert "/dev/nvidia0" not in paths(edits(made.document)[ALL])
    assert made.warnings == ["GPU 0 is in MIG mode and has no MIG device"]


def without_node(inventory: NvidiaInventory, path: str) -> NvidiaInventory:
    nodes = tuple(node for node in inventory.nodes if node.path != path)
    return NvidiaInventory("/", VERSION, "13.0", inventory.gpus, nodes, inventory.files)


def test_a_gpu_without_its_device_node_is_left_out_with_warning() -> None:
    made = generate(source(without_node(machine(gpu(0, 3), gpu(1, 1)), "/dev/nvidia3")))
    assert made.warnings == ["GPU 0: there is no device node /dev/nvidia3"]
    assert "0" not in edits(made.document)
    with pytest.raises(CdiError, match="there is no device node /dev/nvidia3"):
        generate(source(without_node(machine(gpu(0, 3)), "/dev/nvidia3")))


def test_a_machine_without_a_gpu_is_an_error() -> None:
    with pytest.raises(CdiError, match="This host has no GPU or MIG device"):
        generate(source(machine()))
    with pytest.raises(CdiError, match="GPU 0 is in MIG mode and has no MIG device"):
        generate(source(machine(in_mig_mode(0))))


def test_a_lost_gpu_causes_a_warning() -> None:
    inventory = machine(gpu(0, 0))
    lost = NvidiaInventory(
        "/", VERSION, "13.0", inventory.gpus, inventory.nodes, inventory.files, (4,)
    )
    assert generate(source(lost)).warnings == ["GPU 4 has fallen off the bus (lost)"]


# Edits --------------------------------------------------------------------------------------


def test_libraries_are_mounted_into_the_hosts_folders() -> None:
    made = document(rooted(machine(gpu(0, 0)), "/run/nvidia/driver"))
    mounts = {mount["containerPath"]: mount for mount in made["containerEdits"]["mounts"]}
    library = f"{own.FOLDER}/libcuda.so.{VERSION}"
    assert mounts[library] == {
        "hostPath": f"/run/nvidia/driver{library}",
        "containerPath": library,
        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
    }
    assert f"{own.FOLDER32}/libcuda.so.{VERSION}" in mounts
    assert "/run/p/socket" not in mounts


def test_all_supported_capabilities_are_included() -> None:
    inventory = machine(gpu(0, 0))

    def names_of(made: Case) -> set[str]:
        mounts = [mount["containerPath"] for mount in made["containerEdits"]["mounts"]]
        return {path.rpartition("/")[2].partition(".so")[0] for path in mounts}

    every = {"libnvidia-ml", "libcuda", "libnvidia-encode", "libGLX_nvidia", "libnvidia-ngx"}
    assert every <= names_of(document(inventory))
    config = Config()
    config.supported_driver_capabilities = "utility"
    assert names_of(document(inventory, config=config)).isdisjoint(every - {"libnvidia-ml"})


def test_only_constant_device_numbers_are_written() -> None:
    made = document(machine(gpu(0, 0, MIGS)))
    nodes = [*made["containerEdits"]["deviceNodes"], *edits(made)["0:0"]["deviceNodes"]]
    numbered = {node["path"] for node in nodes if "major" in node}
    assert numbered == {"/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia0"}
    for node in nodes:
        assert set(node) <= NODE_FIELDS
        assert node["permissions"] == "rw"
        assert "hostPath" not in node
        assert node.get("major", 195) == 195


def test_a_different_host_path_of_a_node_is_written() -> None:
    made = document(rooted(machine(gpu(0, 0)), "/drv"))
    node = edits(made)["0"]["deviceNodes"][0]
    assert (node["path"], node["hostPath"]) == ("/dev/nvidia0", "/drv/dev/nvidia0")


def closed_machine(mode: int) -> NvidiaInventory:
    inventory = machine(gpu(0, 0))
    nodes = [
        DeviceNode(node.path, *node.numbers, mode, 0, 44) if "dri/" in node.path else node
        for node in inventory.nodes
    ]
    return NvidiaInventory("/", VERSION, "13.0", inventory.gpus, tuple(nodes), inventory.files)


def test_a_restricted_device_node_adds_its_group() -> None:
    made = document(closed_machine(0o660))
    found = edits(made)["0"]
    assert found["additionalGids"] == [44]
    node = next(node for node in found["deviceNodes"] if node["path"] == "/dev/dri/card0")
    assert (node["fileMode"], node["gid"]) == (0o660, 44)
    assert made["cdiVersion"] == "0.7.0"
    config = Config()
    config.features = {"no-additional-gids-for-device-nodes": True}
    without = document(closed_machine(0o660), config=config)
    assert "additionalGids" not in edits(without)["0"]
    assert without["cdiVersion"] == "0.5.0"


@pytest.mark.parametrize(("highest", "written"), [("0.6.0", False), ("0.7.0", True)])
def test_fields_too_new_for_the_oldest_engine_are_omitted_with_warning(
    highest: str, written: bool
) -> None:
    reader = CdiReader("podman 4.9.3", highest)
    here = closed_machine(0o660)
    made = generate(SpecSource(VENDOR, here, Config(), HOOK, None, lambda: reader), ("index",))
    assert ("additionalGids" in edits(made.document)["0"]) == written
    assert versions.accepts(highest, made.document["cdiVersion"])
    said = [text for text in made.warnings if "podman 4.9.3" in text]
    assert len(said) == (not written)
    for text in said:
        assert "up to version 0.6.0, and they need 0.7.0" in text


def test_no_warning_where_no_additional_group_is_needed() -> None:
    reader = CdiReader("podman 4.9.3", "0.6.0")
    asked: list[CdiReader] = []

    def ask() -> CdiReader:
        asked.append(reader)
        return reader

    made = generate(SpecSource(VENDOR, closed_machine(0o666), Config(), HOOK, None, ask))
    assert not [text for text in made.warnings if "podman" in text]
    assert not asked  # asking podman would take a twentieth of a second


def test_without_gpuhooks_hook_links_are_mounts_and_nvidias_hook_is_used() -> None:
    here = machine(gpu(0, 0))
    usual = generate(source(here), ("index",)).document["containerEdits"]
    made = generate(
        SpecSource(VENDOR, here, Config(), HOOK, without_hook=True), ("index",)
    ).document
    common = made["containerEdits"]
    [hook] = common["hooks"]
    folders = [word for each in (own.FOLDER, own.FOLDER32) for word in ("--folder", each)]
    assert hook["args"] == ["nvidia-cdi-hook", "update-ldcache", *folders]
    assert HOOK not in str(made)
    more = {each["containerPath"]: each["hostPath"] for each in common["mounts"]}
    before = {each["containerPath"]: each["hostPath"] for each in usual["mounts"]}
    assert before.items() < more.items()
    assert more[f"{own.FOLDER}/libcuda.so.1"] == f"{own.FOLDER}/libcuda.so.{VERSION}"
    assert "env" in common


def test_a_spec_for_selected_devices_contains_only_those() -> None:
    here = source(machine(gpu(0, 0), gpu(1, 1), gpu(2, 2)))
    made = generate(here, ("index",), ("2", "0")).document
    assert {name: paths(found) for name, found in edits(made).items()} == {
        "0": ["/dev/nvidia0", "/dev/dri/card0", "/dev/dri/renderD128"],
        "2": ["/dev/nvidia2", "/dev/dri/card2", "/dev/dri/renderD130"],
        ALL: [
            "/dev/nvidia0", "/dev/nvidia2", "/dev/dri/card0", "/dev/dri/card2",
            "/dev/dri/renderD128", "/dev/dri/renderD130",
        ],
    }  # fmt: skip
    with pytest.raises(UnknownDeviceError):
        generate(here, ("index",), ("7",))


def test_no_all_device_is_written_if_not_wanted() -> None:
    made = generate(source(machine(gpu(0, 0), gpu(1, 1))), ("index",), all_device=False)
    assert list(edits(made.document)) == ["0", "1"]
    assert made.warnings == generate(source(machine(gpu(0, 0), gpu(1, 1))), ("index",)).warnings


def test_the_devices_variable_is_void_against_other_injectors() -> None:
    made = document(machine(gpu(0, 0)))
    assert made["containerEdits"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_the_hook_is_common_and_has_its_own_environment() -> None:
    made = generate(source(machine(gpu(0, 0), gpu(1, 1)), path="/srv/gpuhook.toml")).document
    [hook] = made["containerEdits"]["hooks"]
    assert hook == {
        "hookName": "createContainer",
        "path": HOOK,
        "args": ["gpuhook-cdi-hook", "--config", "/srv/gpuhook.toml", "nvidia.com/gpu"],
        "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"],
    }
    assert not any("hooks" in each for each in edits(made).values())


@pytest.fixture
def npus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnyInventory:
    """Four NPUs on two boards (0 and 2, 1 and 3); NPU 1 is split, and NPU 3 is being reset."""
    second_vendor.know(monkeypatch)
    return second_vendor.machine(tmp_path / "acme", boards="2", split="1", reset="3")


def test_a_vendor_without_driver_files_gets_no_hook(npus: AnyInventory) -> None:
    vendor = second_vendor.part("vendor").VENDOR
    made = generate(SpecSource(vendor, npus, Config(), HOOK), ("type-index",))
    found = made.document
    assert found["kind"] == "acme.example/npu"
    assert [device["name"] for device in found["devices"]] == ["npu0", "npu2", "part1.0", "part1.1"]
    assert "hooks" not in found["containerEdits"]
    assert found["containerEdits"]["env"][-1] == "ACME_VISIBLE_DEVICES=void"
    assert not any(each.startswith("ACME_VISIBLE_B") for each in found["containerEdits"]["env"])
    assert not any("ACME_DEVICES" in entry for entry in found["containerEdits"]["env"])
    assert "env" not in edits(found)["part1.1"], "engines keep one value of a variable"
    assert read(to_text(found, "yaml").encode()).problems == ()


def test_warnings_name_excluded_devices_and_special_variables(npus: AnyInventory) -> None:
    vendor = second_vendor.part("vendor").VENDOR
    made = generate(SpecSource(vendor, npus, Config(), HOOK))
    assert made.warnings == [
        "NPU 3: it is in reset",
        "There is no device all: NPUs of the boards B0 and B1 can't work in one container",
        (
            "Only gpu-py sets ACME_DEVICES, whose value depends on all devices of a container "
            "(ACME's library opens these NPUs)"
        ),
        "ACME_PLUGIN_PATH replaces the image's value: ACME's library loads plugins",
    ]
    # A part's serial number has a slash, which no name in CDI may have.
    names = [device["name"] for device in made.document["devices"]]
    assert names == ["0", "1.0", "1.1", "2", "A-0000", "A-0002"]


def test_a_device_without_a_valid_name_is_an_error(npus: AnyInventory) -> None:
    vendor = second_vendor.part("vendor").VENDOR
    with pytest.raises(CdiError, match="isn't a valid device name"):
        generate(SpecSource(vendor, npus, Config(), HOOK), ("uuid",))


@pytest.mark.parametrize("form", ["yaml", "json"])
@pytest.mark.parametrize(
    "inventory",
    [
        machine(gpu(0, 0)),
        rooted(machine(gpu(0, 3, MIGS), gpu(1, 0)), "/run/nvidia/driver"),
        closed_machine(0o660),
    ],
)
def test_generated_cdi_specs_are_valid_and_survive_reading(
    inventory: NvidiaInventory, form: str
) -> None:
    made = document(inventory, *STRATEGIES)
    reading = read(to_text(made, form).encode())
    assert reading.problems == ()
    assert reading.document == made


# The shared cases ------------------------------------------------------------------------------

# NVIDIA's modes in which gpuhook can't make a CDI spec, each with the reason.
OTHER_MODES = {
    "management": "every node of every GPU, whatever is asked for, is --privileged's",
    "nvswitch": "a feature, which a container asks for with NVIDIA_NVSWITCH=enabled",
    "gds": "as nvswitch",
    "gdrcopy": "as nvswitch",
    "mofed": "as nvswitch",
}


def is_of_another_mode(case: Case) -> bool:
    """Tell whether a case has a mode that gpuhook lacks, and check that the mode is refused."""
    mode = case["input"].get("mode", "csv" if "csv" in case["group"] else "nvml")
    if mode in ("nvml", "auto"):
        return False
    assert mode in {*OTHER_MODES, "csv"}
    done = CliRunner().invoke(cli, ["cdi", "generate", "--mode", mode])
    assert done.exit_code == 2
    assert f"'{mode}' is not one of 'auto', 'nvml'" in done.stderr
    return True


def machine_of(case: Case, root: Path, library: Any) -> NvidiaInventory:
    """Return the inventory of a case: its files are created, its nodes are only named."""
    tree = case["input"]["tree"]
    for path in tree["files"]:
        file = root / path.strip("/")
        if path.endswith("/"):
            file.mkdir(parents=True, exist_ok=True)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        name = file.name.partition(".so")[0]
        file.write_bytes(library(f"{name}.so.1") if ".so." in path and "cache" not in path else b"")
    for path, target in tree["links"].items():
        (root / path.strip("/")).symlink_to(target)
    folders = ("/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu/vdpau")
    with Rootfs(str(root)) as below:
        index = driver_files.LibraryIndex(below, "/no/cache", folders)
        found = driver_files.find_all(below, index, case["input"]["driver_version"])
    nodes = tuple(DeviceNode(path, 195, at) for at, path in enumerate(tree["nodes"]))
    facts = vars(gpu(0, 0))
    one = Gpu(**{**facts, "drm": ()})
    return NvidiaInventory(str(root), case["input"]["driver_version"], "13.0", (one,), nodes, found)


@pytest.mark.vectors("cdi_generate", "cdi.generate_document")
def test_generated_cdi_specs_match_the_shared_cases(
    case: Case, tmp_path: Path, library: Any
) -> None:
    """gpuhook has one hook for all of NVIDIA's, and passes it no variables."""
    if is_of_another_mode(case):
        return
    inventory = machine_of(case, tmp_path, library)
    if "error_contains" in case["expected"]:
        with pytest.raises(UnknownDeviceError):
            select(tuple(case["input"]["deviceIDs"]), inventory, names)
        return
    made, expected = document(inventory), case["expected"]["document"]
    assert made["cdiVersion"] == expected["cdiVersion"]

    def short(found: Edits) -> Edits:
        nodes = [{"path": n["path"], "hostPath": n["hostPath"]} for n in found["deviceNodes"]]
        return {"deviceNodes": nodes, "mounts": found.get("mounts", [])}

    text = str(expected["containerEdits"]["mounts"]).replace("R/", f"{tmp_path}/")
    common = made["containerEdits"]
    assert str(common["mounts"]) == text
    assert common["env"][-1] == expected["containerEdits"]["env"][-1]
    assert str(short(common)["deviceNodes"]).replace(f"{tmp_path}/", "R/") == str(
        expected["containerEdits"]["deviceNodes"]
    )
    for device, other in zip(made["devices"], expected["devices"], strict=True):
        assert device["name"] == other["name"]
        nodes = str(short(device["containerEdits"])["deviceNodes"])
        assert nodes.replace(f"{tmp_path}/", "R/") == str(other["containerEdits"]["deviceNodes"])


@pytest.mark.vectors("cdi", "cdi.generate_hooks")
def test_generated_hooks_match_the_shared_cases(case: Case) -> None:
    if is_of_another_mode(case):
        return
    expected = case["expected"]
    made = document(rooted(machine(gpu(0, 0)), "/drv"))
    assert [device["name"] for device in made["devices"]] == expected["devices"]
    assert made["cdiVersion"] == expected["cdiVersion"]
    assert len(made["containerEdits"]["hooks"]) == 1  # does what NVIDIA's several hooks do


@pytest.mark.vectors("cdi", "cdi.nvml_ids")
def test_devices_selected_by_name_match_the_shared_cases(case: Case) -> None:
    named = gpu(0, 0)
    facts = vars(named)
    first = Gpu(**{**facts, "uuid": "GPU-12345678-1234-1234-1234-123456789abc"})
    if case["name"] == "mig index":
        first = gpu(0, 0, MIGS)
    count = case["input"].get("gpus", 8)
    inventory = machine(first, *(gpu(index, index) for index in range(1, count)))
    ids = tuple(case["input"]["ids"])
    if "error_contains" in case["expected"]:
        with pytest.raises(UnknownDeviceError):
            select(ids, inventory, names)
    else:
        assert len(select(ids, inventory, names)) == case["expected"]["device_count"]


@pytest.mark.vectors("cdi", "cdi.mode", "cdi.csv_compat")
def test_cases_of_unsupported_modes_are_recognized(case: Case) -> None:
    assert is_of_another_mode(case)


@pytest.mark.vectors("cdi_generate", "cdi.mode_document")
def test_cdi_spec_cases_of_unsupported_modes_are_recognized(case: Case) -> None:
    assert is_of_another_mode(case)


@pytest.mark.vectors("cdi_generate", "cdi.save_version")
def test_the_lowest_version_is_written(case: Case) -> None:
    """No option sets the version: all readers of a higher version accept the lowest one."""
    assert versions.needed(case["input"]["document"]) == "0.3.0"
    asked_for = case["input"].get("cdiVersion", "0.3.0")
    assert case["expected"]["document"]["cdiVersion"] == asked_for


@pytest.mark.vectors("cdi", "cdi.version")
def test_needed_versions_match_the_shared_cases(case: Case) -> None:
    device: Case = {"name": "a", "containerEdits": {"deviceNodes": [{"path": "/dev/a"}]}}
    if "hostPath" in case["input"]["spec"]:
        device["containerEdits"]["deviceNodes"][0]["hostPath"] = "/dev/a"
    else:
        device["name"] = "0"
    needed = versions.needed({"kind": "a.com/b", "devices": [device]})
    assert needed == case["expected"]["cdiVersion"]


@pytest.mark.vectors("cdi_generate", "cdi.simplify_document", "cdi.sort_document")
def test_tidied_cdi_specs_match_the_shared_cases(case: Case) -> None:
    assert tidy(case["input"]["document"]) == case["expected"]["document"]


@pytest.mark.vectors("cdi_generate", "cdi.remove_duplicates")
def test_duplicates_are_removed(case: Case) -> None:
    """NVIDIA removes duplicates before it sorts, so the order isn't compared."""

    def unordered(found: Case) -> list[list[str]]:
        parts = [found, *found.get("devices", ())]
        lists = [each for part in parts for each in part.get("containerEdits", {}).values()]
        return [sorted(map(str, each)) for each in lists]

    found = unordered(tidy(case["input"]["document"]))
    assert found == unordered(case["expected"]["document"])


@pytest.mark.vectors("cdi_generate", "cdi.sort_nodes", "cdi.sort_mounts")
def test_sorted_paths_match_the_shared_cases(case: Case) -> None:
    key, field = (
        ("deviceNodes", "path")
        if case["group"] == "cdi.sort_nodes"
        else ("mounts", "containerPath")
    )
    entries = [{field: path} for path in case["input"]["paths"]]
    made = tidy({"containerEdits": {key: entries}})
    assert [entry[field] for entry in made["containerEdits"][key]] == case["expected"]["paths"]


@pytest.mark.vectors("cdi", "cdi.simplify")
def test_simplified_edits_match_the_shared_cases(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    nodes = [{"path": path} for path in given.get("common_nodes", ())]
    made = tidy({"containerEdits": {"env": given.get("common_env", []), "deviceNodes": nodes}})
    found = made["containerEdits"]
    assert found.get("env", []) == expected.get("common_env", [])
    assert paths(found) == expected.get("common_nodes", [])


@pytest.mark.vectors("cdi_generate", "cdi.merge_devices")
def test_the_all_device_is_planned_as_a_whole(case: Case) -> None:
    """Devices aren't merged: ``all`` is planned like a container that requests all devices."""
    if case["name"] == "bad name":
        odd = gpu(0, 0)
        facts = vars(odd)
        with pytest.raises(CdiError, match="isn't a valid device name"):
            document(machine(Gpu(**{**facts, "uuid": ".-not-valid"})), "uuid")
        return
    gpus = [gpu(index, index) for index in range(len(case["input"]["devices"]))]
    if not gpus:
        with pytest.raises(CdiError):
            document(machine())
        return
    found = edits(document(machine(*gpus)))
    alone = [path for index in range(len(gpus)) for path in paths(found[str(index)])]
    assert set(paths(found[ALL])) == set(alone)


@pytest.mark.vectors("cdi", "cdi.merged_device")
def test_no_device_is_hidden_by_the_all_device(case: Case) -> None:
    made = edits(document(machine(gpu(0, 0)), "index"))
    assert sorted(made) == ["0", ALL]  # no device of a host can be called all


@pytest.mark.vectors("cdi_generate", "cdi.split_by_annotation")
def test_cdi_specs_are_not_split_by_annotation(case: Case) -> None:
    """gpuhook announces coherent memory by no annotation, so no spec needs to be split."""
    made = document(machine(gpu(0, 0)))
    assert not any("annotations" in part for part in (made, *made["devices"]))


@pytest.mark.vectors("cdi", "cdi.additional_gids")
def test_additional_groups_match_the_shared_cases(case: Case) -> None:
    """A case without a mode means Node's default; gpuhook always knows the mode."""
    given = case["input"]
    mode = EVERYBODY if given["mode"] is None else int(given["mode"], 8)
    node = DeviceNode("/dev/foo", 1, 2, mode, gid=given["gid"])
    groups = [node.group] if node.group and not given["disabled"] else None
    assert groups == case["expected"]["additionalGids"]


@pytest.mark.vectors("cdi", "cdi.device_node")
def test_device_nodes_match_the_shared_cases(case: Case) -> None:
    """Access is always rw; modes are written, and numbers only for majors that never change."""
    given, expected = case["input"], dict(case["expected"])
    root = given.get("hostPath", given["path"]).removesuffix(given["path"]) or "/"
    status = given.get("stat", {})
    numbers = (status.get("major", 100), status.get("minor", 200))
    node = DeviceNode(given["path"], *numbers, 0o666, status.get("uid", 0), status.get("gid", 0))
    fixed = (100,) if status else ()
    [found] = CdiWriter(fixed).write([BindDevice(root, node, "")]).edits["deviceNodes"]
    expected.update(permissions="rw", fileMode=0o666)
    if status:
        expected.update(type="c")
    assert found == expected


@pytest.mark.vectors("cdi", "cdi.imex_id")
def test_imex_channels_are_not_in_cdi_specs(case: Case) -> None:
    """CDI specs have no IMEX channels; ``variables.imex_channel`` parses their names."""
    made = document(machine(gpu(0, 0)))
    everything = [made["containerEdits"], *edits(made).values()]
    assert not any("imex" in path for each in everything for path in paths(each))


def test_every_operation_is_an_edit_or_left_to_the_hook() -> None:
    request = asked("all", capabilities=("compute", "graphics", "utility"))
    plan = planned(request, machine(gpu(0, 0)))
    found = CdiWriter((195,)).write(plan.operations).edits
    binds = [op for op in plan.operations if isinstance(op, BindFile)]
    assert len(found["mounts"]) == len(binds)
    assert len(found["deviceNodes"]) == len(granted(request, machine(gpu(0, 0))).nodes)
