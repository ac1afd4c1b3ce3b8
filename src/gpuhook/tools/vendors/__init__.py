"""What commands know of each vendor beyond what a start does."""
