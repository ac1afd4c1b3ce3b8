"""Kubernetes' quantities: 8Gi, 500M, 1e9, or a number."""

import re
from decimal import Decimal, InvalidOperation
from math import ceil

_FORM = re.compile(
    r"(\d{1,20}(?:\.\d{1,20})?)(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|[eE]\d{1,2})?", re.ASCII
)
_POWERS = {letter: power for power, letter in enumerate("kMGTPE", start=1)}
_MOST = 1 << 60


def bytes_of(text: object) -> int | None:
    """Return a quantity of whole bytes (or units), more than 0; None for anything else.

    Source: apimachinery's pkg/api/resource/quantity.go. Fractions of a byte are rounded up.
    """
    match = _FORM.fullmatch(str(text)) if isinstance(text, (str, int)) else None
    if match is None or isinstance(text, bool):
        return None
    number, unit = match.groups()
    try:
        value = Decimal(number)
    except InvalidOperation:
        return None
    if unit and unit[0] in "eE" and len(unit) > 1 and unit[1:].isdecimal():
        value *= Decimal(10) ** int(unit[1:])
    elif unit:
        base = 1024 if unit.endswith("i") else 1000
        value *= Decimal(base) ** _POWERS[unit[0].replace("K", "k")]
    found = ceil(value)
    return found if 0 < found <= _MOST else None
