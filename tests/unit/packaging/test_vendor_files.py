"""Files of packaging/ that list all vendors, as scripts/lib/vendor_files.py writes them."""

import pytest
import vendor_files

from gpuhook.cluster.vendors import cluster
from gpuhook.vendors.registry import BUILT_IN


@pytest.mark.parametrize("name", vendor_files.FILES)
def test_files_equal_the_output_of_vendor_files_py(name: str) -> None:
    text = (vendor_files.PACKAGING / name).read_text()
    assert vendor_files.FILES[name](text) == text, "run scripts/lib/vendor_files.py"


@pytest.mark.parametrize("name", vendor_files.FILES)
def test_removing_a_vendor_shortens_every_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (vendor_files.PACKAGING / name).read_text()
    monkeypatch.setattr(
        vendor_files, "BUILT_IN", {key: names for key, names in BUILT_IN.items() if key != "gaudi"}
    )
    fewer = vendor_files.FILES[name](text)
    assert len(fewer) < len(text)
    monkeypatch.undo()
    assert vendor_files.FILES[name](fewer) == text


def test_a_missing_list_in_a_file_is_an_error() -> None:
    with pytest.raises(ValueError, match="there are 0 lists nodeLabels"):
        vendor_files.values("nodeLabel: []\n")


def test_node_labels_are_those_of_node_feature_discovery() -> None:
    found = {name: cluster.of(names).node_labels() for name, names in BUILT_IN.items()}
    assert found["nvidia"][1] == "feature.node.kubernetes.io/pci-0300_10de.present"
    assert found["nvidia"][0] == "feature.node.kubernetes.io/pci-10de.present"
    assert found["intel_npu"] == ["feature.node.kubernetes.io/pci-1200_8086.present"]
    assert found["neuron"] == []
