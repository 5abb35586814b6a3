"""TokenSelect: the method, with what only it uses."""
