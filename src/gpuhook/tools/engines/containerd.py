"""containerd: a runtime of its CRI plugin, in a drop-in file where the version knows them.

Source: containerd-config.toml(5), docs/cri/config.md; configuration versions 1 to 3.
"""

import copy
import fnmatch
import glob
import os
import re
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuhook.ground import names as our_names
from gpuhook.ground.errors import EngineError
from gpuhook.tools.engines import installed, toml_text
from gpuhook.tools.engines.ask import CDI, SET_DEFAULT, Answer, Ask, Engine
from gpuhook.tools.engines.files import DROP_IN_HEADER, Change, decode, read_text
from gpuhook.tools.engines.merge import Document, Path, get
from gpuhook.tools.engines.store import Target

_CONFIG = "/etc/containerd/config.toml"
_DROP_IN = "conf.d/99-gpuhook.toml"
_STATE = "/run/containerd"
# Where the CRI plugin's settings are, by configuration version.
_CRI = {
    1: ("plugins", "cri"),
    2: ("plugins", "io.containerd.grpc.v1.cri"),
    3: ("plugins", "io.containerd.cri.v1.runtime"),
}
_PLAIN_RUNTIME: Document = {
    "runtime_type": "io.containerd.runc.v2",
    "runtime_root": "",
    "runtime_engine": "",
    "privileged_without_host_devices": False,
}
# What containerd has built in. It forgets this as soon as a file names any runtime.
_BUILT_IN: dict[str, Document] = {"runc": {"runtime_type": "io.containerd.runc.v2", "options": {}}}
# What containerd calls for a container. runc's call the program in BinaryName, others none.
_SHIMS = "io.containerd."
_SHIMS_OF_RUNC = ("io.containerd.runc.", "io.containerd.runtime.v1.linux")
# Until then a plugin's table in an imported file replaces the whole of the main file's.
_MERGES_TABLES = (2, 1)
# From then on settings of the CRI plugin in version 1 are not found (seen with 2.1.9).
_IGNORES_VERSION_1 = (2, 0)
_COPY_NOTE = (
    "This containerd takes the CRI settings from one file alone: they are copied from the\n"
    "others. After changing them there, run the installation again."
)


@dataclass(frozen=True)
class Source:
    """A main configuration file as it is; ``text`` is empty where there is none."""

    path: str
    text: str
    document: Document
    version: int

    @property
    def cri(self) -> Path:
        """Where the CRI plugin's settings are."""
        return _CRI[min(self.version, 3)]


class Containerd(Engine):
    """containerd with its CRI plugin, as Kubernetes uses it."""

    name = "containerd"

    def install(self, ask: Ask) -> Answer:
        """Add the runtimes with the options that the present default has."""
        program = None if ask.prefix else containerd_version()
        return answer(ask, program)

    def afterwards(self) -> str:
        """Return what makes containerd read its configuration."""
        return (
            "Restart containerd, if it is running (containers go on): systemctl restart containerd"
        )

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return the running containers that use one of the runtimes.

        A shim notes the runtime's binary in its container's folder.
        """
        programs = {os.path.realpath(program) for _, program in ask.runtimes}
        state = get(self._document(ask), ("state",)) or ask.system(_STATE)
        pattern = f"{glob.escape(str(state))}/io.containerd.runtime.v2.task/*/*/runtime"
        found = []
        for path in sorted(glob.glob(pattern)):
            binary = read_text(path) or ""
            if os.path.realpath(binary) in programs or os.path.basename(binary) in names:
                namespace, container = path.split("/")[-3:-1]
                found.append(f"{namespace}/{container}")
        return found

    def unread(self, change: Change, prefix: str) -> list[str]:
        """Return the files that the main one imports no more, as others' beside our drop-in."""
        ask = Ask(runtimes=(), prefix=prefix)
        texts = [decode(data or b"", change.path) for data in (change.old, change.new)]
        before, after = (
            _imports(change.path, toml_text.parse(text, change.path), ask) for text in texts
        )
        kept = {path for pattern in after for path in ask.found(pattern)}
        return [path for each in before for path in ask.found(each) if path not in kept]

    def _document(self, ask: Ask) -> Document:
        path = _config(ask)
        return toml_text.parse(read_text(path) or "", path)

    def is_present(self, ask: Ask) -> bool:
        """Tell whether containerd is here, and not for Docker alone, which needs no CRI."""
        found = bool(shutil.which("containerd")) or os.path.exists(_config(ask))
        return found and not _disables_cri(self._document(ask))


