"""Settings of containerd's CRI plugin, in its main file and imported files.

Source: containerd-config.toml(5), docs/cri/config.md; configuration versions 1 to 4.
"""

import copy
import fnmatch
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpuhook.base import names as our_names
from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import marks, toml_text
from gpuhook.tools.engines.ask import CDI, SET_DEFAULT, EngineRequest
from gpuhook.tools.engines.files import decode, read, read_text
from gpuhook.tools.engines.merge import Document, Path, get
from gpuhook.tools.engines.store import TargetFile

ENGINE = "containerd"
# Path of the CRI plugin's settings, by configuration version.
CRI = {
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
_REMOVED_IN_2 = ("runtime_root", "runtime_engine")  # containerd 2 warns of them as unknown keys
# containerd's built-in runtime, which is dropped as soon as a file names any runtime.
BUILT_IN: dict[str, Document] = {"runc": {"runtime_type": "io.containerd.runc.v2", "options": {}}}
# containerd's shims: those of runc call the program in BinaryName, others call none.
_SHIMS = "io.containerd."
_SHIMS_OF_RUNC = ("io.containerd.runc.", "io.containerd.runtime.v1.linux")
# Before this version a plugin's table in an imported file replaces that of the main file.
MERGES_TABLES = (2, 1)
KNOWS_VERSION_3 = (2, 0)
# Since this version, each file is migrated by its own version, and an imported file of a higher
# version than the main file's is an error. Before it, containerd 2 ignores CRI settings of version
# 1 (seen with 2.1.9 and 2.3.4).
MIGRATES_FILES = (2, 3)


Version = tuple[int, int] | None


@dataclass(frozen=True)
class MainConfig:
    """The current main configuration file; ``text`` is empty if there is none.

    ``program`` is the version of the containerd that reads it, None if unknown.
    ``merged_by_owner`` is true if a distribution merges the tables of several files itself.
    ``tables`` is the version of the tables in effect, if it differs: see ``with_tables``.
    """

    path: str
    text: str
    document: Document
    version: int
    program: Version = None
    merged_by_owner: bool = False
    tables: int = 0

    @property
    def cri(self) -> Path:
        """The path of the CRI plugin's settings."""
        return CRI[min(self.tables or self.version, 3)]

    @property
    def is_of_version_2(self) -> bool:
        """True if containerd 2 reads the file, by its version or that of its tables."""
        return self.cri == CRI[3] or (self.program is not None and self.program >= (2, 0))

    def settings_in(self, document: Document) -> Document | None:
        """Return the CRI settings that containerd takes from a file, None if it has none."""
        if self.version < 4 and (self.program or (0, 0)) < MIGRATES_FILES:
            return _dict(get(document, self.cri))
        version = _version_of(document) or 1
        tables = [CRI[3]] + [CRI[2]] * (version < 4) + [CRI[1]] * (version < 2)
        found = [table for path in tables if (table := _dict(get(document, path))) is not None]
        return _migrated(found) if found else None

    @property
    def merges(self) -> bool:
        """True if containerd is known to merge a plugin's tables of several files."""
        known = self.program is not None and self.program >= MERGES_TABLES
        return known or self.merged_by_owner


def _dict(value: object) -> Document | None:
    return value if isinstance(value, dict) else None


def _migrated(tables: list[Document]) -> Document:
    """Return the CRI settings of tables of several versions in one file, the newest one first."""
    result = {key: value for table in reversed(tables) for key, value in table.items()}
    inner = [each for table in reversed(tables) if (each := _dict(table.get("containerd")))]
    if inner:
        result["containerd"] = {key: value for table in inner for key, value in table.items()}
    return result


def read_source(path: str, program: Version) -> MainConfig:
    """Read a main configuration file and its version; EngineError for an unknown version.

    An empty file gets the newest version that the program is known to read. A file with content
    but without a version has version 1.
    """
    data = read(path)
    text = decode(data or b"", path)
    document = toml_text.parse(text, path)
    known = program or (0, 0)
    newest = 4 if known >= MIGRATES_FILES else 3 if known >= KNOWS_VERSION_3 else 2
    version = document.get("version", 1 if document else newest)
    if not isinstance(version, int) or version < 1:
        raise EngineError(
            f"{path} has the configuration version {version!r}, which doesn't exist",
            "Correct it and run this again; the file was not changed",
        )
    # Only containerd 2 reads version 3 and 4.
    reader = max(program or (0, 0), (2, 0)) if version > 2 else program
    marks.check(ENGINE, path, data, lambda: reader and f"{reader[0]}.{reader[1]}")
    return MainConfig(path, text, document, version, program)


def too_new(main: Document, imported: Mapping[str, Document], program: Version) -> list[str]:
    """Return the imported files because of which containerd doesn't start.

    Since 2.3 it accepts none of a higher version than the main file's (seen with 2.3.4).
    ``program`` is its version; if that is unknown, only 2.3 and newer read version 4.
    """
    if program is not None and program < MIGRATES_FILES:
        return []
    versions = {path: _version_of(document) for path, document in imported.items()}
    # A main file without a version is compared as the first file that has one.
    first = next(filter(None, (_version_of(main), *versions.values())), 0)
    most = first if program else max(first, 3)
    return [path for path, version in versions.items() if version > most]


def _version_of(document: Document) -> int:
    """Return the configuration version in a file, 0 if it has none."""
    version = document.get("version")
    return version if isinstance(version, int) else 0


def with_tables(source: MainConfig, ask: EngineRequest, drop_in: str = "") -> MainConfig:
    """Return a main file with the version of the tables in effect, in it and in its imports.

    If any file has tables of version 3, containerd 2 ignores those of version 2 (seen with 2.1.9).
    """
    is_old = source.program is not None and source.program < KNOWS_VERSION_3
    if is_old or source.version not in (2, 3):
        return source
    read = {**imported_files(source, ask), source.path: source.document}
    others = (document for path, document in read.items() if not is_same(path, drop_in))
    found = any(isinstance(get(document, CRI[3]), dict) for document in others)
    return replace(source, tables=3) if found else source


def written_in(drop_in: str) -> Document:
    """Return the CRI settings in a drop-in file of any version; none if it doesn't exist."""
    document = toml_text.parse(read_text(drop_in) or "", drop_in)
    found = [get(document, path) for path in CRI.values()]
    return next((each for each in found if isinstance(each, dict)), {})


def following(
    source: MainConfig,
    ask: EngineRequest,
    written: Document,
    effective: Document,
    *,
    in_place: bool = False,
) -> EngineRequest:
    """Return the request with the settings of earlier installations.

    They are in the CRI settings ``written``, which may contain copies of others, too.
    ``effective`` are the CRI settings without ours; ``in_place`` says that both are in one file.
    """
    merged = in_place or source.merged_by_owner  # then ours are among the effective ones
    others = {} if merged else get(effective, ("containerd", "runtimes")) or {}
    programs = programs_of(written)
    earlier = {
        name: program
        for name, program in programs.items()
        if name not in others
        and (name in ask.known or os.path.basename(program) == our_names.RUNTIME)
    }
    ask = ask.beside(_foreign(source, ask, earlier))
    ask = ask.following(earlier, get(written, ("containerd", "default_runtime_name")))
    has_cdi = not in_place and written.get("enable_cdi") and not effective.get("enable_cdi")
    if CDI not in ask.without and has_cdi:
        return replace(ask, cdi=True, cdi_setting=True)
    return ask


def programs_of(cri: Document) -> dict[str, str]:
    """Return the programs of the runtimes in CRI settings, by name, if they have one."""
    runtimes = get(cri, ("containerd", "runtimes"))
    table = runtimes if isinstance(runtimes, dict) else {}
    found = {name: get(entry, ("options", "BinaryName")) for name, entry in table.items()}
    return {name: program for name, program in found.items() if isinstance(program, str)}


def our_runtimes(path: str, data: bytes | None) -> list[str]:
    """Return the names of the runtimes in a file that call gpu-py."""
    try:
        document = toml_text.parse(decode(data or b"", path), path)
    except EngineError:  # reported when containerd starts
        return []
    found = [programs_of(_dict(get(document, tables)) or {}) for tables in CRI.values()]
    programs = {name: program for each in found for name, program in each.items()}
    return [name for name in programs if os.path.basename(programs[name]) == our_names.RUNTIME]


def _foreign(source: MainConfig, ask: EngineRequest, earlier: Document) -> set[str]:
    """Return the names of the runtimes in the main file that aren't ours.

    ``earlier`` are those registered by earlier installations.
    """
    ours = {program for _, program in ask.runtimes}
    settings = source.settings_in(source.document) or {}
    runtimes = _dict(get(settings, ("containerd", "runtimes"))) or {}
    programs = programs_of(settings)
    return {name for name in runtimes if programs.get(name) not in ours and name not in earlier}


def disables_cri(document: Document) -> bool:
    """Tell whether a main file disables containerd's CRI plugin."""
    disabled = document.get("disabled_plugins")
    return isinstance(disabled, list) and any(path[1] in disabled for path in CRI.values())


def whole_file(source: MainConfig, ask: EngineRequest, *released_too: Path) -> TargetFile:
    """Edit the file itself, because version 1 has no imports, or because it is a template.

    ``released_too`` are settings of earlier installations to remove.
    """
    wanted = copy.deepcopy(source.document)
    cri = _table(wanted, source.cri)
    add_runtimes(cri, source, ask, old=source.version == 1)
    text = toml_text.edited(source.text, wanted, source.path)
    base = (*source.cri, "containerd")
    released: list[Path] = [(*base, "runtimes", name) for name in ask.dropped]
    released += released_too
    if SET_DEFAULT in ask.without and not ask.default:
        released.append((*base, "default_runtime_name"))
    if CDI in ask.without:
        released.append((*source.cri, "enable_cdi"))
    return TargetFile(
        ENGINE, source.path, "toml", text, source.path, owned_paths(source, ask),
        released=tuple(path for path in released if get(wanted, path) is not None),
    )  # fmt: skip


def sets_cdi(cri: Document, ask: EngineRequest) -> bool:
    """Tell whether to write enable_cdi; the newer --cdi overrides an existing false."""
    return ask.cdi and (ask.cdi_setting or "enable_cdi" in cri)


def effective_cri(source: MainConfig, ask: EngineRequest, drop_in: str) -> Document:
    """Return the CRI settings of the main file and its imports, without our drop-in."""
    settings: Document = copy.deepcopy(source.settings_in(source.document) or {})
    for path, document in imported_files(source, ask).items():
        table = source.settings_in(document)
        if table is not None and not is_same(path, drop_in):
            settings = _merged(settings, table) if source.merges else copy.deepcopy(table)
    return settings


def files_after(files: Iterable[str], path: str) -> list[str]:
    """Return the files after a given one."""
    order = [*files]
    at = next((at for at, each in enumerate(order) if is_same(each, path)), len(order))
    return order[at + 1 :]


def _merged(base: Document, over: Document) -> Document:
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = _merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def imports_of(path: str, document: Document, ask: EngineRequest) -> list[str]:
    """Return the patterns of the files that a configuration file imports."""
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(item, str) for item in imports):
        raise EngineError(
            f"imports in {path} isn't a list of file names",
            "Correct it and run this again; the file was not changed",
        )
    folder = os.path.dirname(os.path.abspath(path))
    return [ask.system(item) if item[:1] == "/" else f"{folder}/{item}" for item in imports]


