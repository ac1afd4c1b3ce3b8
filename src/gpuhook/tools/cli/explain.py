"""gpuhook explain: what a container would get and why, without starting it."""

import itertools
import os
import sys
from typing import Any, NamedTuple

import click

from gpuhook.base.config.loader import load
from gpuhook.base.errors import GpuhookError, shown
from gpuhook.base.oci import jsontext
from gpuhook.base.oci.spec import Spec, read_spec
from gpuhook.core.request.sources import parse_environment
from gpuhook.tools.cli import _completion as completing
from gpuhook.tools.cli import _running, _summary
from gpuhook.tools.cli._explanation import Explanation
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option, format_option, print_json
from gpuhook.tools.engines import docker_gpus, images
from gpuhook.tools.root_folder.request import CallerRequest, settings
from gpuhook.vendors import registry

_VARIABLE = next(iter(registry.BUILT_IN["nvidia"].VARIABLES))


class _ExplainedContainer(NamedTuple):
    """The container of the command line: an existing one, or one described by options."""

    container: str | None
    bundle: str | None
    spec: str | None
    image: str | None
    gpus: str | None
    environment: tuple[str, ...]
    privileged: bool
    rootfs: str | None
    devices: tuple[str, ...]
    environ: str

    def check(self) -> None:
        """Raise UsageError unless the options describe exactly one container."""
        spelled = self.image or self.environment or self.privileged or self.gpus is not None
        if self.rootfs and not (self.image or self.gpus is not None):
            spelled = True
        elif self.rootfs or self.devices or self.environ:
            raise click.UsageError(
                "--device and --environ go with --rootfs, and neither --image nor --gpus does."
            )
        if sum(map(bool, (self.container, self.bundle, self.spec, spelled))) != 1:
            raise click.UsageError(
                "Give one of CONTAINER, --bundle, --spec, or options as for docker run: "
                "--image, -e, --gpus."
            )

    def read(self, explanation: Explanation, config_path: str | None) -> Spec | None:
        """Return the container's spec, None if that of a running container isn't found."""
        if self.container:
            return _running.read_running(self.container, explanation, config_path)
        if self.bundle or self.spec:
            return read_spec(self.spec or os.path.join(self.bundle or "", "config.json"))
        if self.rootfs:
            config = load(config_path)
            asked = CallerRequest(
                settings(self.environment), self.devices, self.environ, self.privileged,
                rootfs=self.rootfs,
            )  # fmt: skip
            return asked.spec(config, registry.all_vendors(config))
        return self._spelled_out(explanation)

    def _spelled_out(self, explanation: Explanation) -> Spec:
        """Return the spec that an engine would create; EngineError for an unknown image."""
        changes = [_setting(word) for word in self.environment]
        try:
            gpus = docker_gpus.variables(self.gpus) if self.gpus is not None else []
        except ValueError as error:
            raise click.UsageError(f"{error}.") from None
        image = images.inspect(self.image) if self.image else None
        if image:
            explanation.layers, explanation.architecture = image.layers, image.architecture
        env = parse_environment(image.environment if image else ())
        for name, value in changes:
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        bounding = ["CAP_SYS_ADMIN"] if self.privileged else []
        words = [*(f"{name}={value}" for name, value in env.items()), *gpus]
        data = {
            "ociVersion": "1.0.2",
            "process": {"env": words, "capabilities": {"bounding": bounding}},
            "linux": {"namespaces": [{"type": "mount"}]},
        }
        return Spec("The request", jsontext.dumps(data))


def _setting(word: str) -> tuple[str, str | None]:
    """Return name and value of -e; the value defaults to the caller's, None if unset."""
    name, equals, value = word.partition("=")
    if not name:
        raise click.UsageError(f"-e takes NAME=VALUE or NAME, not {shown(word)}.")
    return name, value if equals else os.environ.get(name)


@command(
    examples={
        "gpuhook explain training": "Show the devices of a running container",
        f"gpuhook explain -e {_VARIABLE}=0,2": "Request two GPUs",
        "gpuhook explain --gpus 2": "Request GPUs as docker run --gpus does",
        "gpuhook explain --spec config.json -v": "Show every step for a container with this spec",
    },
)
@click.argument("container", required=False, shell_complete=completing.containers)
@click.option("--bundle", metavar="DIR", help="An OCI bundle: a folder with config.json.")
@click.option("--spec", "spec_path", metavar="FILE", help="An OCI spec (config.json).")
@click.option(
    "--image", metavar="IMAGE",
    help="An image of Docker or podman on this host; its settings apply as in docker run.",
)  # fmt: skip
@click.option(
    "-e", "--env", "environment", metavar="NAME[=VALUE]", multiple=True,
    shell_complete=completing.variables,
    help="An environment variable of the container; may be repeated. Without a value it is taken "
    "from your own environment.",
)  # fmt: skip
@click.option(
    "--gpus", metavar="GPUS",
    help="As for docker run: all, 2, device=0, '\"device=0,1\"', capabilities=video.",
)  # fmt: skip
@click.option("--privileged", is_flag=True, help="Treat the container as privileged.")
@click.option(
    "--rootfs",
    metavar="DIR",
    help="A root folder, to show what gpuhook apply would give it, with -e.",
)
@click.option(
    "--device", "devices", metavar="KIND=NAME", multiple=True,
    help="With --rootfs, a device by its CDI name; may be repeated.",
)  # fmt: skip
@click.option(
    "--environ", metavar="FILE", default="",
    help="With --rootfs, a file of NAME=VALUE lines: the folder's environment.",
)  # fmt: skip
@click.option(
    "--hook-alone", is_flag=True,
    help="Assume that podman's --hooks-dir added the hook, and the runtime isn't gpu-py.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Show every step, with its reason.")
@config_option
@format_option
def explain(
    container: str | None,
    bundle: str | None,
    spec_path: str | None,
    image: str | None,
    environment: tuple[str, ...],
    gpus: str | None,
    privileged: bool,
    rootfs: str | None,
    devices: tuple[str, ...],
    environ: str,
    hook_alone: bool,
    verbose: bool,
    config_path: str | None,
    output_format: str,
) -> None:
    """Show what a container would get, and why, or what a running one got.

    CONTAINER is a running container's id or name: root sees its devices from the start, and those
    that it would get now. Other containers are described by a bundle, a spec, or options as for
    docker run: --image, -e and --gpus. Nothing is changed, and only CONTAINER needs root. The exit
    status is 1 if the container could not be started.
    """
    what = container, bundle, spec_path, image, gpus, environment, privileged
    given = _ExplainedContainer(*what, rootfs, devices, environ)
    given.check()
    explanation = Explanation(hook_alone=hook_alone)
    try:
        spec = given.read(explanation, config_path)
        if spec is not None:
            root = spec.root_path if container or bundle or spec_path else rootfs
            explanation.follow(spec, root, config_path, folder=bool(rootfs))
    except GpuhookError as error:
        explanation.error = error
    if output_format == "json":
        print_json(explanation.to_json())
    elif verbose:
        click.echo(explanation.to_text())
    else:
        _draw(explanation)
    sys.exit(1 if explanation.error else 0)


def _draw(explanation: Explanation) -> None:
    """Print the summary."""
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    drawn: list[Any] = []
    for titled, group in itertools.groupby(_summary.rows(explanation), lambda row: bool(row.title)):
        rows = [*group]
        if titled:
            drawn.append(_screen.facts([row[:3] for row in rows]))
        else:
            drawn += [_screen.text(row.text, _screen.TONES[row.tone]) for row in rows]
    _screen.show(*drawn)
