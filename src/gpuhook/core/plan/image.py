"""Image probe: the properties of an image that change the plan."""

from gpuhook.base.loader import layout
from gpuhook.base.names import machine_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuhook.base.config.model import Config
    from gpuhook.base.container.rootfs import Rootfs
    from gpuhook.base.oci.jsontext import Record

    Examine = Callable[[Rootfs, Config], Record | None]


class Image:
    """Properties of an image that a plan depends on.

    ``ldconfig`` is the host's program that replaces a damaged loader cache of the image, "" if
    that is off. ``brings`` is, by vendor, what that vendor's probe found.
    """

    __slots__ = ("brings", "layout", "ldconfig")

    def __init__(
        self,
        folders: layout.Layout,
        brings: "Mapping[str, Record | None] | None" = None,
        ldconfig: str = "",
    ) -> None:
        self.layout = folders
        self.brings = brings or {}
        self.ldconfig = ldconfig


def same(one: Image, other: Image) -> bool:
    """Tell whether two images produce the same plan."""
    return _facts(one) == _facts(other)


def _facts(image: Image) -> "tuple[object, ...]":
    folders = image.layout
    return folders.libraries, folders.libraries32, folders.uses_cache, dict(image.brings)


def unknown() -> Image:
    """Return the assumption if there is no image to probe: a plain Debian."""
    return Image(layout.debian(machine_name()))


def examine(root: "Rootfs", config: "Config", looks: "Mapping[str, Examine]") -> Image:
    """Probe an image through its confined root; ``looks`` are the vendors' probes."""
    brings = {vendor: find(root, config) for vendor, find in looks.items()}
    ldconfig = config.host_ldconfig() if config.ldconfig_fallback else ""
    return Image(layout.of_image(root), brings, ldconfig)
