"""podman: a runtime in containers.conf.d, or a hook in the hooks-dir and no runtime at all.

Sources: containers.conf(5), "engine.runtimes"; oci-hooks(5), schema 1.0.0.
"""

import glob
import json
import os
import shutil
import subprocess
from typing import Any

from gpuhook.engines import json_text, toml_text
from gpuhook.engines.ask import DROP_IN_HEADER, Answer, Ask
from gpuhook.engines.files import read_text
from gpuhook.engines.merge import Document, get
from gpuhook.engines.store import Target

_DROP_IN = "containers/containers.conf.d/99-gpuhook.conf"
_HOOK = "containers/oci/hooks.d/gpuhook.json"
_HOOK_ENVIRONMENT = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]
# podman asks only runtimes of this list for errors as JSON, and a setting replaces the list.
_JSON_RUNTIMES = ["crun", "runc", "kata", "runsc", "youki", "krun"]
_JSON_KEY = ("engine", "runtime_supports_json")
_LIST_S = 20


class Podman:
    """podman, rootful or rootless; it has no daemon and reads its files every time."""

    name = "podman"

    def install(self, ask: Ask) -> Answer:
        """Register the runtimes, and where asked the hook for all containers."""
        path = _drop_in(ask)
        ask = ask.beside(())
        engine: Document = {}
        if ask.set_default:
            engine["runtime"] = ask.names[0]
        engine["runtime_supports_json"] = [*_json_runtimes(path, ask), *ask.names]
        engine["runtimes"] = {name: [program] for name, program in ask.runtimes}
        text = toml_text.render({"engine": engine}, DROP_IN_HEADER)
        owned = tuple(("engine", "runtimes", name) for name in ask.names)
        targets = [Target(self.name, path, "toml", text, path, owned, ours=True)]
        warnings = []
        if ask.hook:
            targets.append(_hook_target(ask, path))
        if ask.hook and ask.rootless:
            folder = os.path.dirname(targets[-1].path)
            warnings.append(f"Rootless podman reads no hooks unless told to: --hooks-dir={folder}")
        if ask.cdi:
            warnings.append("podman always knows CDI; --cdi changed nothing")
        return Answer(tuple(targets), (), tuple(warnings))

    def afterwards(self) -> str:
        """Return nothing: podman reads its files every time."""
        return ""

    def reload(self, config: str) -> list[int]:
        """Do nothing: podman has no daemon."""
        del config
        return []

    def bound(self, names: tuple[str, ...], ask: Ask) -> list[str]:
        """Return the containers that were made for one of the runtimes."""
        podman = shutil.which("podman")
        if podman is None or ask.prefix:
            return []
        listed = _podman_json(podman, "ps", "--all", "--format", "json")
        ids = [item["Id"] for item in listed if isinstance(item, dict) and "Id" in item]
        details = _podman_json(podman, "container", "inspect", *ids) if ids else []
        return [item["Name"] for item in details if item.get("OCIRuntime") in names]

    def is_present(self, ask: Ask) -> bool:
        """Tell whether podman is here."""
        del ask
        return bool(shutil.which("podman"))


def _podman_json(podman: str, *words: str) -> list[Any]:
    try:
        done = subprocess.run([podman, *words], capture_output=True, timeout=_LIST_S, check=True)
        answer = json.loads(done.stdout or b"[]")
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return answer if isinstance(answer, list) else []


def _configured(path: str, ask: Ask) -> str:
    """Return a path below the system's or the user's configuration folder."""
    return ask.user(path) if ask.rootless else ask.system(f"/etc/{path}")


def _drop_in(ask: Ask) -> str:
    return ask.config or ask.drop_in or _configured(_DROP_IN, ask)


def _json_runtimes(drop_in: str, ask: Ask) -> list[str]:
    """Return the list that is in force without our file."""
    paths = [ask.system("/usr/share/containers/containers.conf")]
    for folder in {os.path.dirname(drop_in), ask.system("/etc/containers/containers.conf.d")}:
        paths.append(folder.removesuffix(".d"))
        paths += sorted(glob.glob(f"{glob.escape(folder)}/*.conf"))
    names: list[str] = list(_JSON_RUNTIMES)
    for path in paths:
        if os.path.abspath(path) == os.path.abspath(drop_in) or os.path.isdir(path):
            continue
        found = get(toml_text.parse(read_text(path) or "", path), _JSON_KEY)
        names = found if isinstance(found, list) else names
    return [name for name in names if name not in ask.names]


def _hook_target(ask: Ask, config: str) -> Target:
    text = hook_document(ask.hook_path, str(ask.hook), ask.gpuhook_config)
    return Target("podman", _configured(_HOOK, ask), "json", text, config, (), ours=True)


def hook_document(hook: str, stage: str, gpuhook_config: str | None) -> str:
    """Return a hook file that has all containers call ``hook`` at a stage.

    The hook does nothing to a container that asks for no GPU.
    """
    options = ["--config", gpuhook_config] if gpuhook_config else []
    document: Document = {
        "version": "1.0.0",
        "hook": {
            "path": hook,
            "args": [os.path.basename(hook), *options, stage],
            "env": _HOOK_ENVIRONMENT,
        },
        "when": {"always": True},
        "stages": [stage],
    }
    return json_text.render(document)
