"""Where the time of a decode step goes: timed runs of several methods, their parts, and how far they are from a floor.

`run.py` is the place to start reading: it runs the cases in turn. `phases.py` makes parts of spans, `modules.py` gets
spans of the model's own layers, `sources.py` gives the caches something to hold, `peers.py` runs other caches beside.
"""
