"""Set before torch is imported: on models this small a second thread costs more than it brings.

Where there is no GPU, Triton kernels are tested under their interpreter, which has to be said before they are imported.
"""

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