def containerd_version() -> tuple[int, int] | None:
    """Return the installed containerd's version, None if it can't be told."""
    match = re.match(r"(\d+)\.(\d+)\.", installed.version("containerd") or "")
    return (int(match[1]), int(match[2])) if match else None


def _config(ask: Ask) -> str:
    return ask.config or ask.system(_CONFIG)


def read_source(path: str, program: tuple[int, int] | None) -> Source:
    """Read a main configuration file and tell its version; EngineError if that is unknown.

    A file without content gets the newest version that the program is known to read, and
    one that only lacks the version has version 1.
    """
    text = read_text(path) or ""
    document = toml_text.parse(text, path)
    newest = 3 if program is not None and program >= (2, 0) else 2
    version = document.get("version", 1 if document else newest)
    if not isinstance(version, int) or version < 1:
        raise EngineError(
            f"{path} has the configuration version {version!r}, which containerd doesn't know",
            "Correct it and run this again; the file was left as it is",
        )
    return Source(path, text, document, version)


def answer(ask: Ask, program: tuple[int, int] | None) -> Answer:
    """Return the files for a containerd of that version (None: not known)."""
    source = read_source(_config(ask), program)
    drop_in = ask.drop_in or _usual_drop_in(source)
    merges = program is not None and program >= _MERGES_TABLES
    effective = _effective_cri(source, ask, drop_in, merges=merges)
    ask = _following(source, ask, drop_in, effective)
    warnings = _warnings(source, ask, program)
    if source.version == 1:
        targets: tuple[Target, ...] = (_whole_file(source, ask),)
    else:
        settings = _drop_in_settings(source, ask, effective, merges=merges)
        main = _importing_target(source, ask, drop_in)
        targets = (_drop_in_target(source, ask, drop_in, settings), main)
        changed = replace(source, document=toml_text.parse(main.text, source.path))
        warnings += _more_read(source, changed, ask, drop_in)
        warnings += _overridden(changed, ask, drop_in, merges=merges)
    return Answer(targets, (Containerd().afterwards(),), tuple(warnings), restart=True)


def _following(source: Source, ask: Ask, drop_in: str, effective: Document) -> Ask:
    """Return what is asked, with what earlier installations have written.

    That stands in the main file in version 1, else in our drop-in, where there may be copies
    from other files, too. ``effective`` are the CRI settings without ours.
    """
    others: Document = {}
    if source.version == 1:
        cri = effective
    else:
        document = toml_text.parse(read_text(drop_in) or "", drop_in)
        found = [get(document, path) for path in _CRI.values()]
        cri = next((each for each in found if isinstance(each, dict)), {})
        others = get(effective, ("containerd", "runtimes")) or {}
    programs = _programs(cri)
    earlier = {
        name: program
        for name, program in programs.items()
        if name not in others
        and (name in ask.known or os.path.basename(program) == our_names.RUNTIME)
    }
    ask = ask.beside(_foreign(source, ask, earlier))
    ask = ask.following(earlier, get(cri, ("containerd", "default_runtime_name")))
    if CDI not in ask.without and cri.get("enable_cdi") and not effective.get("enable_cdi"):
        return replace(ask, cdi=True, cdi_setting=True)
    return ask


def _programs(cri: Document) -> dict[str, str]:
    """Return the programs of CRI settings' runtimes by name, of those that name one."""
    runtimes = get(cri, ("containerd", "runtimes"))
    table = runtimes if isinstance(runtimes, dict) else {}
    found = {name: get(entry, ("options", "BinaryName")) for name, entry in table.items()}
    return {name: program for name, program in found.items() if isinstance(program, str)}


