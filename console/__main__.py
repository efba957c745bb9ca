"""`python -m console`: the same as `ericllm`."""

import sys

from console.cli import main

sys.exit(main())
