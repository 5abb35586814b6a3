"""`kvcli profile`: timed decode steps of several methods, the phases that they consist of, and their rooflines.

Start reading at `profiler.py`, which runs all cases in turn. `runs.py` decodes with kvcli's methods, `peers.py`
with transformers' own caches; `rounds.py` interleaves their runs. `phases.py` splits a step into phases by the spans of
a timeline (`timelines.py`) or by the kernels of a captured step (`graph_trace.py`). `doctor.py`
examines the machine.
"""
