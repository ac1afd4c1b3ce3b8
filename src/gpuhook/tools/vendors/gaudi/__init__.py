"""Intel Gaudi (Habana), for commands."""
