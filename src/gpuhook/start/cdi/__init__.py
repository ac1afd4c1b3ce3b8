"""CDI: the names of devices, the documents that describe them, and the folders of those."""
