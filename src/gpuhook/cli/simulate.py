"""``gpuhook simulate``: build a driver root with GPUs that don't exist."""

import json

import click

from gpuhook.vendors.nvidia.simulate import Built, Options, build, remove
from gpuhook.vendors.nvidia.simulate.models import MODELS
from gpuhook.vendors.nvidia.simulate.options import (
    DEFAULT_DRIVER,
    FEATURES,
    parse_failure,
    parse_mig,
    parse_numbers,
)


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--gpus", default=1, show_default=True, help="Number of GPUs.")
@click.option(
    "--model",
    default="H200",
    show_default=True,
    help=f"{', '.join(MODELS)}; one for all GPUs, or one for each, separated by commas.",
)
@click.option("--driver-version", default="", help=f"Driver version.  [default: {DEFAULT_DRIVER}]")
@click.option("--cuda-version", default="", help="CUDA version.  [default: the driver's]")
@click.option("--minors", default="", help="N of each GPU's /dev/nvidiaN, like 3,1,0,2.")
@click.option("--mig", multiple=True, metavar="GPU:PROFILE,...", help="MIG devices of a GPU.")
@click.option("--unplug", default="", metavar="GPU,...", help="GPUs that have gone away.")
@click.option("--init-seconds", default=0.0, help="How long starting NVML takes.")
@click.option(
    "--fail", default="", metavar="HOW", help="not-loaded, version-mismatch or gpu-lost[:GPU]."
)
@click.option(
    "--driver-files",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Extracted driver packages to use, all but libcuda and libnvidia-ml.",
)
@click.option("--drm/--no-drm", default=True, help="With or without /dev/dri.  [default: with]")
@click.option("--compat32", is_flag=True, help="With 32-bit libraries.")
@click.option("--imex-channels", default=0, help="Number of IMEX channels.")
@click.option("--features", default="", help=f"Devices beyond GPUs: some of {','.join(FEATURES)}.")
@click.option("--libdir", default="", help="Library folder below DIR.  [default: multiarch]")
@click.option("--seed", default="gpuhook", help="Another seed gives other UUIDs.")
@click.option("--remove", "removing", is_flag=True, help="Delete the simulated root DIR.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
def simulate(
    directory: str,
    gpus: int,
    model: str,
    driver_version: str,
    cuda_version: str,
    minors: str,
    mig: tuple[str, ...],
    unplug: str,
    init_seconds: float,
    fail: str,
    driver_files: str | None,
    drm: bool,
    compat32: bool,
    imex_channels: int,
    features: str,
    libdir: str,
    seed: str,
    removing: bool,
    style: str,
) -> None:
    """Build a simulated driver root in DIR, or replace the one that is there.

    Point gpuhook at it with root = "DIR" in the [nvidia-container-cli] section of config.toml.
    """
    if removing:
        remove(directory)
        return
    failure, lost = parse_failure(fail)
    options = Options(
        root=directory,
        gpus=gpus,
        models=tuple(word.strip() for word in model.split(",")),
        driver_version=driver_version,
        cuda_version=cuda_version,
        minors=parse_numbers(minors, "--minors"),
        mig=parse_mig(mig),
        unplugged=frozenset(parse_numbers(unplug, "--unplug")),
        init_seconds=init_seconds,
        failure=failure,
        lost_gpu=lost,
        driver_files=driver_files or "",
        drm=drm,
        compat32=compat32,
        imex_channels=imex_channels,
        features=frozenset(word.strip() for word in features.split(",") if word.strip()),
        library_dir=libdir.rstrip("/"),
        seed=seed,
    )
    built = build(options)
    click.echo(json.dumps(_as_json(built), indent=2) if style == "json" else _as_text(built))


def _as_json(built: Built) -> dict[str, object]:
    return {
        "root": built.root,
        "driver_version": built.driver_version,
        "cuda_version": built.cuda_version,
        "library_dir": built.library_dir,
        "gpus": [
            {
                "index": index,
                "minor": gpu.minor,
                "uuid": gpu.uuid,
                "pci_bus_id": gpu.pci_bus_id,
                "name": gpu.model.name,
                "lost": gpu.lost,
                "mig_enabled": gpu.mig_enabled,
                "mig": [
                    {"uuid": mig.uuid, "profile": mig.profile.name, "gi": mig.gi, "ci": mig.ci}
                    for mig in gpu.migs
                ],
            }
            for index, gpu in enumerate(built.gpus)
        ],
    }


def _as_text(built: Built) -> str:
    lines = [f"{built.root}: driver {built.driver_version}, CUDA {built.cuda_version}"]
    for index, gpu in enumerate(built.gpus):
        node = f"/dev/nvidia{gpu.minor}{' (lost)' if gpu.lost else ''}"
        lines.append(f"GPU {index}: {gpu.model.name} {gpu.uuid} {gpu.pci_bus_id} {node}")
        lines += [f"  MIG {mig.profile.name} {mig.uuid}" for mig in gpu.migs]
    return "\n".join(lines)
