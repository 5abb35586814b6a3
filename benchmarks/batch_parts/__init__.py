"""The parts of `benchmarks/batch.py`."""
