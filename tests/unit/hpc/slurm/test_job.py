"""Devices of a Slurm job, as requested for its container.

scripts/test-slurm tests that the kernel decides which devices a job may open.
"""

import errno
import json
import os
from pathlib import Path
from typing import Any

import paper
import pytest
from machines import gpu, machine, mig
from slurms import slurms_files

from gpuhook.base.config.model import Config
from gpuhook.base.errors import NoDriverError, RequestError
from gpuhook.base.oci.spec import Spec
from gpuhook.core import contract
from gpuhook.core.inventory.selection import select
from gpuhook.hpc.slurm import guarded, job
from gpuhook.hpc.slurm.devices import SlurmDevices, VendorDevice, _of
from gpuhook.vendors import registry
from gpuhook.vendors.nvidia.vendor import VENDOR as NVIDIA

MACHINE = machine(gpu(0, 3), gpu(1, 0), gpu(2, 1))


def owned(*labels: str, inventory: Any = MACHINE, vendor: Any = NVIDIA) -> list[VendorDevice]:
    devices = _of(vendor, inventory, Config())[0]
    return [each for each in devices if not labels or each.device.label in labels]


def asked(
    mine: list[VendorDevice], *env: str, every: list[VendorDevice] | None = None
) -> dict[str, str]:
    """Return the environment of a bundle that had ``env``, with the request of a job."""
    spec = Spec("/b/config.json", json.dumps({"process": {"env": list(env)}}))
    made = job.requesting(spec, mine, owned() if every is None else every, Config())
    found = made.data.get("process", {}).get("env", [])
    return dict(entry.split("=", 1) for entry in found)


def test_a_job_requests_exactly_its_own_devices() -> None:
    found = asked(owned("0", "2"), "A=1", "NVIDIA_VISIBLE_DEVICES=all")
    assert found["NVIDIA_VISIBLE_DEVICES"] == ",".join(each.device.id for each in owned("0", "2"))
    assert found["A"] == "1"


