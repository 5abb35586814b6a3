"""Checkpoints: their files, their geometry, their rotary positions, loading them or making them up."""
