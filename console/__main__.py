"""`python -m console`: the same as `ericllm`."""

import sys

from ericllm_main import main

sys.exit(main())
