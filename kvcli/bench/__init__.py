"""`kvcli profile`: timed decode steps of several methods, the phases that they consist of, and their rooflines.

Start reading at `profiler.py`, which runs all cases in turn. `runs.py` decodes with kvcli's methods and with
transformers' own caches; `phases.py` splits a step into phases; `report.py` and `html.py` show what came of it.
`doctor.py` examines the machine.
"""
