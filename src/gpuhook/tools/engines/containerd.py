"""containerd: a runtime of its CRI plugin, in a drop-in file if the version supports them.

``containerd_distributions`` handles distributions that write containerd's file themselves.
"""

import copy
import glob
import os
import shlex
from dataclasses import replace

from gpuhook.base.errors import EngineError
from gpuhook.tools.engines import (
    containerd_distributions,
    containerd_files,
    distributions,
    managed,
    placeholders,
    toml_text,
)
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.containerd_settings import (
    BUILT_IN,
    CRI,
    ENGINE,
    KNOWS_VERSION_3,
    MIGRATES_FILES,
    MainConfig,
    Version,
    add_runtimes,
    disables_cri,
    effective_cri,
    files_after,
    following,
    imported_files,
    imports_of,
    is_same,
    owned_paths,
    programs_of,
    read_source,
    sets_cdi,
    too_new,
    whole_file,
    with_tables,
    written_in,
)
from gpuhook.tools.engines.files import DROP_IN_HEADER, Change, decode, read_text
from gpuhook.tools.engines.merge import Document, get
from gpuhook.tools.engines.store import TargetFile

_DROP_IN = "conf.d/99-gpuhook.toml"
_STATE = "/run/containerd"
_COPY_NOTE = (
    "This containerd reads the CRI settings from only one file: they are copied from the\n"
    "others. After changing them there, run the installation again."
)


class Containerd(Engine):
    """containerd with its CRI plugin, as Kubernetes uses it."""

    name = ENGINE

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Add the runtimes with the options of the current default runtime."""
        path = containerd_files.chosen(ask)
        program = None if ask.prefix else containerd_files.version_for(path)
        made = answer(replace(ask, config=path), program)
        return replace(made, warnings=(*made.warnings, *containerd_files.others(path, ask)))

    def main_file(self, config: str) -> str:
        """Return the file that containerd reads for a distribution's template."""
        return distributions.main_file(config, containerd_files.text_of)

    def afterwards(self, config: str = "") -> str:
        """Return the step that makes containerd read its configuration."""
        return containerd_files.restart(config or containerd_files.USUAL)

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return the running containers that use one of the runtimes.

        A shim writes the runtime's path into its container's folder.
        """
        programs = {os.path.realpath(program) for _, program in ask.runtimes}
        path, document = _main(ask)
        usual = containerd_files.distribution(path)
        state = get(document, ("state",)) or ask.system(usual.state if usual else _STATE)
        pattern = f"{glob.escape(str(state))}/io.containerd.runtime.v2.task/*/*/runtime"
        found = []
        for path in sorted(glob.glob(pattern)):
            binary = read_text(path) or ""
            if os.path.realpath(binary) in programs or os.path.basename(binary) in names:
                namespace, container = path.split("/")[-3:-1]
                found.append(f"{namespace}/{container}")
        return found

    def unread(self, change: Change, prefix: str) -> list[str]:
        """Return files that the main file no longer imports, such as others next to our drop-in."""
        if os.path.basename(change.path) in distributions.TEMPLATES:
            return []
        ask = EngineRequest(runtimes=(), prefix=prefix)
        texts = [decode(data or b"", change.path) for data in (change.old, change.new)]
        before, now = (
            imports_of(change.path, toml_text.parse(text, change.path), ask) for text in texts
        )
        kept = {path for pattern in now for path in ask.found(pattern)}
        return [path for each in before for path in ask.found(each) if path not in kept]

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether containerd is installed, and not only for Docker, which needs no CRI."""
        path, document = _main(ask)
        return containerd_files.is_here(path) and not disables_cri(document)


def _main(ask: EngineRequest) -> tuple[str, Document]:
    path = containerd_files.chosen(ask)
    return path, toml_text.parse(read_text(path) or "", path)


