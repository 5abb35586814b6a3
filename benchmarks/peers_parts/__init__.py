"""The parts of `benchmarks/peers_cpu.py`."""
