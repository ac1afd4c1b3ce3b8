"""scripts/take-out-protections finds every protection that it is to take out."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_protection_is_found() -> None:
    path = REPOSITORY / "scripts/take-out-protections"
    loader = SourceFileLoader("take_out_protections", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclass looks itself up
    write, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = write
        del sys.modules[loader.name]
    places = [(each.name, each.file, each.code) for each in module.PROTECTIONS]
    places += [(each.name, *each.also[:2]) for each in module.PROTECTIONS if each.also]
    assert len(places) > 80
    missing = [name for name, file, code in places if code not in (REPOSITORY / file).read_text()]
    assert missing == []
