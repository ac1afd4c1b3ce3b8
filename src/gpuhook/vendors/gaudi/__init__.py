"""Intel Gaudi (Habana) by the contract."""