def _usual_drop_in(source: Source) -> str:
    return os.path.join(os.path.dirname(source.path), _DROP_IN)


def _foreign(source: Source, ask: Ask, earlier: Document) -> set[str]:
    """Return the names of the runtimes in the main file that don't lead to us.

    ``earlier`` are those that earlier installations have registered.
    """
    ours = {program for _, program in ask.runtimes}
    table = get(source.document, (*source.cri, "containerd", "runtimes"))
    runtimes = table if isinstance(table, dict) else {}
    programs = _programs(get(source.document, source.cri) or {})
    return {name for name in runtimes if programs.get(name) not in ours and name not in earlier}


def _disables_cri(document: Document) -> bool:
    disabled = document.get("disabled_plugins")
    return isinstance(disabled, list) and ("cri" in disabled or _CRI[2][1] in disabled)


def _warnings(source: Source, ask: Ask, program: tuple[int, int] | None) -> list[str]:
    warnings = []
    if source.version == 1 and program is not None and program >= _IGNORES_VERSION_1:
        warnings.append(
            f"containerd {program[0]}.{program[1]} ignores the CRI settings in {source.path}, a "
            "file of version 1: Kubernetes can't use the runtime until the file has version = 2 "
            f'and its table plugins.cri is called plugins."{_CRI[2][1]}"; then run this again'
        )
    if _disables_cri(source.document):
        warnings.append(
            f"{source.path} disables the plugin cri: Kubernetes can't use this containerd "
            "until disabled_plugins no longer names it"
        )
    if ask.cdi and ask.cdi_setting and source.version == 1:
        warnings.append("enable_cdi needs a configuration of version 2 and wasn't written")
    return warnings


def _whole_file(source: Source, ask: Ask) -> Target:
    """Edit the main file itself, which in version 1 has no imports."""
    wanted = copy.deepcopy(source.document)
    cri = _table(wanted, source.cri)
    _add_runtimes(cri, source, ask, old=True)
    text = toml_text.edited(source.text, wanted, source.path)
    base = (*source.cri, "containerd")
    released: list[Path] = [(*base, "runtimes", name) for name in ask.dropped]
    if SET_DEFAULT in ask.without and not ask.default:
        released.append((*base, "default_runtime_name"))
    return Target(
        "containerd", source.path, "toml", text, source.path, _owned(source, ask),
        released=tuple(path for path in released if get(wanted, path) is not None),
    )  # fmt: skip


def _drop_in_settings(source: Source, ask: Ask, effective: Document, *, merges: bool) -> Document:
    """Return the CRI settings that the drop-in has to hold."""
    settings = copy.deepcopy(effective)
    default = get(settings, ("containerd", "default_runtime_name"))
    if default in ask.names and not ask.default:
        del settings["containerd"]["default_runtime_name"]
    _add_runtimes(settings, source, ask, old=False)
    if not merges:
        return settings
    known = get(effective, ("containerd", "runtimes")) or {}
    runtimes = settings["containerd"]["runtimes"]
    added = [name for name in runtimes if name in ask.names or name not in known]
    ours: Document = {"containerd": {"runtimes": {name: runtimes[name] for name in added}}}
    if ask.default:
        ours["containerd"]["default_runtime_name"] = ask.default
    if _sets_cdi(effective, ask):
        ours["enable_cdi"] = True
    return ours


def _sets_cdi(cri: Document, ask: Ask) -> bool:
    """Tell whether enable_cdi is to be written; a false is overridden, as --cdi is said later."""
    return ask.cdi and (ask.cdi_setting or "enable_cdi" in cri)


def _effective_cri(source: Source, ask: Ask, drop_in: str, *, merges: bool) -> Document:
    """Return the CRI settings of the main file and of what it imports, without our drop-in."""
    settings: Document = copy.deepcopy(get(source.document, source.cri) or {})
    for path, document in _imported(source, ask).items():
        table = get(document, source.cri)
        if isinstance(table, dict) and not _is_same(path, drop_in):
            settings = _merged(settings, table) if merges else copy.deepcopy(table)
    return settings


