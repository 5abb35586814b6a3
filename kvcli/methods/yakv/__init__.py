"""YAKV: the method, with what only it and methods on top of its index use."""
