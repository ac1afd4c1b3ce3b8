"""CRI-O: a runtime handler in a separate drop-in file; the main file is never changed.

Source: crio.conf(5), "crio.runtime.runtimes", and crio.conf.d(5).
"""

import copy
import glob
import os
import shutil
from functools import partial

from gpuhook.tools.engines import installed, managed, marks, placeholders, toml_text
from gpuhook.tools.engines.ask import Engine, EngineChanges, EngineRequest
from gpuhook.tools.engines.files import DROP_IN_HEADER, read, read_json, read_text
from gpuhook.tools.engines.merge import Document, get
from gpuhook.tools.engines.store import TargetFile

_MAIN = "crio.conf"
_CONFIG = f"/etc/crio/{_MAIN}"
_DROP_IN = "crio.conf.d/99-gpuhook.conf"
_CONTAINERS = "/var/lib/containers/storage/overlay-containers"
_HANDLER = "io.kubernetes.cri-o.RuntimeHandler"
# Runtime types whose options CRI-O refuses for type oci, or that use another monitor than conmon.
_OTHER_TYPES = ("vm", "pod")
# Options that make CRI-O call another program than runtime_path.
_OTHER_PROGRAMS = ("platform_runtime_paths", "inherit_default_runtime")
_RUNTIMES = ("crio", "runtime", "runtimes")
_DEFAULT = ("crio", "runtime", "default_runtime")


class Crio(Engine):
    """CRI-O, as Kubernetes uses it."""

    name = "crio"

    def install(self, ask: EngineRequest) -> EngineChanges:
        """Write the drop-in with the options of the current default runtime.

        Runtimes and the default of earlier installations are kept in it.
        """
        config = _config(ask)
        usual = os.path.join(os.path.dirname(config), _DROP_IN)
        path = ask.drop_in or usual
        managed.check_system(self.name, ask.system)
        for each in (config, path):
            version = partial(installed.version, self.name, ask.prefix)
            marks.check(self.name, each, read(each), version)
        sources = _sources(config, path, ask)
        for each in sources:
            placeholders.check(self.name, each, read_text(each) or "")
        default, known = _known(sources)
        ask = ask.beside(known).following(*_registered(path))
        entry = _template(default, known, ask)
        entry["runtime_type"] = "oci"
        runtimes = {name: {**entry, "runtime_path": program} for name, program in ask.runtimes}
        runtime: Document = {"runtimes": runtimes}
        if ask.default:
            runtime["default_runtime"] = ask.default
        text = toml_text.render({"crio": {"runtime": runtime}}, DROP_IN_HEADER)
        owned = tuple((*_RUNTIMES, name) for name in ask.names)
        target = TargetFile(
            self.name, path, "toml", text, config, owned, ours=True, usual=usual, sources=sources
        )
        later = {each: _known((each,))[0] for each in sources[1:] if each > path}
        warnings = tuple(ask.unheeded(later))
        return EngineChanges((target,), (self.afterwards(config),), warnings, restart=True)

    def afterwards(self, config: str = "") -> str:  # noqa: ARG002
        """Return the step that makes CRI-O read its configuration."""
        return "Restart CRI-O, if it is running: systemctl restart crio"

    def bound(self, names: tuple[str, ...], ask: EngineRequest) -> list[str]:
        """Return the containers created with one of the handlers.

        CRI-O can't stop them once the handler is removed.
        """
        pattern = f"{glob.escape(ask.system(_CONTAINERS))}/*/userdata/config.json"
        found = []
        for path in sorted(glob.glob(pattern)):
            handler = get(read_json(path), ("annotations", _HANDLER))
            if handler in names:
                found.append(path.split("/")[-3][:12])
        return found

    def is_present(self, ask: EngineRequest) -> bool:
        """Tell whether CRI-O or its configuration is installed."""
        return bool(shutil.which("crio")) or os.path.isdir(os.path.dirname(_config(ask)))


def _config(ask: EngineRequest) -> str:
    """Return the main file, also if a file in its folder of drop-ins is named as the configuration.

    Older instructions for nvidia-ctk name one; CRI-O reads no folder below that folder.
    """
    config = ask.config or ask.system(_CONFIG)
    folder, name = os.path.split(os.path.dirname(config))
    return os.path.join(folder, _MAIN) if name == os.path.dirname(_DROP_IN) else config


def _sources(config: str, drop_in: str, ask: EngineRequest) -> tuple[str, ...]:
    """Return the main file and the other drop-ins, in CRI-O's order."""
    paths = ask.found(f"{glob.escape(os.path.dirname(drop_in))}/*")
    return config, *(path for path in paths if path != drop_in and os.path.isfile(path))


def _known(sources: tuple[str, ...]) -> tuple[str | None, Document]:
    """Return the default runtime's name and all runtimes in the files."""
    default = None
    runtimes: Document = {}
    for path in sources:
        document = toml_text.parse(read_text(path) or "", path)
        default = get(document, _DEFAULT) or default
        table = get(document, _RUNTIMES)
        runtimes.update(table if isinstance(table, dict) else {})
    return default, runtimes


def _registered(drop_in: str) -> tuple[dict[str, str], str | None]:
    """Return our runtimes' programs by name, and the default runtime, from our file."""
    default, runtimes = _known((drop_in,))
    programs = {name: get(entry, ("runtime_path",)) for name, entry in runtimes.items()}
    return {name: path for name, path in programs.items() if isinstance(path, str)}, default


def _template(default: str | None, runtimes: Document, ask: EngineRequest) -> Document:
    """Copy the options of the current default runtime, of runc or of crun."""
    for name in (default, "runc", "crun"):
        entry = None if name in (None, *ask.names) else runtimes.get(str(name))
        if isinstance(entry, dict) and entry.get("runtime_type") not in _OTHER_TYPES:
            return {key: copy.deepcopy(entry[key]) for key in entry if key not in _OTHER_PROGRAMS}
    return {}
