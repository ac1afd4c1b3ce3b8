"""From a spec and the configuration to what is asked for, what exists and what was selected.

The one sequence that the runtime, the hook and ``gpuhook explain`` share.
"""

from gpuhook.errors import RequestError
from gpuhook.request.reader import read_request
from gpuhook.start import preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpuhook.config import Config
    from gpuhook.inventory.model import Inventory
    from gpuhook.inventory.selection import Selection
    from gpuhook.request.reader import Request


class Progress:
    """How far the sequence got, for those who want to show a failure's circumstances."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.inventory: Inventory | None = None


class Resolved:
    """A request that can be met: with what, and by which GPUs."""

    def __init__(self, request: "Request", inventory: "Inventory", selected: "Selection") -> None:
        self.request = request
        self.inventory = inventory
        self.selection = selected


def resolve(
    spec: "dict[str, Any]",
    config: "Config",
    progress: Progress | None = None,
    *,
    save: bool = True,
    inventory: "Inventory | None" = None,
) -> Resolved | None:
    """Return how a container's request is met, None where it asks for nothing.

    Raises the GpuhookError of the step that failed; ``progress`` holds the steps before it.
    With ``save`` off, an inventory that had to be made is not saved. An ``inventory`` that is
    given is known to be the machine's.
    """
    progress = progress or Progress()
    try:
        request = progress.request = read_request(spec, config)
    except RequestError as error:
        progress.request = error.request
        raise
    if request.devices is None:
        return None
    if request.cdi_devices:
        raise RequestError(
            f"The container asks for CDI devices ({', '.join(request.cdi_devices)}), "
            "which gpuhook doesn't inject itself",
            "Ask the engine for them (docker run --device NAME), or name GPUs by index or UUID",
        )
    preload.load(preload.INVENTORY)
    from gpuhook.inventory import selection  # noqa: PLC0415
    from gpuhook.vendors.nvidia import completeness, requirements  # noqa: PLC0415 - not always needed

    if inventory is None:
        from gpuhook.inventory.cache import get_inventory  # noqa: PLC0415

        inventory = get_inventory(config, save=save)
    progress.inventory = inventory
    selected = selection.select(request, inventory)
    completeness.check(request, inventory, selected)
    requirements.check(request, inventory, selected)
    return Resolved(request, inventory, selected)
