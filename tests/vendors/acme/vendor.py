"""The vendor ACME: NPUs on boards, whole ones and parts of split ones."""

from gpuhook.base.errors import RequestError
from gpuhook.base.oci.process import EnvironmentSetting
from gpuhook.core.contract import Vendor
from gpuhook.core.inventory import fingerprint
from gpuhook.vendors.acme import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpuhook.base.config.model import Config
    from gpuhook.core.contract import Grant

CLASS = "/sys/class/acme"  # the driver's folder, with a subfolder for each NPU and each part
PLUGINS = "/opt/acme/plugins"


class Acme(Vendor):
    """ACME's NPUs, as the kernel reports them."""

    names = names

    def driver_markers(self) -> "Sequence[str]":
        return (CLASS,)

    def cache_key(self, config: "Config") -> "list[Any]":
        folder = self.root(config).rstrip("/") + CLASS
        return [
            [name, fingerprint.text(f"{folder}/{name}/state")] for name in fingerprint.names(folder)
        ]

    def check(self, grant: "Grant") -> None:
        boards = sorted({device.names["board"][0] for device in grant.devices})
        if len(boards) > 1:
            raise RequestError(
                f"NPUs of the boards {' and '.join(boards)} can't work in one container",
                "Ask for NPUs of one board",
            )

    def environment(self, grant: "Grant") -> list[EnvironmentSetting]:
        labels = ",".join(device.label for device in grant.devices)
        return [
            EnvironmentSetting("ACME_DEVICES", labels, "ACME's library opens these NPUs"),
            EnvironmentSetting(
                "ACME_PLUGIN_PATH", PLUGINS, "ACME's library loads plugins", front=True
            ),
        ]


VENDOR = Acme()
