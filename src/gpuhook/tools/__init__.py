"""What commands and services use, and no start of a container does."""
