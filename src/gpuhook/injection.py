"""The hook's work for one container: what can be done before its process exists, and the rest.

The hook does both at once. The helper does the first while the low-level runtime is busy
making the container, and the rest when the hook asks for it.

Hot path: imports all that touches the driver or the container.
"""

from gpuhook import completeness, image, inject, log, records
from gpuhook.errors import GpuhookError, InjectError
from gpuhook.plan import make_plan
from gpuhook.rootfs import Rootfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuhook.config import Config
    from gpuhook.container import Container
    from gpuhook.image import Image
    from gpuhook.oci import Spec, State
    from gpuhook.plan import Plan
    from gpuhook.resolve import Resolved


class Injection:
    """One container's injection; raises the GpuhookError of what fails."""

    def __init__(self, spec: "Spec", config: "Config", resolved: "Resolved") -> None:
        """Take what the container asks for and what is selected for it."""
        self._spec = spec
        self._config = config
        self._resolved = resolved
        self._image: Image | None = None
        self._plan: Plan | None = None

    def begin(self) -> None:
        """Prepare for the image as it lies in the bundle; ``finish`` checks that it is so."""
        try:
            with Rootfs(self._spec.root_path) as root:
                self._prepare(image.look(root, self._config))
        except (OSError, GpuhookError):
            return  # ``finish`` does it all, and says what is wrong

    def _prepare(self, found: "Image") -> "Plan":
        """Return the prepared plan for an image; the one at hand if it is for such an image."""
        if self._plan is not None:
            if self._image is not None and image.same(self._image, found):
                return self._plan
            inject.close(self._plan)
            self._plan = None
        resolved = self._resolved
        plan = make_plan(resolved.request, resolved.inventory, resolved.selection, found)
        with Rootfs(resolved.inventory.root) as host:
            inject.prepare(plan, host)
        self._plan, self._image = plan, found
        return plan

    def finish(self, state: "State") -> None:
        """Inject into the container of that state, and log it."""
        spec, config = self._spec, self._config
        spec.require_mount_namespace()
        with inject.open_container(state.pid, state.root or spec.root_path) as container:
            plan = self._prepare(_look(container, config))
            resolved = self._resolved
            record = records.describe(
                state, spec.data.get("annotations"), resolved.request, resolved.selection, plan
            )
            with records.Written(config.state_dir, container.process, record):
                how = inject.allow_devices(
                    container.process, plan.devices, spec.device_rules, no_cgroups=config.no_cgroups
                )
                inject.apply(plan, container)
        if config.cli_debug:
            self._log(state.container_id, how, container.skipped)

    def _log(self, container_id: str, cgroup: str, skipped: list[str]) -> None:
        resolved = self._resolved
        log.append(
            self._config.cli_debug,
            {
                "level": "info",
                "msg": "injected",
                "time": log.timestamp(),
                "container": container_id,
                "devices": list(resolved.selection.uuids),
                "cgroup": cgroup,
                "skipped": skipped,
                "warnings": completeness.warnings(resolved.request, resolved.inventory),
            },
        )


def _look(container: "Container", config: "Config") -> "Image":
    try:
        return image.look(container, config)
    except OSError as error:
        raise InjectError(
            f"The image can't be looked at: {error.strerror} ({error.filename})",
            "Mend or remove that path in the image",
        ) from None