def _more_read(source: Source, changed: Source, ask: Ask, drop_in: str) -> list[str]:
    """Say which files lie beside our drop-in and have been imported by nothing so far."""
    before = _imported(source, ask)
    more = [path for path in _imported(changed, ask) if path not in (*before, drop_in)]
    said = f"{source.path} imports {', '.join(more)} from now on, too"
    return [f"{said}: move away what containerd isn't to read"] if more else []


def _overridden(source: Source, ask: Ask, drop_in: str, *, merges: bool) -> list[str]:
    """Say which file takes back what our drop-in says, because containerd reads it later."""
    files = _imported(source, ask, drop_in)
    later = {path: get(files[path], source.cri) for path in _after(files, drop_in)}
    if merges:
        key = ("containerd", "default_runtime_name")
        return ask.unheeded({path: get(table or {}, key) for path, table in later.items()})
    found = [path for path, table in later.items() if isinstance(table, dict)]
    if not found:
        return []
    name = os.path.join(os.path.dirname(found[-1]), "zz-gpuhook.toml")
    is_last = name in _after(_imported(source, ask, name), found[-1])
    way = f", or run this again with --drop-in-config {shlex.quote(name)}" if is_last else ""
    said = f"{found[-1]} is read after {drop_in}, and containerd before 2.1 takes the CRI settings"
    unknown = f"from the last file alone: it won't know {ask.names[0]}"
    return [f"{said} {unknown}. Take them out of there{way}"]


def _after(files: Iterable[str], path: str) -> list[str]:
    """Return the files that come after one."""
    order = [*files]
    at = next((at for at, each in enumerate(order) if _is_same(each, path)), len(order))
    return order[at + 1 :]


def _merged(base: Document, over: Document) -> Document:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def _imports(path: str, document: Document, ask: Ask) -> list[str]:
    """Return the patterns of the files that a configuration file imports."""
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(item, str) for item in imports):
        raise EngineError(
            f"imports in {path} isn't a list of file names",
            "Correct it and run this again; the file was left as it is",
        )
    folder = os.path.dirname(os.path.abspath(path))
    return [ask.system(item) if item[:1] == "/" else f"{folder}/{item}" for item in imports]


def _imported(source: Source, ask: Ask, drop_in: str = "") -> dict[str, Document]:
    """Return the files that are imported, in containerd's order: theirs come after the main one's.

    ``drop_in`` is among them where a pattern covers it, even if it isn't there yet.
    """
    files = {source.path: source.document}
    pending = [source.path]
    while pending:
        path = pending.pop(0)
        for pattern in _imports(path, files[path], ask):
            covered = {drop_in} if drop_in and _matches(drop_in, pattern) else set()
            new = [each for each in sorted({*ask.found(pattern)} | covered) if each not in files]
            files |= {each: toml_text.parse(read_text(each) or "", each) for each in new}
            pending += new
    del files[source.path]
    return files


def _add_runtimes(cri: Document, source: Source, ask: Ask, *, old: bool) -> None:
    """Add the runtimes to CRI settings; ``old`` is configuration version 1."""
    containerd = _table(cri, ("containerd",))
    runtimes = _table(containerd, ("runtimes",))
    for name, program in ask.runtimes:
        entry = _template(containerd, ask)
        if not entry.get("runtime_type"):
            entry["runtime_type"] = _PLAIN_RUNTIME["runtime_type"]
        options = _table(entry, ("options",))
        options["BinaryName"] = program
        if old:
            options["Runtime"] = program
        runtimes[name] = entry
    if set(runtimes) <= set(ask.names):
        runtimes.update(copy.deepcopy(_BUILT_IN) if "runc" not in runtimes else {})
    if ask.default:
        containerd["default_runtime_name"] = ask.default
    if source.version > 1 and _sets_cdi(cri, ask):
        cri["enable_cdi"] = True


