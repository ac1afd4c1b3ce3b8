"""Intel Gaudi (Habana) behind the seam."""