def imported_files(
    source: MainConfig, ask: EngineRequest, drop_in: str = ""
) -> dict[str, Document]:
    """Return the imported files in containerd's order, all after the main file.

    ``drop_in`` is among them if a pattern matches it, even if it doesn't exist yet.
    """
    files = {source.path: source.document}
    pending = [source.path]
    while pending:
        path = pending.pop(0)
        for pattern in imports_of(path, files[path], ask):
            covered = {drop_in} if drop_in and matches(drop_in, pattern) else set()
            new = [each for each in sorted({*ask.found(pattern)} | covered) if each not in files]
            files |= {each: toml_text.parse(read_text(each) or "", each) for each in new}
            pending += new
    del files[source.path]
    return files


def add_runtimes(cri: Document, source: MainConfig, ask: EngineRequest, *, old: bool) -> None:
    """Add the runtimes to CRI settings; ``old`` is configuration version 1."""
    containerd = _table(cri, ("containerd",))
    runtimes = _table(containerd, ("runtimes",))
    for name, program in ask.runtimes:
        entry = _template(containerd, source, ask)
        if not entry.get("runtime_type"):
            entry["runtime_type"] = _PLAIN_RUNTIME["runtime_type"]
        options = _table(entry, ("options",))
        options["BinaryName"] = program
        if old:
            options["Runtime"] = program
        runtimes[name] = entry
    if set(runtimes) <= set(ask.names):
        runtimes.update(copy.deepcopy(BUILT_IN) if "runc" not in runtimes else {})
    if ask.default:
        containerd["default_runtime_name"] = ask.default
    if source.version > 1 and sets_cdi(cri, ask):
        cri["enable_cdi"] = True


