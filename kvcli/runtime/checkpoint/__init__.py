"""Checkpoints of a run: its state in a journal, from which a later process continues."""
