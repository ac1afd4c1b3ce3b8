"""Import of our own modules in half the time of the import system.

The import system lists each folder, keeps locks and records for each module and reads it in
pieces; for fifty small modules that takes as long as an interpreter start. ``load`` reads a module
from Python's compiled file, if that is up to date (PEP 552, with Python's own checks), and gives
it an ``__import__`` that does the same for all modules of ours that it imports, now or later.
Anything unusual is left to the import system. Made for processes of one thread: there are no locks.

A finder on sys.meta_path, the usual way, takes 12 % longer.
"""

import _imp
import builtins
import marshal
import os
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

_PACKAGE = "gpuhook"
_OURS = f"{_PACKAGE}."
_HEADER = 16  # bytes before the code: magic number, flags, the source's time and size
_BY_TIME = b"\0\0\0\0"  # the flags of a file that is validated by time and size
_MODULUS = 1 << 32
_SUFFIX = f".{sys.implementation.cache_tag}.pyc"
# Extension modules of the standard library that modules of ours import. To find one, the import
# system would list two folders.
_EXTENSIONS = ("_json", "_ctypes")
_EXTENSIONS_FOLDER = "lib-dynload"


def load(name: str) -> "ModuleType":
    """Import a module, named in full, and return it. ImportError as of an import statement."""
    return _import(name, fromlist=("",))


def _import(
    name: str,
    globals: "dict[str, Any] | None" = None,  # noqa: A002 - named as those of __import__
    locals: "dict[str, Any] | None" = None,  # noqa: A002
    fromlist: "tuple[str, ...] | None" = (),
    level: int = 0,
) -> "ModuleType":
    """Do what ``__import__`` does, which an import statement calls.

    Source: the Python reference, "The import statement"; the library reference, __import__.
    """
    if name.startswith(_OURS) or name == _PACKAGE:
        module = sys.modules.get(name) or _load(name)
        if module is not None and not fromlist:
            return sys.modules[_PACKAGE]
        if module is not None and all(_has(module, each) for each in fromlist or ()):
            return module
    elif name in _EXTENSIONS:
        _load_extension(name)
    return __import__(name, globals, locals, fromlist or (), level)


# What the modules loaded here have as built-in names.
_BUILTINS = {**vars(builtins), "__import__": _import}


def _has(module: "ModuleType", name: str) -> bool:
    """Tell whether a module has this name ("" always), or a module inside of it that is loaded."""
    if not name or hasattr(module, name):
        return True
    full = f"{module.__name__}.{name}"
    return full in sys.modules or _load(full) is not None


def _load(full: str) -> "ModuleType | None":
    """Import a module of ours that isn't imported yet; None if the import system has to."""
    parent, _, name = full.rpartition(".")
    package = sys.modules.get(parent) or (_load(parent) if parent else None)
    folders = getattr(package, "__path__", None)
    if not folders:  # none for a module that isn't a package
        return None
    path = f"{folders[0]}/{name}"
    module = type(sys)(full)
    code = _compiled(folders[0], name)
    if code is None:
        code = _compiled(path, "__init__")
        module.__path__ = [path]
        module.__file__ = f"{path}/__init__.py"
        module.__package__ = full
    else:
        module.__file__ = f"{path}.py"
        module.__package__ = parent
    if code is None:
        return None
    module.__dict__["__builtins__"] = _BUILTINS
    sys.modules[full] = module
    try:
        exec(code, module.__dict__)  # noqa: S102 - this is what importing is
    except BaseException:
        del sys.modules[full]
        raise
    setattr(package, name, module)
    return module


def _compiled(folder: str, name: str) -> "CodeType | None":
    """Return Python's compiled code of a source file, None if there is none."""
    try:
        source = os.stat(f"{folder}/{name}.py")
        fd = os.open(f"{folder}/__pycache__/{name}{_SUFFIX}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    except OSError:
        return None
    time, size = int(source.st_mtime) % _MODULUS, source.st_size % _MODULUS
    header = MAGIC_NUMBER + _BY_TIME + time.to_bytes(4, "little") + size.to_bytes(4, "little")
    if data[:_HEADER] != header:
        return None
    try:
        code: CodeType = marshal.loads(memoryview(data)[_HEADER:])  # noqa: S302 - as Python does
    except (EOFError, ValueError, TypeError):
        return None
    return code


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
