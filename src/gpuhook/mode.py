"""How one container gets its GPUs: by the hook, or by what config.json can say.

Hot path: imports nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.request import Request


def resolve(mode: str, request: "Request") -> str:
    """Return hook or spec for a container; ``mode`` is the configuration's.

    In mode cdi, names of NVIDIA's automatic kind stand for the machine's own GPUs and are
    written into config.json. CDI devices never get here: ``resolve.resolve`` refuses them.
    """
    if mode == "cdi" and request.selectors:
        return "spec"
    return "spec" if mode == "spec" else "hook"
