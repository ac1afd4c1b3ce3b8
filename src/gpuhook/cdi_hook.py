"""gpuhook-cdi-hook, the createContainer hook of our CDI documents: do what CDI can't say.

The engine has mounted the driver's files and made the nodes. All else depends on the image
and on which devices are given together: links to libraries, the loader's cache, the cover of
/proc/driver, files that name the devices.

It is started in the container's namespaces and its cgroup, before the root is pivoted.
"""

import os
import sys

from gpuhook import __version__
from gpuhook.ground import log, names, preload
from gpuhook.ground.config.loader import load
from gpuhook.ground.config.model import Config
from gpuhook.ground.errors import CdiError, GpuhookError, shown
from gpuhook.ground.oci.spec import State, parse_state, read_spec
from gpuhook.start import contract
from gpuhook.vendors import registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import NoReturn

    from gpuhook.ground.oci.spec import Spec
    from gpuhook.start.contract import Grant
    from gpuhook.start.records.records import Written

USAGE = f"""usage: {names.CDI_HOOK} [--config FILE] KIND

Reads an OCI container state on standard input and does what a CDI document of that kind
(nvidia.com/gpu) can't say. The documents that `gpuhook cdi generate` writes name it.
"""
_STATE_LIMIT = 16 << 20


def main(argv: list[str]) -> "NoReturn":
    """Act as the hook on the words after the program's name; exit with 0, 1 or 2."""
    if "-h" in argv or "--help" in argv:
        sys.stdout.write(USAGE)
        sys.exit(0)
    if argv[:1] in (["-v"], ["--version"]):
        sys.stdout.write(f"{names.CDI_HOOK} {__version__}\n")
        sys.exit(0)
    config = Config()
    try:
        config_path, kind = read_arguments(argv)
        state = sys.stdin.buffer.read(_STATE_LIMIT)
        config = load(config_path)
        run(state, config, _vendor_of(kind, config))
    except GpuhookError as error:
        log.error(names.CDI_HOOK, str(error), config)
        sys.exit(1)
    os._exit(0)  # nothing is buffered, and taking the interpreter apart takes 2 ms


def read_arguments(argv: list[str]) -> tuple[str | None, str]:
    """Return the configuration file given (None: none) and the kind; usage and exit 2 else.

    CdiError for a verb: a document calls the hook of another toolkit, whose name leads to us.
    """
    path = None
    words = list(argv)
    if words[:1] == ["--config"] and len(words) > 1:
        path = words[1]
        words = words[2:]
    if words and "/" not in words[0] and not words[0].startswith("-"):
        raise CdiError(
            f"A CDI document of another toolkit calls its hook with {shown(words[0])}, "
            f"and {names.CDI_HOOK} works for documents of gpuhook alone",
            "Make the document again with `gpuhook cdi generate`, and delete the other one",
        )
    if len(words) != 1 or words[0].startswith("-") or path == "":
        sys.stderr.write(USAGE)
        sys.exit(2)
    return path, words[0]


def _vendor_of(kind: str, config: Config) -> "ModuleType":
    known = {each.KIND: each for each in registry.known(config).values()}
    if kind in known:
        return known[kind]
    raise CdiError(
        f"gpuhook doesn't know devices of the kind {shown(kind)}",
        "Make the CDI document again with `gpuhook cdi generate`",
    )


def run(state_text: bytes, config: Config, vendor_names: "ModuleType") -> None:
    """Do what the engine can't for the container of this state, or nothing if that fails."""
    state = parse_state(state_text, needs_pid=False)
    spec = read_spec(os.path.join(state.bundle, "config.json"))
    spec.require_mount_namespace()
    modules = (*preload.vendor(vendor_names), *preload.vendor_edits(vendor_names))
    preload.load((*preload.INJECTION, *modules))
    from gpuhook import inject  # noqa: PLC0415 - preloaded, as what follows
    from gpuhook.start.cdi.hook import Work  # noqa: PLC0415
    from gpuhook.start.inventory import cache  # noqa: PLC0415

    vendor = contract.load(vendor_names)
    # In the container's cgroup, a driver shows the container's devices alone: never saved.
    inventory = cache.get_inventory(config, vendor, save=False)  # protects: cdi-saves-nothing
    work = Work(spec.data, vendor, inventory, config)
    with inject.open_inside(state.root or spec.root_path) as container:
        found = inject.examine(container, config, {vendor_names.NAME: vendor.examine})
        with _record(state, spec, work.grant, config):
            inject.inject_inside(work.plan(found), container)
        if config.cli_debug:
            facts = {"devices": list(work.grant.ids), "cgroup": "cdi"}
            inject.note(config, state, {**facts, "skipped": container.skipped})


def _record(state: State, spec: "Spec", grant: "Grant", config: Config) -> "Written":
    """Write down what the container is given, for a block."""
    from gpuhook.start.records import records  # noqa: PLC0415 - as in run

    pid, process = records.first_process()
    try:
        state = State(state.container_id, pid, state.bundle, state.root)
        exclusive = config.exclusive
        if exclusive:
            from gpuhook.start.records import claims  # noqa: PLC0415 - few have exclusive devices

            record = claims.describe(
                state, spec, [grant], (), registry.known(config), config, save=False
            )
        else:
            record = records.describe(state, spec.data.get("annotations"), [grant])
        return records.Written(config.state_dir, process, record, add=True, exclusive=exclusive)
    finally:
        if process >= 0:
            os.close(process)
