"""The device plugin's file (--config-file): NVIDIA's layout ``version: v1``, in YAML or JSON.

Settings without effect here are logged with their line. Invalid ones that would change what pods
get are refused.
"""

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from gpuhook.base.config.mps import MOST_CLIENTS
from gpuhook.base.errors import ConfigError, shown
from gpuhook.base.host import files
from gpuhook.base.oci import jsontext
from gpuhook.base.sizes import Size, parse_size
from gpuhook.cluster.device_plugin import options
from gpuhook.cluster.device_plugin.names import full_name
from gpuhook.cluster.device_plugin.options import Content
from gpuhook.cluster.device_plugin.settings import Sharing
from gpuhook.cluster.plugin_option import PluginOption
from gpuhook.core.cdi import yaml_reader

VERSION = "v1"
# The sections of options, and all sections.
_OPTIONS = tuple(dict.fromkeys(each.place[0] for each in options.OPTIONS if each.place))
_SECTIONS = ("version", "resources", "sharing", *_OPTIONS)
_SLICING, _MPS, _MEMORY = "timeSlicing", "mps", "memory"
_OURS = ("sizes", "overcommit", "unlimited")  # in sharing.mps; sharing.memory has the first two
_WHOLE = 100
_SHARED = ".shared"
_MOST_REPLICAS = 1024  # of a device; the kubelet limits the size of a list
_UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_REFERENCES = {
    "gpuIndex": re.compile(r"[0-9]+", re.ASCII),
    "migIndex": re.compile(r"[0-9]+:[0-9]+", re.ASCII),
    "uuid": re.compile(rf"GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+", re.ASCII),
}


class SharedResource(NamedTuple):
    """One shared resource, as the file defines it; ``devices`` are all, a number or names."""

    name: str
    replicas: int
    rename: str | None
    devices: str | int | list[str]


def read(path: str) -> Content:
    """Return a file's content; ConfigError if it can't be read or is invalid."""
    try:
        data = files.read(path)
    except OSError as error:
        raise ConfigError(
            f"The device plugin's file {path} can't be read: {error.strerror or error}",
            "Correct --config-file or $CONFIG_FILE, or make the file readable",
        ) from None
    reader = ConfigReader(path)
    try:
        root = yaml_reader.read(data)
        if root is not None:
            reader.read(root)
    except yaml_reader.TreeError as error:
        raise reader.wrong(error.line, error.sentence) from None
    return reader.content


