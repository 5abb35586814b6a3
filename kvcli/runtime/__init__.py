"""Run a model with a method: prefill, decode, and the one hook into transformers."""
