"""``nvidia-container-cli configure``: injection of the driver into a container, as the hook does.

Request, plan and injection are the same as for gpu-py; only the interface differs.
"""

from gpuhook import inject
from gpuhook.base.config.model import Config
from gpuhook.base.container.changes import ContainerRootfs
from gpuhook.base.errors import RequestError
from gpuhook.base.oci.jsontext import Record
from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.contract import Grant, check_others
from gpuhook.core.plan import image
from gpuhook.core.plan.operations import BindDevice, Plan
from gpuhook.core.planner import make_plan
from gpuhook.core.records import records
from gpuhook.nvidia_cli import callers
from gpuhook.nvidia_cli.argp import CliError
from gpuhook.vendors.nvidia import completeness, requirements
from gpuhook.vendors.nvidia.names import NAME


class ConfigureTarget(Record):
    """The container: its process (None: this runs in its mount namespace already) and root."""

    pid: int | None
    root: str


class DeviceSwitches(Record):
    """Switches for the bind mounts of devices, and for their rules in the cgroup."""

    devbind: bool
    cgroups: bool


def configure(
    target: ConfigureTarget, grant: Grant, config: Config, switches: DeviceSwitches
) -> None:
    """Inject what was granted; if that fails, roll it back and raise GpuhookError."""
    if config.gate:  # protects: configure-gate
        raise RequestError(
            "This node has a gate, which gives devices only to containers that gpu-py starts",
            "Start the container with gpu-py, or set gate = false in [gpuhook]",
        )
    check_others(grant, config)
    completeness.check(grant)
    requirements.check(grant)
    pid = target.pid or callers.parent()
    with inject.open_container(pid, target.root) as container:
        if target.pid is None:
            _adopt(container)
        found = image.examine(container, config, {NAME: grant.vendor.examine})
        plan = make_plan([grant], found)
        record = records.describe(ContainerState("", pid, "", None), None, [grant])
        exclusive = config.exclusive
        with records.RecordWriter(config.state_dir, container.process, record, exclusive=exclusive):
            if switches.cgroups:
                inject.allow_devices(
                    container.process, plan.devices, [], no_cgroups=config.no_cgroups
                )
            if not switches.devbind:
                plan = Plan([op for op in plan.operations if op.kind != BindDevice.kind])
            inject.inject(plan, container, enter=target.pid is not None)


def _adopt(container: ContainerRootfs) -> None:
    """Distinguish the container's own mounts, in whose namespace this runs, from the host's.

    Apptainer mounts a filesystem for each container and the root in it. When enroot calls this,
    all of the host's mounts are in this process's mount table; mounts only in the root are the
    container's.
    """
    tables = callers.mount_tables()
    if not container.adopt(tables):
        container.settle(tables)


def checked_root(path: str) -> str:
    """Return the container's root; CliError if it can't be one."""
    if not path.startswith("/") or not path.strip("/"):
        raise CliError("input error", "invalid rootfs directory")
    return path
