"""Which operations make a request true, and what they are written as."""