def answer(ask: EngineRequest, program: Version) -> EngineChanges:
    """Return the target files for a containerd version (None if unknown)."""
    managed.check_system(ENGINE, ask.system, ask.config)
    path = containerd_files.chosen(ask)
    owner = containerd_files.distribution(path)
    if owner is None:
        placeholders.check(ENGINE, path, read_text(path) or "")  # protects: placeholders
        source = read_source(path, program)
        programs = programs_of(source.settings_in(source.document) or {}).values()
        if managed.BOTTLEROCKETS.intersection(programs):
            raise managed.closed(ENGINE, "Bottlerocket")
        return _checked(
            source, ask, _with_drop_in(source, ask, ask.drop_in or _usual_drop_in(source))
        )
    place = containerd_distributions.place(owner, path, ask, program)
    if isinstance(place, EngineChanges):
        return place
    made = _with_drop_in(place.source, ask, place.path)
    return replace(made, targets=made.targets[:1])  # the distribution does the rest


def _checked(source: MainConfig, ask: EngineRequest, made: EngineChanges) -> EngineChanges:
    """Return the answer; EngineError if its edit of the main file would be lost or impossible."""
    ours = {target.path for target in made.targets}
    for path in imported_files(source, ask):
        if path not in ours:
            placeholders.check(ENGINE, path, read_text(path) or "")
    main = made.targets[-1]
    if main.text != source.text:
        folder = os.path.dirname(made.targets[0].path)
        instead = f'imports = ["{folder}/*.toml"]' if len(made.targets) > 1 else "the runtime"
        managed.check_edit(ENGINE, source.path, source.text, instead)
    return made


def _with_drop_in(source: MainConfig, ask: EngineRequest, drop_in: str) -> EngineChanges:
    """Return the drop-in, and the main file that imports it; in version 1 only the main file."""
    source = with_tables(source, ask, drop_in)
    effective = effective_cri(source, ask, drop_in)
    in_place = source.version == 1
    ask = following(
        source, ask, effective if in_place else written_in(drop_in), effective, in_place=in_place
    )
    warnings = _warnings(source, ask)
    if in_place:
        targets: tuple[TargetFile, ...] = (whole_file(source, ask),)
    else:
        settings = _drop_in_settings(source, ask, effective)
        main = _importing_target(source, ask, drop_in)
        targets = (_drop_in_target(source, ask, drop_in, settings), main)
        changed = replace(source, document=toml_text.parse(main.text, source.path))
        _check_versions(changed, ask, drop_in)
        warnings += _more_read(source, changed, ask, drop_in)
        warnings += _overridden(changed, ask, drop_in)
    restart = containerd_files.restart(source.path)
    return EngineChanges(targets, (restart,), tuple(warnings), restart=True)


def _check_versions(changed: MainConfig, ask: EngineRequest, drop_in: str) -> None:
    """Raise EngineError if containerd refuses the main file because of one that it imports."""
    files = imported_files(changed, ask)
    others = {path: files[path] for path in files if not is_same(path, drop_in)}
    for path in too_new(changed.document, others, changed.program)[:1]:
        said = f"{path} has the configuration version {others[path]['version']}, and"
        raise EngineError(
            f"{said} {changed.path}, which would import it, {changed.version}: containerd 2.3 and "
            "newer don't start then",
            f"Raise the version of {changed.path} (containerd config migrate), or move {path} "
            "away; then run this again",
        )


def _usual_drop_in(source: MainConfig) -> str:
    return os.path.join(os.path.dirname(source.path), _DROP_IN)


def _warnings(source: MainConfig, ask: EngineRequest) -> list[str]:
    warnings = []
    program = source.program
    if source.version == 1 and program and KNOWS_VERSION_3 <= program < MIGRATES_FILES:
        warnings.append(
            f"containerd {program[0]}.{program[1]} ignores the CRI settings in {source.path}, a "
            "file of version 1: Kubernetes can't use the runtime until the file has version = 2 "
            f'and its table plugins.cri is renamed plugins."{CRI[2][1]}"; then run this again'
        )
    if disables_cri(source.document):
        warnings.append(
            f"{source.path} disables the plugin cri: Kubernetes can't use this containerd "
            "until it is removed from disabled_plugins"
        )
    if ask.cdi and ask.cdi_setting and source.version == 1:
        warnings.append("enable_cdi needs a configuration of version 2 and wasn't written")
    return warnings


