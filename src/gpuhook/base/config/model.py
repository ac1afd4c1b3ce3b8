"""The loaded configuration, and every key that config.toml may hold.

NVIDIA's keys keep NVIDIA's names and sections, so that a file written for the NVIDIA
container toolkit works unchanged; gpuhook's own are in [gpuhook]. A key of NVIDIA's tools that
has no effect in gpuhook is in WITHOUT_EFFECT, with what to do instead.
"""

import os

from gpuhook.base.config.source import BOOL, LIST, NUMBER, PAUSE, SECONDS, STRING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.base.config.declared import DeclaredTable

ALL_CAPABILITIES = "compat32,compute,display,graphics,ngx,utility,video"

_CLI = "nvidia-container-cli."
_RUNTIME = "nvidia-container-runtime."
_CDI = _RUNTIME + "modes.cdi."

# key -> (attribute of Config, type, default)
KEYS: "dict[str, tuple[str, str, object]]" = {
    "disable-require": ("disable_require", BOOL, False),
    "swarm-resource": ("swarm_resource", STRING, ""),
    "accept-nvidia-visible-devices-envvar-when-unprivileged": (
        "accept_envvar_unprivileged",
        BOOL,
        True,
    ),
    "accept-nvidia-visible-devices-as-volume-mounts": ("accept_volume_mounts", BOOL, False),
    "supported-driver-capabilities": (
        "supported_driver_capabilities",
        STRING,
        ALL_CAPABILITIES,
    ),
    _CLI + "root": ("driver_root", STRING, ""),
    _CLI + "ldcache": ("ldcache", STRING, ""),
    _CLI + "ldconfig": ("ldconfig", STRING, "@/sbin/ldconfig"),
    _CLI + "load-kmods": ("load_kmods", BOOL, True),
    _CLI + "no-cgroups": ("no_cgroups", BOOL, False),
    _CLI + "user": ("user", STRING, ""),
    _CLI + "environment": ("environment", LIST, ()),
    _CLI + "debug": ("cli_debug", STRING, ""),
    _RUNTIME + "debug": ("runtime_debug", STRING, "/dev/null"),
    _RUNTIME + "log-level": ("log_level", STRING, "info"),
    _RUNTIME + "runtimes": ("runtimes", LIST, ("runc", "crun")),
    _RUNTIME + "mode": ("mode", STRING, "hook"),
    _CDI + "spec-dirs": ("cdi_spec_dirs", LIST, ("/etc/cdi", "/var/run/cdi")),
    _CDI + "default-kind": ("cdi_default_kind", STRING, "nvidia.com/gpu"),
    _CDI + "annotation-prefixes": ("cdi_annotation_prefixes", LIST, ("cdi.k8s.io/",)),
    _RUNTIME + "modes.csv.mount-spec-path": (
        "csv_mount_spec_path",
        STRING,
        "/etc/nvidia-container-runtime/host-files-for-container.d",
    ),
    _RUNTIME + "modes.legacy.cuda-compat-mode": ("cuda_compat_mode", STRING, "ldconfig"),
    "gpuhook.root": ("root", STRING, ""),
    "gpuhook.driver-roots": ("driver_roots", LIST, ()),
    "gpuhook.missing-driver": ("missing_driver", STRING, "fail"),
    "gpuhook.accept-annotations": ("accept_annotations", BOOL, False),
    "gpuhook.cdi-kinds-from-environment": ("cdi_kinds_from_environment", LIST, ()),
    "gpuhook.exclusive": ("exclusive", LIST, ()),
    "gpuhook.gate": ("gate", BOOL, False),
    "gpuhook.state-dir": ("state_dir", STRING, "/run/gpuhook"),
    "gpuhook.nvml-timeout": ("nvml_timeout", SECONDS, 30.0),
    "gpuhook.library-search-paths": ("library_search_paths", LIST, ()),
    "gpuhook.binary-search-paths": ("binary_search_paths", LIST, ()),
    "gpuhook.data-search-paths": ("data_search_paths", LIST, ()),
    "gpuhook.cuda-compat-root": ("cuda_compat_root", STRING, "/usr/local/cuda/compat"),
    "gpuhook.csv-ignore": ("csv_ignore", LIST, ()),
    "gpuhook.ldconfig-fallback": ("ldconfig_fallback", BOOL, False),
    "gpuhook.helper": ("helper", BOOL, True),
    "gpuhook.standby": ("standby", PAUSE, 60.0),
    "gpuhook.limits.device-memory": ("device_memory", STRING, ""),
    "gpuhook.limits.most-device-memory": ("most_device_memory", STRING, ""),
    "gpuhook.limits.required": ("limit_required", BOOL, False),
    "gpuhook.containers.memlock": ("memlock", STRING, ""),
    "gpuhook.containers.stack": ("stack", STRING, ""),
    "gpuhook.containers.shm-size": ("shm_size", STRING, ""),
    "gpuhook.mps.devices": ("mps_devices", STRING, ""),
    "gpuhook.mps.active-thread-percentage": ("mps_percentage", NUMBER, 0),
    "gpuhook.mps.device-memory": ("mps_memory", STRING, ""),
    "gpuhook.mps.clients": ("mps_clients", NUMBER, 16),
    "gpuhook.mps.version": ("mps_version", STRING, "auto"),
}

