"""Find config.toml, check every value in it, and fill in a Config."""

import os

from gpuhook.base import names
from gpuhook.base.config.model import (
    ALL_CAPABILITIES,
    CUDA_COMPAT_MODES,
    DEFAULT_PATH,
    FEATURE_PREFIX,
    FEATURES,
    KEYS,
    LOG_LEVELS,
    MISSING_DRIVER,
    MODES,
    WITHOUT_EFFECT,
    Config,
)
from gpuhook.base.config.source import BOOL, LIST, NUMBER, PAUSE, STRING, flatten, parse, read_text
from gpuhook.base.errors import ConfigError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PATH_VARIABLE = "GPUHOOK_CONFIG"

_OS_RELEASE = "/etc/os-release"
_SUSE_USER = "root:video"  # whose group video owns the nodes
_VENDORS = "gpuhook.vendors"
_MPS = "gpuhook.mps."
_LONGEST = 10 * 24 * 3600  # seconds; also excludes infinity

# A key with any of these attributes holds absolute paths; the optional ones may be "".
_PATHS = (
    "driver_root",
    "root",
    "ldcache",
    "state_dir",
    "library_search_paths",
    "binary_search_paths",
    "data_search_paths",
    "cdi_spec_dirs",
    "csv_mount_spec_path",
    "cuda_compat_root",
)
_OPTIONAL_PATHS = ("driver_root", "root", "ldcache")


def load(path: str | None = None) -> Config:
    """Return the effective configuration.

    ``path`` None means $GPUHOOK_CONFIG, else /etc/gpuhook/config.toml; only this last one
    may be missing. Raises ConfigError for a file that can't be read, isn't TOML, or has an
    invalid value.
    """
    path = path or os.environ.get(PATH_VARIABLE)
    try:
        text = read_text(path or DEFAULT_PATH)
    except FileNotFoundError:
        if path:
            raise ConfigError(
                f"The configuration file {shown(path)} does not exist",
                f"Create it (`gpuhook config default` prints one), or unset {PATH_VARIABLE}",
            ) from None
        config = Config()
    else:
        config = loads(text, path or DEFAULT_PATH)
    config.user = config.user or default_user()
    return config


def loads(text: str, path: str | None = None) -> Config:
    """Return the configuration that ``text`` describes; ``path`` only names it in errors."""
    config, errors = examine(text, path)
    if errors:
        raise errors[0]
    return config


def examine(text: str, path: str | None = None) -> tuple[Config, list[ConfigError]]:
    """Return the configuration and all its errors; an invalid value keeps its default.

    Raises ConfigError only for text that isn't TOML.
    """
    reading = _FileReader(text, path)
    for key, value in flatten(parse(text, path), tuple(KEYS)).items():
        reading.apply(key, value)
    reading.check()
    reading.config.ignored = tuple(reading.ignored)
    reading.config.given = tuple(reading.given)
    return reading.config, reading.errors


def wrong_setting(config: Config, key: str, problem: str) -> ConfigError:
    """Return the error of an invalid value that is detected after the file was read."""
    try:
        text = read_text(config.path) if config.path else ""
    except (FileNotFoundError, ConfigError):  # it has changed since
        text = ""
    return _wrong(config.path, text, key, problem, key)


def _wrong(path: str | None, text: str, key: str, problem: str, at: str) -> ConfigError:
    from gpuhook.base.config.locate import line_of  # noqa: PLC0415

    line = line_of(text, at)
    place = (path or "The configuration") + (f", line {line}" if line else "")
    return ConfigError(
        f"{place}: {key} {problem}", "Correct it; `gpuhook config validate` checks it again"
    )


def default_user(os_release: str = _OS_RELEASE) -> str:
    """Return the user:group that the driver's nodes need on this distribution, usually ""."""
    try:
        words = read_text(os_release).split("\n")
    except (FileNotFoundError, ConfigError):
        return ""
    for line in words:
        name, _, value = line.partition("=")
        if name == "ID_LIKE" and {"suse", "opensuse"} & set(value.strip("\"'").split(" ")):
            return _SUSE_USER
    return ""


