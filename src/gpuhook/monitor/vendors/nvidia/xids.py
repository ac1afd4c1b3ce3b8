"""NVIDIA's errors by their numbers, XIDs: their meanings, and their effects on the device."""

from collections.abc import Mapping

from gpuhook.monitor.vendor_parts import APPLICATION, FATAL, IGNORE

EVERY = 0  # stands for all XIDs in an administrator's settings; there is no XID 0
# Variables of NVIDIA's plugin: XIDs to ignore, and XIDs to heed.
DISABLED, ENABLED = "DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS"
_MOST = (1 << 64) - 1  # an XID's number has 64 bits
_ALL = ("all", "xids")


# NVML's recovery actions (nvmlDeviceGpuRecoveryAction_t) that need an unused GPU: resets of it and
# of its bus, with or without draining it before, and a reboot of the node or the whole system.
_NEEDS_NOBODY = {1, 2, 4, 6, 7}


def must_be_left(event: Mapping[str, object]) -> bool:
    """Tell whether a GPU recovers only when nothing uses it, by NVML's action for an error."""
    return event.get("recovery") in _NEEDS_NOBODY


def _span(first: int, last: int, action: str, words: str) -> dict[int, tuple[str, str]]:
    return dict.fromkeys(range(first, last + 1), (action, words))


# NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors), by its immediate action for GPUs since
# Ampere: a reset or a reboot is fatal. XIDs that aren't listed are fatal, too, to be on the safe
# side. Each has a short description for the log.
XIDS: Mapping[int, tuple[str, str]] = {
    8: (APPLICATION, "GPU stopped processing"),
    11: (APPLICATION, "invalid or corrupted push buffer"),
    13: (APPLICATION, "graphics engine exception"),
    31: (APPLICATION, "memory page fault"),
    32: (APPLICATION, "push buffer error"),
    **_span(39, 41, APPLICATION, "copy engine error"),
    43: (APPLICATION, "channel stopped by a verification error"),
    45: (IGNORE, "channel removed after another error"),
    46: (FATAL, "GPU stopped processing"),
    48: (FATAL, "double bit ECC error"),
    60: (APPLICATION, "security engine error"),
    61: (FATAL, "breakpoint of the power management unit"),
    62: (FATAL, "power management unit halted"),
    63: (IGNORE, "memory row or page retired"),
    64: (FATAL, "memory row or page could not be retired"),
    66: (IGNORE, "illegal access by firmware"),
    67: (IGNORE, "verification error of firmware"),
    68: (APPLICATION, "video decoder error"),
    69: (APPLICATION, "graphics engine class error"),
    **_span(70, 72, APPLICATION, "copy engine error"),
    74: (FATAL, "NVLink error"),
    **_span(75, 77, APPLICATION, "copy engine error"),
    79: (FATAL, "GPU has fallen off the bus"),
    80: (APPLICATION, "corrupted data sent to the GPU"),
    82: (APPLICATION, "JPEG engine error"),
    **_span(83, 84, APPLICATION, "video decoder error"),
    85: (APPLICATION, "copy engine error"),
    86: (APPLICATION, "optical flow engine error"),
    **_span(88, 89, APPLICATION, "video decoder error"),
    92: (IGNORE, "many single bit ECC errors"),
    93: (IGNORE, "InfoROM can't be erased any more"),
    94: (APPLICATION, "contained memory error"),
    95: (FATAL, "uncontained memory error"),
    **_span(96, 98, APPLICATION, "video decoder error"),
    **_span(99, 105, APPLICATION, "JPEG engine error"),
    **_span(106, 107, IGNORE, "test message"),
    108: (IGNORE, "NVLink address translation error of a peer"),
    109: (FATAL, "context switch timeout"),
    110: (FATAL, "security fault"),
    119: (FATAL, "timeout of the GPU's system processor"),
    120: (FATAL, "error of the GPU's system processor"),
    121: (IGNORE, "link between chips corrected an error"),
    **_span(126, 135, APPLICATION, "copy engine error"),
    136: (FATAL, "link training failed"),
    137: (IGNORE, "NVLink privilege error of a peer"),
    139: (APPLICATION, "optical flow engine error"),
    140: (FATAL, "unrecoverable ECC error"),
    141: (IGNORE, "error on the fast path"),
    143: (FATAL, "GPU initialization failed"),
    **_span(144, 150, FATAL, "NVLink error"),
    **_span(152, 153, IGNORE, "deep learning accelerator error"),
    # Reports the action for another XID, which has come before it.
    154: (IGNORE, "recovery action changed"),
    155: (FATAL, "NVLink error"),
    156: (FATAL, "resource retired"),
    157: (IGNORE, "resource could not be retired"),
    158: (FATAL, "fatal timeout"),
    **_span(160, 161, IGNORE, "channel retired"),
    **_span(162, 165, IGNORE, "power smoothing changed"),
}


def read_xids(text: str) -> set[int]:
    """Return the XIDs of a list as NVIDIA's plugin reads it; only ``EVERY`` for "all" or "xids".

    Words that aren't numbers are skipped; case and blanks are ignored.
    """
    found = set()
    for word in (each.strip() for each in text.lower().split(",")):
        if word in _ALL:
            return {EVERY}
        if word.isascii() and word.isdecimal() and len(word) <= len(str(_MOST)):
            found.add(int(word))
    return {number for number in found if number <= _MOST}


def policy(environ: Mapping[str, str]) -> tuple[bool, dict[int, str]]:
    """Return whether devices are watched, and the changes to the table of XIDs.

    They come from DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS, with the meanings of
    NVIDIA's plugin: an enabled XID is fatal and a disabled one is not, enabling wins, "all" is
    every XID, and if all are disabled, then nothing is watched.
    """
    disabled = read_xids(environ.get(DISABLED, ""))
    enabled = read_xids(environ.get(ENABLED, ""))
    if EVERY in enabled:
        return True, {EVERY: FATAL}
    settings = {**dict.fromkeys(disabled, IGNORE), **dict.fromkeys(enabled, FATAL)}
    return EVERY not in disabled, settings


def action(xid: int, settings: Mapping[int, str]) -> str:
    """Return an XID's effect on its device, one of ACTIONS; ``settings`` override the table."""
    known = XIDS.get(xid, (FATAL, ""))[0]
    return settings.get(xid) or settings.get(EVERY) or known


def describe(xid: int) -> str:
    """Return an XID's number with its meaning, if known."""
    words = XIDS.get(xid, ("", ""))[1]
    return f"XID {xid} ({words})" if words else f"XID {xid}"
