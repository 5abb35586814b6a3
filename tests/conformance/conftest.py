"""Make the mark of these tests known where they run outside of kvcli's repository."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; it has no effect without `-m`."""
    config.addinivalue_line("markers", "exhaustive: further pairs of cases that each have their turn in every run")
