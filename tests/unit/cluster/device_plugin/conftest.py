"""Debian has neither Kubernetes' models nor CEL: the tests with those run where pip's are."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("celpy") and find_spec("kubernetes") else ["test_dra.py"]
