"""What containers were given: written at each start, and read to refuse a device to a second."""
