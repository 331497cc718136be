"""`python -m relibra` is the command `relibra`."""

import sys

from relibra.cli import main

if __name__ == "__main__":
    sys.exit(main())
