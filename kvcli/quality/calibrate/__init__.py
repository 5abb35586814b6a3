"""Calibration: from a model and a kind of text to the settings that keep a method close to full attention.

`targets` lists what can be calibrated. `run` leads from text to result: text to passages (`plan`), every setting
compared on them with full attention (`kvcli.quality.fidelity`), a curve and a choice (`sweep`), and all of it as
tables, JSON and a profile (`outcome`) or a page (`html`).
"""
