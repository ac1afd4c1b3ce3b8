"""gpuhook slurm: gres.conf for Slurm, and a job's devices for its containers."""

import contextlib
import os
from collections.abc import Callable, Iterator

import click

from gpuhook.base import names
from gpuhook.base.config.loader import load
from gpuhook.base.errors import GpuhookError
from gpuhook.hpc.slurm import devices, gres, job, job_folder, oci_conf, scripts
from gpuhook.hpc.slurm.cores import Cores
from gpuhook.monitor.host.driver_program import our_program
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cli._help import group
from gpuhook.tools.cli._output import config_option, raise_last, say, warn

STDIO = "-"


@group()
def slurm() -> None:
    """Offer this host's devices to Slurm.

    gres writes gres.conf for slurmd, and oci writes oci.conf, on each node as root. request runs
    in a job, from a line of oci.conf. prolog and epilog run as Prolog and Epilog in slurm.conf.
    """


@slurm.command(
    "gres",
    examples={
        "gpuhook slurm gres --output /etc/slurm/gres.conf": "Write this node's lines, as root",
        "gpuhook slurm gres --node gpu7": "Print the lines for another NodeName",
    },
)
@config_option
@click.option(
    "--node", metavar="NAME",
    help="The NodeName in slurm.conf, or a range of nodes: node[0-7].  [default: the host name]",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", default=STDIO, show_default=True,
    help="The file to write if its contents change; - prints to stdout.",
)  # fmt: skip
def gres_(config_path: str | None, node: str | None, output: str) -> None:
    """Write the lines of gres.conf for the devices of this host.

    They are in Slurm's own order; the lines for slurm.conf are a comment.
    Run it where all devices can be opened: it fails inside a job. No file is replaced while a
    driver fails, because jobs may open all devices that the file lacks.
    """
    config = load(config_path)
    machine = devices.devices_here(config)
    if output != STDIO:
        raise_last(machine.failed)  # every job may open the devices that the file lacks
    links, unknown = devices.links(machine.devices, config)
    cores = Cores()
    entries = [_entry(each, cores, links) for each in machine.devices]
    name = os.uname().nodename.partition(".")[0] if node is None else node
    _write(output, gres.text(entries, name))
    for warning in (*machine.warnings, *unknown):
        warn(warning)
    raise_last(machine.failed)


def _entry(owned: devices.VendorDevice, cores: Cores, links: devices.Links) -> gres.GresEntry:
    vendor, device = owned.vendor.names.NAME, owned.device
    near = cores.near(device.bus_id, (owned.inventory.root,))
    word, files = gres.word(owned.model, vendor), tuple(owned.files)
    return gres.GresEntry(vendor, word, files, near, device.id, links.get(device.id, {}))


@slurm.command(
    examples={
        "gpuhook slurm oci --output /etc/slurm/oci.conf": "Write the file, as root",
        "gpuhook slurm oci": "Print its lines",
    },
)
@click.option(
    "--folder", metavar="DIR", default=job_folder.DEFAULT, show_default=True,
    help="Folder in which prolog creates one for each job.",
)  # fmt: skip
@click.option(
    "--cgroup-conf", metavar="FILE",
    help="Slurm's file with ConstrainDevices=yes, if it isn't the default one of request.",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", default=STDIO, show_default=True,
    help="The file to write if its contents change; - prints to stdout.",
)  # fmt: skip
def oci(folder: str, cgroup_conf: str | None, output: str) -> None:
    """Write oci.conf, with which slurmd starts a job's container with the job's devices.

    It calls gpuhook and gpu-py by their paths on this node. Its lines for query, kill and delete
    do nothing: slurmd would run them as root, outside the job's cgroup.
    """
    programs = (our_program("gpuhook"), our_program(names.RUNTIME))
    _write(output, oci_conf.text(*programs, folder, cgroup_conf))


def _write(output: str, text: str) -> None:
    """Print a text, or write it to a file if that differs."""
    if output == STDIO:
        click.echo(text, nl=False)
    elif writing.write(os.path.abspath(output), text):
        say(f"wrote {os.path.abspath(output)}")
    else:
        say(f"{os.path.abspath(output)}: unchanged")


@slurm.command(
    examples={
        "gpuhook slurm request /run/user/1000/job/bundle": "Request the job's devices for a bundle",
    },
)
@config_option
@click.option(
    "--cgroup-conf", metavar="FILE", default=job.CGROUP_CONF, show_default=True,
    help="Slurm's file with ConstrainDevices=yes; slurm.conf and gres.conf are in its folder.",
)  # fmt: skip
@click.argument("bundle", metavar="BUNDLE")
def request(config_path: str | None, cgroup_conf: str, bundle: str) -> None:
    """Request the devices that Slurm allocated to this job for the container of BUNDLE.

    Runs in the job, before gpu-py, from a line of oci.conf in which %b is the bundle. The devices
    are those of gres.conf that the kernel lets this process open; variables can't add any.
    """
    job.write_request(bundle, load(config_path), cgroup_conf)


folder_argument = click.argument("folder", metavar="[FOLDER]", default=job_folder.DEFAULT)


@slurm.command(
    examples={"gpuhook slurm prolog": "Create a job's folder; slurmd sets the job's variables"},
)
@folder_argument
def prolog(folder: str) -> None:
    """Create the folder for a job's containers, as root, before the job starts.

    It is USER.ID in FOLDER (default: /run/slurm-containers), which belongs to root. Leftovers and
    mounts of users in its place are moved away. It fails, and Slurm drains the node, only if root
    has put something else there, or other users may change a part of its path.
    """
    with _logging("slurm-prolog"):
        scripts.prolog(folder, scripts.job_of(os.environ), _tell("slurm-prolog"))


@slurm.command(
    examples={"gpuhook slurm epilog": "Clean up after a job; slurmd sets the job's variables"},
)
@folder_argument
def epilog(folder: str) -> None:
    """Kill a job's remaining processes, as root, and remove the folder that prolog created.

    Processes in the job's cgroups are killed, except root's, and mounts in its folder are
    detached. Files that can't be removed in time are removed after the next job.
    """
    with _logging("slurm-epilog"):
        scripts.epilog(folder, scripts.job_of(os.environ), _tell("slurm-epilog"))


def _tell(name: str) -> Callable[[str], None]:
    """Return a function that warns, also in the system's log: slurmd discards printed output."""

    def tell(text: str) -> None:
        warn(text)
        scripts.log(name, text)

    return tell


@contextlib.contextmanager
def _logging(name: str) -> Iterator[None]:
    """Write an error to the system's log, too."""
    try:
        yield
    except GpuhookError as error:
        scripts.log(name, str(error))
        raise
