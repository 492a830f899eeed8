"""Python imports this module when a process starts that has this folder on PYTHONPATH. With FAKE_CUDA in the
environment, the process is on a machine with fake GPUs (see `process`)."""

import os
import sys
from pathlib import Path

if os.environ.get("FAKE_CUDA"):
    root = str(Path(__file__).resolve().parents[3])
    sys.path.insert(0, root)
    try:
        from tests.fakecuda.site import process

        process.begin()
    finally:
        sys.path.remove(root)
