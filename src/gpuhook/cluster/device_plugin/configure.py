"""The device plugin's settings: flags, then the environment, then the file, then defaults."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.errors import ConfigError
from gpuhook.cluster.device_plugin import options, status
from gpuhook.cluster.device_plugin.options import INEFFECTIVE, OPTIONS, OWN, VENDORS, Content
from gpuhook.cluster.device_plugin.settings import CDI_ANNOTATIONS, CDI_CRI, VOLUME_MOUNTS, Settings
from gpuhook.cluster.plugin_option import PluginOption

FILE = "config-file"


def read(flags: Mapping[str, str], environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Return the settings, and warnings about them, a sentence each.

    ``flags`` are those given on the command line, by name. ConfigError for invalid settings.
    """
    path = flags.get(FILE) or environ.get(_variable(FILE), "")
    content = _content(path) if path else Content()
    values = {**content.values}
    for option in OPTIONS:
        for where, text in _texts(option, flags, environ):
            try:
                values[option.flag] = option.parse(text)
            except ValueError as why:
                raise ConfigError(
                    options.wrong(where, text, why), "Correct it; see gpuhook device-plugin --help"
                ) from None
    settings = _settings(values, environ)
    settings = replace(settings, sharing=content.sharing, single_requests=content.single_requests)
    _check_memory(settings)
    given = [*_ineffective(flags, environ), *content.warnings]
    return settings, given + _together(settings)


def _check_memory(settings: Settings) -> None:
    """Raise ConfigError for memory limits that a pod could evade."""
    limited = [each.name for each in settings.sharing.values() if each.memory]
    # protects: plugin-memory-strategy
    if limited and settings.device_list_strategy != (VOLUME_MOUNTS,):
        raise ConfigError(
            f"sharing.memory of {limited[0]} needs volume-mounts as the only strategy: its mounts "
            "keep a pod from getting the device without the limit",
            "Set deviceListStrategy to volume-mounts, or share by timeSlicing",
        )


def _settings(values: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Return the settings, including each vendor's, from values by the options' flags."""
    own = _by_field(OWN, values)
    if own.get("kubelet_folder") == "":
        own = {**own, "kubelet_folder": Settings.kubelet_folder, "register": False}
    vendors = {
        name: plugin.settings(_by_field(plugin.OPTIONS, values), environ)
        for name, plugin in VENDORS.items()
    }
    return Settings(**own, vendors=vendors)


def _by_field(known: tuple[PluginOption, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    return {option.field: values[option.flag] for option in known if option.flag in values}


def apply(settings: Settings, config: Config) -> Settings:
    """Set the configuration's root from the settings; return them with the host's driver root.

    In a pod the driver root has another path than on the host: gpuhook reads it at the pod's path
    and gives the kubelet the host's. Outside a pod the folder of the pod's path doesn't exist.
    """
    root = look_at(settings.driver_root, settings.driver_root_ctr_path, config)
    return replace(settings, driver_root=root, state_dir=config.state_dir, status_dir=status.FOLDER)


def look_at(driver_root: str, seen_as: str, config: Config) -> str:
    """Set the configuration's root to this process's path of a driver root; return the host's."""
    on_host = driver_root or config.root or config.driver_root or "/"
    if os.path.isdir(seen_as):
        config.root = seen_as
        return on_host
    if driver_root:
        config.root = driver_root
    return driver_root


def _content(path: str) -> Content:
    from gpuhook.cluster.device_plugin import config_file  # noqa: PLC0415 - YAML takes memory, and few have a file

    return config_file.read(path)


def _variable(flag: str) -> str:
    return flag.upper().replace("-", "_")


def _texts(
    option: PluginOption, flags: Mapping[str, str], environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the place that sets an option, and its value: the one that counts, or none.

    An empty text sets nothing, except for the socket: then nothing is registered.
    """
    places = [(f"--{each}", flags.get(each)) for each in (option.flag, *option.old)]
    places += [(f"${each}", environ.get(each)) for each in option.variables]
    for where, text in places:
        if text or (text == "" and option.field == "kubelet_folder"):
            yield where, text
            return


def _ineffective(flags: Mapping[str, str], environ: Mapping[str, str]) -> Iterator[str]:
    for option in INEFFECTIVE:
        variable = _variable(option.flag)
        places = {f"--{option.flag}": flags.get(option.flag), f"${variable}": environ.get(variable)}
        for where, text in places.items():
            if text and text not in option.silent:
                yield f"{where} has no effect: {option.why}"


def _together(settings: Settings) -> list[str]:
    """Return warnings about settings that conflict with each other."""
    chosen = {*settings.device_list_strategy}
    named = {CDI_CRI, CDI_ANNOTATIONS} & chosen
    others = chosen - named
    found = []
    if len(named) > 1:
        found.append(
            "With cdi-cri and cdi-annotations, engines get every name twice: one of them is enough"
        )
    if named and VOLUME_MOUNTS in others:
        found.append(
            "With volume-mounts and CDI, a container gets its devices twice where gpu-py reads the "
            "mounts: CDI specs disable only the variable"
        )
    if named and not others and settings.pass_device_specs:
        found.append("pass-device-specs has no effect with only CDI, whose specs contain the nodes")
    for name, plugin in VENDORS.items():
        found += plugin.advice(settings.vendors[name], by_cdi=bool(named))
    return found
