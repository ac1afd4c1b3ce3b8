"""What makes a start cheap: the helper, the process that stands ready, the launcher's files."""
