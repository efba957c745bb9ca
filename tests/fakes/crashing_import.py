"""A module whose import ends its process."""

import os

os.write(2, b"the import crashed\n")
os._exit(7)
