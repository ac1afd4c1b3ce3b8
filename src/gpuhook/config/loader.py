"""Read config.toml: find the file, parse it, check every value, fill in a Config.

Hot path: imports os and nothing heavy; tomllib only when a file exists that holds more than
plain ``key = value`` lines, the line finder only for an error message.
"""

import os
import stat

from gpuhook.config.model import Config
from gpuhook.config.schema import (
    BOOL,
    CUDA_COMPAT_MODES,
    FEATURE_PREFIX,
    FEATURES,
    KEYS,
    LIST,
    LOG_LEVELS,
    MODES,
    SECONDS,
    STRING,
    WITHOUT_EFFECT,
)
from gpuhook.errors import ConfigError
from gpuhook.quoting import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEFAULT_PATH = "/etc/gpuhook/config.toml"
PATH_VARIABLE = "GPUHOOK_CONFIG"
SIZE_LIMIT = 1 << 18  # bytes; the commented default has less than 2 % of it

_ABSOLUTE = ("driver_root", "ldcache", "state_dir", "library_search_paths", "cdi_spec_dirs")
_CHECK = "run `gpuhook config validate` after correcting it"


def load(path: str | None = None) -> Config:
    """Return the configuration in force.

    ``path`` None means $GPUHOOK_CONFIG, else /etc/gpuhook/config.toml; only this last one
    may be missing. Raises ConfigError for a file that can't be read, isn't TOML, or holds
    a value that its key can't have.
    """
    path = path or os.environ.get(PATH_VARIABLE)
    try:
        text = read_text(path or DEFAULT_PATH)
    except FileNotFoundError:
        if path:
            raise ConfigError(
                f"the configuration file {shown(path)} does not exist",
                f"create it with `gpuhook config default > FILE`, or unset {PATH_VARIABLE}",
            ) from None
        return _finish(Config(), "")
    return loads(text, path or DEFAULT_PATH)


def loads(text: str, path: str | None = None) -> Config:
    """Return the configuration that ``text`` describes; ``path`` only names it in errors."""
    config = Config(path)
    leaves: dict[str, object] = {}
    _flatten(parse(text, path), "", leaves)
    ignored: list[tuple[str, str]] = []
    for key, value in leaves.items():
        reason = _apply(config, key, value, text)
        if reason:
            ignored.append((key, reason))
    config.ignored = tuple(ignored)
    return _finish(config, text)


def read_text(path: str) -> str:
    """Return a configuration file's text; FileNotFoundError, or ConfigError if unreadable."""
    try:
        data = _read_bytes(path)
        return data.decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"the configuration file {shown(path)} can't be read: {reason}",
            "make it a readable file of UTF-8 text",
        ) from None


def parse(text: str, path: str | None = None) -> "dict[str, Any]":
    """Return TOML text as nested dicts; ConfigError, with the line, if it isn't TOML."""
    import tomllib  # noqa: PLC0415

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{shown(path or 'the configuration')} is not valid TOML: {error}", _CHECK
        ) from None


def _read_bytes(path: str) -> bytes:
    # O_NONBLOCK: a FIFO put in the place of the file must not make a container start wait.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            raise ValueError("it is not a regular file")
        data = b""
        while chunk := os.read(fd, SIZE_LIMIT + 1 - len(data)):
            data += chunk
        if len(data) > SIZE_LIMIT:
            raise ValueError(f"it is larger than {SIZE_LIMIT} bytes")
        return data
    finally:
        os.close(fd)


def _flatten(table: "dict[str, Any]", prefix: str, leaves: dict[str, object]) -> None:
    """Collect the values of nested tables under their dotted keys."""
    pending = [(prefix, table)]
    while pending:
        prefix, table = pending.pop()
        for name, value in table.items():
            # A quoted name with a dot in it is one name, not a path of two.
            key = prefix + (f'"{name}"' if "." in name else name)
            if isinstance(value, dict) and key not in KEYS:
                pending.append((key + ".", value))
            else:
                leaves[key] = value


