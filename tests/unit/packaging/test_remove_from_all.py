"""Removal from all nodes before Helm uninstalls, with an API server of the tests."""

import copy
import importlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from api_server import ApiServer, serving

from gpuhook.base.errors import PluginError
from gpuhook.cluster.dra.access import Access
from gpuhook.cluster.dra.api_client import ApiClient

FOLDER = Path(__file__).parents[3] / "packaging/kubernetes/image"
REMOVER: dict[str, Any] = {
    "metadata": {"name": "gpuhook-installer"},
    "spec": {"template": {"spec": {"a": 2}}, "updateStrategy": {"type": "RollingUpdate"}},
}
INSTALLER = "daemonsets", "gpuhook", "gpuhook-installer"


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        yield importlib.import_module("remove_from_all")


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with serving(tmp_path / "api") as found:
        yield found


def removal(module: ModuleType, api: ApiServer) -> Any:
    access = Access(api.url, f"{api.folder}/ca.crt", token=f"{api.folder}/token")
    return module.Removal("gpuhook", ApiClient(access), lambda _: time.sleep(0.01))


def install(api: ApiServer) -> None:
    for name in ("gpuhook", "gpuhook-installer", "other"):
        given = {"spec": {"selector": name, "template": {"spec": {"a": 1, "b": 1}}}}
        api.add("daemonsets", name, {**given, "metadata": {"generation": 3}}, "gpuhook")
    api.objects[INSTALLER]["status"] = status(3, 2, 2)
    api.add("runtimeclasses", "gpu-py", {})


def status(generation: int, updated: int, ready: int, wanted: int = 2) -> dict[str, int]:
    return {
        "observedGeneration": generation,
        "desiredNumberScheduled": wanted,
        "updatedNumberScheduled": updated,
        "numberReady": ready,
    }


def test_removal_waits_until_all_nodes_are_done(
    module: ModuleType, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    install(api)
    api.fail(503, "PUT")
    thread = threading.Thread(target=lambda: removal(module, api).run([REMOVER], "gpu-py"))
    thread.start()
    deadline = time.monotonic() + 30
    while api.objects[INSTALLER]["metadata"]["generation"] != 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # States during a rollout, none of which is the final one.
    for each in (status(3, 2, 2), status(4, 0, 2), status(4, 1, 2), status(4, 2, 1)):
        api.objects[INSTALLER]["status"] = each
        asked = api.count("GET", "gpuhook-installer")
        while api.count("GET", "gpuhook-installer") < asked + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert thread.is_alive()
    api.objects[INSTALLER]["status"] = status(4, 2, 2)
    thread.join(30)
    assert not thread.is_alive()
    spec = copy.deepcopy(api.objects[INSTALLER]["spec"])
    assert spec == {"selector": "gpuhook-installer", **REMOVER["spec"]}
    assert {key[2] for key in api.objects} == {"gpuhook-installer", "other"}
    said = capsys.readouterr().out
    assert "0 of 2 nodes are done" in said or "2 of 2" in said
    assert "gpuhook-installer is done on all nodes" in said


def test_removal_without_an_installation_reports_nothing_to_remove(
    module: ModuleType, api: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    removal(module, api).run([REMOVER], "gpu-py")
    assert "nothing to remove" in capsys.readouterr().out


def test_missing_rights_are_an_error_and_nothing_is_removed(
    module: ModuleType, api: ApiServer
) -> None:
    install(api)
    api.fail(403, "PUT")
    with pytest.raises(PluginError, match="refuses PUT"):
        removal(module, api).run([REMOVER], "")
    assert ("runtimeclasses", "", "gpu-py") in api.objects
