"""podman: a runtime in containers.conf.d, or only a hook in the hooks-dir.

Sources: containers.conf(5), "engine.runtimes"; oci-hooks(5), schema 1.0.0.
"""

import glob
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.errors import GpuhookError
from gpuhook.runtime_shim import find_runtime
from gpuhook.tools.engines import installed, json_text, marks, placeholders, toml_text
from gpuhook.tools.engines.ask import HOOK, Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER, read, read_json, read_text
from gpuhook.tools.engines.merge import Document, get
from gpuhook.tools.engines.prefix import checked
from gpuhook.tools.engines.store import TargetFile

_DROP_IN = "containers/containers.conf.d/99-gpuhook.conf"
# Hook files by stage. Builds (podman's and buildah's) also read the usual folder, and fail at a
# file of the stage precreate, which only podman supports.
_HOOKS = {
    "prestart": "containers/oci/hooks.d/gpuhook.json",
    "precreate": "containers/oci/precreate.d/gpuhook.json",
}
# List settings with podman's default, which a setting replaces: variables of conmon, which starts
# the runtime with them; runtimes that report errors as JSON; runtimes that support
# --cgroups=disabled (the manual has another name for the key, which no podman from 4.3 to 5.8
# reads); folders of hooks (the second one since 5.0).
_MONITOR_VARIABLES = (
    "conmon_env_vars",
    ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
)
_JSON_RUNTIMES = ("runtime_supports_json", ["crun", "runc", "kata", "runsc", "youki", "krun"])
_NO_CGROUPS = ("runtime_supports_nocgroup", ["crun", "krun"])
_HOOK_FOLDERS = (
    "hooks_dir",
    ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"],
)
_LIST_S = 20
# podman's order, where no file names a runtime, and its folders, before those of PATH.
_LOW_LEVEL = ("crun", "runc")
_PROGRAM_FOLDERS = (
    *("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/sbin", "/bin"),
    "/run/current-system/sw/bin",
)
_MACHINES = ("kata", "krun")  # runtimes that start virtual machines
_OWN_TEMPLATE = re.compile(r"\{\{ ?\.")  # podman's own placeholders, such as for log tags
HOOK_KEYS = (("version",), ("hook",), ("when",), ("stages",))


class Podman(Engine):
    """podman, rootful or rootless; it has no daemon and reads its files at every command."""

    name = "podman"

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Register the runtimes, and if requested the hook for all containers.

        The runtimes, the default and the hook of earlier installations are kept.
        """
        path = _drop_in(ask)
        marks.check(self.name, path, read(path), lambda: installed.version(self.name, ask.prefix))
        earlier, default = _registered(path)
        moved = ask.moved(earlier)
        ask = ask.beside(()).following(earlier, default)
        engine: Document = {}
        if ask.default:
            engine["runtime"] = ask.default
        sources = _sources(path, ask)
        for setting in (_JSON_RUNTIMES, _NO_CGROUPS):
            engine[setting[0]] = _extended(sources.values(), setting, ask.names)
        own = own_runtime(sources.values(), ask)
        if own:
            engine[_MONITOR_VARIABLES[0]] = monitor_variables(sources.values(), own)
        engine["runtimes"] = {name: [program] for name, program in ask.runtimes}
        hooks = _hook_targets(ask, path, moved)
        for hook in hooks:
            if not hook.gone:
                folder = os.path.dirname(hook.path).removeprefix(ask.prefix.rstrip("/"))
                engine["hooks_dir"] = _extended(sources.values(), _HOOK_FOLDERS, (folder,))
        text = toml_text.render({"engine": engine}, DROP_IN_HEADER)
        owned = tuple(("engine", "runtimes", name) for name in ask.names)
        usual = _configured(_DROP_IN, ask)
        drop_in = TargetFile(self.name, path, "toml", text, path, owned, ours=True, usual=usual)
        later = {
            each: engine.get("runtime")
            for each, engine in sources.items()
            if each > path and os.path.dirname(each) == os.path.dirname(path)
        }
        warnings = (*ask.unheeded(later), *other_runtime(own, ask))
        return EngineChanges((drop_in, *hooks), warnings=warnings)

    def reload(self, config: str) -> list[int]:
        """Do nothing: podman has no daemon."""
        del config
        return []

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return the containers created for one of the runtimes."""
        podman = shutil.which("podman")
        if podman is None or ask.prefix:
            return []
        listed = _podman_json(podman, "ps", "--all", "--format", "json")
        ids = [item["Id"] for item in listed if isinstance(item, dict) and "Id" in item]
        details = _podman_json(podman, "container", "inspect", *ids) if ids else []
        return [item["Name"] for item in details if item.get("OCIRuntime") in names]

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether podman is installed."""
        del ask
        return bool(shutil.which("podman"))

    def is_users(self, ask: EngineRequest) -> bool:
        """Return True: every user can run podman."""
        del ask
        return True


def _podman_json(podman: str, *words: str) -> list[Any]:
    try:
        done = subprocess.run([podman, *words], capture_output=True, timeout=_LIST_S, check=True)
        answer = json.loads(done.stdout or b"[]")
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return answer if isinstance(answer, list) else []


def _configured(path: str, ask: EngineRequest) -> str:
    """Return a path below the system's or the user's configuration folder."""
    return ask.user(path) if ask.rootless else ask.system(f"/etc/{path}")


def _drop_in(ask: EngineRequest) -> str:
    return ask.config or ask.drop_in or _configured(_DROP_IN, ask)


def _registered(drop_in: str) -> tuple[dict[str, str], str | None]:
    """Return our runtimes' programs by name, and the default runtime, from our file."""
    engine = toml_text.parse(read_text(drop_in) or "", drop_in).get("engine")
    engine = engine if isinstance(engine, dict) else {}
    runtimes = engine.get("runtimes")
    programs = {
        name: str(paths[0])
        for name, paths in (runtimes.items() if isinstance(runtimes, dict) else ())
        if isinstance(paths, list) and paths
    }
    default = engine.get("runtime")
    return programs, default if isinstance(default, str) else None


