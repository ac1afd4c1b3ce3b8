"""The command gpuhook dra between a kubelet and an API server: slices, claims, statuses."""

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import ApiServer, serving
from dra_kubelet import Claim, DraKubelet
from dra_rest import memory
from harness.commands import daemon, run, wait_until
from harness.dra import GPU_DRIVER, NODE, result, slice_name
from harness.driver import Driver, simulate
from harness.forked import PROGRAM
from harness.installation import Installation, write_config
from harness.node import children, listens


@pytest.fixture
def api(workspace: Path, tmp_path: Path) -> Iterator[ApiServer]:
    folder = workspace / f"w{hash(tmp_path) & 0xFFFFFFFF:x}"
    folder.mkdir()
    with serving(folder) as made:
        made.add("nodes", NODE, {})
        yield made


@pytest.fixture
def driver(installation: Installation, tmp_path: Path) -> Driver:
    return simulate(installation, tmp_path / "root", "--gpus", "8")


def kubeconfig(api: ApiServer) -> str:
    user = {"client-certificate": "client.crt", "client-key": "client.key"}
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [
            {"name": "c", "cluster": {"server": api.url, "certificate-authority": "ca.crt"}}
        ],
        "users": [{"name": "u", "user": user}],
    }
    path = api.folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_slices_claims_and_statuses_are_published(
    installation: Installation, driver: Driver, api: ApiServer, tmp_path: Path
) -> None:
    config = write_config(api.folder / "etc", driver.root, ["runc"])
    (api.folder / "cdi").mkdir()
    names = [slice_name(gpu.uuid) for gpu in driver.gpus]
    argv = command(installation, config, api)
    claim = Claim("ns", "a", str(uuid.uuid4()))
    allocation = {"devices": {"results": [result(names[2])], "config": []}}
    given = {"metadata": {"uid": claim.uid}, "status": {"allocation": allocation}}
    api.add("resourceclaims", "a", given, "ns")
    with (
        DraKubelet(api.folder) as kubelet,
        daemon(
            argv, api.folder / "log", lambda: bool(kubelet.instances(GPU_DRIVER)), start=True
        ) as process,
    ):
        wait_until(lambda: len(_published(api)) == 8, "all are published")
        prepared = kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
        assert not isinstance(prepared, str), prepared
        assert [device.name for device in prepared] == [names[2]]
        wait_until(lambda: _status(api) == [(names[2], "True")], "the claim's status says so")
        wait_until(lambda: listens(process.pid), "somebody listens to the driver")
        run([installation.command, "simulate", driver.root, "--xid=79", "--gpu=3"]).ok()
        wait_until(lambda: _tainted(api) == [names[3]], "a taint")
        assert kubelet.unprepare(GPU_DRIVER, claim) == {claim.uid: ""}
        wait_until(lambda: _status(api) == [], "the claim's status is empty")
        usual = {"gpuhook-events", "gpuhook-server"}
        wait_until(lambda: {*children(process.pid)} == usual, "the claims' children have ended")
        pids = [process.pid, *children(process.pid).values()]
        # It uses 55 MiB if it shares no libraries (docs/engineering/measurements.md).
        wait_until(
            lambda: memory(pids) < 60 << 20, "little memory", shown=lambda: str(memory(pids))
        )
        os.kill(children(process.pid)["gpuhook-server"], signal.SIGKILL)
        api.wipe()
        wait_until(lambda: len(_published(api)) == 8, "the next server publishes, too")


@pytest.mark.protects(
    "dra-mps-named",
    "DRA: no claim gets a device of [gpuhook.mps], even if no MPS daemon runs",
    instead="shared = []",
)
def test_devices_shared_by_mps_are_not_published_and_claims_are_refused(
    installation: Installation, driver: Driver, api: ApiServer
) -> None:
    """Configured devices count before a daemon runs; a running daemon's devices count too."""
    config = write_config(api.folder / "etc", driver.root, ["runc"])
    own = config.with_name("mps.toml")
    own.write_text(f'{config.read_text()}[gpuhook.mps]\ndevices = "1,2"\n')
    config.write_text(f'{config.read_text()}[gpuhook.mps]\ndevices = "1"\n')
    (api.folder / "cdi").mkdir()
    names = [slice_name(gpu.uuid) for gpu in driver.gpus]
    claims = []
    for number in (1, 2):
        claims.append(Claim("ns", f"a{number}", str(uuid.uuid4())))
        allocation = {"devices": {"results": [result(names[number])], "config": []}}
        given = {"metadata": {"uid": claims[-1].uid}, "status": {"allocation": allocation}}
        api.add("resourceclaims", claims[-1].name, given, "ns")

    def mps(verb: str) -> None:
        run([installation.command, "mps", verb], env={"GPUHOOK_CONFIG": str(own)}).ok()

    with (
        DraKubelet(api.folder) as kubelet,
        daemon(
            command(installation, config, api),
            api.folder / "log",
            lambda: bool(kubelet.instances(GPU_DRIVER)),
            start=True,
        ) as process,
    ):

        def await_published(*shared: int) -> None:
            os.kill(process.pid, signal.SIGHUP)  # else it would look only half a minute later
            wanted = {name for number, name in enumerate(names) if number not in shared}
            wait_until(
                lambda: {each["name"] for each in _published(api)} == wanted, f"not {shared}"
            )

        def ask(claim: Claim) -> str:
            found = kubelet.prepare(GPU_DRIVER, claim)[claim.uid]
            return found if isinstance(found, str) else ""

        await_published(1)
        assert "shared by MPS on this node" in ask(claims[0])
        mps("start")
        try:
            await_published(1, 2)
            assert "shared by MPS on this node" in ask(claims[0])
            assert "shared by MPS on this node" in ask(claims[1])
        finally:
            mps("stop")
        assert ask(claims[1]) == ""  # the GPU is published again within a minute


def command(installation: Installation, config: Path, api: ApiServer) -> list[str | Path]:
    """Return the command that starts gpuhook dra with an API server."""
    return [
        *(sys.executable, "-c", PROGRAM, installation.command, "dra"),
        *("--node", NODE, "--config", config, f"--kubeconfig={kubeconfig(api)}"),
        *(f"--plugins={api.folder}/plugins", f"--registry={api.folder}/reg"),
        f"--cdi-folder={api.folder}/cdi",
    ]


def _published(api: ApiServer) -> list[Any]:
    return [each for one in api.slices() for each in one["spec"].get("devices", ())]


def _tainted(api: ApiServer) -> list[str]:
    return [each["name"] for each in _published(api) if each.get("taints")]


def _status(api: ApiServer) -> list[tuple[str, str]]:
    found = next(value for key, value in api.objects.items() if key[0] == "resourceclaims")
    devices = (found.get("status") or {}).get("devices") or []
    return [(each["device"], each["conditions"][0]["status"]) for each in devices]
