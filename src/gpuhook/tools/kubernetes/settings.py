"""The device plugin's settings, by the names and with the meanings of NVIDIA's plugin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """How one resource is shared: ``replicas`` containers per device (2 or more).

    ``rename`` is the name under which it is offered then, its own where it keeps that. ``shares``
    are those of MPS in percent of a device, by the replica's number, 0 for one without limits;
    () where MPS doesn't share it. ``memory`` are the limits of memory by the replica's number, as
    ``ground.sizes`` has them, all in percent or none; () is no limit. With ``overcommits`` they may
    be more together than the device has. With ``single`` a container may ask for one only (None:
    as ``single_requests`` says).
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
    """What the flags, the environment and the file together say; the fields are the flags' names.

    ``sharing`` is by resource name. ``single_requests`` is the file's failRequestsGreaterThanOne.
    ``driver_root`` is the host's path of what this process sees as ``driver_root_ctr_path``, as a
    pod does; ``dev_root`` is the folder on the host above the nodes' /dev ("": the driver root).
    ``register`` is False where nothing is registered with the kubelet, as for tests.
    ``recovery`` is after how many seconds without trouble a device that answers counts as healthy
    again (0: never).
    ``interval`` is the time between two looks at the machine, in seconds. ``cdi_folder`` is where
    CDI documents are kept for the strategies that name devices to the engine, and
    ``cdi_hook_path`` the host's path of the hook in them ("": the hook beside this program).
    ``vendors`` has what the options of vendors say, by their names (``parts.Plugin.settings``).
    ``state_dir`` is where it is written down what was given away ("": nowhere).
    """

    fail_on_init_error: bool = True
    device_list_strategy: tuple[str, ...] = (ENVVAR,)
    device_id_strategy: str = "uuid"
    pass_device_specs: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    shared_devices_allocation_policy: str = "distributed"
    driver_root: str = ""
    driver_root_ctr_path: str = "/driver-root"
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
