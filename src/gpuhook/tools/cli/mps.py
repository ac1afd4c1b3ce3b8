"""gpuhook mps: run NVIDIA's MPS, so that containers share GPUs."""

import signal
import sys
from functools import partial
from types import FrameType
from typing import Any

import click

from gpuhook.base.config.loader import load
from gpuhook.monitor.followed import FollowedConfig, report_ready
from gpuhook.monitor.mps.keep import MpsController
from gpuhook.monitor.telemetry import ids_in_use
from gpuhook.tools.cli._containers import pod_resources_option
from gpuhook.tools.cli._help import SecondsParam, group
from gpuhook.tools.cli._output import config_option, format_option, print_json
from gpuhook.tools.running.mps_status import status as status_of

_MEBI = 1 << 20
_SHORT = 12  # characters of a container's id


@group()
def mps() -> None:
    """Share NVIDIA GPUs between containers by MPS, as [gpuhook.mps] in config.toml says.

    Each container that is given such a GPU is a client of one control daemon, which these
    commands manage. gpuhook-mps.service runs serve, and stop at its end.
    """


@mps.command(examples={"gpuhook mps start": "Start MPS for the devices of config.toml"})
@pod_resources_option
@config_option
def start(pod_resources: str, config_path: str | None) -> None:
    """Start the control daemon, and set the compute mode of its GPUs.

    If it runs and responds, nothing is done; after a change of [gpuhook.mps] it is restarted,
    and containers that use it must be restarted, too. Needs root. Only serve monitors the
    daemon.
    """
    config = load(config_path)
    in_use = partial(ids_in_use, config, pod_resources)
    state = MpsController(config, click.echo, in_use=in_use).start()
    click.echo(f"MPS {state.version} is running")


@mps.command(examples={"gpuhook mps stop": "End MPS, and set the compute modes back"})
@config_option
def stop(config_path: str | None) -> None:
    """Stop the control daemon, and restore the compute mode of its GPUs.

    Works also after it was killed. Containers that use it lose their GPUs' work.
    """
    done = MpsController(load(config_path), click.echo).stop()
    click.echo("MPS is stopped" if done else "MPS wasn't started")


@mps.command(examples={"gpuhook mps serve": "What gpuhook-mps.service runs"})
@click.option(
    "--interval",
    default=10.0,
    show_default=True,
    type=SecondsParam(0.1, 3600.0),
    metavar="SECONDS",
    help="The time between two looks at the daemon.",
)
@pod_resources_option
@config_option
def serve(interval: float, pod_resources: str, config_path: str | None) -> None:
    """Start the control daemon and monitor it, until stopped (SIGTERM, SIGINT).

    A daemon that doesn't respond is restarted, after a pause that grows to a minute.
    """
    followed = FollowedConfig(config_path)
    in_use = partial(ids_in_use, followed.config, pod_resources)
    keeper = MpsController(followed.config, click.echo, in_use=in_use, followed=followed)

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        keeper.serve(interval, report_ready)
    finally:
        keeper.stop()


@mps.command(
    examples={
        "gpuhook mps status": "Show who shares which GPU",
        "gpuhook mps status --format json": "The same for a program",
    }
)
@format_option
@config_option
def status(output_format: str, config_path: str | None) -> None:
    """Show the control daemon, its devices and limits, and the containers that are its clients.

    Status 1 if the daemon doesn't respond, or doesn't run.
    """
    found = status_of(load(config_path))
    if output_format == "json":
        print_json(found)
    elif found is None:
        click.echo("MPS isn't started")
    else:
        _print(found)
    if found is None or found["problem"]:
        sys.exit(1)


def _print(found: dict[str, Any]) -> None:
    from gpuhook.tools.cli import _screen  # noqa: PLC0415 - costs a tenth of a second

    threads = found["active_thread_percentage"]
    words = f"version {found['version']}, process {found['process'] or 'none'}"
    facts = [
        ("MPS", found["problem"] or words, "bad" if found["problem"] else "good"),
        ("Threads", f"{threads} % for each container" if threads else "no limit", ""),
        ("Containers", f"{found['most_containers']} for each GPU at most", ""),
    ]
    for each in found["devices"]:
        limit = f"{each['memory'] // _MEBI} MiB for each container" if each["memory"] else ""
        facts.append((f"GPU {each['index']}", limit or "no limit of memory", ""))
    if found["others"]:
        facts.append(("Other clients", ", ".join(map(str, found["others"])), ""))
    _screen.show(_screen.facts(facts))
    labels = {each["uuid"]: str(each["index"]) for each in found["devices"]}
    rows = [
        (
            each["name"] or each["pod"] or each["id"][:_SHORT] or f"process {each['process']}",
            ", ".join(labels.get(uuid, uuid) for uuid in each["devices"]),
            each["place"],
            ", ".join(map(str, each["clients"])),
        )
        for each in found["containers"]
    ]
    click.echo()
    if rows:
        header = ("CONTAINER", "GPU", "PLACE", "CLIENTS")
        _screen.show(_screen.table(header, rows, less=("PLACE",), wrap="CLIENTS"))
    else:
        click.echo("No container shares a GPU")
