"""`python -m megnorm`: the command `megnorm`, also as the worker of torchrun."""

import sys

from megnorm.cli import main

if __name__ == "__main__":
    sys.exit(main())
