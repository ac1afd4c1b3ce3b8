"""The C library's functions, by the core of ctypes without its Python half.

Importing ctypes takes half as long as an interpreter takes to start, and nearly all of that
goes into types and classes for other systems. Its core, the extension module ``_ctypes``, has
all that is needed here. It is no public interface, so where it differs ctypes itself is used.

Hot path: imports _ctypes.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import Structure, byref, c_long, c_uint64, get_errno, sizeof
    from typing import Any

    def _function(name: str) -> Any: ...
else:
    try:
        from _ctypes import (
            FUNCFLAG_CDECL,
            FUNCFLAG_USE_ERRNO,
            CFuncPtr,
            Structure,
            _SimpleCData,
            byref,
            dlopen,
            dlsym,
            get_errno,
            sizeof,
        )

        class c_int(_SimpleCData):  # noqa: N801 - as ctypes calls it
            """C's int."""

            _type_ = "i"

        class c_long(_SimpleCData):  # noqa: N801
            """C's long."""

            _type_ = "l"

        class c_uint64(_SimpleCData):  # noqa: N801
            """A 64-bit number: unsigned long long on every machine."""

            _type_ = "Q"

        class _Function(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = c_int

        _HANDLE = dlopen(None, 0)

        def _function(name: str) -> "Any":
            return _Function(dlsym(_HANDLE, name))

    except (ImportError, AttributeError, TypeError):
        from ctypes import CDLL, Structure, byref, c_long, c_uint64, get_errno, sizeof

        _LIBRARY = CDLL(None, use_errno=True)

        def _function(name: str) -> "Any":
            return _LIBRARY[name]


__all__ = ["Library", "Structure", "byref", "c_long", "c_uint64", "get_errno", "sizeof"]


class Library:
    """The C library that this process is linked with; its functions keep errno for us.

    They return an int unless their ``restype`` says otherwise. AttributeError for a function
    that the library doesn't have.
    """

    def __getattr__(self, name: str) -> "Any":
        """Find a function when it is first used."""
        try:
            found = _function(name)
        except OSError as error:
            raise AttributeError(str(error)) from None
        setattr(self, name, found)
        return found