# The features are optional: an absent one differs from false in a file, though both mean off.
FEATURES = (
    "allow-ldconfig-from-container",
    "disable-cuda-compat-lib-hook",
    "ignore-imex-channel-requests",
    "no-additional-gids-for-device-nodes",
)
FEATURE_PREFIX = "features."

_OWN_LIBRARY = "gpuhook does this work itself and calls no such program"

# NVIDIA keys that gpuhook doesn't use -> why.
WITHOUT_EFFECT = {
    _CLI + "path": _OWN_LIBRARY,
    _CLI + "no-pivot": "gpuhook never calls pivot_root in the container",
    "nvidia-container-runtime-hook.path": "the hook is gpuhook-prestart, next to gpu-py",
    "nvidia-container-runtime-hook.skip-mode-detection": "gpuhook's hook works in every mode",
    "nvidia-ctk.path": _OWN_LIBRARY,
    _RUNTIME
    + "modes.csv.compat-container-root": "gpuhook doesn't look for newer CUDA in an image on Tegra",
    _RUNTIME + "modes.jit-cdi.nvcdi-feature-flags": "it tunes NVIDIA's own CDI generator",
    _RUNTIME + "modes.jit-cdi.nvcdi-disable-hooks": "it tunes NVIDIA's own CDI generator",
    FEATURE_PREFIX
    + "allow-cuda-compat-libs-from-container": "libraries of an image are never mounted",
    FEATURE_PREFIX
    + "allow-unknown-oci-spec-fields": "unknown fields of config.json are always kept",
    FEATURE_PREFIX + "disable-imex-channel-creation": "gpuhook makes no IMEX channel nodes",
}

# Accepted values of mode: gpuhook's own, and NVIDIA's with the nearest one of gpuhook.
MODES = {
    "hook": "hook",
    "spec": "spec",
    "cdi": "cdi",
    "auto": "auto",
    "legacy": "hook",
    "csv": "hook",
    "jit-cdi": "spec",
}

# What happens to a container that requests all devices of a vendor without a driver on this host.
MISSING_DRIVER = ("fail", "ignore")

# NVIDIA has four values; all but the one that disables it mean the same in gpuhook, because the
# image's folder is put first in the loader's search path and never mounted.
CUDA_COMPAT_MODES = ("disabled", "hook", "ldconfig", "mount")

DEFAULT_PATH = "/etc/gpuhook/config.toml"

LOG_LEVELS = ("panic", "fatal", "error", "warning", "warn", "info", "debug", "trace")


