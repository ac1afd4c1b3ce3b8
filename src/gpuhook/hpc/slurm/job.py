"""Devices that Slurm allocated to the job of this process, and the request for them.

The kernel is queried, because no process in the job can change its answer. Slurm's task/cgroup
denies a job the devices of others (ConstrainDevices), and access(2) tells which, without opening
any. Variables such as SLURM_STEP_GPUS can be changed by the user. Slurm 22.05 puts them neither
into a container's config.json nor into the runtime's environment.
"""

import errno
import os
from collections.abc import Iterable

from gpuhook.base.cgroup import answers
from gpuhook.base.config.model import Config
from gpuhook.base.errors import NoDriverError, RequestError
from gpuhook.base.oci.process import EnvironmentSetting, set_variable
from gpuhook.base.oci.spec import Spec, read_spec
from gpuhook.core.request.sources import parse_environment
from gpuhook.hpc.slurm.devices import VendorDevice, devices_here
from gpuhook.hpc.slurm.guarded import GresDevices, guarded
from gpuhook.vendors import registry

CGROUP_CONF = "/etc/slurm/cgroup.conf"
VOID = "void"
_REASON = "the devices that Slurm allocated to this job"
# Device indices of the node are wrong in a container that has only some of its devices.
_COUNTS = {
    "CUDA_VISIBLE_DEVICES": "nvidia",
    "ROCR_VISIBLE_DEVICES": "amd",
    "GPU_DEVICE_ORDINAL": "amd",
    "ZE_AFFINITY_MASK": "intel_gpu",
}


def write_request(
    bundle: str, config: Config, cgroup_conf: str = CGROUP_CONF
) -> list[VendorDevice]:
    """Write a request for the job's devices into a bundle's config.json, and return them.

    It replaces all other requests by variables. ConfigError if Slurm doesn't constrain jobs to
    their own devices, SpecError for a bundle that can't be read or written.
    """
    by_slurm = guarded(cgroup_conf)
    spec = read_spec(os.path.join(bundle, "config.json"))
    mine, every = _mine(config, by_slurm)
    changed = requesting(spec, mine, every, config)
    if changed is not spec:
        changed.write()
    return mine


def given(spec: Spec, config: Config, cgroup_conf: str = CGROUP_CONF) -> Spec:
    """Return a spec that requests the job's devices; errors as in ``write_request``."""
    return requesting(spec, *_mine(config, guarded(cgroup_conf)), config)


def _mine(config: Config, by_slurm: GresDevices) -> tuple[list[VendorDevice], list[VendorDevice]]:
    """Return the job's devices, and all devices of the host."""
    try:
        machine = devices_here(config, whole=False)
    except NoDriverError:
        if by_slurm.has_any:
            raise
        return [], []  # a node without devices, where containers run as well
    if machine.failed:
        raise machine.failed[0]
    # protects: slurm-guards
    mine = [
        each
        for each in machine.devices
        if by_slurm.has(each.own_files) and is_given(map(answer, each.files))
    ]
    return mine, machine.devices


def requesting(
    spec: Spec, mine: list[VendorDevice], every: list[VendorDevice], config: Config
) -> Spec:
    """Return a spec that requests only ``mine``, with each vendor's first variable.

    Vendors without devices on this host that the spec doesn't request either are left out.
    """
    here = {each.vendor.names.NAME for each in every}
    for name, names in registry.all_vendors(config).items():
        ids = [each.device.id for each in mine if name == each.vendor.names.NAME]
        asked = [variable for variable in names.VARIABLES if _value(spec, variable) is not None]
        if name not in here and not asked:
            continue
        first = next(iter(names.VARIABLES))
        spec = set_variable(spec, EnvironmentSetting(first, ",".join(ids) or VOID, _REASON))
    for variable, vendor in _COUNTS.items():
        if _value(spec, variable) is not None:
            spec = set_variable(spec, EnvironmentSetting(variable, _counted(mine, vendor), _REASON))
    return spec


def _counted(mine: list[VendorDevice], vendor: str) -> str:
    """Return the vendor library's names of the devices in a container that has only these."""
    devices = [each.device for each in mine if vendor == each.vendor.names.NAME]
    if any(device.parent for device in devices):
        return ",".join(device.id for device in devices)
    return ",".join(map(str, range(len(devices))))


def _value(spec: Spec, variable: str) -> str | None:
    process = spec.data.get("process")
    entries = process.get("env") if isinstance(process, dict) else None
    return parse_environment(each for each in entries or () if isinstance(each, str)).get(variable)


def answer(path: str) -> int:
    """Return the kernel's answer to read access by this process: 0, EPERM or EACCES.

    EPERM comes from the device cgroup, EACCES from the node's mode. Nothing is opened.
    RequestError for any other answer.
    """
    number = answers.answer(path)
    if number in (0, errno.EPERM, errno.EACCES):
        return number
    raise RequestError(
        f"The kernel can't check the access to {path}: {os.strerror(number)}",
        "Check that the driver's device nodes exist, and run `gpuhook doctor`",
    )


def is_given(answers: Iterable[int]) -> bool:
    """Return whether Slurm allocated a device, from the answers for its nodes.

    Node modes don't count: capabilities of MIG devices are readable by all users, and many users
    may open a GPU's render node but not its card.
    """
    found = {*answers}
    return 0 in found and errno.EPERM not in found  # protects: cgroup-refuses
