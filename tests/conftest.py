"""Set before torch is imported: on models this small a second thread costs more than it brings."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
