"""Import of many of our own modules at once, in half the time of the import system.

The import system asks the filesystem about each module again, reads it in pieces and keeps locks
and records; for fifty small modules that takes as long as an interpreter start. Here each module
is read from Python's compiled file, if that is up to date (PEP 552, with Python's own checks).
Anything unusual is left to the import system.
"""

import _imp
import marshal
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType

_HEADER = 16  # bytes before the code: magic number, flags, the source's time and size
_BY_TIME = b"\0\0\0\0"  # the flags of a file that is validated by time and size
_LIMIT = 1 << 32
# Extension modules of the standard library that modules of ours begin with. To find one, the
# import system would list two folders.
_EXTENSIONS = {"base.oci.jsontext": "_json", "base.container.clib": "_ctypes"}
_EXTENSIONS_FOLDER = "lib-dynload"

# Modules that starts import, in the order in which their imports complete, so that none needs a
# later one. Of ``VENDORS`` a start imports the requested ones; ``NAME.edits`` are those that the
# hook needs in addition.
# Made by scripts/lib/preload_lists.py; don't edit the lists below.
REQUEST = (
    "base.oci.jsontext", "base.log", "base.errors", "base.fileio", "base.config.source",
    "base.config.model", "base.config.loader", "base.oci.spec", "core.contract",
    "core.request.sources", "core.request.reader", "core.resolve", "vendors.nvidia.names",
    "vendors.amd.names", "vendors.neuron.names", "vendors.gaudi.names", "vendors.ascend.names",
    "vendors.intel_gpu.names", "vendors.intel_npu.names", "vendors.registry",
)  # fmt: skip
RUNTIME = (
    *REQUEST, "base.oci.runtime_argv", "runtime_shim", "core.edit",
)  # fmt: skip
HOOK = (
    *REQUEST, "prestart_hook",
)  # fmt: skip
INVENTORY = (
    "core.inventory.fingerprint", "core.inventory.model", "core.inventory.cache",
    "core.inventory.selection",
)  # fmt: skip
EDIT = (
    "base.host.proc", "base.cgroup.access", "prefork.hook_worker",
)  # fmt: skip
INJECTION = (
    *INVENTORY, "base.host.proc", "base.cgroup.access", "base.container.clib",
    "base.container.kernel", "base.container.rootfs", "base.container.entries",
    "base.container.mounts", "base.container.changes", "base.loader.ldcache", "base.loader.layout",
    "core.plan.image", "core.plan.operations", "core.planner", "core.records.records", "inject",
)  # fmt: skip
DOCUMENTS = (
    "base.host.files", "core.cdi.apply", "core.cdi.hook_args", "core.cdi.worker_mounts",
    "core.cdi.parse_result", "core.cdi.folders", "core.cdi.parse_cache",
)  # fmt: skip
DOCUMENT_HOOK = (
    "core.cdi.hook_args", "cdi_hook", "core.spec_devices", "core.plan.writer", "core.cdi.hook",
)  # fmt: skip
VENDORS = {
    "nvidia": (
        "vendors.nvidia.model", "vendors.nvidia.variables", "vendors.nvidia.completeness",
        "vendors.nvidia.device_nodes", "vendors.nvidia.vendor",
    ),
    "nvidia.edits": (
        "vendors.nvidia.own_files", "vendors.nvidia.edits",
    ),
    "amd": (
        "vendors.amd.paths", "vendors.amd.vendor",
    ),
    "neuron": (
        "vendors.neuron.model", "vendors.neuron.vendor",
    ),
    "gaudi": (
        "base.oci.process", "vendors.gaudi.model", "vendors.gaudi.vendor",
    ),
    "ascend": (
        "base.oci.process", "vendors.ascend.variables", "vendors.ascend.model",
        "vendors.ascend.vendor",
    ),
    "ascend.edits": (
        "vendors.ascend.edits",
    ),
    "intel_gpu": (
        "vendors.intel_gpu.vendor",
    ),
    "intel_npu": (
        "vendors.intel_npu.vendor",
    ),
    "declared": (
        "base.oci.process", "base.config.declared", "vendors.declared.names",
        "vendors.declared.vendor",
    ),
}  # fmt: skip
# Until here.


