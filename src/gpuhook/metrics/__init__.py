"""Usage of accelerators by containers, for `gpuhook metrics` and `gpuhook stats`."""
