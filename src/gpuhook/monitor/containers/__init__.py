"""Containers as the kernel has them: processes, device nodes and cgroups."""
