"""Huawei's Ascend NPUs, for commands."""
