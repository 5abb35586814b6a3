"""Checkpoints of a run: its state in a journal, and how a later process goes on with it."""
