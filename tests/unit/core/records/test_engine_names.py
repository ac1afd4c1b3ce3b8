"""Container names in a refusal, which are those that `gpuhook list` shows."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuhook.base.oci.spec import ContainerState
from gpuhook.core.records import engine_names, leases, records

ID = "0123456789abcdef" * 4
MOBY = "io.containerd.runtime.v2.task/moby"


def record(bundle: Path, manager: str = "") -> dict[str, Any]:
    annotations = {"io.container.manager": manager} if manager else None
    return {**records.describe(ContainerState(ID, 7, str(bundle), None), annotations, []), "pid": 7}


def of_docker(folder: Path, about: str = '{"Name": "/training"}', place: str = "") -> Path:
    """Return the bundle of a Docker container whose data are in a separate folder."""
    data = folder / (place or f"data/containers/{ID}")
    bundle = folder / MOBY / ID
    for made in (data, bundle):
        made.mkdir(parents=True)
    (data / "config.v2.json").write_text(about)
    mounts = [
        {"destination": "/volume", "source": f"{folder}/elsewhere/containers/{ID}/x"},
        {"destination": "/etc/hostname", "source": f"{data}/hostname"},
    ]
    (bundle / "config.json").write_text(json.dumps({"mounts": mounts}))
    return bundle


def test_a_docker_container_is_named_as_docker_names_it(tmp_path: Path) -> None:
    found = record(of_docker(tmp_path))
    assert found["engine"] == "docker"
    assert engine_names.name_of(found) == "training"
    assert leases.holder(found) == "docker's container training"


def test_a_podman_container_is_named_as_podman_names_it(tmp_path: Path) -> None:
    bundle = tmp_path / f"overlay-containers/{ID}/userdata"
    bundle.mkdir(parents=True)
    stored = [{"id": "other", "names": ["other"]}, {"id": ID, "names": ["training", "2nd"]}]
    (tmp_path / "overlay-containers/containers.json").write_text(json.dumps(stored))
    found = record(bundle, "libpod")
    assert leases.holder(found) == "podman's container training"


@pytest.mark.parametrize(
    "about", ["", "{}", "[]", "null", '{"Name": null}', "[" * 10**5, "\udcff", '{"name": "/x"}']
)
def test_a_container_without_a_readable_name_is_named_by_its_id(tmp_path: Path, about: str) -> None:
    bundle = of_docker(tmp_path, about.encode("utf-8", "surrogateescape").decode("latin-1"))
    assert leases.holder(record(bundle)) == f"docker's container {ID[:12]}"
    (bundle / "config.json").unlink()
    assert leases.holder(record(bundle)) == f"docker's container {ID[:12]}"


def test_a_name_from_another_containers_data_is_ignored(tmp_path: Path) -> None:
    bundle = of_docker(tmp_path, place="data/containers/" + "f" * 64)
    assert leases.holder(record(bundle)) == f"docker's container {ID[:12]}"


def test_a_container_name_with_control_characters_is_escaped(tmp_path: Path) -> None:
    text = leases.holder(record(of_docker(tmp_path, '{"Name": "/a\\n\\u001b[2J"}')))
    assert text == "docker's container 'a\\n\\x1b[2J'"
