"""Shipped retrieval profiles: one TOML file each."""
