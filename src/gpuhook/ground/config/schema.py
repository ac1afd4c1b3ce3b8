"""Every key that config.toml may hold: its name, type, default and the attribute it sets.

NVIDIA's keys keep NVIDIA's names and sections, so that a file written for the NVIDIA
container toolkit can be used as it is; ours are in [gpuhook]. A key that NVIDIA has and
that means nothing here is in WITHOUT_EFFECT, with what to do instead.
"""

BOOL = "true or false"
STRING = "a string"
LIST = "a list of strings"
SECONDS = "a number of seconds above 0"
PAUSE = "a number of seconds, or 0"

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
    "gpuhook.state-dir": ("state_dir", STRING, "/run/gpuhook"),
    "gpuhook.nvml-timeout": ("nvml_timeout", SECONDS, 30.0),
    "gpuhook.library-search-paths": ("library_search_paths", LIST, ()),
    "gpuhook.csv-ignore": ("csv_ignore", LIST, ()),
    "gpuhook.ldconfig-fallback": ("ldconfig_fallback", BOOL, False),
    "gpuhook.helper": ("helper", BOOL, True),
    "gpuhook.standby": ("standby", PAUSE, 60.0),
}

# The features are optional: absent is not the same as false in a file, though both mean off.
FEATURES = (
    "allow-ldconfig-from-container",
    "disable-cuda-compat-lib-hook",
    "ignore-imex-channel-requests",
    "no-additional-gids-for-device-nodes",
)
FEATURE_PREFIX = "features."

_OWN_LIBRARY = "gpuhook does this work itself and calls no such program"

# NVIDIA's keys that are read by nobody here -> why.
WITHOUT_EFFECT = {
    _CLI + "path": _OWN_LIBRARY,
    _CLI + "no-pivot": "gpuhook never calls pivot_root in the container",
    "nvidia-container-runtime-hook.path": "the hook is gpuhook-prestart, found beside gpu-py",
    "nvidia-container-runtime-hook.skip-mode-detection": "gpuhook's hook works in every mode",
    "nvidia-ctk.path": _OWN_LIBRARY,
    _RUNTIME
    + "modes.csv.compat-container-root": "newer CUDA in an image isn't looked for on Tegra",
    _RUNTIME + "modes.jit-cdi.nvcdi-feature-flags": "it tunes NVIDIA's own CDI generator",
    _RUNTIME + "modes.jit-cdi.nvcdi-disable-hooks": "it tunes NVIDIA's own CDI generator",
    FEATURE_PREFIX
    + "allow-cuda-compat-libs-from-container": "libraries of an image are never mounted",
    FEATURE_PREFIX
    + "allow-unknown-oci-spec-fields": "unknown fields of config.json are always kept",
    FEATURE_PREFIX + "disable-imex-channel-creation": "gpuhook makes no IMEX channel nodes",
}

# What may stand for the mode: gpuhook's words, and NVIDIA's with the nearest of ours.
MODES = {
    "hook": "hook",
    "spec": "spec",
    "cdi": "cdi",
    "auto": "auto",
    "legacy": "hook",
    "csv": "hook",
    "jit-cdi": "spec",
}

# What becomes of a container that asks for all devices of a vendor without a driver here.
MISSING_DRIVER = ("fail", "ignore")

# NVIDIA knows four words; all that do not disable it are the same thing here, because the
# image's folder is put first in the loader's search and never mounted.
CUDA_COMPAT_MODES = ("disabled", "hook", "ldconfig", "mount")

LOG_LEVELS = ("panic", "fatal", "error", "warning", "warn", "info", "debug", "trace")