def _apply(config: Config, key: str, value: object, text: str) -> str | None:
    """Set one value; return why it has no effect, or None if it has."""
    if key in KEYS:
        attribute, kind, _ = KEYS[key]
        setattr(config, attribute, _checked(key, kind, value, config.path, text))
        return None
    if key.startswith(FEATURE_PREFIX):
        name = key[len(FEATURE_PREFIX) :]
        if name in FEATURES:
            config.features[name] = bool(_checked(key, BOOL, value, config.path, text))
            return None
    if any(known.startswith(key + ".") for known in KEYS) or key + "." == FEATURE_PREFIX:
        raise _invalid(config.path, text, key, f"must be a table, not {shown(value)}")
    return WITHOUT_EFFECT.get(key, "gpuhook knows no such key")


def _checked(key: str, kind: str, value: object, path: str | None, text: str) -> object:
    if kind is LIST:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            _refuse_nul(key, "".join(value), path, text)
            return tuple(value)
    elif kind is STRING:
        if isinstance(value, str):
            _refuse_nul(key, value, path, text)
            return value
    elif kind is BOOL:
        if isinstance(value, bool):
            return value
    elif kind is SECONDS and _is_seconds(value):
        return float(value)  # type: ignore[arg-type]
    raise _invalid(path, text, key, f"must be {kind}, not {shown(value)}")


def _is_seconds(value: object) -> bool:
    # The upper bound, ten days, also keeps infinity and NaN out.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 864000


def _refuse_nul(key: str, value: str, path: str | None, text: str) -> None:
    if "\0" in value:
        raise _invalid(path, text, key, "holds a NUL character")


def _invalid(path: str | None, text: str, key: str, problem: str) -> ConfigError:
    from gpuhook.config.locate import line_of  # noqa: PLC0415

    line = line_of(text, key)
    place = f"{path or 'the configuration'}, line {line}" if line else f"{path or 'configuration'}"
    return ConfigError(f"{place}: {key} {problem}", _CHECK)


def _finish(config: Config, text: str) -> Config:
    """Check what depends on more than a type, and replace NVIDIA's words by ours."""
    _check_ldconfig(config, text)
    _check_paths(config, text)
    _check_capabilities(config, text)
    mode = MODES.get(config.mode)
    if mode is None:
        key = "nvidia-container-runtime.mode"
        words = ", ".join(MODES)
        raise _invalid(config.path, text, key, f"must be one of {words}, not {shown(config.mode)}")
    config.mode = mode
    _replace_unknown_words(config)
    return config


def _check_ldconfig(config: Config, text: str) -> None:
    if config.ldconfig.startswith("@") or config.feature("allow-ldconfig-from-container"):
        return
    problem = (
        "must begin with @ (a program of the host), because no program of an image is run: "
        + shown(config.ldconfig)
    )
    raise _invalid(config.path, text, "nvidia-container-cli.ldconfig", problem)


def _check_paths(config: Config, text: str) -> None:
    for key, (attribute, _, _) in KEYS.items():
        if attribute not in _ABSOLUTE:
            continue
        value = getattr(config, attribute)
        for path in (value,) if isinstance(value, str) else value:
            empty_is_fine = path == "" and attribute in ("driver_root", "ldcache")
            if not path.startswith("/") and not empty_is_fine:
                problem = f"must be an absolute path, not {shown(path)}"
                raise _invalid(config.path, text, key, problem)


def _check_capabilities(config: Config, text: str) -> None:
    from gpuhook.capabilities import KNOWN, split  # noqa: PLC0415

    words = split(config.supported_driver_capabilities)
    unknown = [word for word in words if word not in KNOWN and word != "all"]
    if unknown:
        key = "supported-driver-capabilities"
        problem = f"names {shown(unknown[0])}, which is none of {', '.join(KNOWN)}"
        raise _invalid(config.path, text, key, problem)


def _replace_unknown_words(config: Config) -> None:
    """NVIDIA goes on with a safe word where it does not know one; so do we, and say so."""
    if config.cuda_compat_mode not in CUDA_COMPAT_MODES:
        key = "nvidia-container-runtime.modes.legacy.cuda-compat-mode"
        reason = f"{shown(config.cuda_compat_mode)} is no such mode; it counts as disabled"
        config.ignored += ((key, reason),)
        config.cuda_compat_mode = "disabled"
    if config.log_level not in LOG_LEVELS:
        reason = f"{shown(config.log_level)} is no log level; it counts as info"
        config.ignored += (("nvidia-container-runtime.log-level", reason),)
        config.log_level = "info"
