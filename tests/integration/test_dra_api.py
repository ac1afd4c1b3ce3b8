"""The published devices of simulated machines, and the commands that call an API server."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, serving
from dra_node import Node
from dra_reader import check
from harness.commands import Result, run
from harness.driver import simulate
from harness.installation import Installation, write_config

from gpuhook.cluster.dra.slice_reconciler import APART, TOGETHER

Object = dict[str, Any]
Call = Callable[..., Result]
MACHINES = {
    "whole": ("--gpus", "8"),
    "parts": ("--gpus", "2", "--set", "model=H100", "--set", "mig=0:1g.10gb,1g.10gb,1g.10gb+me"),
    "one lost": ("--gpus", "4", "--set", "lost=2"),
}


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    folder = tmp_path / "api"
    folder.mkdir()
    with serving(folder) as made:
        made.add("nodes", "n1", {})
        yield made


@pytest.fixture
def call(installation: Installation, tmp_path: Path) -> Call:
    """A function that runs gpuhook for the simulated machine in this test's folder."""
    config = write_config(tmp_path / "config", tmp_path / "root", ["runc"])

    def words(command: str, *more: str) -> Result:
        argv = [str(installation.command), command, *more, "--config", str(config)]
        return run(argv, env={**os.environ, "NODE_NAME": "n1"})

    return words


@pytest.fixture
def kubeconfig(api: ApiServer, tmp_path: Path) -> str:
    """A node's kubeconfig with a client certificate, whose files are next to it."""
    user = {"client-certificate": "api/client.crt", "client-key": "api/client.key"}
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": api.url, "certificate-authority": "api/ca.crt"}}
        ],
        "users": [{"name": "u", "user": user}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def slices(result: Result) -> Sequence[Object]:
    items = json.loads(result.ok().stdout)["items"]
    return [each for each in items if each["kind"] == "ResourceSlice"]


@pytest.mark.parametrize("release", ["1.34", "1.36"])
@pytest.mark.parametrize("name", [*MACHINES])
def test_published_slices_conform_to_the_api(
    name: str, release: str, installation: Installation, api: ApiServer, call: Call, tmp_path: Path
) -> None:
    """The written slices must conform to the API's rules and models."""
    simulate(installation, tmp_path / "root", *MACHINES[name])
    options = ("--dry-run", "--dynamic-mig", "--format", "json", "--kubernetes")
    forms = {form: [*slices(call("dra", *options, version))] for form, version in (
        (APART, "1.35"), (TOGETHER, "1.34"))}  # fmt: skip
    api.release = ("1", release.partition(".")[2])
    node = Node(api)
    node.keeper.want(forms, [])
    wanted = forms[APART if release == "1.36" else TOGETHER]
    node.run(lambda: len(api.slices()) == len(wanted))
    node.rest(200)
    found = api.slices()
    for each in found:
        del each["metadata"]["resourceVersion"]
        for device in each["spec"].get("devices", []):
            for taint in device.get("taints", []):
                del taint["timeAdded"]
    check(found, (1, int(api.release[1])))
    assert [each["spec"].get("devices") for each in found] == [
        each["spec"].get("devices") for each in json.loads(shortened(wanted))
    ]
    assert node.writes() == len(wanted)
    assert node.said == []
    node.keeper.close()


def shortened(given: Any) -> str:
    """Return slices as the server writes them, such as 132k for 132000."""
    from api_server import _plain  # noqa: PLC0415

    return json.dumps(_plain(given))


def test_a_dry_run_uses_the_api_servers_version(
    installation: Installation, api: ApiServer, call: Call, kubeconfig: str, tmp_path: Path
) -> None:
    simulate(installation, tmp_path / "root", *MACHINES["parts"])
    words = ("--dry-run", "--format", "json")
    api.release = ("1", "34")
    asked = slices(call("dra", *words, "--kubeconfig", kubeconfig))
    assert asked == slices(call("dra", *words, "--kubernetes", "1.34"))
    assert asked != slices(call("dra", *words))
    refused = call("dra", *words, "--kubeconfig", kubeconfig, "--api-server", "http://a").failed()
    assert "a token is sent only over https" in refused.stderr
    api.fail(403)
    assert (
        "refuses GET of /version" in call("dra", *words, "--kubeconfig", kubeconfig).failed().stderr
    )


def test_the_service_starts_without_asking_the_api_server(
    installation: Installation, api: ApiServer, call: Call, kubeconfig: str, tmp_path: Path
) -> None:
    """It can unprepare claims without the server; here it exits because gRPC is missing."""
    simulate(installation, tmp_path / "root", *MACHINES["whole"])
    assert "grpcio" in call("dra", "--kubeconfig", kubeconfig).failed().stderr
    assert api.asked == []


def test_labels_can_be_set_and_removed_outside_a_pod(
    installation: Installation, api: ApiServer, call: Call, kubeconfig: str, tmp_path: Path
) -> None:
    simulate(installation, tmp_path / "root", "--gpus", "2")
    call("labels", "--node", "n1", "--kubeconfig", kubeconfig).ok()
    labels = api.objects["nodes", "", "n1"]["metadata"]["labels"]
    assert labels["nvidia.com/gpu.count"] == "2"
    call("labels", "--node", "n1", "--kubeconfig", kubeconfig, "--remove").ok()
    assert api.objects["nodes", "", "n1"]["metadata"]["labels"] == {}
    assert "Add --node" in call("labels", "--kubeconfig", kubeconfig).failed().stderr
    assert "isn't a pod" in call("labels", "--node", "n1").failed().stderr


def test_a_probe_without_a_pod_uid_is_refused(call: Call) -> None:
    assert "Set POD_UID" in call("dra", "--probe").failed().stderr
