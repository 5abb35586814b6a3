"""Caches of keys and values, one class for each data structure of the papers, and the memory they live in."""
