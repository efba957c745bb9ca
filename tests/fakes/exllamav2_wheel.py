"""The real exllamav2 package, unpacked but not installed: what tests read, and import with its kernels stubbed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fakes.published_sources import EXLLAMAV2, source_folder


def wheel_folder() -> Path:
    """A folder whose `exllamav2/` is the package (pure Python and CUDA sources).

    ERICLLM_EXLLAMAV2_WHEEL may name a wheel file that is at hand. Raises RuntimeError where it is neither at hand nor
    can be downloaded.
    """
    at_hand = os.environ.get("ERICLLM_EXLLAMAV2_WHEEL")
    return source_folder(EXLLAMAV2, Path(at_hand) if at_hand else None)
