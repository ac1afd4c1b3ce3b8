"""Slurm's configuration, as docs/schedulers/slurm.md shows it."""

from pathlib import Path


def slurms_files(
    folder: Path,
    cgroup: str = "ConstrainDevices=yes\n",
    slurm: str = "TaskPlugin=task/cgroup\nGresTypes=gpu\n",
    gres: str = "AutoDetect=off\n",
) -> Path:
    """Write Slurm's files and return the path of cgroup.conf."""
    for name, text in {"cgroup": cgroup, "slurm": slurm, "gres": gres}.items():
        (folder / f"{name}.conf").write_text(text)
    return folder / "cgroup.conf"
