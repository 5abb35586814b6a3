"""Memory and times of a run, before there are weights."""
