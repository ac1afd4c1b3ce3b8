"""Functions of the C library, through the core of ctypes without its Python part.

Importing ctypes takes half as long as an interpreter start, mostly for types and classes of other
systems. Its core, the extension module ``_ctypes``, has all that is needed here. It isn't a
public interface, so ctypes itself is used if it differs.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import addressof, c_long, get_errno
    from typing import Any

    def _open(path: str | None) -> Any: ...

    def _function(library: Any, name: str) -> Any: ...
else:
    try:
        from _ctypes import (
            FUNCFLAG_CDECL,
            FUNCFLAG_USE_ERRNO,
            CFuncPtr,
            _SimpleCData,
            addressof,
            dlopen,
            dlsym,
            get_errno,
        )

        class c_int(_SimpleCData):  # noqa: N801 - as in ctypes
            """C's int."""

            _type_ = "i"

        class c_long(_SimpleCData):  # noqa: N801
            """C's long."""

            _type_ = "l"

        class _Function(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = c_int

        def _open(path: str | None) -> "Any":
            return dlopen(path, 0)

        def _function(library: "Any", name: str) -> "Any":
            return _Function(dlsym(library, name))

    except (ImportError, AttributeError, TypeError):
        from ctypes import CDLL, addressof, c_long, get_errno

        def _open(path: str | None) -> "Any":
            return CDLL(path, use_errno=True)

        def _function(library: "Any", name: str) -> "Any":
            return library[name]


__all__ = ["CLibrary", "addressof", "c_long", "get_errno"]


class CLibrary:
    """The C library of this process, or another library; functions save errno for us.

    They return an int unless their ``restype`` differs. AttributeError for a missing function,
    OSError for a library at ``path`` that can't be loaded.
    """

    def __init__(self, path: str | None = None) -> None:
        self._library = _open(path)

    def __getattr__(self, name: str) -> "Any":
        """Look up a function when it is first used."""
        try:
            found = _function(self._library, name)
        except OSError as error:
            raise AttributeError(str(error)) from None
        setattr(self, name, found)
        return found
