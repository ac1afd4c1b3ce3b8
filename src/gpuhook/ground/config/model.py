"""The configuration as the rest of gpuhook sees it: one attribute per setting."""

import os

from gpuhook.ground.config.schema import KEYS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.ground.config.declared import Declared


class Config:
    """The settings in force: what the file says, else the defaults.

    ``path`` is the file that was read (None: none, all defaults). Paths are absolute or,
    for ``driver_root``, ``root`` and ``ldcache``, "" for what isn't set; ``driver_root_of``
    says which driver root counts. ``mode`` is one of hook, spec, cdi and auto;
    ``nvml_timeout`` is in seconds; ``features`` holds the optional switches that the file
    sets; ``vendors`` are those that it declares; ``ignored`` are (key, reason) pairs that
    changed nothing.
    """

    __slots__ = (
        "accept_annotations",
        "accept_envvar_unprivileged",
        "accept_volume_mounts",
        "cdi_annotation_prefixes",
        "cdi_default_kind",
        "cdi_kinds_from_environment",
        "cdi_spec_dirs",
        "cli_debug",
        "csv_ignore",
        "csv_mount_spec_path",
        "cuda_compat_mode",
        "disable_require",
        "driver_root",
        "driver_roots",
        "environment",
        "exclusive",
        "features",
        "helper",
        "ignored",
        "ldcache",
        "ldconfig",
        "ldconfig_fallback",
        "library_search_paths",
        "load_kmods",
        "log_level",
        "missing_driver",
        "mode",
        "no_cgroups",
        "nvml_timeout",
        "path",
        "root",
        "runtime_debug",
        "runtimes",
        "standby",
        "state_dir",
        "supported_driver_capabilities",
        "swarm_resource",
        "user",
        "vendors",
    )

    if TYPE_CHECKING:
        accept_annotations: bool
        accept_envvar_unprivileged: bool
        accept_volume_mounts: bool
        cdi_annotation_prefixes: tuple[str, ...]
        cdi_default_kind: str
        cdi_kinds_from_environment: tuple[str, ...]
        cdi_spec_dirs: tuple[str, ...]
        cli_debug: str
        csv_ignore: tuple[str, ...]
        csv_mount_spec_path: str
        cuda_compat_mode: str
        disable_require: bool
        driver_root: str
        driver_roots: tuple[str, ...]
        environment: tuple[str, ...]
        exclusive: tuple[str, ...]
        features: dict[str, bool]
        helper: bool
        ignored: tuple[tuple[str, str], ...]
        ldcache: str
        ldconfig: str
        ldconfig_fallback: bool
        library_search_paths: tuple[str, ...]
        load_kmods: bool
        log_level: str
        missing_driver: str
        mode: str
        no_cgroups: bool
        nvml_timeout: float
        path: str | None
        root: str
        runtime_debug: str
        runtimes: tuple[str, ...]
        standby: float
        state_dir: str
        supported_driver_capabilities: str
        swarm_resource: str
        user: str
        vendors: tuple[Declared, ...]

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.features = {}
        self.ignored = ()
        self.vendors = ()
        for attribute, _, default in KEYS.values():
            setattr(self, attribute, default)

    def feature(self, name: str) -> bool:
        """Say whether the optional switch [features] ``name`` is on; absent means off."""
        return self.features.get(name, False)

    def driver_root_of(self, vendor: str) -> str:
        """Return the driver root of a vendor, / for the host's own.

        The first of these that is set: the vendor's own in ``driver-roots``, ``[gpuhook]
        root``, ``[nvidia-container-cli] root``.
        """
        return self.own_driver_root(vendor) or self.root or self.driver_root or "/"

    def own_driver_root(self, vendor: str) -> str:
        """Return the root that ``driver-roots`` names for a vendor alone, "" if there is none."""
        return dict(entry.split("=", 1) for entry in self.driver_roots).get(vendor, "")

    @property
    def reads_annotations(self) -> bool:
        """Whether annotations may name devices at all: always in mode cdi, else on request."""
        return self.mode == "cdi" or self.accept_annotations  # protects: annotations-accepted

    def host_ldconfig(self) -> str:
        """Return the path of the host's ldconfig, "" if there is none that may be run.

        Debian's /sbin/ldconfig is a script around ldconfig.real, and we want the program. A
        setting without @ means a program of the image, and such a program is never run.
        """
        path = self.ldconfig.removeprefix("@").removesuffix(".real")
        if path == self.ldconfig.removesuffix(".real"):
            return ""
        for candidate in (path + ".real", path):
            if os.access(candidate, os.X_OK):
                return candidate
        return ""