def _template(containerd: Document, source: MainConfig, ask: EngineRequest) -> Document:
    """Copy the options of the current default runtime, of runc or of crun.

    SystemdCgroup matters most: pods don't stay up if it differs from the kubelet's setting.
    """
    default = containerd.get("default_runtime_name")
    candidates = ["runc", "crun"]
    foreign = isinstance(default, str) and not default.startswith("nvidia")
    if foreign and default not in ask.names:
        candidates.insert(0, str(default))
    for name in candidates:
        entry = get(containerd, ("runtimes", name))
        # An empty entry next to ours counts as no entry.
        if isinstance(entry, dict) and entry != BUILT_IN.get(name) and _calls_a_program(entry):
            return copy.deepcopy(entry)
    unknown = _REMOVED_IN_2 if source.is_of_version_2 else ()
    return {key: value for key, value in _PLAIN_RUNTIME.items() if key not in unknown}


def _calls_a_program(entry: Document) -> bool:
    """Tell whether a runtime's shim calls a program; those of Kata and gVisor don't."""
    shim = str(entry.get("runtime_type"))
    return not shim.startswith(_SHIMS) or shim.startswith(_SHIMS_OF_RUNC)


def _table(document: Document, path: Path) -> Document:
    """Return the table at a path, created if missing."""
    for key in path:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise EngineError(
                f"{'.'.join(path)} in containerd's configuration isn't a table",
                "Correct it and run this again; the file was not changed",
            )
    return document


def owned_paths(source: MainConfig, ask: EngineRequest) -> tuple[Path, ...]:
    """Return the paths of our runtimes."""
    return tuple((*source.cri, "containerd", "runtimes", name) for name in ask.names)


def is_same(one: str, other: str) -> bool:
    """Tell whether two paths are the same file."""
    return os.path.abspath(one) == os.path.abspath(other)


def matches(path: str, pattern: str) -> bool:
    """Tell whether a glob pattern matches a path, which may not exist yet."""
    path = os.path.abspath(path)
    folder, name = os.path.split(pattern)
    if os.path.dirname(path) != os.path.normpath(folder):
        return False
    return fnmatch.fnmatchcase(os.path.basename(path), name)
