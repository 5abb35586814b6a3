"""`python -m kvcli`."""

import os
import sys

# `python -m` puts the working directory first on the path. In a checkout that makes the top-level `kernels/` shadow
# the package of the same name that transformers looks for.
if sys.path and sys.path[0] in ("", os.getcwd()):  # noqa: PTH109 - compared as the string Python put there
    del sys.path[0]

from kvcli.cli import main

main()
