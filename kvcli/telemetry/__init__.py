"""Observation of a run: callbacks while it goes on, counters, spans, and results as data."""