class _FileReader:
    """One reading of a file: the configuration so far, and the file's errors."""

    __slots__ = ("config", "errors", "given", "ignored", "text")

    def __init__(self, text: str, path: str | None) -> None:
        self.text = text
        self.config = Config(path)
        self.errors: list[ConfigError] = []
        self.ignored: list[tuple[str, str]] = []
        self.given: list[str] = []  # keys

    def wrong(self, key: str, problem: str, at: str = "") -> None:
        """Record an error, with the line of the key or of ``at``."""
        self.errors.append(_wrong(self.config.path, self.text, key, problem, at or key))

    def ignore(self, key: str, reason: str) -> None:
        self.ignored.append((key, reason))

    def apply(self, key: str, value: object) -> None:
        """Set a value, or record why it has no effect."""
        config = self.config
        self.given.append(key)
        if key in KEYS:
            attribute, kind, default = KEYS[key]
            if self.fits(key, kind, value):
                setattr(config, attribute, _as_default(value, default))
        elif key.startswith(FEATURE_PREFIX) and key[len(FEATURE_PREFIX) :] in FEATURES:
            if self.fits(key, BOOL, value):
                config.features[key[len(FEATURE_PREFIX) :]] = bool(value)
        elif key == _VENDORS:
            self.declare(value)
        elif any(known.startswith(key + ".") for known in (*KEYS, FEATURE_PREFIX)):
            self.wrong(key, f"must be a table, not {shown(value)}")
        else:
            self.ignore(key, WITHOUT_EFFECT.get(key, "gpuhook doesn't know this key"))

    def declare(self, tables: object) -> None:
        """Set the declared vendors from their tables."""
        from gpuhook.base.config import declared  # noqa: PLC0415 - rarely used

        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self.wrong(_VENDORS, f"must be tables, [[{_VENDORS}]], not {shown(tables)}")
            return

        def wrong_at(number: int) -> "declared.Wrong":
            def wrong(key: str, problem: str) -> None:
                shown_key = f"{_VENDORS}.{key}".rstrip(".")
                self.wrong(shown_key, problem, f"{_VENDORS}.{number}.{key}".rstrip("."))

            return wrong

        self.config.vendors = declared.read(tables, wrong_at)

    def fits(self, key: str, kind: str, value: object) -> bool:
        """Tell whether a value has the key's type, and record an error if not."""
        if not _is_kind(kind, value):
            self.wrong(key, f"must be {kind}, not {shown(value)}")
            return False
        if isinstance(value, (str, list)) and any("\0" in item for item in value):
            self.wrong(key, "contains a NUL character")
            return False
        return True

    def check(self) -> None:
        """Check everything beyond types, and replace NVIDIA's words by ours."""
        self.check_ldconfig()
        self.check_paths()
        self.check_capabilities()
        self.check_kind()
        self.check_words()
        self.check_sizes()
        self.check_mps()
        self.check_containers()

    def check_containers(self) -> None:
        """Check the limits to raise: sizes, or the word for no limit."""
        for name in ("memlock", "stack", "shm-size") if self.config.raises_resource_limits else ():
            from gpuhook.base.sizes import parse_size  # noqa: PLC0415 - rarely set

            key = f"gpuhook.containers.{name}"
            value = getattr(self.config, KEYS[key][0])
            size = parse_size(value) if value else None
            if name == "shm-size" and value and size is None:
                problem = "must be a size such as 8GiB, or 50% of the container's memory"
                self.wrong(key, f"{problem}, not {shown(value)}")
            plain = value in ("", "unlimited") or (size is not None and not size.percent)
            if name != "shm-size" and not plain:
                problem = 'must be "unlimited" or a size such as 64MiB'
                self.wrong(key, f"{problem}, not {shown(value)}")

    def check_sizes(self) -> None:
        for key in ("gpuhook.limits.device-memory", "gpuhook.limits.most-device-memory"):
            value = getattr(self.config, KEYS[key][0])
            if not value:
                continue
            from gpuhook.base.sizes import parse_size  # noqa: PLC0415 - rarely set

            if parse_size(value) is None:
                self.wrong(key, f"must be a size such as 8GiB, 8192MiB or 50%, not {shown(value)}")

    def check_mps(self) -> None:
        if self.config.mps_devices or any(key.startswith(_MPS) for key in self.given):
            from gpuhook.base.config import mps  # noqa: PLC0415 - MPS is rarely used

            mps.check(self.config, self.wrong)

    def check_ldconfig(self) -> None:
        config = self.config
        if not config.ldconfig.startswith("@/"):
            if config.feature("allow-ldconfig-from-container"):
                return
            problem = (
                "must begin with @/ (a program of the host), because no program of an image "
                f"is run: {shown(config.ldconfig)}"
            )
            self.wrong("nvidia-container-cli.ldconfig", problem)

    def check_paths(self) -> None:
        for key, (attribute, _, _) in KEYS.items():
            if attribute not in _PATHS:
                continue
            value = getattr(self.config, attribute)
            for path in (value,) if isinstance(value, str) else value:
                optional = path == "" and attribute in _OPTIONAL_PATHS
                if not path.startswith("/") and not optional:
                    self.wrong(key, f"must be an absolute path, not {shown(path)}")
        for entry in self.config.driver_roots:
            if not entry.partition("=")[2].startswith("/"):
                problem = f"contains {shown(entry)}, which isn't VENDOR=/FOLDER"
                self.wrong("gpuhook.driver-roots", problem)

    def check_capabilities(self) -> None:
        allowed = (*ALL_CAPABILITIES.split(","), "all")
        words = self.config.supported_driver_capabilities.split(",")
        for word in sorted({word.strip() for word in words} - {""}):
            if word not in allowed:
                problem = f"names {shown(word)}, which isn't one of {', '.join(allowed)}"
                self.wrong("supported-driver-capabilities", problem)

    def check_kind(self) -> None:
        kind = self.config.cdi_default_kind
        if names.cdi_parts(kind + "=0") is None:
            problem = f"must be a CDI kind such as nvidia.com/gpu, not {shown(kind)}"
            self.wrong("nvidia-container-runtime.modes.cdi.default-kind", problem)

        for key in ("gpuhook.exclusive", "gpuhook.cdi-kinds-from-environment"):
            for kind in getattr(self.config, KEYS[key][0]):
                if names.cdi_parts(kind + "=0") is None:
                    problem = f"contains {shown(kind)}, not a CDI kind such as nvidia.com/gpu"
                    self.wrong(key, problem)

    def check_words(self) -> None:
        """Check reserved words; where NVIDIA replaces an unknown one safely, do the same."""
        config = self.config
        if config.mode in MODES:
            config.mode = MODES[config.mode]
        else:
            problem = f"must be one of {', '.join(MODES)}, not {shown(config.mode)}"
            self.wrong("nvidia-container-runtime.mode", problem)
        if config.missing_driver not in MISSING_DRIVER:
            words = " or ".join(MISSING_DRIVER)
            problem = f"must be {words}, not {shown(config.missing_driver)}"
            self.wrong("gpuhook.missing-driver", problem)
        if config.cuda_compat_mode not in CUDA_COMPAT_MODES:
            reason = f"{shown(config.cuda_compat_mode)} isn't a mode and counts as disabled"
            self.ignore("nvidia-container-runtime.modes.legacy.cuda-compat-mode", reason)
            config.cuda_compat_mode = "disabled"
        if config.log_level not in LOG_LEVELS:
            reason = f"{shown(config.log_level)} isn't a log level and counts as info"
            self.ignore("nvidia-container-runtime.log-level", reason)
            config.log_level = "info"


def _as_default(value: "Any", default: object) -> object:
    """Return a list as a tuple and a whole number of seconds as a float."""
    if isinstance(default, float):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _is_kind(kind: str, value: object) -> bool:
    if kind is STRING:
        return isinstance(value, str)
    if kind is BOOL:
        return isinstance(value, bool)
    if kind is LIST:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    if kind is NUMBER:
        return isinstance(value, int) and value >= 0
    return (value > 0 or kind is PAUSE) and 0 <= value < _LONGEST
