"""Talking about documents: what is said, and how it becomes tokens."""
