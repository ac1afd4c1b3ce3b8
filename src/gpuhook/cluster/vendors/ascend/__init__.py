"""Huawei Ascend NPUs: as resources of a cluster."""
