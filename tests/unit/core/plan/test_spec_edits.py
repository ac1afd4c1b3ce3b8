"""spec_edits: the part of a plan that config.json can express."""

import json
from typing import Any

import own
from machines import VERSION, gpu, machine, planned, read_request

from gpuhook.base.config.model import Config
from gpuhook.base.oci.spec import Spec
from gpuhook.core.plan import spec_edits
from gpuhook.core.plan.operations import Plan
from gpuhook.core.plan.spec_edits import SpecWriter

LIBS = own.FOLDER
MACHINE = machine(gpu(0, 3))


def plan(*env: str) -> Plan:
    request = read_request({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0", *env]}}, Config())
    return planned(request, MACHINE)


def done(made: Plan) -> SpecWriter:
    return SpecWriter().write(made.operations)


def applied(made: Plan, text: str = "{}") -> dict[str, Any]:
    return spec_edits.apply(Spec("/b/config.json", text), done(made)).data


def test_nodes_and_mounts_are_appended() -> None:
    first = {"destination": "/proc", "type": "proc"}
    spec = applied(plan(), json.dumps({"mounts": [first], "linux": {"devices": [{"path": "/x"}]}}))
    assert spec["mounts"][0] == first
    assert [node["path"] for node in spec["linux"]["devices"]] == [
        "/x", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia3",
    ]  # fmt: skip
    assert spec["linux"]["devices"][-1] == {
        "path": "/dev/nvidia3", "type": "c", "major": 195, "minor": 3,
        "fileMode": 0o666, "uid": 0, "gid": 0,
    }  # fmt: skip


def test_nodes_below_a_driver_root_are_mounted_in_a_user_namespace() -> None:
    """A user namespace can't make a node, so runtimes mount the host's node of the same name."""
    below = machine(gpu(0, 3))
    below.root = "/run/driver"
    request = read_request({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}}, Config())
    user = json.dumps({"linux": {"namespaces": [{"type": "user"}]}})
    spec = applied(planned(request, below), user)
    assert "devices" not in spec["linux"]
    mounts = {mount["destination"]: mount for mount in spec["mounts"]}
    assert mounts["/dev/nvidia3"]["source"] == "/run/driver/dev/nvidia3"
    assert "nodev" not in mounts["/dev/nvidia3"]["options"]
    assert len(applied(planned(request, below))["linux"]["devices"]) == 4
    here = applied(plan(), user)
    assert len(here["linux"]["devices"]) == 4
    assert not any(mount["destination"].startswith("/dev/") for mount in here["mounts"])


def test_links_become_mounts_of_their_targets() -> None:
    mounts = {mount["destination"]: mount for mount in applied(plan())["mounts"]}
    file = f"{LIBS}/libcuda.so.{VERSION}"
    for destination in (file, f"{LIBS}/libcuda.so.1", f"{LIBS}/libcuda.so"):
        assert mounts[destination]["source"] == file
        assert mounts[destination]["options"] == ["bind", "rprivate", "ro", "nosuid", "nodev"]


def test_steps_that_spec_mode_cannot_write_are_listed() -> None:
    assert [op.kind for op in done(plan()).unwritten] == ["proc-driver", "bind", "ldcache"]


def test_applying_a_plan_twice_changes_nothing_more() -> None:
    once = spec_edits.apply(Spec("/b/config.json", "{}"), done(plan()))
    assert spec_edits.apply(once, done(plan())).data == once.data


def test_a_node_with_changed_numbers_replaces_the_old_entry() -> None:
    before = spec_edits.apply(
        Spec("/b/config.json", '{"linux":{"devices":[{"path":"/x"}]}}'), done(plan())
    )
    nodes = before.data["linux"]["devices"]
    stale = [{**node, "minor": 77} if node["path"] == "/dev/nvidia3" else node for node in nodes]
    text = json.dumps({**before.data, "linux": {"devices": stale}})
    after = applied(plan(), text)["linux"]["devices"]
    assert sorted(node["path"] for node in after) == sorted(node["path"] for node in nodes)
    assert [node for node in after if node["path"] == "/dev/nvidia3"] == nodes[-1:]


def test_an_empty_plan_changes_nothing() -> None:
    assert applied(Plan([]), '{"a": 1}') == {"a": 1}
