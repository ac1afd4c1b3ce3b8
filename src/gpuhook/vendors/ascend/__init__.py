"""Huawei Ascend NPUs: whole ones, and vNPUs made by npu-smi."""
