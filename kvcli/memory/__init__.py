"""The memory that KV lives in: the device, pinned host memory, and files on a disk."""
