"""The settings in effect as TOML text for display."""

from gpuhook.base.config.model import FEATURE_PREFIX, KEYS, Config


def as_toml(config: Config) -> str:
    """Return all settings in their sections, as TOML that loads into the same settings."""
    sections: dict[str, list[str]] = {"": []}
    values = {key: getattr(config, attribute) for key, (attribute, _, _) in KEYS.items()}
    values |= {FEATURE_PREFIX + name: on for name, on in sorted(config.features.items())}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {_value(value)}\n")
    text = "".join(sections.pop(""))
    for section in sorted(sections):
        text += f"\n[{section}]\n{''.join(sections[section])}"
    for vendor in config.vendors:
        lines = "".join(f"{key} = {_value(value)}\n" for key, value in vendor.values().items())
        text += f"\n[[gpuhook.vendors]]\n{lines}"
    return text


def value_of(config: Config, key: str) -> str:
    """Return a setting's value in effect, as `gpuhook config set` takes it: strings unquoted."""
    if key.startswith(FEATURE_PREFIX):
        value: object = config.features.get(key.removeprefix(FEATURE_PREFIX), False)
    else:
        value = getattr(config, KEYS[key][0])
    return value if isinstance(value, str) else _value(value)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, tuple):
        return f"[{', '.join(_string(item) for item in value)}]"
    return str(value)


def _string(text: str) -> str:
    """Return a TOML basic string, escaped where needed."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
