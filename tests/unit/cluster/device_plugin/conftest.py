"""Tests with Kubernetes' models and CEL, skipped with Debian's packages, which have neither."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("celpy") and find_spec("kubernetes") else ["test_dra.py"]
