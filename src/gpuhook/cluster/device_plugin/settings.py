"""The device plugin's settings, by the names and with the meanings of NVIDIA's plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuhook.monitor import DRIVER_ROOT_IN_POD

KUBELET_FOLDER = "/var/lib/kubelet/device-plugins"
DRIVER_FOLDER = "/var/lib/gpuhook/driver"
CDI_FOLDER = "/var/run/cdi"

ENVVAR, VOLUME_MOUNTS, CDI_CRI, CDI_ANNOTATIONS, MOUNTS = STRATEGIES = (
    "envvar",
    "volume-mounts",
    "cdi-cri",
    "cdi-annotations",
    "mounts",
)
UUID, INDEX = ID_STRATEGIES = ("uuid", "index")
POLICIES = ("distributed", "packed")


@dataclass(frozen=True)
class Sharing:
    """The sharing of one resource: ``replicas`` containers per device (2 or more).

    ``rename`` is the name under which it is offered, which may be its own. ``shares`` are MPS
    shares in percent of a device, by the replica's number, 0 for one without limits; () if MPS
    doesn't share it. ``memory`` are memory limits by the replica's number, in the format of
    ``base.sizes``, all in percent or none; () means no limit. With ``overcommits`` their sum may
    exceed the device's memory. With ``single`` a container may request only one (None: as
    ``single_requests`` says).
    """

    name: str
    replicas: int
    rename: str
    shares: tuple[int, ...] = ()
    single: bool | None = None
    memory: tuple[str, ...] = ()
    overcommits: bool = False


@dataclass(frozen=True)
class Settings:
    """The settings from flags, environment and file; the fields have the flags' names.

    ``sharing`` is by resource name. ``single_requests`` is the file's failRequestsGreaterThanOne.
    ``driver_root`` is the host's path of the folder that this process, as in a pod, sees as
    ``driver_root_ctr_path``; ``dev_root`` is the folder on the host above the nodes' /dev ("": the
    driver root). ``register`` is False to register nothing with the kubelet, as for tests.
    ``recovery`` is the number of seconds without errors after which a device that answers is
    healthy again (0: never). ``interval`` is the polling interval in seconds. ``cdi_folder`` holds
    the CDI specs for the strategies that name devices to the engine, and ``cdi_hook_path`` is the
    host's path of the hook in them ("": the hook in this program's folder). ``vendors`` has the
    settings of each vendor's options, by its name (``vendor_parts.PluginModule.settings``).
    ``state_dir`` is the folder for records of allocated devices ("": none are written),
    ``status_dir`` that of the status file, as well. ``metrics_listen`` is the address for the
    plugin's own metrics ("": none are served).
    """

    fail_on_init_error: bool = True
    device_list_strategy: tuple[str, ...] = (ENVVAR,)
    device_id_strategy: str = "uuid"
    pass_device_specs: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    shared_devices_allocation_policy: str = "distributed"
    driver_root: str = ""
    driver_root_ctr_path: str = DRIVER_ROOT_IN_POD
    dev_root: str = ""
    kubelet_folder: str = KUBELET_FOLDER
    register: bool = True
    driver_folder: str = DRIVER_FOLDER
    cdi_folder: str = CDI_FOLDER
    cdi_hook_path: str = ""
    sharing: dict[str, Sharing] = field(default_factory=dict)
    single_requests: bool = False
    recovery: float = 300.0
    interval: float = 30.0
    vendors: Mapping[str, Any] = field(default_factory=dict)
    state_dir: str = ""
    status_dir: str = ""
    metrics_listen: str = ""
