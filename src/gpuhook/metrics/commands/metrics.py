"""gpuhook metrics: each container's use of the devices, for Prometheus."""

import os
import time

import click

from gpuhook.base.config.model import Config
from gpuhook.base.errors import MetricsError, printable
from gpuhook.metrics import service
from gpuhook.metrics.model import SeriesOptions
from gpuhook.metrics.observer import Observer
from gpuhook.metrics.web_files import WebFiles
from gpuhook.monitor import DRIVER_ROOT_IN_POD, service_metrics
from gpuhook.monitor.followed import FollowedConfig
from gpuhook.monitor.telemetry import PATIENCE
from gpuhook.tools.cli._containers import pod_resources_option
from gpuhook.tools.cli._help import command
from gpuhook.tools.cli._output import config_option

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
@click.option(
    "--web-config", metavar="FILE",
    help="TLS and passwords, in the file that Prometheus' exporters call web.config.file.",
)  # fmt: skip
@click.option("--cadvisor", is_flag=True, help="Add cAdvisor's container_accelerator_* series.")
@click.option("--dcgm", is_flag=True, help="Add the DCGM_FI_DEV_* series that NVML knows.")
@pod_resources_option
@click.option(
    "--driver-root-ctr-path", default=DRIVER_ROOT_IN_POD, show_default=True,
    metavar="DIR", help="In a pod: where the node's driver root is mounted.",
)  # fmt: skip
@config_option
def metrics(
    listen: str | None,
    textfile: str | None,
    web_config: str | None,
    cadvisor: bool,
    dcgm: bool,
    pod_resources: str,
    driver_root_ctr_path: str,
    config_path: str | None,
) -> None:
    """Serve metrics of the devices, and of each container's use of them, to Prometheus.

    Runs until it is stopped (SIGTERM, SIGINT). SIGHUP releases the drivers for half a
    minute, so that they can be updated; without requests that happens after two minutes.
    """
    if textfile == "":
        raise MetricsError("--textfile names no file", "Name one, or leave the option out")
    if listen and textfile is not None:
        raise click.UsageError("--textfile serves nothing: it doesn't go with --listen.")
    if web_config is not None and textfile is not None:
        raise click.UsageError("--textfile serves nothing: it doesn't go with --web-config.")
    options = SeriesOptions(cadvisor=cadvisor, dcgm=dcgm)
    followed = FollowedConfig(config_path)

    def current() -> Config:
        config = followed.config
        if os.path.isdir(driver_root_ctr_path):
            config.root = driver_root_ctr_path
        return config

    config = current()
    if textfile is not None:
        from gpuhook.metrics import exporter  # noqa: PLC0415 - it needs prometheus_client

        patience = max(PATIENCE, 2 * config.nvml_timeout)  # there is no other poll
        observer = Observer(config, readings=dcgm, patience=patience, pod_resources=pod_resources)
        before = time.monotonic()
        snapshot = observer.take()
        observer.let_go()
        exporter.write(snapshot, options, time.monotonic() - before, textfile)
        for problem in (*snapshot.problems, *snapshot.notes):
            _tell(problem)
        return

    def observing() -> Observer:
        return Observer(
            current(), readings=dcgm, prepared=True, pod_resources=pod_resources, tell=_tell
        )

    def renewed() -> Observer | None:
        return observing() if followed.has_changed(_tell) else None

    address = listen if listen is not None else _ADDRESS
    web = None if web_config is None else WebFiles(web_config)

    def ready(scheme: str) -> None:
        _tell(f"Listening at {address}{'' if web is None else f' ({scheme})'}")

    with service_metrics.listen(address) as listener:
        service.Service(observing(), options, _tell, web, renewed).run(listener, ready)


def _tell(text: str) -> None:
    click.echo(f"gpuhook: {printable(text)}.", err=True)
