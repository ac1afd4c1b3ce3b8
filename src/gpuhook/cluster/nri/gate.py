"""The gate: checks that no runtime gives a container devices that the kubelet didn't allocate.

The kubelet reports the devices of a container, and the container's own requests choose among them.
gpu-py obeys the verdict (``core.verdict``) on a node whose config.toml has ``gate``. Other
runtimes, such as NVIDIA's own, obey the container's requests, and each reads them in its own way:
the first or the last entry of a variable, mounts, annotations, a swarm's variables. So the gate
sets the variables such that no way of reading them gives more, or refuses the container.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuhook.base.config.model import Config
from gpuhook.base.config.source import flatten, parse
from gpuhook.base.errors import DriverError, GpuhookError, RequestError, listed, shown
from gpuhook.base.host import files
from gpuhook.cluster.nri import asked as words
from gpuhook.cluster.nri.asked import CDI, ContainerRequest
from gpuhook.cluster.vendors import cluster
from gpuhook.core import contract
from gpuhook.core.contract import Grant, Vendor
from gpuhook.core.inventory import cache
from gpuhook.core.inventory.model import Device, Inventory
from gpuhook.core.request import sources
from gpuhook.core.request.sources import MountRequests, parse_environment
from gpuhook.core.resolve import Allocation, Progress, resolve
from gpuhook.core.verdict import Verdict
from gpuhook.vendors import registry

# A container's devices by the kubelet: (resource or CDI kind, device id).
Names = Iterable[tuple[str, str]]
_REMEDY = "Request it in the pod's resources: {}: 1"
_NVIDIAS = "/etc/nvidia-container-runtime/config.toml"  # the configuration of NVIDIA's runtime
_SWARM = "swarm-resource"  # a key of it
_PLAIN = ("", "void", "none")  # every runtime reads these as no device


class Gate:
    """The gate for one container; ``names`` returns its devices by the kubelet."""

    def __init__(self, asked: ContainerRequest, config: Config, names: Callable[[], Names]) -> None:
        self._asked = asked
        self._config = config
        self._names = names
        self._vendors = registry.all_vendors(config)
        self._given: list[tuple[str, str]] | None = None

    @property
    def given(self) -> list[tuple[str, str]]:
        """The container's devices by the kubelet; PluginError if it doesn't answer."""
        if self._given is None:  # protects: nri-gate-once
            self._given = [*self._names()]
        return self._given

    def check_understood(self) -> None:
        """Raise RequestError for requests for devices that runtimes may read in different ways."""
        deciding = words.variables(self._config)
        for entry in self._asked.env:
            if _is_odd(entry, deciding):  # protects: nri-gate-entries
                raise self._refused(f"has the entry {shown(entry)} in its environment")
        folders = [each.MOUNTS for each in self._vendors.values() if each.MOUNTS]
        for place, source in self._asked.mounts:
            below = [each for each in folders if _is_below(place, each)]
            skipped = [MountRequests([(source, place)], each).skipped for each in below]
            # protects: nri-gate-mounts
            if any(skipped) or (below and source != sources.SOURCE):
                raise self._refused(f"has the mount {shown(place)} of {shown(source)}")

    def _refused(self, what: str) -> RequestError:
        return RequestError(
            f"{self._asked} {what}, which runtimes understand in different ways",
            "Remove it: a node with a gate refuses ambiguous requests",
        )

    # gpu-py --------------------------------------------------------------------------------------

    def verdict(self, env: Iterable[str], but: Iterable[str] = ()) -> Verdict:
        """Return what gpu-py may give a container with this environment.

        The vendors ``but`` are excluded. RequestError for devices that the kubelet didn't allocate.
        """
        config = ungated(self._config)
        config.accept_envvar_unprivileged = True  # gpu-py knows the privileges, and checks later
        resolved = self._resolved(config, env)
        if resolved is None:
            return Verdict({})
        found = self._checked(resolved)
        left = {*but}
        return Verdict(
            {
                grant.vendor.names.NAME: tuple(device.id for device in devices)
                for grant, devices in found
                if devices and grant.vendor.names.NAME not in left
            },
            tuple(dict.fromkeys([*resolved.cdi_devices, *_tenant_names(resolved)])),
        )

    def _resolved(
        self, config: Config, env: Iterable[str], progress: Progress | None = None
    ) -> Allocation | None:
        """Resolve the container's requests as gpu-py does with this configuration."""
        spec = spec_of(self._asked, env, self._asked.annotations)
        return resolve(spec, config, self._vendors, progress, skip_absent=True, any_is_all=True)

    def _checked(self, resolved: Allocation) -> list[tuple[Grant, tuple[Device, ...]]]:
        """Return each grant with its allowed devices; RequestError for any others."""
        self._check_documents(resolved)
        self._check_tenants(resolved)
        return [(grant, self.let_through(grant)) for grant in resolved.grants]

    def let_through(self, grant: Grant) -> tuple[Device, ...]:
        """Return the allowed devices of a grant; RequestError for any others."""
        given = _devices(grant.vendor, grant.inventory, self.given) if grant.devices else set()
        words = grant.request.selectors
        if "all" in map(str.lower, words) or any(map(sources.is_any, words)):
            return tuple(device for device in grant.inventory.devices if device.id in given)
        others = [device.label for device in grant.devices if device.id not in given]
        if others:  # protects: nri-gate
            names = grant.vendor.names
            what = f"{names.NOUN} {listed(others)} by a variable"
            raise self._ungiven(what, _REMEDY.format(names.KIND))
        return tuple(grant.devices)

    def _check_tenants(self, resolved: Allocation) -> None:
        """Raise RequestError if options request a tenant's resources, such as IMEX channels."""
        wanted = _tenant_names(resolved)
        given = {f"{resource}={name}" for resource, name in self.given} if wanted else set()
        others = [name for name in wanted if name not in given]
        if others:  # protects: nri-gate-beside
            remedy = "Remove the variable or mount that asks for it, or allocate it by a CDI name"
            raise self._ungiven(listed(others), remedy)

    def _check_documents(self, resolved: Allocation) -> None:
        """Raise RequestError for requested CDI devices that the kubelet didn't allocate."""
        others = self._ungiven_names(resolved.cdi_devices)
        if others:  # protects: nri-gate-documents
            remedy = _REMEDY.format(others[0].partition("=")[0])
            raise self._ungiven(f"CDI device {listed(others)}", remedy)

    def _ungiven_names(self, names: Iterable[str]) -> list[str]:
        """Return the CDI names that aren't of a device allocated by the kubelet."""
        wanted = [*names]
        if not wanted:
            return []
        right = {f"{resource}={name.partition('::')[0]}" for resource, name in self.given}
        kinds = {name.partition("=")[0] for name in wanted}
        for each in self._vendors.values():
            own = (each.KIND, *each.AUTOMATIC)
            if kinds.intersection(own):
                vendor = contract.load(each)
                inventory = cache.get_inventory(self._config, vendor)
                ids = _devices(vendor, inventory, self.given)
                its = [device for device in inventory.devices if device.id in ids]
                ids |= {device.label for device in its}
                right |= {f"{kind}={name}" for kind in own for name in ids}
        return [name for name in wanted if name not in right]

    def _ungiven(self, what: str, remedy: str) -> RequestError:
        return RequestError(
            f"{self._asked} asks for {what}, and the kubelet hasn't allocated that to it", remedy
        )

    # Other runtimes -------------------------------------------------------------------------------

    def changes(self, ours: dict[str, str]) -> dict[str, str]:
        """Return the variables to set so that no runtime gives more than the kubelet allocated.

        ``ours`` are set in any case.
        """
        found = {**self._wanted(), **ours}
        starts = words.prefixes(self._config)
        about = [each.partition("=")[0] for each in self._asked.env if each.startswith(starts)]
        last = parse_environment(self._asked.env)
        doubled = {name: last[name] for name in about if about.count(name) > 1}
        return {**doubled, **found}  # protects: nri-gate-doubled

    def check_readings(self, env: list[str]) -> None:
        """Raise RequestError if some runtime would give more with this environment than allowed."""
        for config in self._readings():
            for view in self._views(env):
                self._check_reading(self._resolved(config, view))
        self._check_swarm(env)

    def _wanted(self) -> dict[str, str]:
        """Return values of variables: each vendor's devices by plain names, or no device."""
        config = self._reader()
        progress = Progress()
        resolved = self._resolved(config, self._asked.env, progress)
        grants = {each.vendor.names.NAME: each for each in (resolved.grants if resolved else ())}
        asked = {each.vendor: each for each in progress.requests}
        last = parse_environment(self._asked.env)
        found: dict[str, str] = {}
        for each in self._vendors.values():
            present = [name for name in each.VARIABLES if name in last]
            request, grant = asked.get(each.NAME), grants.get(each.NAME)
            if grant is not None:
                wanted = self._names_for(grant)
            elif request is not None and request.cdi_devices:
                continue  # of CDI specs, which is checked elsewhere
            else:
                wanted = cluster.of(each).nothing
            if [last[name] for name in present] in ([wanted], *([text] for text in _PLAIN)):
                continue
            if present or grant is not None:
                found.update(dict.fromkeys(present, cluster.of(each).nothing))
                found.update(dict.fromkeys([*each.VARIABLES][:1], wanted))
        return found

    def _names_for(self, grant: Grant) -> str:
        """Return the value of a vendor's variable for the allowed devices."""
        if not grant.devices:
            return "none"
        devices = self.let_through(grant)
        asked = grant.request.devices or ()
        plain = asked == ("all",) or all(_is_plain(grant, name) for name in asked)
        if plain and len(devices) == len(grant.devices):
            return ",".join(asked)
        labels = ",".join(device.label for device in devices)
        return labels or cluster.of(grant.vendor.names).nothing

    def environment(self, changes: dict[str, str]) -> list[str]:
        """Return the container's environment after an engine has applied these changes.

        For a name with several entries, engines replace the first (containerd, CRI-O), and most
        runtimes read the last.
        """
        names = [entry.partition("=")[0] for entry in self._asked.env]
        single = {name for name in changes if names.count(name) <= 1}  # protects: nri-gate-twice
        kept = [each for each in self._asked.env if each.partition("=")[0] not in single]
        return [*kept, *(f"{name}={changes[name]}" for name in changes if name in single)]

    def _reader(self, *, by_mounts: bool = False, by_notes: bool = False) -> Config:
        """Return the settings of a runtime that reads variables, and optionally other sources."""
        config = ungated(self._config)
        config.accept_envvar_unprivileged = True  # protects: nri-gate-privileges
        config.accept_volume_mounts, config.accept_annotations = by_mounts, by_notes
        return config

    def _readings(self) -> Iterator[Config]:
        """Yield the possible settings of a runtime: the combinations of sources that it reads."""
        # protects: nri-gate-sources
        mounts = {False, any(sources.FOLDERS in place for place, _ in self._asked.mounts)}
        # protects: nri-gate-annotations
        notes = {False, any(CDI in key for key, _ in self._asked.annotations)}
        for by_mounts in sorted(mounts):
            for by_notes in sorted(notes):
                yield self._reader(by_mounts=by_mounts, by_notes=by_notes)

    def _views(self, env: list[str]) -> Iterator[list[str]]:
        """Yield the environment as runtimes may read it: whole, or with one vendor variable."""
        yield env
        for each in self._vendors.values():
            for variable in each.VARIABLES if len(each.VARIABLES) > 1 else ():
                others = {f"{name}=" for name in each.VARIABLES if name != variable}
                yield [entry for entry in env if not entry.startswith((*others,))]

    def _check_reading(self, resolved: Allocation | None) -> None:
        """Raise RequestError if a runtime would give more than the kubelet allocated."""
        for grant, devices in self._checked(resolved) if resolved is not None else ():
            if len(devices) < len(grant.devices):  # protects: nri-gate-readings
                variable = next(iter(grant.vendor.names.VARIABLES), "")
                twice = sum(each.startswith(f"{variable}=") for each in self._asked.env) > 1
                if twice:
                    raise RequestError(
                        f"{self._asked} has {variable} more than once, in the pod or the image, "
                        "and the last one asks for all, which the kubelet hasn't allocated to it",
                        f"Remove {variable} from the pod: the kubelet's own value counts then",
                    )
                raise RequestError(
                    f"{self._asked} asks for all devices in a way that no variable changes, and "
                    "the kubelet hasn't allocated all to it",
                    f"Request them by a variable, such as {variable}=all",
                )

    def _check_swarm(self, env: list[str]) -> None:
        """Raise RequestError if a swarm's variable names devices that the kubelet didn't allocate.

        AMD's runtime reads every variable with the prefix, NVIDIA's the one in its configuration.
        """
        theirs = _swarm_variables()
        for entry in env:
            name, _, value = entry.partition("=")
            if name.startswith(words.SWARM) or name in theirs:
                named = [word for word in sources.items(value) if word not in _PLAIN]
                right = self._ids() if named else set()
                others = [word for word in named if word.lower() not in right]
                if others:  # protects: nri-gate-swarm
                    remedy = f"Remove the variable {shown(name)}"
                    raise self._ungiven(f"{shown(others[0])} by {shown(name)}", remedy)

    def _ids(self) -> set[str]:
        """Return the ids of all devices that the kubelet allocated, in lower case."""
        found: set[str] = set()
        for each in self._vendors.values():
            vendor = contract.load(each)
            try:
                inventory = cache.get_inventory(self._config, vendor)
            except DriverError:
                continue
            found |= _devices(vendor, inventory, self.given)
        return {name.lower() for name in found}

    def check_annotations(self) -> None:
        """Raise RequestError if a pod's annotations name CDI devices that weren't allocated to it.

        Runtimes and plugins use different prefixes, and all of them contain CDI's. A key that ends
        with container.NAME applies to that container.
        """
        named = []
        for key, text in self._asked.pod_annotations:
            head, _, tail = key.partition("/")
            ours = key.startswith(self._config.cdi_annotation_prefixes)
            other = tail.startswith("container.") and tail != f"container.{self._asked.name}"
            if (ours or head == CDI or head.endswith(f".{CDI}")) and not other:
                named += sources.items(text)
        others = self._ungiven_names(named)
        if others:  # protects: nri-gate-notes
            raise self._ungiven(f"{listed([*map(shown, others)])} by an annotation", "Remove it")


