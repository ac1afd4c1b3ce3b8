"""Forms of plan steps: config.json, CDI specs, fstab and systemd settings."""

import ast
from pathlib import Path
from typing import Any

import pytest

import gpuhook
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.base.oci.spec import Spec
from gpuhook.core.cdi.generate import CdiWriter
from gpuhook.core.inventory.model import DeviceNode
from gpuhook.core.plan import operations as steps
from gpuhook.core.plan import spec_edits
from gpuhook.core.plan.operations import (
    FILE_OPTIONS,
    AddGroup,
    AllowDevice,
    BindDevice,
    BindFile,
    BindSocket,
    Operation,
    Plan,
    SetVariable,
    Symlink,
    UpdateLdCache,
    WriteFile,
)
from gpuhook.core.plan.spec_edits import SpecWriter
from gpuhook.core.plan.writer import PlanWriter
from gpuhook.hpc.rootfs import fstab, units

NODE = DeviceNode("/dev/maker0", 240, 7, 0o660, 0, 44)
FILE = BindFile("/", "/etc/hostname", "/usr/share/maker/name", FILE_OPTIONS, "")
CACHE = UpdateLdCache((("libm.so.1", "/usr/lib/libm.so.1", 0x303),), "")


class Scratch(BindFile):
    """A step that no format knows by its class: a folder that programs write to."""

    def __init__(self, path: str) -> None:
        super().__init__("/", path, "/scratch", ("nosuid", "nodev"), "made up")


def spec(*operations: Operation) -> dict[str, Any]:
    return spec_edits.apply(Spec("/b/config.json", "{}"), SpecWriter().write(operations)).data


def cdi(*operations: Operation) -> dict[str, Any]:
    return CdiWriter(()).write(operations).edits


def lines(*operations: Operation) -> dict[str, list[str]]:
    plan = Plan([*operations])
    return {
        "fstab": fstab.lines(plan),
        "machine": units.machine(plan, ()),
        "arguments": units.arguments(plan, ()),
        "unit": units.service(plan, (), own_root=True),
        "plain unit": units.service(plan, (), own_root=False),
    }


def test_a_writable_folder_is_writable_in_every_format(tmp_path: Path) -> None:
    op = Scratch(str(tmp_path))
    [mount] = spec(op)["mounts"]
    assert mount["options"] == ["bind", "rprivate", "nosuid", "nodev"]
    [mount] = cdi(op)["mounts"]
    assert mount["options"] == ["nosuid", "nodev", "rbind", "rprivate"]
    pair = f"{tmp_path}:/scratch"
    assert lines(op) == {
        "fstab": [f"{tmp_path} /scratch none x-create=dir,bind,nosuid,nodev 0 0"],
        "machine": ["[Files]", f"Bind={pair}"],
        "arguments": [f"--bind={pair}"],
        "unit": ["[Service]", f"BindPaths={pair}"],
        "plain unit": ["[Service]"],
    }


def test_a_file_is_read_only_in_every_format() -> None:
    [mount] = spec(FILE)["mounts"]
    assert mount["options"] == ["bind", "rprivate", "ro", "nosuid", "nodev"]
    assert cdi(FILE)["mounts"][0]["options"][0] == "ro"
    pair = "/etc/hostname:/usr/share/maker/name"
    assert lines(FILE)["machine"] == ["[Files]", f"BindReadOnly={pair}"]
    assert lines(FILE)["arguments"] == [f"--bind-ro={pair}"]
    assert lines(FILE)["unit"] == ["[Service]", f"BindReadOnlyPaths={pair}"]
    [line] = lines(FILE)["fstab"]
    assert "x-create=file,bind,ro,nosuid,nodev" in line


def test_a_node_is_written_with_its_rule_and_group_in_every_format() -> None:
    plan = [AllowDevice(NODE.numbers, ""), AddGroup(44, ""), BindDevice("/", NODE, "")]
    [device] = spec(*plan)["linux"]["devices"]
    assert (device["path"], device["major"], device["minor"]) == ("/dev/maker0", 240, 7)
    assert cdi(*plan)["additionalGids"] == [44]
    assert lines(*plan)["unit"] == [
        "[Service]",
        "DeviceAllow=/dev/maker0 rw",
        "SupplementaryGroups=44",
        "BindPaths=/dev/maker0:/dev/maker0",
    ]


@pytest.mark.parametrize(
    ("op", "unwritten"),
    [
        (SetVariable(EnvironmentSetting("A", "1", "")), ""),
        (AddGroup(44, ""), ""),
        (AllowDevice((240, 7), ""), ""),
        (BindDevice("/", NODE, ""), ""),
        (FILE, ""),
        (BindSocket("/", "/run/s", "/run/s", (), ""), "spec cdi fstab"),
        (WriteFile("/etc/maker.conf", "", 0o644, ""), "spec cdi fstab"),
        (Symlink("/usr/lib/libm.so", "libm.so.1", replace=False, reason=""), "spec cdi fstab"),
        (CACHE, "spec cdi fstab"),
    ],
)
def test_steps_a_format_cannot_express_are_reported_as_unwritten(
    op: Operation, unwritten: str
) -> None:
    writers: dict[str, PlanWriter] = {
        "spec": SpecWriter(),
        "cdi": CdiWriter(()),
        "fstab": fstab.FstabWriter(),
    }
    found = [name for name, writer in writers.items() if writer.write([op]).unwritten]
    assert " ".join(found) == unwritten


def test_a_link_to_another_folder_becomes_a_mount_in_linkless_formats() -> None:
    """GBM finds the driver through such a link."""
    file = BindFile("/", "/etc/hostname", "/lib/libm-alloc.so.1.2", FILE_OPTIONS, "")
    soname = Symlink("/lib/libm-alloc.so.1", "libm-alloc.so.1.2", replace=True, reason="")
    link = Symlink("/lib/gbm/maker_gbm.so", "../libm-alloc.so.1", replace=False, reason="")
    lost = Symlink("/lib/libm.so", "nothing", replace=False, reason="")
    written = SpecWriter().write([file, soname, link, lost])
    places = [op.destination for op in written.mounts]
    assert places == [file.destination, soname.destination, link.destination]
    assert {op.source for op in written.mounts} == {"/etc/hostname"}
    assert written.unwritten == [lost]


def test_few_isinstance_checks_on_step_classes_remain() -> None:
    """A format that checks for known classes ignores a new kind of step."""
    names = {
        name
        for name, each in vars(steps).items()
        if isinstance(each, type) and issubclass(each, Operation)
    } | {"MakeNode", "ApplyDocument", "AlreadyMounted", "MaskProc", "BindOwn", "BindPipe"}
    found = [
        f"{path}:{node.lineno}"
        for path in Path(gpuhook.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and names.intersection(
            each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)
        )
    ]
    assert len(found) < 10, found
