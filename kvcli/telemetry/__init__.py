"""What a run tells: callbacks while it goes on, counters, spans, and results as data."""