def ungated(config: Config) -> Config:
    """Return settings with which requests are read, and no verdict."""
    found = copy.copy(config)
    found.gate = False
    return found


def spec_of(
    asked: ContainerRequest, env: Iterable[str], annotations: Iterable[tuple[str, str]] = ()
) -> Any:
    """Return a container's config.json with this environment."""
    return {
        "process": {"env": [*env]},
        "mounts": [{"destination": to, "source": source} for to, source in asked.mounts],
        "annotations": dict(annotations),
    }


def _is_odd(entry: str, deciding: Iterable[str]) -> bool:
    """Tell whether an entry is about a deciding variable, and isn't plain NAME=VALUE."""
    name, equals, _ = entry.partition("=")
    for variable in deciding:
        if variable not in (entry if "\0" in entry else name):
            continue
        if name == variable:
            return not (equals and entry.isprintable())
        seen = "".join(each for each in name if each.isprintable() and not each.isspace())
        if "\0" in entry or seen == variable:
            return True
    return False


def _tenant_names(resolved: Allocation) -> list[str]:
    return [
        name
        for grant in resolved.grants
        for name in grant.vendor.tenant_names(grant.request.options)
    ]


def _is_below(place: str, folder: str) -> bool:
    """Tell whether a mount is a vendor's folder or below it, however the path is spelled."""
    request = MountRequests([(sources.SOURCE, place)], folder)
    return bool(request.devices or request.imex or request.memory_limits or request.skipped)


def _is_plain(grant: Grant, name: str) -> bool:
    """Tell whether a name is a device's id or label, which all runtimes read alike."""
    return any(name in (device.id, device.label) for device in grant.devices)


def _swarm_variables() -> list[str]:
    """Return the swarm variables of NVIDIA's own runtime, if that is installed."""
    try:
        found: Any = flatten(parse(files.read(_NVIDIAS).decode(), _NVIDIAS)).get(_SWARM, "")
    except (OSError, ValueError, GpuhookError):
        return []
    return sources.items(found) if isinstance(found, str) else []


def _devices(vendor: Vendor, inventory: Inventory, names: Names) -> set[str]:
    """Return the ids of the devices that the kubelet's names refer to, including shares."""
    answers = cluster.of(vendor.names)
    by_name: dict[str, str] = {}
    for device in inventory.devices:
        by_name[answers.id(device)] = by_name[device.id] = device.id
    given = {name.partition("::")[0]: resource for resource, name in names}
    found = {by_name[word] for word in given if word in by_name}
    kinds = [word for word, resource in given.items() if resource == vendor.names.KIND]
    labels = {device.label: device.id for device in inventory.devices}
    return found | {labels[word] for word in kinds if word in labels}