def _drop_in_settings(source: MainConfig, ask: EngineRequest, effective: Document) -> Document:
    """Return the CRI settings for the drop-in."""
    settings = copy.deepcopy(effective)
    default = get(settings, ("containerd", "default_runtime_name"))
    if default in ask.names and not ask.default:
        del settings["containerd"]["default_runtime_name"]
    add_runtimes(settings, source, ask, old=False)
    if not source.merges:
        return settings
    known = get(effective, ("containerd", "runtimes")) or {}
    runtimes = settings["containerd"]["runtimes"]
    added = [name for name in runtimes if name in ask.names or name not in known]
    ours: Document = {"containerd": {"runtimes": {name: runtimes[name] for name in added}}}
    if ask.default:
        ours["containerd"]["default_runtime_name"] = ask.default
    if sets_cdi(effective, ask):
        ours["enable_cdi"] = True
    return ours


def _more_read(
    source: MainConfig, changed: MainConfig, ask: EngineRequest, drop_in: str
) -> list[str]:
    """Return a warning about files next to our drop-in that weren't imported so far."""
    before = imported_files(source, ask)
    more = [path for path in imported_files(changed, ask) if path not in (*before, drop_in)]
    said = f"{source.path} now also imports {', '.join(more)}"
    return [f"{said}: move away the files that containerd must not read"] if more else []


def _overridden(source: MainConfig, ask: EngineRequest, drop_in: str) -> list[str]:
    """Return a warning about a file that overrides our drop-in, because it is read later."""
    files = imported_files(source, ask, drop_in)
    later = {path: source.settings_in(files[path]) for path in files_after(files, drop_in)}
    if source.merges:
        key = ("containerd", "default_runtime_name")
        return ask.unheeded({path: get(table or {}, key) for path, table in later.items()})
    found = [path for path, table in later.items() if isinstance(table, dict)]
    if not found:
        return []
    name = os.path.join(os.path.dirname(found[-1]), "zz-gpuhook.toml")
    is_last = name in files_after(imported_files(source, ask, name), found[-1])
    way = f", or run this again with --drop-in-config {shlex.quote(name)}" if is_last else ""
    said = f"{found[-1]} is read after {drop_in}, and containerd before 2.1 takes the CRI settings"
    unknown = f"only from the last file: it ignores {ask.names[0]}"
    return [f"{said} {unknown}. Remove them from that file{way}"]


def _drop_in_target(
    source: MainConfig, ask: EngineRequest, path: str, settings: Document
) -> TargetFile:
    if not os.path.isabs(path):
        raise EngineError(
            f"The drop-in file {path} isn't an absolute path",
            "Give --drop-in-config an absolute path",
        )
    head, plugin = source.cri
    document = {"version": source.version, head: {plugin: settings}}
    runtimes = settings["containerd"]["runtimes"]
    others = {name: runtimes[name] for name in runtimes if name not in ask.names}
    elsewhere = set(settings) - {"containerd", "enable_cdi"}
    copied = elsewhere or others not in ({}, BUILT_IN)
    header = DROP_IN_HEADER + ("\n" + _COPY_NOTE if copied else "")
    text = toml_text.render(document, header)
    # A partial copy would replace the complete original.
    owned = (*owned_paths(source, ask), *(((head,),) if elsewhere or others else ()))
    usual = _usual_drop_in(source)
    others_read = (each for each in imported_files(source, ask) if not is_same(each, path))
    return TargetFile(
        ENGINE, path, "toml", text, source.path, owned,
        ours=True, usual=usual, sources=(source.path, *others_read),
    )  # fmt: skip


def _importing_target(source: MainConfig, ask: EngineRequest, drop_in: str) -> TargetFile:
    """Make the main file import the drop-in, if it doesn't already."""
    wanted = dict(source.document)
    imports = source.document.get("imports", [])
    # Before 1.6.29 and 1.7.16 a pattern without a leading / was relative to containerd's folder.
    sure = [each for each in imports if each.startswith("/") or "*" not in each]
    known = replace(source, document={"imports": sure})
    if not any(is_same(each, drop_in) for each in imported_files(known, ask, drop_in)):
        folder = os.path.dirname(os.path.abspath(drop_in)).removeprefix(ask.prefix.rstrip("/"))
        wanted["imports"] = [*imports, f"{folder}/*.toml"]
    text = source.text
    if not source.document:
        wanted["version"] = source.version
        text = toml_text.edited(text, {"version": source.version}, source.path)
    text = toml_text.edited(text, wanted, source.path)
    return TargetFile(ENGINE, source.path, "toml", text, source.path)
