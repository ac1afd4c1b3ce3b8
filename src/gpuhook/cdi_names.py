"""Qualified CDI device names, vendor/class=device, by the grammar of the CDI specification.

Hot path: imports nothing.
"""

_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_ALNUM = _LETTERS | frozenset("0123456789")
_CLASS = _ALNUM | frozenset("-_")
_VENDOR = _CLASS | frozenset(".")
_DEVICE = _ALNUM | frozenset("-_.:")


def parse(name: str) -> tuple[str, str, str] | None:
    """Return (vendor, class, device) of a qualified name, None if it is not one."""
    kind, equals, device = name.partition("=")
    vendor, slash, device_class = kind.partition("/")
    if not (equals and slash):
        return None
    if not _is_word(vendor, _LETTERS, _VENDOR) or not _is_word(device_class, _LETTERS, _CLASS):
        return None
    return (vendor, device_class, device) if _is_word(device, _ALNUM, _DEVICE) else None


def _is_word(text: str, first: frozenset[str], allowed: frozenset[str]) -> bool:
    return bool(text) and text[0] in first and text[-1] in _ALNUM and allowed.issuperset(text)
