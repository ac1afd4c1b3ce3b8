"""From what a container asks for to what it is given; it knows vendors by their contract alone."""