class ConfigReader:
    """A reader of a file's values, which fills in ``content``."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.content = Content()

    def wrong(self, line: int | None, sentence: str) -> ConfigError:
        """Return the error about a line."""
        at = f", line {line}" if line else ""
        return ConfigError(
            f"The device plugin's file {self._path}{at}: {sentence}",
            "Correct it; docs/kubernetes/device-plugin.md lists what it may contain",
        )

    def read(self, root: yaml_reader.YamlNode) -> None:
        """Read the whole file."""
        sections = self.table(root, (), _SECTIONS)
        version = sections.get("version")
        if version is not None and (self._scalar(version) or VERSION) != VERSION:
            raise self.wrong(version.line, f"the version is {shown(version.text)}, not {VERSION}")
        places = {option.place: option for option in options.OPTIONS if option.place}
        silent = {each.place: each for each in options.INEFFECTIVE if each.place}
        for name in _OPTIONS:
            if name in sections:
                self._options(sections[name], (name,), places, silent)
        if "resources" in sections:
            self._resources(sections["resources"])
        if "sharing" in sections:
            self._sharing(sections["sharing"])

    # Options -----------------------------------------------------------------------------------

    def _options(
        self,
        node: yaml_reader.YamlNode,
        place: tuple[str, ...],
        known: dict[tuple[str, ...], PluginOption],
        silent: dict[tuple[str, ...], options.IneffectiveOption],
    ) -> None:
        every = [*known, *silent, *options.OF_OTHERS]
        size = len(place)
        names = {each[size] for each in every if each[:size] == place and len(each) > size}
        for name, value in self.table(node, place, names).items():
            here = (*place, name)
            if here in options.OF_OTHERS or _is_null(value):
                continue
            if here in known:
                self._option(value, known[here])
            elif here in silent:
                self._ineffective(value, silent[here])
            else:
                self._options(value, here, known, silent)

    def _option(self, node: yaml_reader.YamlNode, option: PluginOption) -> None:
        value = self._plain(node)
        try:
            self.content.values[option.flag] = option.check(value)
        except ValueError as why:
            name = ".".join(option.place)
            text = node.text if node.text is not None else value
            raise self.wrong(node.line, options.wrong(name, text, why)) from None

    def _ineffective(self, node: yaml_reader.YamlNode, option: options.IneffectiveOption) -> None:
        if node.text not in option.silent:
            self._warn(node.line, f"{'.'.join(option.place)} has no effect: {option.why}")

    def _resources(self, node: yaml_reader.YamlNode) -> None:
        for name, value in self.table(node, ("resources",), ("gpus", "migs")).items():
            if value.items:
                self._warn(
                    value.line,
                    f"resources.{name} has no effect, as in NVIDIA's plugin: resources keep "
                    "their names",
                )

    # Sharing -----------------------------------------------------------------------------------

    def _sharing(self, node: yaml_reader.YamlNode) -> None:
        ways = self.table(node, ("sharing",), (_SLICING, _MPS, _MEMORY))
        for way, value in ways.items():
            if not _is_null(value):
                self._shared_by(way, value)

    def _shared_by(self, way: str, node: yaml_reader.YamlNode) -> None:
        """Read one kind of sharing: sharing.timeSlicing, sharing.mps or sharing.memory."""
        place = ("sharing", way)
        one = "failRequestsGreaterThanOne"
        found = self.table(node, place, ("renameByDefault", one, "resources"))
        renames = self._is_true(found.get("renameByDefault"), f"{way}.renameByDefault")
        said = found.get(one)
        single = self._is_true(said, f"{way}.{one}")
        if way == _SLICING:
            self.content.single_requests = single
        elif said is None or _is_null(said):
            single = True  # as in NVIDIA's plugin for MPS; sharing.memory is ours
        listed = found.get("resources")
        if listed is None or _is_null(listed):
            return
        if not listed.is_list:
            raise self.wrong(listed.line, f"{'.'.join(place)}.resources must be a list")
        for each in listed.items:
            self._shared(each, renames, way, single)

    def _is_true(self, node: yaml_reader.YamlNode | None, name: str) -> bool:
        value = None if node is None else self._scalar(node)
        if node is not None and not isinstance(value, bool) and not _is_null(node):
            raise self.wrong(node.line, f"sharing.{name} must be true or false")
        return value is True

    def _shared(self, node: yaml_reader.YamlNode, renames: bool, way: str, single: bool) -> None:
        shares: tuple[int, ...] = ()
        memory: tuple[str, ...] = ()
        overcommits = False
        if way == _MPS:
            found, shares = self._of_mps(node)
        elif way == _MEMORY:
            found, memory, overcommits = self._of_memory(node)
        else:
            found = self.replicated(node)
        if found.name in self.content.sharing:
            raise self.wrong(node.line, f"the resource {found.name} is shared twice")
        rename = found.name + _SHARED if renames else found.name
        try:
            full_name(rename)
        except ValueError as error:
            raise self.wrong(node.line, str(error)) from None
        for name, is_set in (
            ("rename", found.rename not in (None, rename)),
            ("devices", found.devices != "all"),
        ):
            if is_set:
                self._warn(
                    node.line,
                    f"{name} of {found.name} has no effect, as in NVIDIA's plugin: all devices "
                    f"are shared, as {rename}",
                )
        self.content.sharing[found.name] = Sharing(
            found.name,
            found.replicas,
            rename,
            shares,
            None if way == _SLICING else single,
            memory,
            overcommits,
        )

    def _of_mps(self, node: yaml_reader.YamlNode) -> tuple[SharedResource, tuple[int, ...]]:
        """Return one entry of sharing.mps, with the share of each replica in percent.

        ``sizes``, ``overcommit`` and ``unlimited`` are gpuhook's: shares of different sizes, shares
        of more than the whole device, and one additional replica without limits.
        """
        every = ("name", "rename", "devices", "replicas", *_OURS)
        found = self.table(node, ("sharing", _MPS, "resources"), every)
        sizes = self._sizes(found["sizes"]) if "sizes" in found else ()
        if sizes and "replicas" in found:
            raise self.wrong(node.line, "a resource has replicas or sizes, not both")
        overcommits = self._is_true(found.get("overcommit"), "mps.resources.overcommit")
        if sum(sizes) > _WHOLE and not overcommits:
            raise self.wrong(
                found["sizes"].line,
                f"the sizes are {sum(sizes)} % together; overcommit: true allows that",
            )
        extra = (0,) if self._is_true(found.get("unlimited"), "mps.resources.unlimited") else ()
        one = self.replicated(node, len(sizes) + len(extra) if sizes else 0, _OURS)
        shares = sizes or (max(_WHOLE // one.replicas, 1),) * one.replicas
        every_share = (*shares, *extra)
        if len(every_share) > MOST_CLIENTS:
            raise self.wrong(node.line, f"MPS serves {MOST_CLIENTS} containers for each device")
        return one._replace(replicas=len(every_share)), every_share

    def _of_memory(
        self, node: yaml_reader.YamlNode
    ) -> tuple[SharedResource, tuple[str, ...], bool]:
        """Return one entry of sharing.memory, with each replica's limit, and ``overcommit``."""
        ours = ("sizes", "overcommit")
        every = ("name", "rename", "devices", "replicas", *ours)
        found = self.table(node, ("sharing", _MEMORY, "resources"), every)
        sizes = self._amounts(found["sizes"]) if "sizes" in found else []
        if sizes and "replicas" in found:
            raise self.wrong(node.line, "a resource has replicas or sizes, not both")
        overcommits = self._is_true(found.get("overcommit"), "memory.resources.overcommit")
        percent = sum(size.number for size in sizes if size.percent)
        if percent > _WHOLE and not overcommits:
            raise self.wrong(
                found["sizes"].line,
                f"the sizes are {percent} % together; overcommit: true allows that",
            )
        one = self.replicated(node, len(sizes), ours)
        if not sizes and one.replicas > _WHOLE:
            wanted = f"from 2 to {_WHOLE}"
            raise self.wrong(
                found["replicas"].line, f"replicas must be {wanted}, not {one.replicas}"
            )
        texts = tuple(size.text for size in sizes)
        return one, texts or (f"{_WHOLE // one.replicas}%",) * one.replicas, overcommits

    def _amounts(self, node: yaml_reader.YamlNode) -> "list[Size]":
        """Return memory sizes; plain numbers are percent, as in sharing.mps."""
        values = [self._scalar(each) for each in node.items] if node.is_list else []
        texts = [f"{each}%" if isinstance(each, int) else str(each) for each in values]
        sizes = [size for text in texts if (size := parse_size(text))]
        if not sizes or len(sizes) != len(texts) or len({size.percent for size in sizes}) > 1:
            raise self.wrong(
                node.line,
                "sizes must be a list of sizes such as 8GiB, or of percents from 1 to 100",
            )
        return sizes

    def _sizes(self, node: yaml_reader.YamlNode) -> tuple[int, ...]:
        sizes = [self._scalar(each) for each in node.items] if node.is_list else []
        # True is an integer to Python, and equals 1.
        found = tuple(each for each in sizes if type(each) is int and 1 <= each <= _WHOLE)
        if not found or len(found) != len(sizes):
            raise self.wrong(node.line, "sizes must be a list of whole numbers from 1 to 100")
        return found

    def replicated(
        self, node: yaml_reader.YamlNode, known: int = 0, ours: tuple[str, ...] = ()
    ) -> SharedResource:
        """Return one entry of the shared resources; ConfigError if it is invalid.

        ``known`` is the number of replicas if another key determines it, else 0. ``ours`` are
        keys that were read before.
        """
        place = ("sharing", _SLICING, "resources")
        every = ("name", "rename", "devices", "replicas", *ours)
        found = self.table(node, place, every)
        for name in ("name",) if known else ("name", "replicas"):
            if name not in found or _is_null(found[name]):
                raise self.wrong(node.line, f"a resource to be shared lacks {name}")
        replicas = known or self._scalar(found["replicas"])
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise self.wrong(found["replicas"].line, "replicas must be a whole number")
        if not 2 <= replicas <= _MOST_REPLICAS:
            wanted = f"from 2 to {_MOST_REPLICAS}"
            at = found.get("replicas", node).line
            raise self.wrong(at, f"replicas must be {wanted}, not {replicas}")
        rename = found.get("rename")
        devices = found.get("devices")
        return SharedResource(
            self._name(found["name"]),
            replicas,
            None if rename is None or _is_null(rename) else self._name(rename),
            "all" if devices is None or _is_null(devices) else self.devices(devices),
        )

    def _name(self, node: yaml_reader.YamlNode) -> str:
        value = self._scalar(node)
        if not isinstance(value, str):
            raise self.wrong(node.line, f"{shown(node.text)} can't be a resource")
        try:
            return full_name(value)
        except ValueError as error:
            raise self.wrong(node.line, str(error)) from None

    def devices(self, node: yaml_reader.YamlNode) -> str | int | list[str]:
        """Return the devices to share: "all", their number, or their names."""
        if node.is_list:
            return [self._reference(each) for each in node.items]
        value = self._scalar(node)
        if value == "all":
            return "all"
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.wrong(node.line, f'devices is {shown(node.text)}, not "all", a number or a list')

    def _reference(self, node: yaml_reader.YamlNode) -> str:
        value = self._scalar(node)
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        if reference_kind(text) is None:
            raise self.wrong(node.line, f"{shown(node.text)} isn't a GPU's number or UUID")
        return text

    # Values --------------------------------------------------------------------------------------

    def table(
        self, node: yaml_reader.YamlNode, place: tuple[str, ...], known: Collection[str]
    ) -> dict[str, yaml_reader.YamlNode]:
        """Return the values of a table by name; unknown names are skipped with a warning.

        NVIDIA's plugin reads its file with Go's encoding/json, which accepts names in any case. Its
        own readers below sharing.timeSlicing and sharing.mps are case-sensitive.
        """
        where = ".".join(place) or "the file"
        if _is_null(node):
            return {}
        if not node.is_table:
            raise self.wrong(node.line, f"{where} must be a table, not {node.kind}")
        in_case = str if place[:1] == ("sharing",) and len(place) > 1 else jsontext.folded
        names = {in_case(each): each for each in known}
        found: dict[str, yaml_reader.YamlNode] = {}
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            name = names.get(in_case(key.text or ""))
            if name in found:
                raise self.wrong(key.line, f"{'.'.join((*place, name))} comes twice")
            if name is not None:
                found[name] = value
            else:
                text = shown(".".join((*place, key.text or "")))
                self._warn(key.line, f"{text} is unknown, and has no effect")
        return found

    def _plain(self, node: yaml_reader.YamlNode) -> Any:
        """Return an option's value: a scalar, or a list or table of scalars."""
        if node.is_list:
            return [self._scalar(each) for each in node.items]
        if node.is_table:
            keys, values = node.items[::2], node.items[1::2]
            return {
                self._scalar(key): self._scalar(value)
                for key, value in zip(keys, values, strict=True)
            }
        return self._scalar(node)

    def _scalar(self, node: yaml_reader.YamlNode) -> "yaml_reader.Scalar":
        try:
            return yaml_reader.scalar(node)
        except yaml_reader.TreeError as error:
            raise self.wrong(error.line, error.sentence) from None

    def _warn(self, line: int, sentence: str) -> None:
        self.content.warnings.append(f"{self._path}, line {line}: {sentence}")


def reference_kind(text: str) -> str | None:
    """Return the kind of a device reference (gpuIndex, migIndex, uuid), None if it is none."""
    return next((kind for kind, form in _REFERENCES.items() if form.fullmatch(text)), None)


def _is_null(node: yaml_reader.YamlNode) -> bool:
    return node.is_scalar and not node.tag and node.plain and yaml_reader.scalar(node) is None
