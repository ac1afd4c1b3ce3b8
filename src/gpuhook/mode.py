"""How one container gets its devices: the configured mode, seen with what it asks for.

Hot path: imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.request import Request


def resolve(mode: str, request: "Request") -> str:
    """Return hook, spec or cdi for a container; ``mode`` is the configuration's, or auto.

    CDI names can be had in one way only, whatever is configured. In mode cdi, names of
    NVIDIA's automatic kind stand for the machine's own GPUs and are written into config.json.
    """
    if request.cdi_devices:
        return "cdi"
    if mode == "cdi":
        return "spec" if request.selectors else "cdi"
    return "hook" if mode == "auto" else mode
