"""gpuhook slurm: gres.conf for Slurm, and a job's devices for its containers."""

import contextlib
import os
from collections.abc import Callable, Iterator

import click

from gpuhook.ground.config.loader import load
from gpuhook.ground.errors import GpuhookError
from gpuhook.tools.cdi import write as writing
from gpuhook.tools.cli._help import group
from gpuhook.tools.cli._output import config_option, raise_last, say, warn
from gpuhook.tools.slurm import devices, gres, job, job_folder, scripts
from gpuhook.tools.slurm.cores import Cores

STDIO = "-"


@group()
def slurm() -> None:
    """Offer this host's devices to Slurm.

    gres writes what slurmd has to know, on each node as root. request runs in a job, by a line
    of oci.conf:

    \b
    RunTimeRun="gpuhook slurm request %b && gpu-py run -b %b %n.%u.%j.%s.%t"

    prolog and epilog are what the scripts of that name run, which slurm.conf names.
    """  # noqa: D301 - \b keeps click from filling the line


@slurm.command(
    "gres",
    examples={
        "gpuhook slurm gres --output /etc/slurm/gres.conf": "Write the lines of this node, as root",
        "gpuhook slurm gres --node gpu7": "Print those of a node with another name in slurm.conf",
    },
)
@config_option
@click.option(
    "--node", metavar="NAME",
    help="The NodeName in slurm.conf, or of several alike: node[0-7].  [default: the host's name]",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", default=STDIO, show_default=True,
    help="The file to replace, where it says something else; - prints it.",
)  # fmt: skip
def gres_(config_path: str | None, node: str | None, output: str) -> None:
    """Write the lines of gres.conf for the devices of this host.

    They are in the order in which Slurm numbers them; what slurm.conf needs is a comment.
    Run it where all devices can be opened: it refuses to in a job. No file is replaced while a
    driver fails, because every job may open what the file lacks.
    """
    config = load(config_path)
    machine = devices.devices_here(config)
    if output != STDIO:
        raise_last(machine.failed)  # every job may open what the file lacks
    links, unknown = devices.links(machine.devices, config)
    cores = Cores()
    entries = [_entry(each, cores, links) for each in machine.devices]
    name = os.uname().nodename.partition(".")[0] if node is None else node
    text = gres.text(entries, name)
    if output == STDIO:
        click.echo(text, nl=False)
    elif writing.write(os.path.abspath(output), text):
        say(f"wrote {os.path.abspath(output)}")
    else:
        say(f"{os.path.abspath(output)}: unchanged")
    for warning in (*machine.warnings, *unknown):
        warn(warning)
    raise_last(machine.failed)


def _entry(owned: devices.Owned, cores: Cores, links: devices.Links) -> gres.Entry:
    vendor, device = owned.vendor.names.NAME, owned.device
    near = cores.near(device.bus_id, (owned.inventory.root,))
    word, files = gres.word(owned.model, vendor), tuple(owned.files)
    return gres.Entry(vendor, word, files, near, device.id, links.get(device.id, {}))


@slurm.command(
    examples={
        "gpuhook slurm request /run/user/1000/job/bundle": "Give a bundle the job's devices",
    },
)
@config_option
@click.option(
    "--cgroup-conf", metavar="FILE", default=job.CGROUP_CONF, show_default=True,
    help="Slurm's file that says ConstrainDevices=yes; slurm.conf and gres.conf are beside it.",
)  # fmt: skip
@click.argument("bundle", metavar="BUNDLE")
def request(config_path: str | None, cgroup_conf: str, bundle: str) -> None:
    """Let the container of BUNDLE ask for the devices that Slurm gave to this job.

    Runs in the job, before gpu-py, by a pattern of oci.conf, in which %b is the bundle. The devices
    are those of gres.conf that the kernel lets this process open; no variable adds one.
    """
    job.write_request(bundle, load(config_path), cgroup_conf)


folder_argument = click.argument("folder", metavar="[FOLDER]", default=job_folder.DEFAULT)


@slurm.command(
    examples={"gpuhook slurm prolog": "Make a job's folder; slurmd's environment says whose"},
)
@folder_argument
def prolog(folder: str) -> None:
    """Make the folder in which a job's containers are kept, as root, before the job starts.

    In FOLDER, which is root's (/run/slurm-containers unless named), the job gets USER.ID, for its
    user. What users left or mounted in its place is moved away. It fails, and Slurm drains the
    node, only where root has put something else there, or others may change the way to it.
    """
    with _logging("slurm-prolog"):
        scripts.prolog(folder, scripts.job_of(os.environ), _tell("slurm-prolog"))


@slurm.command(
    examples={"gpuhook slurm epilog": "Clean up after a job; slurmd's environment says which"},
)
@folder_argument
def epilog(folder: str) -> None:
    """End what is left of a job's containers, as root, and remove what prolog made.

    Processes in the job's cgroups are killed, except root's, and what is mounted in its folder is
    detached. What can't be removed in time is removed after the next job.
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
