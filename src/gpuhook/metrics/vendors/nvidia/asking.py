"""Queries of NVML for values that a GPU or a driver may not support."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by valueType
ALL_LINKS = 0xFFFFFFFF  # a scope of fields: the sum over all NVLinks


def ask(pynvml: "Any", function: str, *words: "Any") -> "Any":
    """Return NVML's result, None if it isn't supported here.

    Raises NVMLError for a lost GPU.
    """
    try:
        return getattr(pynvml, function)(*words)
    except AttributeError:
        return None  # a pynvml that is older than the call
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def fields(
    pynvml: "Any", handle: "Any", asked: "Mapping[str, int | tuple[int, int]]"
) -> "dict[str, int | float]":
    """Return values of a device by the caller's names, without unsupported ones.

    Their units are those of NVML's fields, which nvml.h states with each.
    ``asked`` are NVML_FI_DEV_... of nvml.h, each with a scope if it needs one.
    """
    values = ask(pynvml, "nvmlDeviceGetFieldValues", handle, [*asked.values()])
    return {
        name: getattr(value.value, _MEMBERS[value.valueType])
        for name, value in zip(asked, values or (), strict=False)
        if value.nvmlReturn == pynvml.NVML_SUCCESS and value.valueType < len(_MEMBERS)
    }
