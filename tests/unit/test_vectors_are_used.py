"""Groups of shared cases about requests, configuration, CDI and vendors: a test uses each."""

import json
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WHOLE = [
    "image", "csv", "hook", "capabilities", "requirements", "config", "mode", "params_file",
    "cuda_compat", "application_profile", "cdi", "cdi_annotations", "cdi_apply", "cdi_cache",
    "cdi_generate", "cdi_names", "cdi_transform", "cdi_validate", "cdi_versions", "vendor_amd",
    "vendor_habana", "vendor_neuron", "plugin_health", "plugin_allocate", "plugin_config",
    "metrics_cgroup", "system", "create_symlinks", "hook_creator", "installer", "ldconfig", "nri",
    "runtime",
]  # fmt: skip
# Groups of vectors for features that gpuhook doesn't have -> the reason.
WITHOUT = {
    "hook_creator.create": "documents have one hook, whose work isn't chosen by arguments",
    "hook_creator.is_library": "a library is one by its place and its ELF header, not by its name",
    "ldconfig.filter": "an image's ld.so.conf isn't read: its cache gets the libraries themselves",
    "ldconfig.top_level": "as ldconfig.filter: no ldconfig is run that would need one",
    "habana.mac_list": "the network ports are left to Habana's own hook",
    "habana.gaudinet": "as habana.mac_list",
    "habana.write_target": "as habana.mac_list: nothing is written into the container",
    "habana.hook_path": "no program of the vendor's is run",
    "habana.config": "Habana's config.toml isn't read",
    "neuron.neuron_ls": "no program of the vendor's is run",
    "neuron.add_hooks": "oci-add-hooks: gpu-py is the runtime itself",
    "neuron.read_hooks": "as neuron.add_hooks",
    "neuron.exit_code": "as neuron.add_hooks: gpu-py becomes the low-level runtime",
    "neuron.runtime_path": "as neuron.add_hooks",
    "neuron.engine": "as neuron.add_hooks: one runtime for every vendor",
}


def used(file: str) -> set[str]:
    pattern = re.compile(rf'@pytest\.mark\.vectors\("{file}", ([^)]+)\)')
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]
    return {name for text in texts for names in pattern.findall(text) for name in
            re.findall(r'"([^"]+)"', names)}  # fmt: skip


@pytest.mark.parametrize("file", WHOLE)
def test_every_group_of_vectors_is_used_by_a_test(file: str) -> None:
    vectors = json.loads((TESTS.parent / "vectors" / f"{file}.json").read_text())["vectors"]
    groups = {case["group"].removesuffix(".derived_from_code") for case in vectors}
    assert groups - set(WITHOUT) <= used(file)
