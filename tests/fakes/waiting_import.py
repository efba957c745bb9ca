"""A module whose import ends once something was written to the FIFO that ERICLLM_TEST_FIFO names."""

import os
from pathlib import Path

from tests.fakes.backend_factories import make

__all__ = ["make"]

Path(os.environ["ERICLLM_TEST_FIFO"]).read_bytes()
