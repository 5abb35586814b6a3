"""Checkpoints: their files, geometry and rotary positions; loading them or making random ones."""
