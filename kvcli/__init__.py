"""Offline long-context generation with the KV cache in host memory."""

__version__ = "0.1.0"
