"""The makers of accelerators; a folder for each."""
