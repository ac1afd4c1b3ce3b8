"""gpuhook metrics: who uses which device how much, for Prometheus."""

import time

import click

from gpuhook.ground.config.loader import load
from gpuhook.ground.errors import MetricsError, printable
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option
from gpuhook.tools.metrics.kubelet import SOCKET
from gpuhook.tools.metrics.observer import Observer
from gpuhook.tools.metrics.telemetry import PATIENCE

_ADDRESS = "127.0.0.1:9836"


@command(
    examples={
        "gpuhook metrics --listen 0.0.0.0:9836": "Serve metrics to a Prometheus on another machine",
        "gpuhook metrics --textfile /srv/metrics/gpus.prom": "Write them for node_exporter",
    },
)
@click.option(
    "--listen", metavar="HOST:PORT", help=f"Where to serve /metrics.  [default: {_ADDRESS}]"
)  # fmt: skip
@click.option(
    "--textfile", metavar="FILE",
    help="Serve nothing: write the metrics once and end; node_exporter takes files in .prom.",
)  # fmt: skip
@click.option("--cadvisor", is_flag=True, help="Add cAdvisor's container_accelerator_* series.")
@click.option("--dcgm", is_flag=True, help="Add the DCGM_FI_DEV_* series that NVML knows.")
@click.option(
    "--pod-resources", default=SOCKET, show_default=True, metavar="SOCKET",
    help="Where to ask the kubelet for pods' devices.",
)  # fmt: skip
@config_option
def metrics(
    listen: str | None,
    textfile: str | None,
    cadvisor: bool,
    dcgm: bool,
    pod_resources: str,
    config_path: str | None,
) -> None:
    """Tell Prometheus what the devices do, and how much of them each container uses.

    Runs until it is told to stop (SIGTERM, SIGINT). SIGHUP lets go of the drivers for half a
    minute, so that they can be updated; without requests that happens after two minutes.
    """
    from gpuhook.tools.metrics import exporter, serve  # noqa: PLC0415 - they need prometheus_client

    if textfile == "":
        raise MetricsError("--textfile names no file", "Name one, or leave the option out")
    if listen and textfile is not None:
        raise click.UsageError("--textfile serves nothing: it doesn't go with --listen.")
    options = exporter.SeriesOptions(cadvisor=cadvisor, dcgm=dcgm)
    config = load(config_path)
    if textfile is not None:
        patience = max(PATIENCE, 2 * config.nvml_timeout)  # there is no other look
        observer = Observer(config, readings=dcgm, patience=patience, pod_resources=pod_resources)
        before = time.monotonic()
        snapshot = observer.take()
        observer.let_go()
        exporter.write(snapshot, options, time.monotonic() - before, textfile)
        for problem in snapshot.problems:
            _tell(problem)
        return
    observer = Observer(
        config, readings=dcgm, prepared=True, pod_resources=pod_resources, tell=_tell
    )
    address = listen if listen is not None else _ADDRESS
    with serve.listen(address) as listener:
        _tell(f"Listening at {address}")
        serve.Service(observer, options, _tell).run(listener)


def _tell(text: str) -> None:
    click.echo(f"gpuhook: {printable(text)}.", err=True)
