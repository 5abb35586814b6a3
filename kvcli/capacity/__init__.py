"""Whether a run fits and how long it takes, before it starts: memory, the roofline, planning."""
