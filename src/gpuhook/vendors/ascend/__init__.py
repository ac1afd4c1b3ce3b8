"""Huawei's Ascend NPUs: whole ones, and the vNPUs that npu-smi makes of them."""
