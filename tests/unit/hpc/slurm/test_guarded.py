"""Devices that Slurm keeps jobs from opening, according to Slurm's own files."""

import os
from pathlib import Path

import pytest
from slurms import slurms_files

from gpuhook.base.errors import ConfigError
from gpuhook.hpc.slurm.guarded import guarded
from gpuhook.hpc.slurm.node import count, expanded

HOST = os.uname().nodename.partition(".")[0]
PLUGIN = "TaskPlugin=task/cgroup\n"
NULL = "Name=gpu File=/dev/null\n"


@pytest.mark.protects(
    "slurm-constrains", "a Slurm job gets no devices unless cgroup.conf sets ConstrainDevices=yes"
)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "ConstrainDevices=no\n",
        "#ConstrainDevices=yes\n",
        "x # ConstrainDevices=yes",
        "ConstrainDevices=yesterday",
        "ConstrainDevices=yes\nConstrainDevices=no\n",  # Slurm uses the last value
        "ConstrainDevices=yes constraindevices = no",
        "xConstrainDevices=yes\n",
    ],
)  # fmt: skip
def test_slurm_without_constraindevices_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every job may open every device"):
        guarded(str(slurms_files(tmp_path, cgroup=text)))


@pytest.mark.parametrize(
    "text",
    [
        "ConstrainDevices=yes",
        "A=b\n constraindevices = YES # x\n",
        "ConstrainDevices=no\nConstrainDevices=yes\n# include x\n",
    ],
)
def test_constraindevices_is_recognised(text: str, tmp_path: Path) -> None:
    assert guarded(str(slurms_files(tmp_path, cgroup=text)))


@pytest.mark.protects(
    "slurm-plugin", "Slurm: a job gets no devices if slurm.conf lacks the task/cgroup plugin"
)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "TaskPlugin=task/affinity\n",
        "#TaskPlugin=task/cgroup\n",
        "TaskPluginParam=task/cgroup\n",
        "TaskPlugin=task/cgroup\nTaskPlugin=task/none\n",
        "Include more\nTaskPlugin=task/affinity\n",
    ],
)
def test_slurm_without_the_task_cgroup_plugin_is_refused(text: str, tmp_path: Path) -> None:
    """ConstrainDevices=yes by itself keeps no job from a device."""
    with pytest.raises(ConfigError, match=r"slurm\.conf has no task/cgroup"):
        guarded(str(slurms_files(tmp_path, slurm=text)))


@pytest.mark.parametrize(
    "text",
    [
        "taskplugin = affinity,cgroup\n",
        "TaskPlugin=task/affinity,\\\ntask/cgroup",
        'TaskPlugin="task/cgroup,task/affinity"',
        "TaskPlugin=task/none\nTaskPlugin=task/cgroup",
        "Include more\n",  # the included file may have the plugin
    ],
)
def test_the_task_cgroup_plugin_is_recognised(text: str, tmp_path: Path) -> None:
    assert guarded(str(slurms_files(tmp_path, slurm=text)))


@pytest.mark.parametrize("name", ["cgroup", "gres"])
def test_a_slurm_file_that_includes_another_is_refused(name: str, tmp_path: Path) -> None:
    path = slurms_files(tmp_path)
    with (tmp_path / f"{name}.conf").open("a") as file:
        file.write("ConstrainDevices=yes\ninclude more.conf\n")
    with pytest.raises(ConfigError, match=f"{name}.conf includes another file"):
        guarded(str(path))


@pytest.mark.parametrize("name", ["cgroup", "slurm", "gres"])
def test_a_missing_slurm_file_is_refused(name: str, tmp_path: Path) -> None:
    path = slurms_files(tmp_path)
    (tmp_path / f"{name}.conf").unlink()
    with pytest.raises(ConfigError, match=f"{name}.conf can't be read"):
        guarded(str(path))


