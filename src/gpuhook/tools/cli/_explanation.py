"""Devices of a container and the reasons, from its requests followed through gpuhook."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from gpuhook import inject
from gpuhook.base.config.loader import load
from gpuhook.base.config.model import Config
from gpuhook.base.container.rootfs import Rootfs
from gpuhook.base.errors import GpuhookError, printable
from gpuhook.base.oci import process
from gpuhook.base.oci.spec import Spec
from gpuhook.core import contract, resource_limits
from gpuhook.core.inventory.model import Inventory
from gpuhook.core.inventory.selection import fallen_off
from gpuhook.core.memory_limits import MemoryLimits
from gpuhook.core.plan import image, spec_edits
from gpuhook.core.plan.operations import AddGroup, Operation, Plan, usable
from gpuhook.core.plan.volumes import Volumes
from gpuhook.core.plan.writer import PlanIndex
from gpuhook.core.planner import make_plan
from gpuhook.core.records import exclusive_request
from gpuhook.core.request import sources as environments
from gpuhook.core.request.reader import Request, SpecReader, effective_mode
from gpuhook.core.resolve import Allocation, Progress, find_memory_limits, resolve
from gpuhook.tools import root_folder
from gpuhook.tools.cli import _image_checks, _suggest
from gpuhook.vendors import registry

_HEADINGS = {
    "cdi": "gpu-py writes into config.json, from CDI specs:",
    "folder": "Steps of gpuhook apply, in order:",
    "hook": "Steps of the hook, in order:",
    "spec": "gpu-py writes into config.json (mode spec), in order:",
}

_UNDONE = "Skipped, because config.json can't express it:"
_UNDONE_IN_FOLDERS = "Left to the program that starts processes there:"
_UNDONE_ALONE = "Skipped, because only the runtime gpu-py can do it:"


_GATED = (
    "This node has a gate: a pod's container gets only those of the devices below that the kubelet "
    "allocated to it, and any other container none"
)
_CHOSEN = (
    "Devices for any are chosen when a container starts; those below have the fewest containers now"
)
_UNSEEN = "as far as the records are readable: only root sees all"


class Row(NamedTuple):
    """A fact, shown as a sentence if it has no title; ``tone`` is good, poor or bad.

    An ``extra`` fact is omitted first if there is no space.
    """

    title: str
    text: str
    tone: str = ""
    extra: bool = False


class Explanation:
    """A container's requests followed through gpuhook, up to the first error.

    ``mode`` is the way in which the container gets its devices: cdi, hook, spec or folder.
    ``operations`` are the steps, and ``undone`` those that are skipped: only another mode, or only
    gpu-py, can do them. ``hints`` are sentences on variables that may have been meant as requests,
    and on problems in the image. ``layers`` are the folders with its files, if no single root has
    them all. ``architecture`` is the image's as its engine reports it, or "". ``circumstances``
    are facts shown first, and ``container`` describes a running container, as JSON.
    """

    def __init__(self, *, hook_alone: bool = False) -> None:
        self.progress = Progress()
        self.resolved: Allocation | None = None
        self.mode: str | None = None
        self.operations: list[Operation] = []
        self.undone: list[Operation] = []
        self.left_out: list[str] = []
        self.error: GpuhookError | None = None
        self.why_nothing = ""
        self.hints: list[str] = []
        self.layers: list[str] = []
        self.architecture = ""
        self.vendors: Mapping[str, ModuleType] = registry.BUILT_IN
        self.circumstances: list[Row] = []
        self.container: dict[str, Any] | None = None
        self._hook_alone = hook_alone

    def follow(
        self, spec: Spec, root_path: str | None, config_path: str | None, *, folder: bool = False
    ) -> None:
        """Follow the steps of runtime and hook, without changing anything.

        With ``folder``, follow those of gpuhook apply with a root folder.
        """
        try:
            config = load(config_path)
            if folder:
                root_folder.settle(config)
            elif config.gate and self.container is None:
                config.gate = False  # without a container there is no verdict
                self.hints.append(_GATED)
            self.vendors = registry.all_vendors(config)
            reader = SpecReader(spec.data, config)
            swarm = [name for _, name in environments.swarm_variables(config.swarm_resource)]
            others = [name for name in reader.env if name not in swarm]
            self.hints += _suggest.misspelt(others, self.vendors)
            name = str((self.container or {}).get("id", ""))
            self.resolved = resolve(
                spec.data, config, self.vendors, self.progress,
                container=name, save=False, starter=None if folder else 0,
            )  # fmt: skip
            if self.resolved is not None and self.resolved.chosen and self.container is None:
                self.hints.append(_CHOSEN if os.geteuid() == 0 else f"{_CHOSEN}, {_UNSEEN}")
            if self.resolved is None:
                self._explain_nothing(reader, config)
                self.hints += _suggest.for_programs(others, self.vendors)
            else:
                spec.require_mount_namespace()
                self._plan(self.resolved, spec, root_path, config, folder=folder)
        except GpuhookError as error:
            self.error = error

    def _explain_nothing(self, reader: SpecReader, config: Config) -> None:
        if not self.progress.requests:
            names = next(iter(self.vendors.values()))
            self.progress.requests.append(reader.read(names, contract.load(names)))
        self.why_nothing = _why_nothing(reader.env, config, self.vendors)

    def _plan(
        self,
        resolved: Allocation,
        spec: Spec,
        root_path: str | None,
        config: Config,
        *,
        folder: bool,
    ) -> None:
        if folder:
            root_folder.check(resolved, config, spec)
        documents = _documents(resolved, config)
        found = _image(root_path, config, resolved)
        if config.exclusive and self.container is None:
            exclusive_request.check(
                _with_documents(spec, documents), resolved, self.vendors, config
            )
        given = _with_documents(spec, documents) if documents else spec
        limited = find_memory_limits(given, config, self.vendors, resolved)
        plan = make_plan(resolved.grants, found, resolved.groups)
        folders = self.layers if root_path is None else [root_path]
        gives_files = bool(PlanIndex().write(plan.operations).mounts)
        plan.operations, self.left_out = usable(plan.operations)
        if gives_files:
            self._check_image(folders, spec)
        plan.operations[:0] = documents
        self.mode = effective_mode(config.mode, resolved.requests) if resolved.grants else "cdi"
        if folder:
            self.mode = "folder"
            self.undone = root_folder.undone(plan)
        elif self._hook_alone:
            self.mode = "hook"
            self.undone = inject.left_to_runtime(plan, spec.data)
        else:
            self.undone = [op for op in plan.operations if _is_no_group(op, spec)]
        self.operations = plan.operations
        if self.mode == "spec":
            with _opened(root_path) as root:
                written = spec_edits.written(spec, plan, root)
            self.operations = written.steps
            self.undone += written.unwritten
            self.left_out += written.left_out
        else:
            self.left_out += _lacking(spec, plan, root_path)
        self.operations = [op for op in self.operations if op not in self.undone]
        self._add_memory_limits(limited)
        if config.raises_resource_limits and resolved.gives_devices and not folder:
            more = resource_limits.changes(spec, config)
            self.undone += [op for op in more if self._hook_alone and not op.by_hook]
            self.operations[:0] = [op for op in more if op not in self.undone]

    def _check_image(self, folders: list[str], spec: Spec) -> None:
        """Note what prevents the driver's programs and libraries from running in the image."""
        started = spec.data.get("process")
        words = started.get("args") if isinstance(started, dict) else None
        program = words[0] if isinstance(words, list) and words else ""
        told = program if isinstance(program, str) else ""
        other = _image_checks.other_machine(folders, self.architecture, told)
        if other:
            self.left_out.append(other)
        elif _image_checks.has_musl(folders):
            self.hints.append(_image_checks.MUSL)

    def _add_memory_limits(self, limited: MemoryLimits | None) -> None:
        """Add the limits, which a hook sets in every mode, after the rules for devices."""
        place = sum(op.allows is not None for op in self.operations)
        self.operations[place:place] = limited.operations if limited is not None else ()

    @property
    def warnings(self) -> list[str]:
        """Warnings about devices and files that the container lacks."""
        found = [] if self.resolved is None else self.resolved.warnings()
        return list(dict.fromkeys([*found, *self.left_out]))

    @property
    def lost(self) -> list[str]:
        """The devices of the requested vendors that can't be used, a sentence each."""
        found = []
        for inventory in self.progress.inventories:
            names = self.vendors[inventory.vendor]
            if inventory.lost:
                found.append(fallen_off(inventory.lost, names))
            found += [
                f"{names.NOUN} {device.label} can't be used: {device.state}"
                for device in inventory.devices
                if device.state
            ]
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the command's output format: every key, null if not reached.

        ``requests`` and ``inventories`` are those of all vendors; the keys in the singular
        are those of the first vendor.
        """
        requests = [request.to_json() for request in self.progress.requests]
        inventories = [
            {**inventory.summary(), "driver_root": inventory.root}
            for inventory in self.progress.inventories
        ]
        return {
            "request": requests[0] if requests else None,
            "inventory": inventories[0] if inventories else None,
            "requests": requests,
            "inventories": inventories,
            "selected": list(self.resolved.ids) if self.resolved else [],
            "warnings": self.warnings,
            "mode": self.mode,
            "operations": [op.to_json() for op in self.operations],
            "undone": [op.to_json() for op in self.undone],
            "lost": self.lost,
            "hints": self.hints,
            "container": self.container,
            "error": {"code": self.error.code, "message": str(self.error)} if self.error else None,
        }

    def to_text(self) -> str:
        """Return every step as text."""
        lines = [f"{row.title + ':':<16} {row.text}" for row in self.circumstances]
        lines += _request_lines(self)
        if self.mode is not None:
            lines += ["", _HEADINGS[self.mode]]
            for number, operation in enumerate(self.operations, 1):
                lines.append(f"{number:4}. {operation.describe()}")
                lines.append(f"      because: {operation.reason}")
        if self.undone:
            alone = _UNDONE_ALONE if self._hook_alone else _UNDONE
            lines += ["", _UNDONE_IN_FOLDERS if self.mode == "folder" else alone]
            lines += [f"      {operation.describe()}" for operation in self.undone]
        lines += [f"{'Hint:':<16} {hint}" for hint in self.hints]
        if self.error is not None:
            lines += ["", f"Error ({self.error.code}): {self.error}"]
        return "\n".join(map(printable, lines))  # protects: explained-line


class ApplyDocument(Operation):
    """Application of a CDI device's edits to config.json, by the runtime."""

    kind = "cdi-device"
    by_runtime = True

    def __init__(self, name: str, file: str, edits: dict[str, Any], reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.file = file
        self.edits = edits

    def describe(self) -> str:
        """Return a sentence with the device, its file and the number of its edits."""
        counts = [f"{len(value)} {field}" for field, value in self.edits.items() if value]
        return f"apply {self.name} from {self.file} ({', '.join(counts) or 'nothing'})"

    def to_json(self) -> dict[str, Any]:
        """Add the device's name, its file and its edits."""
        return {
            "kind": self.kind,
            "name": self.name,
            "source": self.file,
            "edits": self.edits,
            "reason": self.reason,
        }


def _documents(resolved: Allocation, config: Config) -> list[ApplyDocument]:
    """Return the edits of CDI specs; UnknownDeviceError for a name that is in none."""
    if not resolved.cdi_devices:
        return []
    from gpuhook.core.cdi import apply, folders  # noqa: PLC0415 - slow: only for documents

    found = folders.read_folders(config.cdi_spec_dirs)
    apply.resolve(found, resolved.cdi_devices)
    operations = []
    seen: set[str] = set()
    for device in (found.devices[name] for name in resolved.cdi_devices):
        common = {} if device.file in seen else device.document.get("containerEdits") or {}
        seen.add(device.file)
        edits = apply.merge([common, device.edits])
        operations.append(ApplyDocument(device.name, device.file, edits, "requested by name"))
    return operations


def _with_documents(spec: Spec, documents: list[ApplyDocument]) -> Spec:
    """Return a spec with the edits of CDI specs, as the runtime writes it."""
    from gpuhook.core.cdi import apply  # noqa: PLC0415 - slow: only for documents

    return apply.apply_to_spec(spec, apply.merge(each.edits for each in documents))


def _is_no_group(operation: Operation, spec: Spec) -> bool:
    """Return whether an operation adds a group that the container's user namespace lacks."""
    unknown = isinstance(operation, AddGroup) and process.group_inside(spec.data, operation.gid)
    return unknown is None


def _image(root_path: str | None, config: Config, resolved: Allocation) -> image.Image:
    """Probe the image, if there is one."""
    with _opened(root_path) as root:
        if root is None:
            return image.unknown()
        return image.examine(root, config, resolved.examiners())


@contextlib.contextmanager
def _opened(root_path: str | None) -> Iterator[Rootfs | None]:
    """Open the image, if there is one."""
    if root_path is None or not os.path.isdir(root_path):
        yield None
        return
    with Rootfs(root_path) as root:
        yield root


def _lacking(spec: Spec, plan: Plan, root_path: str | None) -> list[str]:
    """Return the entries that a volume can't hold; VolumeError for required ones."""
    with _opened(root_path) as root:
        if root is None:
            return []
        places = PlanIndex().write(plan.operations)
        steps = [*places.mounts.values(), *places.links.values()]
        return Volumes(spec.data, root).fit(steps)[1]


def _request_lines(explanation: Explanation) -> list[str]:
    requests = explanation.progress.requests
    lines = [
        f"Ignored from {source}: {reason}"
        for request in requests
        for source, reason in request.ignored
    ]
    asking = [request for request in requests if request.devices is not None]
    if requests and not asking:
        lines.append("The container asks for no GPU: nothing is done to it.")
        return [*lines, *([f"Because: {why}"] if (why := explanation.why_nothing) else [])]
    inventories = {each.vendor: each for each in explanation.progress.inventories}
    for request in asking:
        title = explanation.vendors[request.vendor].TITLE
        lines += _vendor_lines(request, title, inventories.get(request.vendor))
    if explanation.resolved is not None:
        noun = " or ".join(explanation.vendors[request.vendor].NOUN for request in asking)
        lines.append(f"Selected:        {', '.join(explanation.resolved.ids) or f'no {noun}'}")
    lines += [f"Lost:            {text}" for text in explanation.lost]
    return [*lines, *(f"Warning:         {text}" for text in explanation.warnings)]


def _vendor_lines(request: Request, title: str, inventory: Inventory | None) -> list[str]:
    options = request.options.facts() if request.options is not None else []
    facts = [
        ("Vendor", title),
        ("Asked for by", request.source),
        ("Devices", ", ".join(request.devices or ()) or "none"),
        *options,
    ]
    if inventory is not None:
        facts.append(("Driver root", inventory.root))
        facts.append(("This host", inventory.sentence()))
    return [f"{title + ':':<16} {text}" for title, text in facts]


def _why_nothing(env: dict[str, str], config: Config, vendors: Mapping[str, ModuleType]) -> str:
    """Return why the environment requests nothing, "" if it names devices."""
    swarm = environments.swarm_variables(config.swarm_resource)
    variables = [name for _, name in swarm if name in env]
    every = [name for names in vendors.values() for name in names.VARIABLES]
    variables = variables or [name for name in every if name in env] or every[:1]
    what = " and ".join(variables)
    values = [env[name] for name in variables if name in env]
    names = [name for value in values for name in environments.items(value)]
    if not values:
        return f"{what} isn't set"
    if not names:
        return f"{what} is empty"
    return f"void is among the names in {what}" if "void" in map(str.lower, names) else ""