def _hook_targets(ask: EngineRequest, config: str, moved: Mapping[str, str]) -> list[TargetFile]:
    """Return the requested hook file, or that of an earlier installation, if there is any.

    Our hook file of another stage is removed. ``moved`` maps old to new paths of our programs:
    a hook next to a moved program has moved with it.
    """
    places = {stage: _configured(path, ask) for stage, path in _HOOKS.items()}
    there = {path: hook for path in places.values() if (hook := _read_hook(path))[1]}
    program, stage, configuration = next(iter(there.values()), ("", "", None))
    if ask.hook:
        program, stage = ask.hook_path, ask.hook
    if stage not in places:
        return []
    folders = {os.path.dirname(old): os.path.dirname(new) for old, new in moved.items()}
    folder, name = os.path.split(program)
    program = os.path.join(folders.get(folder, folder), name)
    text = hook_document(program, stage, ask.gpuhook_config or configuration)
    wanted = "" if HOOK in ask.without else places[stage]
    return [
        TargetFile("podman", path, "json", text, config, HOOK_KEYS, ours=True, gone=path != wanted)
        for path in dict.fromkeys((places[stage], *there))
    ]


def _read_hook(path: str) -> tuple[str, str, str | None]:
    """Return program, stage and configuration file of our hook file; no stage if there is none.

    Its format is that of ``hook_document``.
    """
    document = read_json(path)
    program = get(document, ("hook", "path"))
    words = get(document, ("hook", "args"))
    if os.path.basename(str(program)) != names.HOOK or not isinstance(words, list) or not words:
        return "", "", None
    options = [str(word) for word in words]
    at = options.index("--config") + 1 if "--config" in options else 0
    return str(program), options[-1], options[at] if 0 < at < len(options) else None


