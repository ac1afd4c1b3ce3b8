"""Commands for Slurm and root folders, nspawn machines and LXC (``tools.extensions``)."""

COMMANDS = {
    "apply": (
        "gpuhook.hpc.commands.apply",
        "Add devices to a root folder, without an engine.",
        "Folders and units",
    ),
    "lxc-lines": (
        "gpuhook.hpc.commands.lxc_lines",
        "Print lines that add devices to an LXC container.",
        "Folders and units",
    ),
    "nspawn-arguments": (
        "gpuhook.hpc.commands.units",
        "Print systemd-nspawn arguments that add devices.",
        "Folders and units",
    ),
    "slurm": (
        "gpuhook.hpc.commands.slurm",
        "Write Slurm's gres.conf, and print a job's devices.",
        "Services",
    ),
    "unit-lines": (
        "gpuhook.hpc.commands.units",
        "Print settings that add devices to a systemd unit.",
        "",
    ),
}
MODULES = {
    "engine-lxc": "gpuhook.hpc.lxc.engine",
    "engine-nspawn": "gpuhook.hpc.rootfs.nspawn_engine",
    "lxc": "gpuhook.hpc.lxc.containers",
    "nspawn": "gpuhook.hpc.rootfs.machines",
}
CHECKS = "gpuhook.hpc.checks"