def test_every_entry_of_a_variable_is_replaced() -> None:
    spec = Spec(
        "/b/config.json",
        json.dumps(
            {"process": {"env": ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=all"]}}
        ),
    )
    made = job.requesting(spec, owned("1"), owned(), Config())
    assert {*made.data["process"]["env"]} == {f"NVIDIA_VISIBLE_DEVICES={owned('1')[0].device.id}"}


def test_a_job_without_a_device_requests_none() -> None:
    """An old image requests all devices just by not having the variable."""
    assert asked([], "CUDA_VERSION=11.0")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert asked([], "NVIDIA_VISIBLE_DEVICES=all", every=[])["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_variables_of_missing_vendors_are_voided_but_never_added() -> None:
    assert asked(owned("0")).keys() == {"NVIDIA_VISIBLE_DEVICES"}
    assert asked(owned("0"), "AMD_VISIBLE_DEVICES=all")["AMD_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize(
    ("inventory", "labels", "expected"),
    [
        (MACHINE, ("1", "2"), "0,1"),
        (MACHINE, ("none",), ""),
        (machine(gpu(3, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22)))), ("3:1",), "MIG-00000001-0000"),
    ],
)
def test_library_variables_number_the_jobs_devices_from_0(
    inventory: Any, labels: Any, expected: str
) -> None:
    mine = owned(*labels, inventory=inventory)
    found = asked(mine, "CUDA_VISIBLE_DEVICES=6,7", "ROCR_VISIBLE_DEVICES=6,7")
    assert found["CUDA_VISIBLE_DEVICES"] == expected
    assert found["ROCR_VISIBLE_DEVICES"] == ""


def test_a_mig_device_needs_its_own_nodes_and_its_gpus() -> None:
    inventory = machine(gpu(3, 3, (mig(0, 1, 12, 13),)))
    (found,) = owned(inventory=inventory)
    caps = [f"/dev/nvidia-caps/nvidia-cap{cap}" for cap in (12, 13)]
    assert found.files == ["/dev/nvidia3", *caps]
    assert found.model == "NVIDIA H200 MIG 1g.18gb"


def test_device_files_are_below_the_driver_root(tmp_path: Path) -> None:
    inventory = paper.machine("amd", tmp_path, 2)
    found = owned(inventory=inventory, vendor=contract.load(registry.BUILT_IN["amd"]))
    assert len(found) == 2
    assert all(path.startswith(f"{tmp_path}/dev/") for each in found for path in each.files)


@pytest.mark.parametrize("name", [name for name in registry.BUILT_IN if name != "nvidia"])
def test_a_jobs_device_id_selects_that_device_alone(name: str, tmp_path: Path) -> None:
    inventory = paper.machine(name, tmp_path)
    names = registry.BUILT_IN[name]
    spaces = next(iter(names.VARIABLES.values()))
    found = owned(inventory=inventory, vendor=contract.load(names))
    assert found
    for each in found:
        assert select([each.device.id], inventory, names, spaces) == (each.device,)


def test_access_to_a_device_is_decided_by_opening_it(tmp_path: Path) -> None:
    assert job.answer("/dev/null") == 0
    with pytest.raises(RequestError, match="No such file"):
        job.answer(str(tmp_path / "gone"))
    closed = tmp_path / "closed"
    closed.touch(0o000)
    assert job.answer(str(closed)) == (0 if os.geteuid() == 0 else errno.EACCES)


@pytest.mark.protects(
    "cgroup-refuses",
    "a device that the cgroup denies isn't mistaken for a device of the job",
    instead="return 0 in found",
)
@pytest.mark.parametrize(
    ("answers", "given"),
    [
        ([0], True),
        ([0, 0], True),
        ([errno.EPERM], False),
        (
            [0, errno.EPERM],
            False,
        ),  # another job's MIG device, on a GPU of which this job also has a part
        ([0, errno.EACCES], True),  # the user's render node, and a card that isn't the user's
        ([errno.EACCES], False),
        ([errno.EACCES, errno.EPERM], False),
    ],
)
def test_a_device_refused_by_the_cgroup_is_not_given_to_the_job(
    answers: list[int], given: bool
) -> None:
    assert job.is_given(answers) is given


@pytest.mark.protects(
    "slurm-guards",
    "Slurm: a device missing from gres.conf isn't allocated to a job's container",
    instead="mine = [each for each in machine.devices if is_given(map(answer, each.files))]",
)
def test_a_device_missing_from_gres_conf_is_not_given_to_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel lets every job open a GPU that came back after gres.conf was written."""
    devices = owned()
    monkeypatch.setattr(job, "devices_here", lambda *_, **__: SlurmDevices(devices, [], []))
    monkeypatch.setattr(job, "answer", lambda _: 0)
    (tmp_path / "config.json").write_text(json.dumps({"process": {"env": []}}))
    conf = slurms_files(tmp_path, gres="Name=gpu File=/dev/null\n")
    numbers = dict.fromkeys(("/dev/nvidia0", "/dev/null"), 259)
    monkeypatch.setattr(guarded, "_number", numbers.get)
    mine = job.write_request(str(tmp_path), Config(), str(conf))
    assert [each.device.nodes for each in mine] == [("/dev/nvidia0",)]
    env = json.loads((tmp_path / "config.json").read_text())["process"]["env"]
    assert env == [f"NVIDIA_VISIBLE_DEVICES={mine[0].device.id}"]


def test_a_node_without_devices_runs_containers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a cluster share one oci.conf, and some nodes have no driver."""

    def none(*_: Any, **__: Any) -> None:
        raise NoDriverError("No driver", "Install one")

    monkeypatch.setattr(job, "devices_here", none)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}))
    assert job.write_request(str(tmp_path), Config(), str(slurms_files(tmp_path))) == []
    assert json.loads(config.read_text())["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]
    conf = slurms_files(tmp_path, gres="Name=gpu File=/dev/nvidia0\n")
    with pytest.raises(NoDriverError):
        job.write_request(str(tmp_path), Config(), str(conf))
