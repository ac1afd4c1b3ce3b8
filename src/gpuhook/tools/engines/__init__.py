"""The container engines that can be told about gpu-py: one module each, and what they share."""
