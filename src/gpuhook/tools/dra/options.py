"""What can be chosen of ``gpuhook dra`` as it serves a kubelet."""

from dataclasses import dataclass
from hashlib import sha256

from gpuhook.tools.kubernetes.settings import CDI_FOLDER
from gpuhook.tools.metrics.kubelet import SOCKET

PLUGINS = "/var/lib/kubelet/plugins"
REGISTRY = "/var/lib/kubelet/plugins_registry"


def short(instance: str) -> str:
    """Return what tells an instance's sockets from another's: few characters, "" for one alone."""
    return instance and sha256(instance.encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Options:
    """Folders, and how often to look.

    ``plugins`` and ``registry`` are the kubelet's folders. ``instance`` tells this process from
    another one that an update has started beside it, such as the pod's uid ("": there is one).
    ``pod_resources`` is the socket at which the kubelet says what pods have.
    The others are those of the device plugin (``settings.Settings``).
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
    recovery: float = 300.0
    interval: float = 30.0
