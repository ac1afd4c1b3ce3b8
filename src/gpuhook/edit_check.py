"""Does config.json allow devices that the container doesn't get? The check of a repeated edit.

The launcher may write into config.json what Python wrote for an earlier container that asked
for the same (edit_records). Our hook's arguments in it say which devices that allowed. The
hook, which has read the request and looked at the machine anew, compares before anything of
the container runs.

Hot path: imports errors.
"""

from gpuhook.errors import EditError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

    from gpuhook.config import Config
    from gpuhook.oci import Spec

ALLOWED_OPTION = "--allowed"
_HOOK_NAME = "gpuhook-prestart"


def option(pairs: "list[tuple[int, int]]") -> list[str]:
    """Return the words of our hook that say which (major, minor) were allowed."""
    return [ALLOWED_OPTION, ",".join(f"{major}:{minor}" for major, minor in pairs)]


def check(spec: "Spec", devices: "Container[tuple[int, int]]", config: "Config") -> None:
    """Raise EditError if a repeated edit has allowed something else than these devices.

    Then nothing is repeated any more until Python has made the edits anew.
    """
    for hook in spec.hooks("prestart"):
        extra = [pair for pair in allowed(hook.get("args")) if pair not in devices]
        if extra:
            from gpuhook import edit_records  # noqa: PLC0415 - slow, and hardly ever needed

            edit_records.forget(config)
            names = ", ".join(f"{major}:{minor}" for major, minor in extra)
            raise EditError(
                f"config.json allows the devices {names}, as for an earlier container that asked"
                " for the same, and this one doesn't get them",
                "Start the container again",
            )


def allowed(args: "Any") -> list[tuple[int, int]]:
    """Return the devices that a hook's arguments name; none for one that isn't ours."""
    if not isinstance(args, list) or args[:1] != [_HOOK_NAME] or ALLOWED_OPTION not in args:
        return []
    text = args[args.index(ALLOWED_OPTION) + 1]
    pairs = [pair.split(":") for pair in text.split(",") if pair]
    return [(int(major), int(minor)) for major, minor in pairs]
