"""`kvcli profile`: timed decode steps of several methods, their phases, and their rooflines.

Start reading at `profiler.py`, which runs all cases in turn. `runs.py` decodes with kvcli's methods and with
transformers' own caches; `phases.py` splits a step into phases; `report.py` and `html.py` show the results. `doctor.py`
examines the machine.
"""
