"""The vendor Intel Gaudi (Habana)."""
