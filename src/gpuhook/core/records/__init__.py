"""Records of what containers were given: written at each start, and read for exclusive devices."""
