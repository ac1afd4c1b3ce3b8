"""Contracts of the vendors' optional modules for clusters (``monitor.vendor_parts``)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.cluster.plugin_option import PluginOption
from gpuhook.core.inventory.model import Device
from gpuhook.monitor.vendor_parts import Values, VendorPart


class PluginModule(Protocol):
    """``plugin``: options of the clusters' device plugin for this vendor."""

    @property
    def OPTIONS(self) -> tuple[PluginOption, ...]:  # noqa: N802
        """The options, in the order of the help; no other vendor uses their names."""

    @property
    def VARIABLES(self) -> tuple[str, ...]:  # noqa: N802
        """Variables of the environment that ``settings`` reads itself."""

    @property
    def SETTINGS(self) -> type:  # noqa: N802
        """The class whose fields the options set, with the defaults."""

    def settings(self, values: Values, environ: Mapping[str, str], /) -> Any:
        """Return an instance of SETTINGS with the values that are set, by field."""

    def advice(self, chosen: Any, /, *, by_cdi: bool) -> Iterable[str]:
        """Return advice for the administrator about such settings, a sentence each.

        ``by_cdi`` is whether engines get CDI device names.
        """


@dataclass(frozen=True)
class Share:
    """The sharing of a resource: its replicas, whether it is renamed, and whether MPS is used."""

    replicas: int = 1
    renamed: bool = False
    by_mps: bool = False


class Labels(Protocol):
    """``labels``: the node labels that the vendor's own programs set."""

    def labels(
        self,
        config: Config,
        inventory: Any,
        root: Rootfs,
        chosen: Any,
        shares: Mapping[str, Share],
        /,
    ) -> Mapping[str, str]:
        """Return the labels; DriverError if the driver doesn't answer.

        ``root`` is the driver root, ``chosen`` the result of ``PluginModule.settings``, None for a
        vendor without. ``shares`` are by resource.
        """


class ClaimConfig(Protocol):
    """``claim_config``: the vendor's own configuration of devices in claims.

    ``read`` returns a plan of plain values. It changes ``settings`` of its device, and may start
    programs: an effect is a plain dict with ``devices``, the inventory's ids, which is recorded
    before it is started.
    """

    @property
    def APIS(self) -> tuple[str, ...]:  # noqa: N802
        """The apiVersions of the parameters that it reads."""

    def read(self, parameters: Values, /, *, is_part: bool) -> Values | None:
        """Return a device's plan, None if the kind is for other devices; RequestError."""

    def settings(self, plan: Values, /) -> Mapping[str, int]:
        """Return the settings of its device that a plan needs, by their names."""

    def effects(
        self,
        config: Config,
        inventory: Any,
        wanted: Sequence[tuple[Device, Values]],
        folder: str,
        /,
    ) -> list[dict[str, Any]]:
        """Return the programs to start for a claim, which has its own ``folder``.

        All checks of the plans are done here, before any change; a GpuhookError.
        """

    def begin(self, config: Config, inventory: Any, effect: Values, /) -> dict[str, list[Any]]:
        """Start an effect; return CDI edits for the devices. It is idempotent."""

    def look_after(self, config: Config, inventory: Any, effect: Values, /) -> bool:
        """Start programs again that have ended by themselves; tell whether there were any."""

    def undo(self, config: Config, inventory: Any, effect: Values, /) -> None:
        """Stop an effect; the inventory is None without a driver.

        A GpuhookError if that has to be tried again: until then no other claim gets the devices.
        """


plugin: VendorPart[PluginModule] = VendorPart("cluster", "plugin")

labels: VendorPart[Labels] = VendorPart("cluster", "labels")

claim_config: VendorPart[ClaimConfig] = VendorPart("cluster", "claim_config")
