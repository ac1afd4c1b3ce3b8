"""Ascend devices of containers: NPUs, nodes, files."""

from pathlib import Path
from typing import Any

import machines
import pytest
from asking import places, planned, resolved
from node_files import Machine, machine
from paper import spec_with
from steps import resolve

from gpuhook.base.config.model import Config
from gpuhook.base.errors import DriverError, GpuhookError, LostDeviceError, RequestError
from gpuhook.base.loader.layout import Layout
from gpuhook.base.oci.process import has_variable
from gpuhook.core.cdi.generate import SpecSource, generate
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import Plan
from gpuhook.core.planner import make_plan
from gpuhook.vendors.ascend.model import DRIVER, LISTS, AscendInventory
from gpuhook.vendors.ascend.vendor import VENDOR

Case = dict[str, Any]
ASK = "ASCEND_VISIBLE_DEVICES"
VIRTUAL = "ASCEND_RUNTIME_OPTIONS=VIRTUAL"
NODES_ONLY = "ASCEND_RUNTIME_OPTIONS=NODRV"


@pytest.fixture
def npus(tmp_path: Path) -> AscendInventory:
    """Four NPUs, the second of them split."""
    found: AscendInventory = machine(
        "ascend", tmp_path / "ascend", 4, vnpus="116,117", ub="ub0,ub1"
    )
    return found


def nodes(plan: Plan) -> list[tuple[str, str]]:
    """Return the NPUs' nodes of a plan: path on the host, path in the container."""
    ops = [op.to_json() for op in plan.operations if op.kind == "device"]
    pairs = [("/dev/" + op["source"].rpartition("/dev/")[2], op["destination"]) for op in ops]
    return [pair for pair in pairs if "davinci" in pair[0] and "manager" not in pair[0]]