def _sources(drop_in: str, ask: EngineRequest) -> dict[str, Document]:
    """Return the engine settings of the other files, in podman's order."""
    folders = [ask.system("/etc/containers/containers.conf.d")]
    if ask.rootless:
        folders.append(ask.user("containers/containers.conf.d"))
    paths = [ask.system("/usr/share/containers/containers.conf")]
    for folder in folders:
        paths.append(checked(ask.prefix, folder.removesuffix(".d")))
        paths += ask.found(f"{glob.escape(folder)}/*.conf")
    others = [path for path in paths if os.path.abspath(path) != os.path.abspath(drop_in)]
    for path in others:
        text = read_text(path) or ""
        own = {found for _, found in placeholders.find(text) if _OWN_TEMPLATE.match(found)}
        placeholders.check(Podman.name, path, text, own)
    documents = {path: toml_text.parse(read_text(path) or "", path) for path in others}
    return {
        path: engine
        for path, one in documents.items()
        if isinstance(engine := one.get("engine"), dict)
    }


def own_runtime(sources: Iterable[Document], ask: EngineRequest) -> str:
    """Return the path of the low-level runtime that podman calls by itself; "" if gpu-py can't.

    ``sources`` are the engine settings of the files, in podman's order. gpu-py can't call itself,
    nor runtimes that start virtual machines.
    Source: containers.conf(5), "runtime" and "engine.runtimes".
    """
    chosen, programs = "", dict[str, Any]()
    for engine in sources:
        named = str(engine.get("runtime") or chosen)
        chosen = chosen if named in ask.names else named
        table = engine.get("runtimes")
        programs.update(table if isinstance(table, dict) else {})
    for name in dict.fromkeys((*filter(None, [chosen]), *_LOW_LEVEL)):
        listed = programs.get(name, [f"{folder}/{name}" for folder in _PROGRAM_FOLDERS])
        places = [name] if "/" in name else [*(listed if isinstance(listed, list) else ())]
        if not ask.prefix:
            places += filter(None, [shutil.which(name)])
        for place in map(str, places):
            base = os.path.basename(place)
            if place.startswith("/") and base != names.RUNTIME and _is_program(place, ask.prefix):
                return "" if any(each in base for each in _MACHINES) else place
    return ""


def _is_program(path: str, prefix: str) -> bool:
    """Tell whether there is a program; below a prefix, whose links aren't followed, any file."""
    if prefix:
        return os.path.lexists(prefix.rstrip("/") + path)
    return os.path.isfile(path) and os.access(path, os.X_OK)


def other_runtime(own: str, ask: EngineRequest) -> Iterator[str]:
    """Yield a warning if config.toml names another low-level runtime than podman's ``own``."""
    if ask.prefix or ask.default or not own:
        return
    try:
        config = load(ask.gpuhook_config)
        used = find_runtime(
            config.low_level_runtimes(own), os.fsencode(names.SEARCH_PATH), ask.runtimes[0][1]
        )
    except GpuhookError:
        return
    if os.path.basename(own) not in os.path.basename(used):
        yield (
            f"podman itself calls {own}, but gpu-py calls {used}, because {config.file} names it "
            "in nvidia-container-runtime.runtimes: to keep podman's, remove that key, which holds "
            "for every engine, or use --hook instead of the runtime"
        )


def monitor_variables(sources: Iterable[Document], own: str) -> list[str]:
    """Return conmon's variables, which reach gpu-py, with podman's own low-level runtime.

    An administrator's own choice of it stays.
    """
    found = _extended(sources, _MONITOR_VARIABLES, ())
    start = f"{names.ENGINES_RUNTIME}="
    if not own or any(str(each).startswith(start) for each in found):
        return found
    return [*found, start + own]


def _extended(
    sources: Iterable[Document], setting: tuple[str, list[str]], more: tuple[str, ...]
) -> list[str]:
    """Return a list setting in effect without our file, extended by ``more``."""
    key, found = setting
    for engine in sources:
        if isinstance(engine.get(key), list):
            found = engine[key]
    return [*(item for item in found if item not in more), *more]


def hook_document(hook: str, stage: str, gpuhook_config: str | None) -> str:
    """Return a hook file that calls ``hook`` in all containers at a stage.

    The hook doesn't change a container that requests no GPU.
    """
    options = ["--config", gpuhook_config] if gpuhook_config else []
    document: Document = {
        "version": "1.0.0",
        "hook": {
            "path": hook,
            "args": [os.path.basename(hook), *options, stage],
            "env": names.HOOK_ENVIRONMENT,
        },
        "when": {"always": True},
        "stages": [stage],
    }
    return json_text.render(document)
