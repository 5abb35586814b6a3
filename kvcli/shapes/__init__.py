"""Shipped model shapes: config.json files for `--load-format dummy`."""
