"""gpuhook explain: what a container would get and why, without starting it."""

import os
import sys
from typing import Any

import click

from gpuhook.cli._output import config_option, format_option, print_json
from gpuhook.config import Config, load
from gpuhook.container.rootfs import Rootfs
from gpuhook.errors import GpuhookError, shown
from gpuhook.oci import jsontext
from gpuhook.oci.spec import Spec, read_spec
from gpuhook.plan import image, spec_edits
from gpuhook.plan.operations import Operation
from gpuhook.plan.planner import make_plan
from gpuhook.request import sources as environments
from gpuhook.request.reader import effective_mode
from gpuhook.resolve import Progress, Resolved, resolve
from gpuhook.vendors.nvidia import completeness
from gpuhook.vendors.nvidia.variables import VISIBLE_DEVICES

_HEADINGS = {
    "hook": "What the hook does, in order:",
    "spec": "What gpu-py writes into config.json (mode spec), in order:",
}


class Explanation:
    """A request followed through the house, as far as it gets.

    ``mode`` is how the container gets its GPUs, hook or spec; ``operations`` are what is done
    then, and ``undone`` is what only the other mode does.
    """

    def __init__(self) -> None:
        self.progress = Progress()
        self.resolved: Resolved | None = None
        self.mode: str | None = None
        self.operations: list[Operation] = []
        self.undone: list[Operation] = []
        self.error: GpuhookError | None = None
        self.why_nothing = ""

    def follow(self, spec: Spec, root_path: str | None, config_path: str | None) -> None:
        """Take the steps that runtime and hook would take, short of changing anything."""
        try:
            config = load(config_path)
            self.resolved = resolve(spec.data, config, self.progress, save=False)
            if self.resolved is None:
                self.why_nothing = _why_nothing(spec.data, config)
            else:
                spec.require_mount_namespace()
                self._plan(self.resolved, root_path, config)
        except GpuhookError as error:
            self.error = error

    def _plan(self, resolved: Resolved, root_path: str | None, config: Config) -> None:
        found = _image(root_path, config)
        plan = make_plan(resolved.request, resolved.inventory, resolved.selection, found)
        self.mode = effective_mode(config.mode, resolved.request)
        self.operations = plan.operations
        if self.mode == "spec":
            self.operations, self.undone = spec_edits.steps(plan), spec_edits.undone(plan)

    @property
    def warnings(self) -> list[str]:
        """What the container would get only in part."""
        found = self.resolved
        if found is None:
            return []
        return completeness.warnings(found.request, found.inventory)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the command's contract: every key, null where it didn't get."""
        request, inventory = self.progress.request, self.progress.inventory
        return {
            "request": request.to_json() if request else None,
            "inventory": {
                "driver_version": inventory.driver_version,
                "cuda_version": inventory.cuda_version,
                "gpus": [gpu.to_json() for gpu in inventory.gpus],
            }
            if inventory
            else None,
            "selected": list(self.resolved.selection.uuids) if self.resolved else [],
            "warnings": self.warnings,
            "mode": self.mode,
            "operations": [op.to_json() for op in self.operations],
            "undone": [op.to_json() for op in self.undone],
            "error": {"code": self.error.code, "message": str(self.error)} if self.error else None,
        }

    def to_text(self) -> str:
        """Return the same for people."""
        lines = _request_lines(self)
        if self.mode is not None:
            lines += ["", _HEADINGS[self.mode]]
            for number, operation in enumerate(self.operations, 1):
                lines.append(f"{number:4}. {operation.describe()}")
                lines.append(f"      because: {operation.reason}")
        if self.undone:
            lines += ["", "What is left undone, because config.json has no words for it:"]
            lines += [f"      {operation.describe()}" for operation in self.undone]
        if self.error is not None:
            lines += ["", f"Error ({self.error.code}): {self.error}"]
        return "\n".join(lines)


def _image(root_path: str | None, config: Config) -> image.Image:
    """Look at the image, where there is one to look at."""
    if root_path is None or not os.path.isdir(root_path):
        return image.unknown()
    with Rootfs(root_path) as root:
        return image.look(root, config)


def _request_lines(explanation: Explanation) -> list[str]:
    request, inventory = explanation.progress.request, explanation.progress.inventory
    if request is None:
        return []
    lines = [f"Ignored from {source}: {reason}" for source, reason in request.ignored]
    if request.devices is None:
        lines.append("The container asks for no GPU: nothing is done to it.")
        return [*lines, *([f"Because: {why}"] if (why := explanation.why_nothing) else [])]
    lines += [
        f"Asked for by:    {request.source}",
        f"Devices:         {', '.join(request.devices) or 'none (driver files alone)'}",
        f"Capabilities:    {', '.join(request.capabilities) or 'none'}",
        f"Requirements:    {', '.join(request.requirements) or 'none'}"
        + (" (disabled)" if request.requirements_disabled else ""),
    ]
    if inventory is not None:
        lines.append(
            f"This machine:    driver {inventory.driver_version}, CUDA {inventory.cuda_version}, "
            f"{len(inventory.gpus)} GPUs"
        )
    if explanation.resolved is not None:
        lines.append(
            f"Selected:        {', '.join(explanation.resolved.selection.uuids) or 'no GPU'}"
        )
    lines += [f"Warning:         {text}" for text in explanation.warnings]
    return lines


def _why_nothing(spec: dict[str, Any], config: Config) -> str:
    """Return why the environment asks for nothing, "" where it names devices."""
    env = environments.parse_environment((spec.get("process") or {}).get("env") or [])
    variables = [name for name in environments.items(config.swarm_resource) if name in env]
    variables = variables or [VISIBLE_DEVICES]
    what = " and ".join(variables)
    values = [env[name] for name in variables if name in env]
    names = [name for value in values for name in environments.items(value)]
    if not values:
        return f"{what} isn't set"
    if not names:
        return f"{what} is empty"
    return f"void is among the names in {what}" if "void" in names else ""


def _spelled_out(environment: tuple[str, ...], privileged: bool) -> Spec:
    bounding = ["CAP_SYS_ADMIN"] if privileged else []
    data = {
        "ociVersion": "1.0.2",
        "process": {"env": list(environment), "capabilities": {"bounding": bounding}},
        "linux": {"namespaces": [{"type": "mount"}]},
    }
    return Spec("The request", jsontext.dumps(data))


@click.command()
@click.option("--bundle", metavar="DIR", help="An OCI bundle: a folder with config.json.")
@click.option("--spec", "spec_path", metavar="FILE", help="An OCI spec (config.json).")
@click.option(
    "-e", "--env", "environment", metavar="NAME=VALUE", multiple=True,
    help="An environment variable of the container; may be repeated.",
)  # fmt: skip
@click.option("--privileged", is_flag=True, help="As if the container were privileged.")
@config_option
@format_option
def explain(
    bundle: str | None,
    spec_path: str | None,
    environment: tuple[str, ...],
    privileged: bool,
    config_path: str | None,
    output_format: str,
) -> None:
    """Show what a container would get, and why. Changes nothing, needs no root.

    The container is given by its bundle, by its spec, or spelled out with -e. The exit
    status is 1 if the container could not be started.
    """
    for word in environment:
        name, equals, _ = word.partition("=")
        if not name or not equals:
            raise click.UsageError(f"-e takes NAME=VALUE, not {shown(word)}.")
    given = [bool(bundle), bool(spec_path), bool(environment or privileged)]
    if sum(given) != 1:
        raise click.UsageError("Give one of --bundle, --spec, or the request with -e.")
    explanation = Explanation()
    try:
        if bundle or spec_path:
            spec = read_spec(spec_path or os.path.join(bundle or "", "config.json"))
            explanation.follow(spec, spec.root_path, config_path)
        else:
            explanation.follow(_spelled_out(environment, privileged), None, config_path)
    except GpuhookError as error:
        explanation.error = error
    if output_format == "json":
        print_json(explanation.to_json())
    else:
        click.echo(explanation.to_text())
    sys.exit(1 if explanation.error else 0)
