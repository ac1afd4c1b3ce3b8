"""The C library's functions, by the core of ctypes without its Python half.

Importing ctypes takes half as long as an interpreter takes to start, and nearly all of that
goes into types and classes for other systems. Its core, the extension module ``_ctypes``, has
all that is needed here. It is no public interface, so where it differs ctypes itself is used.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ctypes import c_long, get_errno
    from typing import Any

    def _function(name: str) -> Any: ...
else:
    try:
        from _ctypes import (
            FUNCFLAG_CDECL,
            FUNCFLAG_USE_ERRNO,
            CFuncPtr,
            _SimpleCData,
            dlopen,
            dlsym,
            get_errno,
        )

        class c_int(_SimpleCData):  # noqa: N801 - as ctypes calls it
            """C's int."""

            _type_ = "i"

        class c_long(_SimpleCData):  # noqa: N801
            """C's long."""

            _type_ = "l"

        class _Function(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = c_int

        _HANDLE = dlopen(None, 0)

        def _function(name: str) -> "Any":
            return _Function(dlsym(_HANDLE, name))

    except (ImportError, AttributeError, TypeError):
        from ctypes import CDLL, c_long, get_errno

        _LIBRARY = CDLL(None, use_errno=True)

        def _function(name: str) -> "Any":
            return _LIBRARY[name]


__all__ = ["Library", "c_long", "get_errno"]


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
