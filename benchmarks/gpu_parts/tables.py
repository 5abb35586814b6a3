"""What was found, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show(results: Mapping[str, Any]) -> None:
    """Print how each part ended."""
    print()
    for name, part in results.items():
        error = f": {part['error']}" if part["error"] else ""
        print(f"{name:<12} {part['state']}{error}")
