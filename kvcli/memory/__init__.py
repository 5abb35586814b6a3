"""Memory of KV: the device, pinned host memory, and files on a disk."""
