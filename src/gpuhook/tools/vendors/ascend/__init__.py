"""Huawei Ascend NPUs, for commands."""
