"""KV-cache methods, one file each."""
