"""What an image itself brings that changes the plan: its library folders, and for each vendor."""

from gpuhook.ground.loader import layout
from gpuhook.ground.names import machine_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuhook.ground.config.model import Config
    from gpuhook.ground.container.rootfs import Rootfs
    from gpuhook.ground.oci.jsontext import Record

    Examine = Callable[[Rootfs, Config], Record | None]


class Image:
    """The facts about an image that a plan depends on.

    ``ldconfig`` is the host's program that may make a cache where the image's own is
    damaged, "" if none may. ``brings`` is what each vendor asked for found in it.
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
    """Tell whether two images make the same plan."""
    return _facts(one) == _facts(other)


def _facts(image: Image) -> "tuple[object, ...]":
    folders = image.layout
    return folders.libraries, folders.libraries32, folders.uses_cache, dict(image.brings)


def unknown() -> Image:
    """Return what to assume where there is no image to look at: Debian, bringing nothing."""
    return Image(layout.debian(machine_name()))


def examine(root: "Rootfs", config: "Config", looks: "Mapping[str, Examine]") -> Image:
    """Examine at an image through its confined root; ``looks`` are those of the vendors."""
    brings = {vendor: find(root, config) for vendor, find in looks.items()}
    ldconfig = config.host_ldconfig() if config.ldconfig_fallback else ""
    return Image(layout.of_image(root), brings, ldconfig)
