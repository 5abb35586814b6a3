"""Synthetic long-context tasks: seeded generators and their scorer."""
