"""Recovery of the bundle for containers whose hooks crun calls with the bundle "/".

crun passes its working directory as the bundle. That is "/" after crun has entered the
container's mount namespace: if a container with a user namespace has nodes in linux.devices
(crun 1.8 to 1.29, ``do_hooks`` in container.c, for prestart and createRuntime hooks).

Then the bundle in the hook's arguments counts, which gpu-py wrote. A hook that an engine added
reads the command line of its parent process, which is crun.
"""

import os

from gpuhook.base.errors import StateError
from gpuhook.base.host import proc
from gpuhook.base.names import CREATING_VERBS
from gpuhook.base.oci.runtime_argv import Arguments
from gpuhook.base.oci.spec import ContainerState, Spec, read_spec

LOST = "/"


def read(state: ContainerState, written: str) -> tuple[ContainerState, Spec]:
    """Return a state with the container's real bundle, and that bundle's config.json.

    ``written`` is the bundle in the hook's arguments, "" if there is none. StateError if
    no bundle is found, or one of another container.
    """
    bundle = written or _of_caller()
    if not bundle:
        raise StateError(
            "The low-level runtime gave the hook no bundle but /, as crun does for a container "
            "with a user namespace and nodes in linux.devices",
            "Start the container with gpu-py, or pass the bundle's absolute path with --bundle",
        )
    spec = read_spec(f"{bundle}/config.json")
    return with_bundle(state, spec), spec


def _of_caller() -> str:
    """Return the bundle in our parent process' command line, "" for none."""
    pid = os.getppid()
    words = proc.data_of(f"/proc/{pid}/cmdline").split(b"\0")[1:-1]
    if os.getppid() != pid:  # it may be another process that reuses the id
        return ""
    return of_command_line([os.fsdecode(word) for word in words])


def of_command_line(words: list[str]) -> str:
    """Return the bundle that a low-level runtime's arguments name by absolute path, else ""."""
    arguments = Arguments(words)
    bundle = arguments.bundle or ""
    return bundle if arguments.verb in CREATING_VERBS and bundle.startswith("/") else ""


def with_bundle(state: ContainerState, spec: Spec) -> ContainerState:
    """Return a state with the bundle of a config.json; StateError if that is another container's.

    crun gives the root as in config.json.
    """
    root = spec.data.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if state.root not in (None, os.path.join(LOST, str(path))):  # protects: root-of-bundle
        raise StateError(
            f"{spec.path} has another root than the container, {state.root}",
            "Start the container with gpu-py, and with a bundle of its own",
        )
    return ContainerState(state.container_id, state.pid, spec.bundle, spec.root_path)
