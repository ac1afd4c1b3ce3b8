"""Options of ``gpuhook dra`` as a service for the kubelet."""

from dataclasses import dataclass
from hashlib import sha256

from gpuhook.cluster.device_plugin.settings import CDI_FOLDER
from gpuhook.monitor.kubelet import SOCKET

PLUGINS = "/var/lib/kubelet/plugins"
REGISTRY = "/var/lib/kubelet/plugins_registry"


def short(instance: str) -> str:
    """Return a short suffix for an instance's sockets, "" if it is the only instance."""
    return instance and sha256(instance.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class DraOptions:
    """Folders, and intervals.

    ``plugins`` and ``registry`` are the kubelet's folders. ``instance`` distinguishes this process
    from another one that runs at the same time during an update, such as by the pod's uid ("":
    there is only one). ``pod_resources`` is the kubelet's PodResources socket. The others are
    those of the device plugin (``settings.Settings``), except for
    ``device_metadata``: whether containers get files that describe their devices.
    """

    plugins: str = PLUGINS
    registry: str = REGISTRY
    instance: str = ""
    pod_resources: str = SOCKET
    driver_root: str = ""
    driver_root_ctr_path: str = "/driver-root"
    dev_root: str = ""
    cdi_folder: str = CDI_FOLDER
    cdi_hook_path: str = ""
    device_metadata: bool = False
    metrics_listen: str = ""
    recovery: float = 300.0
    interval: float = 30.0