def test_devices_in_gres_conf_are_matched_by_number_not_path(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    text = f"NodeName={HOST} Name=gpu MultipleFiles={link},/dev/gone # File=/dev/zero\n"
    found = guarded(str(slurms_files(tmp_path, gres=text)))
    assert found.has(["/dev/gone", "/dev/null"])
    assert not found.has(["/dev/zero"])
    assert not found.has(["/dev/gone"])
    assert not found.has([])
    text = f"Name=gpu File={os.devnull}[\n"
    assert not guarded(str(slurms_files(tmp_path, gres=text))).has(["/dev/zero"])


def test_autodetect_in_gres_conf_counts_every_device_as_guarded(tmp_path: Path) -> None:
    text = "AutoDetect=nvml\nName=gpu File=/dev/null\n"
    assert guarded(str(slurms_files(tmp_path, gres=text))).has(["/dev/zero"])


@pytest.mark.protects(
    "slurm-own-lines",
    "Slurm: a gres.conf line for another node doesn't make a device guarded on this node",
    instead="own = every",
)
@pytest.mark.protects(
    "slurm-plugins-lines",
    "Slurm: files of a site's own Gres names don't count as guarded by Slurm",
    instead="return True",
)
@pytest.mark.parametrize(
    ("gres", "has"),
    [
        (f"NodeName=other {NULL}", False),
        (f"NodeName=other[0-9],{HOST}x {NULL}", False),
        (f"NodeName=other,{HOST} {NULL}", True),
        (NULL, True),
        ("Name=npu File=/dev/null\n", False),  # Slurm knows no plugin of that name
        ("Name=GPU File=/dev/null\n", True),
        ("File=/dev/null\n", False),
        (f"NodeName=other AutoDetect=nvml\nNodeName={HOST} AutoDetect=off\n", False),
        (f"AutoDetect=nvml\nNodeName={HOST} AutoDetect=off\n", False),
        (f"AutoDetect=off\nNodeName={HOST} AutoDetect=nvml\n", True),
        (f"AutoDetect=nvml\nNodeName=other AutoDetect=off\nNodeName={HOST} {NULL}", True),
    ],
)
def test_only_gres_lines_that_apply_to_this_node_guard_devices(
    gres: str, has: bool, tmp_path: Path
) -> None:
    slurm = f"{PLUGIN}GresTypes=gpu,npu\nNodeName={HOST} Gres=gpu:1,npu:1\n"
    assert guarded(str(slurms_files(tmp_path, slurm=slurm, gres=gres))).has(["/dev/null"]) is has


def test_a_node_is_matched_by_its_nodehostname(tmp_path: Path) -> None:
    slurm = f"{PLUGIN}GresTypes=gpu\nNodeName=n[1-2] NodeHostname=far,{HOST} Gres=gpu:1\n"
    for node, has in (("n1", False), ("n2", True), (HOST, False)):
        conf = slurms_files(tmp_path, slurm=slurm, gres=f"NodeName={node} {NULL}")
        assert guarded(str(conf)).has(["/dev/null"]) is has


def test_a_node_with_devices_missing_from_slurm_conf_is_refused(tmp_path: Path) -> None:
    """Without these lines, nothing shows whether Slurm guards the devices; a CPU node has none."""
    for more in ("Include nodes.conf\n", "GresTypes=gpu\n"):
        slurm = PLUGIN + more
        conf = slurms_files(tmp_path, slurm=slurm, gres=f"NodeName=n1 {NULL}")
        with pytest.raises(ConfigError, match="doesn't say"):
            guarded(str(conf))
        conf = slurms_files(tmp_path, slurm=slurm, gres=f"NodeName=n1 {NULL}NodeName={HOST} {NULL}")
        assert guarded(str(conf)).has(["/dev/null"])
        conf = slurms_files(tmp_path, slurm=slurm, gres="NodeName=n1 Name=gpu File=/dev/gone\n")
        assert not guarded(str(conf)).has_any


@pytest.mark.protects(
    "slurm-all-lines", "Slurm: a gres.conf with more devices than slurm.conf is refused"
)
@pytest.mark.parametrize(
    "text",
    [
        f"GresTypes=gpu\nNodeName={HOST} Gres=gpu:h100:1\n",
        f"GresTypes=gpu\nNodeName={HOST} CPUs=4\n",
        f"GresTypes=gpu\nNodeName=DEFAULT Gres=gpu\nNodeName=other,{HOST}\n",
        f"GresTypes=nic\nNodeName={HOST} Gres=gpu:2\n",
        f"NodeName={HOST}\n",
    ],
)
def test_fewer_devices_in_slurm_conf_than_in_gres_conf_are_refused(
    text: str, tmp_path: Path
) -> None:
    """Slurm guards only as many devices as slurm.conf has, and leaves the others open."""
    gres = "Name=gpu File=/dev/null\nName=gpu MultipleFiles=/dev/zero,/dev/full\n"
    with pytest.raises(ConfigError, match=r"2 devices of this node and slurm.conf [01],"):
        guarded(str(slurms_files(tmp_path, slurm=PLUGIN + text, gres=gres)))


def test_a_node_without_gres_has_no_guarded_devices(tmp_path: Path) -> None:
    slurm = f"{PLUGIN}GresTypes=gpu\nNodeName={HOST}\n"
    found = guarded(str(slurms_files(tmp_path, slurm=slurm, gres="AutoDetect=nvml\n")))
    assert not found.has_any
    assert not found.has(["/dev/null"])


@pytest.mark.parametrize(
    ("gres", "number"),
    [
        ("gpu", 1),
        ("gpu:2", 2),
        ("gpu:h100:8", 8),
        ("gpu:h100:no_consume:4(S:0-1),nic:2,gpu:a:1K(S:0,2)", 1028),
        ("gpu:h100", 1),
        ("npu:3", 0),
        ("(null)", 0),
        ("", 0),
    ],
)
def test_gres_counts_of_a_node_are_parsed(gres: str, number: int) -> None:
    assert count(gres) == number


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/dev/nvidia0", ["/dev/nvidia0"]),
        ("/dev/a,/dev/b", ["/dev/a", "/dev/b"]),
        ("/dev/nvidia[0,2-3]", ["/dev/nvidia0", "/dev/nvidia2", "/dev/nvidia3"]),
        ("/dev/x[08-10]y,/dev/z", ["/dev/x08y", "/dev/x09y", "/dev/x10y", "/dev/z"]),
        ("/dev/[0-1]a[2-3]", ["/dev/0a2", "/dev/0a3", "/dev/1a2", "/dev/1a3"]),
        ("/dev/x[3-1]", []),
        ("/dev/x[-]", []),
        ("", []),
    ],
)
def test_slurms_device_lists_are_expanded(text: str, names: list[str]) -> None:
    assert expanded(text) == names


def test_expansion_of_a_huge_device_list_is_bounded() -> None:
    assert len(expanded("/dev/x[0-999999999]", 1 << 12)) <= 1 << 13
    assert len(expanded("/dev/x[0-999][0-999][0-999]", 1 << 12)) <= 1 << 13