def vendor(names: "ModuleType") -> tuple[str, ...]:
    """Return the modules of the vendor with these names, () for an external one."""
    return VENDORS.get(names.__name__.split(".")[-2], ())


def vendor_edits(names: "ModuleType") -> tuple[str, ...]:
    """Return the further modules of this vendor that the hook needs."""
    return VENDORS.get(f"{names.__name__.split('.')[-2]}.edits", ())


def load(modules: tuple[str, ...]) -> None:
    """Import modules, named without ``gpuhook.``, that are not imported yet.

    Stops without error at the first one that isn't compiled or can't be read.
    """
    folder = os.path.dirname(os.path.dirname(__file__))
    for room in _rooms(modules):
        _make(folder, room)
    for name in modules:
        full = f"gpuhook.{name}"
        if full in sys.modules:
            continue
        path = f"{folder}/{name.replace('.', '/')}.py"
        code = _compiled(path)
        if code is None:
            break
        if name in _EXTENSIONS:
            _load_extension(_EXTENSIONS[name])
        _execute(full, path, code)


def _rooms(modules: tuple[str, ...]) -> list[str]:
    """Return the packages of these modules, each after its parent."""
    rooms: dict[str, None] = {}
    for name in modules:
        parts = name.split(".")
        for end in range(1, len(parts)):
            rooms[".".join(parts[:end])] = None
    return list(rooms)


def _make(folder: str, name: str) -> None:
    """Create an empty package that its modules can find, if there is none yet.

    Its file has only a docstring, so it needn't be read.
    """
    full = f"gpuhook.{name}"
    if full in sys.modules:
        return
    module = type(sys)(full)
    module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
    module.__package__ = full
    sys.modules[full] = module
    parent, _, last = full.rpartition(".")
    setattr(sys.modules[parent], last, module)


def _load_extension(name: str) -> None:
    """Import an extension module from the interpreter's own folder, if it is there."""
    folder = next((path for path in sys.path if path.endswith(_EXTENSIONS_FOLDER)), "")
    path = f"{folder}/{name}{_imp.extension_suffixes()[0]}"
    if name in sys.modules or _imp.is_builtin(name) or not os.access(path, os.R_OK):
        return
    try:
        module = _imp.create_dynamic(ModuleSpec(name, None, origin=path))
        _imp.exec_dynamic(module)
    except ImportError:
        return
    sys.modules[name] = module


def _compiled(path: str) -> "CodeType | None":
    """Return Python's compiled code of a source file, None if there is none."""
    folder, _, file = path.rpartition("/")
    cached = f"{folder}/__pycache__/{file[:-3]}.{sys.implementation.cache_tag}.pyc"
    try:
        source = os.stat(path)
        fd = os.open(cached, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    except OSError:
        return None
    time, size = int(source.st_mtime) % _LIMIT, source.st_size % _LIMIT
    header = MAGIC_NUMBER + _BY_TIME + time.to_bytes(4, "little") + size.to_bytes(4, "little")
    if data[:_HEADER] != header:
        return None
    try:
        code: CodeType = marshal.loads(memoryview(data)[_HEADER:])  # noqa: S302 - as Python does
    except (EOFError, ValueError, TypeError):
        return None
    return code


def _execute(full: str, path: str, code: "CodeType") -> None:
    parent, _, name = full.rpartition(".")
    module = sys.modules.get(full)
    if module is None:
        module = type(sys)(full)
        module.__package__ = parent
        sys.modules[full] = module
    module.__file__ = path
    try:
        exec(code, module.__dict__)  # noqa: S102 - this is what importing is
    except BaseException:
        del sys.modules[full]
        raise
    setattr(sys.modules[parent], name, module)
