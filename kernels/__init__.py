"""Numerical kernels, one file each: the maths and shapes, then the code."""