@pytest.mark.parametrize(
    ("asked", "ids"), [("all", ("vnpu-116", "vnpu-117")), ("117", ("vnpu-117",))]
)
def test_virtual_requests_select_vnpus(
    npus: AscendInventory, asked: str, ids: tuple[str, ...]
) -> None:
    assert resolved(npus, f"{ASK}={asked}", VIRTUAL).ids == ids


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["1"], "NPU 1 can't be used: it is split into vNPUs"),
        (["0", VIRTUAL], "no NPU or vNPU 'vnpu-0'"),
    ],
)
def test_split_npus_and_unknown_vnpus_are_refused(
    npus: AscendInventory, asked: list[str], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        resolved(npus, f"{ASK}={asked[0]}", *asked[1:])
    assert isinstance(caught.value, LostDeviceError) == ("split" in words)


def test_an_npu_and_a_vnpu_with_the_same_node_are_refused(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 1, vnpus="0")
    assert nodes(planned(found, f"{ASK}=0")) == [("/dev/davinci0", "/dev/davinci0")]
    assert nodes(planned(found, f"{ASK}=0", VIRTUAL)) == [("/dev/vdavinci0", "/dev/davinci0")]
    with pytest.raises(RequestError, match="would both be /dev/davinci0 in the container"):
        resolved(found, f"{ASK}=0,vnpu-0")


def test_a_container_gets_nodes_files_and_libraries_of_its_npus(npus: AscendInventory) -> None:
    plan = planned(npus, f"{ASK}=2,116")
    assert nodes(plan) == [
        ("/dev/davinci2", "/dev/davinci2"),
        ("/dev/vdavinci116", "/dev/davinci116"),
    ]
    shared = {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist"}
    ub = {"/dev/uburma/ub0", "/dev/uburma/ub1"}
    assert {*places(plan, "device")} == {"/dev/davinci2", "/dev/davinci116"} | shared | ub
    numbers = {node.path: node.numbers for node in npus.nodes}
    assert {*plan.devices} == {
        numbers[path] for path in ("/dev/davinci2", "/dev/vdavinci116", *shared, *ub)
    }
    variables = [op.describe() for op in plan.operations if op.kind == "environment"]
    assert variables == ["set ASCEND_DOCKER_RUNTIME=True"]
    assert [op.to_json()["gid"] for op in plan.operations if op.kind == "group"] == [1000]
    assert places(plan, "bind") == [
        "/etc/hccl_rootinfo.json", "/var/queue_schedule", "/usr/local/dcmi",
        "/usr/local/bin/npu-smi", f"{DRIVER}/include", f"{DRIVER}/lib64",
    ]  # fmt: skip
    assert plan.operations[-1].to_json()["libraries"] == ["libc_sec.so", "libascend_hal.so"]


def test_the_loader_cache_lists_libraries_at_their_own_paths(npus: AscendInventory) -> None:
    cache: Any = planned(npus, f"{ASK}=0").operations[-1]
    assert [path for _, path, _ in cache.libraries] == [
        f"{DRIVER}/lib64/common/libc_sec.so",
        f"{DRIVER}/lib64/driver/libascend_hal.so",
    ]


def test_an_image_without_a_loader_cache_gets_no_cache_entries(npus: AscendInventory) -> None:
    answer = resolved(npus, f"{ASK}=0")
    musl = image.Image(Layout("/usr/lib", None, uses_cache=False))
    assert make_plan(answer.grants, musl).operations[-1].kind == "bind"


def test_the_nodrv_option_gives_nodes_without_files(npus: AscendInventory) -> None:
    plan = planned(npus, f"{ASK}=0", NODES_ONLY)
    assert nodes(plan) == [("/dev/davinci0", "/dev/davinci0")]
    assert not {"bind", "ldcache"} & {op.kind for op in plan.operations}


def test_disable_ub_mount_leaves_out_the_ub_nodes(npus: AscendInventory) -> None:
    found = places(planned(npus, f"{ASK}=0", "DISABLE_UB_MOUNT=True"), "device")
    assert "/dev/davinci_manager" in found
    assert not [path for path in found if "uburma" in path]


def test_requested_lists_are_mounted_and_unknown_ones_warned_of(tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 1)
    made.folder("/run")
    made.write(f"{LISTS}/Tools.list", f"{DRIVER}\n{DRIVER}/include\n/usr/local/dcmi\n/run\n")
    found = made.look()
    plan = planned(found, f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=tools,nothing")
    assert places(plan, "bind") == [
        "/etc/hccl_rootinfo.json",
        "/usr/local/dcmi",
        "/usr/local/Ascend/driver",
    ]
    assert plan.operations[-1].kind == "ldcache"
    warned = resolved(found, f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=tools,nothing").warnings()
    assert warned[0] == "ASCEND_RUNTIME_MOUNTS names the list nothing, which this host doesn't have"
    assert warned[1].startswith("The list Tools has /run, which contains /run/containerd")
    assert resolved(found, f"{ASK}=0").warnings() == []
    both = planned(found, f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=base,Tools")
    assert places(both, "bind").count("/usr/local/dcmi") == 1
    assert f"{DRIVER}/lib64" not in places(both, "bind")


def test_a_file_below_a_linked_folder_is_mounted_separately(tmp_path: Path) -> None:
    """A link below the folder leads elsewhere, so the folder's mount lacks the file."""
    made = Machine("ascend", tmp_path, 1)
    made.write("/opt/other/npu", "")
    made.link("/usr/local/dcmi/away", "/opt/other")
    made.write(f"{LISTS}/base.list", "/usr/local/dcmi\n/usr/local/dcmi/away/npu\n")
    assert places(planned(made.look(), f"{ASK}=0"), "bind")[-2:] == [
        "/usr/local/dcmi",
        "/usr/local/dcmi/away/npu",
    ]


def test_an_unusable_list_is_refused_only_when_requested(tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 1)
    made.write(f"{LISTS}/long.list", "/x\n" * 129)
    found = made.look()
    assert resolved(found, f"{ASK}=0").ids == ("npu-0",)
    assert resolved(found, f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=long", NODES_ONLY).ids == ("npu-0",)
    with pytest.raises(DriverError, match=r"long\.list can't be used: it has 129 lines"):
        resolved(found, f"{ASK}=0", "ASCEND_RUNTIME_MOUNTS=long")


def test_a_missing_manager_node_is_refused(tmp_path: Path) -> None:
    found = machine("ascend", tmp_path, 1, missing="davinci_manager")
    with pytest.raises(DriverError, match=r"Ascend's driver has no node /dev/davinci_manager"):
        resolved(found, f"{ASK}=0")


def test_npus_and_nvidia_gpus_share_one_plan(npus: AscendInventory) -> None:
    gpus = machines.machine(machines.gpu(0, 3))
    plan = planned(npus, f"{ASK}=0", "NVIDIA_VISIBLE_DEVICES=0", beside=[gpus])
    assert {"/dev/davinci0", "/dev/nvidia3"} < {*places(plan, "device")}
    assert [op.kind for op in plan.operations].count("ldcache") == 1
    assert {"libcuda.so.1", "libascend_hal.so"} < {*plan.operations[-1].to_json()["libraries"]}


def test_a_cdi_spec_names_usable_npus_and_vnpus(npus: AscendInventory) -> None:
    made = generate(SpecSource(VENDOR, npus, Config(), "/usr/bin/gpuhook-cdi-hook"))
    document = made.document
    names = {device["name"]: device["containerEdits"] for device in document["devices"]}
    assert {"0", "npu-0", "116", "vnpu-116", "all"} < {*names}
    assert "1" not in names
    [node] = names["vnpu-116"]["deviceNodes"]
    assert (node["path"], node["hostPath"].rpartition("/")[2]) == ("/dev/davinci116", "vdavinci116")
    common = document["containerEdits"]
    assert common["env"] == ["ASCEND_DOCKER_RUNTIME=True", "ASCEND_VISIBLE_DEVICES=void"]
    assert f"{DRIVER}/lib64" in [mount["containerPath"] for mount in common["mounts"]]
    assert common["hooks"][0]["args"][-1] == "ascend.com/npu"
    assert made.warnings == ["NPU 1: it is split into vNPUs"]


# The vendor's cases --------------------------------------------------------------------------

MANY = 132  # NPUs; the cases ask for numbers up to 129
# Cases in which gpuhook allocates devices but the vendor's program fails; see differences.md.
GIVEN: dict[str, list[int] | None] = {
    "right bound beyond it": [126, 127, 128, 129],
    "all is not a word here": list(range(MANY)),
    "empty item": [0],
    "names and numbers do not mix": [0, 1],
    # An entry without = counts as an empty variable, which hides no other entry.
    "entry without = after it hides the request (fault)": [0],
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> AscendInventory:
    found: AscendInventory = machine("ascend", tmp_path_factory.mktemp("many"), MANY)
    return found


def answer(found: AscendInventory, env: list[str]) -> list[int] | str | None:
    """Return the numbers of the devices that an environment requests, "error" for a refusal."""
    try:
        answer = resolve(spec_with(*env), Config(), inventories={"ascend": found})
    except GpuhookError:
        return "error"
    return None if answer is None else sorted(int(each.partition("-")[2]) for each in answer.ids)


@pytest.mark.vectors("vendor_ascend", "ascend.request")
def test_requests_match_the_vectors(case: Case, many: AscendInventory) -> None:
    """The vendor sorts by number and gpuhook doesn't, so the test sorts both."""
    expected = "error" if case["expected"].get("error") else case["expected"]["devices"]
    expected = GIVEN.get(case["name"], expected)
    assert answer(many, [f"{ASK}={case['input']['value']}"]) == expected


@pytest.mark.vectors("vendor_ascend", "ascend.environment")
def test_environments_match_the_vectors(case: Case, many: AscendInventory) -> None:
    expected = "error" if case["expected"].get("error") else case["expected"]["devices"]
    assert answer(many, case["input"]["env"]) == GIVEN.get(case["name"], expected)


@pytest.mark.vectors("vendor_ascend", "ascend.device_nodes")
def test_device_nodes_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    numbers = ",".join(str(number) for number in given["devices"])
    sort = {"vnpus": numbers.replace("-", "")} if given["virtual"] else {}
    found = machine("ascend", tmp_path, 8, **sort)
    env = [f"{ASK}={numbers}", *([VIRTUAL] if given["virtual"] else [])]
    if not given["devices"]:  # the vendor's function fails, but gpuhook sees no request
        assert answer(found, env) is None
    elif expected.get("error"):
        assert answer(found, env) == "error"
    else:
        assert nodes(planned(found, *env)) == [tuple(pair) for pair in expected["nodes"]]


# Cases in which gpuhook mounts nothing, unlike the vendor's program.
NOT_MOUNTED = ("nodes in a list are looked up without that root",)


@pytest.mark.vectors("vendor_ascend", "ascend.mount_list")
def test_mounted_lists_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    made = Machine("ascend", tmp_path, 1)
    (tmp_path / "etc/hccl_rootinfo.json").unlink()
    for name, named in given["lists"].items():
        lines = ["/" + "x" * given["line_length"]] if "line_length" in given else named
        made.write(f"{LISTS}/{name}.list", "".join(f"{line}\n" for line in lines))
    for path in given.get("exists", ()):
        made.write(path, "")
    env = [f"{ASK}=0", f"ASCEND_RUNTIME_MOUNTS={given['names']}"]
    assert (answer(made.look(), env) == "error") == bool(expected.get("error"))
    if expected.get("error"):
        return
    wanted = [] if case["name"] in NOT_MOUNTED else expected["mounts_any_order"]
    assert sorted(places(planned(made.look(), *env), "bind")) == sorted(wanted)


@pytest.mark.vectors("vendor_ascend", "ascend.topology_files")
def test_topology_files_match_the_vectors(case: Case, tmp_path: Path) -> None:
    made = Machine("ascend", tmp_path, 1)
    (tmp_path / "etc/hccl_rootinfo.json").unlink()
    lines = case["input"]["driver_mounts"]
    for path in (*lines, *case["input"]["exists"]):
        made.write(path, "")
    made.write(f"{LISTS}/base.list", "".join(f"{line}\n" for line in lines))
    found = places(planned(made.look(), f"{ASK}=0"), "bind")
    assert sorted(found) == sorted(case["expected"]["mounts_any_order"])


@pytest.mark.vectors("vendor_ascend", "ascend.marker_variable")
def test_the_marker_variable_is_set_only_with_a_device(case: Case, many: AscendInventory) -> None:
    """The vendor sets it in every container, gpuhook only in containers with a device."""
    env = case["input"]["env"]
    assert answer(many, env) is None
    [setting] = resolved(many, *env, f"{ASK}=0").settings
    adds = case["expected"]["adds"]
    assert (
        f"{setting.name}={setting.value}" == adds
        if adds
        else has_variable(spec_with(*env), setting)
    )


@pytest.mark.vectors("vendor_ascend", "ascend.library_path")
def test_library_folders_match_the_vectors_without_ld_library_path(
    case: Case, tmp_path: Path, library: Any
) -> None:
    """The image's variable is unchanged; the loader's cache has the same folders in order."""
    made = Machine("ascend", tmp_path, 1)
    exists = [path for path in case["input"]["exists"] if path.startswith(DRIVER)]
    for file in (tmp_path / DRIVER.lstrip("/") / "lib64").rglob("*.so"):
        file.unlink()
    for number, folder in enumerate(exists):
        made.data(f"{folder}/libcase{number}.so", library(f"libcase{number}.so"))
        made.data(f"{folder}/libshared.so", library("libshared.so"))
    plan = planned(made.look(), f"{ASK}=0", "LD_LIBRARY_PATH=/x")
    caches: list[Any] = [op for op in plan.operations if op.kind == "ldcache"]
    found = {name: path for cache in caches for name, path, _ in cache.libraries}
    assert found.get("libshared.so", "") == (f"{exists[0]}/libshared.so" if exists else "")
    ours = [found[f"libcase{number}.so"].rpartition("/")[0] for number in range(len(exists))]
    assert ours == exists
    assert not [op for op in plan.operations if "LD_LIBRARY_PATH" in op.describe()]


@pytest.mark.vectors("vendor_ascend", "ascend.mode")
def test_the_vendors_mode_setting_changes_nothing(case: Case, many: AscendInventory) -> None:
    """gpuhook's mode comes from its own config.toml, not from the vendor's installation."""
    assert case["expected"]["mode"] in ("legacy", "cdi")
    assert Config().mode == "hook"
    assert answer(many, [f"{ASK}=0"]) == [0]


@pytest.mark.vectors("vendor_ascend", "ascend.cdi")
def test_cdi_specs_match_the_vectors(case: Case, tmp_path: Path) -> None:
    given, expected = case["input"], case["expected"]
    made = Machine("ascend", tmp_path, len(given.get("devices", [0])))
    for path in given.get("mounts", ()):
        made.write(f"{path}/x" if "." not in path else path, "")
    if "mounts" in given:
        made.write(f"{LISTS}/base.list", "".join(f"{path}\n" for path in given["mounts"]))
    source = SpecSource(VENDOR, made.look(), Config(), "/hook")
    if expected.get("error"):
        with pytest.raises(GpuhookError):
            generate(source)
        return
    document = generate(source).document
    names = [f"{document['kind']}={device['name']}" for device in document["devices"]]
    assert document["kind"] == expected.get("kind", document["kind"])
    assert {*expected.get("names", ())} <= {*names}
    mounts = [mount["containerPath"] for mount in document["containerEdits"]["mounts"]]
    asked = [path for path in mounts if path in given.get("mounts", ())]
    assert asked == expected.get("mounts", [])