def _template(containerd: Document, ask: Ask) -> Document:
    """Copy the options of the present default runtime, of runc or of crun.

    What matters most is SystemdCgroup: with another value than the kubelet's, pods don't
    stay up.
    """
    default = containerd.get("default_runtime_name")
    candidates = ["runc", "crun"]
    foreign = isinstance(default, str) and not default.startswith("nvidia")
    if foreign and default not in ask.names:
        candidates.insert(0, str(default))
    for name in candidates:
        entry = get(containerd, ("runtimes", name))
        # What was written beside ours, and says nothing, gives the same as no entry.
        if isinstance(entry, dict) and entry != _BUILT_IN.get(name) and _calls_a_program(entry):
            return copy.deepcopy(entry)
    return copy.deepcopy(_PLAIN_RUNTIME)


def _calls_a_program(entry: Document) -> bool:
    """Tell whether a runtime's shim is one that calls a program: kata's and gVisor's aren't."""
    shim = str(entry.get("runtime_type"))
    return not shim.startswith(_SHIMS) or shim.startswith(_SHIMS_OF_RUNC)


def _table(document: Document, path: Path) -> Document:
    """Return the table at a path, made where it is missing."""
    for key in path:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise EngineError(
                f"{'.'.join(path)} in containerd's configuration isn't a table",
                "Correct it and run this again; the file was left as it is",
            )
    return document


def _owned(source: Source, ask: Ask) -> tuple[Path, ...]:
    return tuple((*source.cri, "containerd", "runtimes", name) for name in ask.names)


def _drop_in_target(source: Source, ask: Ask, path: str, settings: Document) -> Target:
    if not os.path.isabs(path):
        raise EngineError(
            f"The drop-in file {path} isn't an absolute path", "Give --drop-in-config one"
        )
    head, plugin = source.cri
    document = {"version": source.version, head: {plugin: settings}}
    runtimes = settings["containerd"]["runtimes"]
    others = {name: runtimes[name] for name in runtimes if name not in ask.names}
    elsewhere = set(settings) - {"containerd", "enable_cdi"}
    copied = elsewhere or others not in ({}, _BUILT_IN)
    header = DROP_IN_HEADER + ("\n" + _COPY_NOTE if copied else "")
    text = toml_text.render(document, header)
    # Half of a copy would replace the whole of what it is a copy of.
    owned = (*_owned(source, ask), *(((head,),) if elsewhere or others else ()))
    usual = _usual_drop_in(source)
    imported = (each for each in _imported(source, ask) if not _is_same(each, path))
    return Target(
        "containerd", path, "toml", text, source.path, owned,
        ours=True, usual=usual, sources=(source.path, *imported),
    )  # fmt: skip


def _importing_target(source: Source, ask: Ask, drop_in: str) -> Target:
    """Have the main file import the drop-in, where it doesn't do so already."""
    wanted = dict(source.document)
    imports = source.document.get("imports", [])
    # Before 1.6.29 and 1.7.16 a pattern without a / in front was one of containerd's own folder.
    sure = [each for each in imports if each.startswith("/") or "*" not in each]
    known = replace(source, document={"imports": sure})
    if not any(_is_same(each, drop_in) for each in _imported(known, ask, drop_in)):
        folder = os.path.dirname(os.path.abspath(drop_in)).removeprefix(ask.prefix.rstrip("/"))
        wanted["imports"] = [*imports, f"{folder}/*.toml"]
    text = source.text
    if not source.document:
        wanted["version"] = source.version
        text = toml_text.edited(text, {"version": source.version}, source.path)
    text = toml_text.edited(text, wanted, source.path)
    return Target("containerd", source.path, "toml", text, source.path)


def _is_same(one: str, other: str) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


def _matches(path: str, pattern: str) -> bool:
    """Tell whether a glob pattern covers a path, which needn't exist yet."""
    path = os.path.abspath(path)
    folder, name = os.path.split(pattern)
    if os.path.dirname(path) != os.path.normpath(folder):
        return False
    return fnmatch.fnmatchcase(os.path.basename(path), name)
