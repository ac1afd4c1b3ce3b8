"""Management of MIG: of all GPUs or none, and with nodes that are still to be made."""

import pytest
from machines import asked, gpu, granted, machine, mig

from gpuhook.ground.errors import RequestError
from gpuhook.vendors.nvidia.device_nodes import check_mig_management

MACHINE = machine(gpu(0, 3, (mig(0, 1, 12, 13), mig(1, 2, 21, 22))), gpu(1, 0))


def check(*selectors: str, **options: str) -> None:
    check_mig_management(granted(asked(*selectors, **options), MACHINE))


def test_it_is_for_all_devices() -> None:
    check("all", mig_config="all", mig_monitor="all")
    check("0", mig_config="all")


@pytest.mark.parametrize("field", ["mig_config", "mig_monitor"])
def test_of_a_part(field: str) -> None:
    with pytest.raises(RequestError, match="managed as a whole"):
        check("all", **{field: "mig0,mig1"})
    with pytest.raises(RequestError, match="single MIG devices"):
        check("0:0", **{field: "all"})


def test_every_instance_may_be_opened_and_the_folder_is_mounted_instead_of_nodes() -> None:
    grant = granted(asked("all", mig_config="all"), MACHINE)
    assert not [node for node, _ in grant.nodes if "nvidia-cap" in node.path]
    caps = {minor for major, minor in grant.rules() if major == 508}
    assert caps == {1, 12, 13, 21, 22}
