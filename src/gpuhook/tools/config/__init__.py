"""The configuration as commands change it and show it."""