class Config:
    """The effective settings: those of the file, else the defaults.

    ``path`` is the file that was read (None: none, all defaults). Paths are absolute or,
    for ``driver_root``, ``root`` and ``ldcache``, "" if unset; ``driver_root_of`` returns the
    effective driver root. ``mode`` is one of hook, spec, cdi and auto; ``nvml_timeout`` is in
    seconds; ``features`` holds the optional switches that the file sets; ``vendors`` are those
    that it declares; ``ignored`` are (key, reason) pairs of keys without effect, ``given`` all
    keys in the file.
    """

    accept_annotations: bool
    accept_envvar_unprivileged: bool
    accept_volume_mounts: bool
    binary_search_paths: tuple[str, ...]
    cdi_annotation_prefixes: tuple[str, ...]
    cdi_default_kind: str
    cdi_kinds_from_environment: tuple[str, ...]
    cdi_spec_dirs: tuple[str, ...]
    cli_debug: str
    csv_ignore: tuple[str, ...]
    csv_mount_spec_path: str
    cuda_compat_mode: str
    cuda_compat_root: str
    data_search_paths: tuple[str, ...]
    device_memory: str
    disable_require: bool
    driver_root: str
    driver_roots: tuple[str, ...]
    environment: tuple[str, ...]
    exclusive: tuple[str, ...]
    features: dict[str, bool]
    gate: bool
    given: tuple[str, ...]
    helper: bool
    ignored: tuple[tuple[str, str], ...]
    ldcache: str
    ldconfig: str
    ldconfig_fallback: bool
    library_search_paths: tuple[str, ...]
    limit_required: bool
    load_kmods: bool
    log_level: str
    memlock: str
    missing_driver: str
    mode: str
    most_device_memory: str
    mps_clients: int
    mps_devices: str
    mps_memory: str
    mps_percentage: int
    mps_version: str
    no_cgroups: bool
    nvml_timeout: float
    path: str | None
    root: str
    runtime_debug: str
    runtimes: tuple[str, ...]
    shm_size: str
    stack: str
    standby: float
    state_dir: str
    supported_driver_capabilities: str
    swarm_resource: str
    user: str
    vendors: "tuple[DeclaredTable, ...]"

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.features = {}
        self.ignored = ()
        self.given = ()
        self.vendors = ()
        for attribute, _, default in KEYS.values():
            setattr(self, attribute, default)

    @property
    def file(self) -> str:
        """The file to correct: the one that was read, or the default path."""
        return self.path or DEFAULT_PATH

    def feature(self, name: str) -> bool:
        """Tell whether the optional switch [features] ``name`` is on; absent means off."""
        return self.features.get(name, False)

    def driver_root_of(self, vendor: str) -> str:
        """Return the effective driver root of a vendor, / for the host's own.

        The first that is set of: the vendor's own in ``driver-roots``, ``[gpuhook]
        root``, ``[nvidia-container-cli] root``.
        """
        return self.own_driver_root(vendor) or self.root or self.driver_root or "/"

    def own_driver_root(self, vendor: str) -> str:
        """Return the root that ``driver-roots`` sets for this vendor only, "" if there is none."""
        return dict(entry.split("=", 1) for entry in self.driver_roots).get(vendor, "")

    @property
    def names_runtimes(self) -> bool:
        """True if the file names low-level runtimes: then an engine's own isn't preferred."""
        return _RUNTIME + "runtimes" in self.given

    def low_level_runtimes(self, engines: str) -> tuple[str, ...]:
        """Return the low-level runtimes to look for, in this order.

        ``engines`` is the path of the engine's own, "" if unknown. It comes first unless the file
        names others; a name or a path relative to the caller's folder is ignored.
        """
        if self.names_runtimes or not engines.startswith("/"):
            return self.runtimes
        return (engines, *self.runtimes)

    @property
    def limits_memory(self) -> bool:
        """True if the administrator limits the memory of containers' devices."""
        return bool(self.device_memory or self.most_device_memory or self.limit_required)

    @property
    def raises_resource_limits(self) -> bool:
        """True if limits of containers with devices are raised."""
        return bool(self.memlock or self.stack or self.shm_size)

    @property
    def reads_annotations(self) -> bool:
        """True if annotations may name devices: always in mode cdi, else if configured."""
        return self.mode == "cdi" or self.accept_annotations  # protects: annotations-accepted

    def host_ldconfig(self) -> str:
        """Return the path of the host's ldconfig, "" if there is none that gpuhook may run.

        Debian's /sbin/ldconfig is a script around ldconfig.real; this returns the program. A
        setting without @ means a program of the image, which gpuhook never runs.
        """
        path = self.ldconfig.removeprefix("@").removesuffix(".real")
        if path == self.ldconfig.removesuffix(".real"):
            return ""
        for candidate in (path + ".real", path):
            if os.access(candidate, os.X_OK):
                return candidate
        return ""
