import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Runs a command like `kvcli` does, without waiting for torch each time."""
    from command import warm_command

    with warm_command(tmp_path_factory.mktemp("warm")) as run:
        yield run
