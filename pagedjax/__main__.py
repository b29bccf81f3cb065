"""`python -m pagedjax` is `pagedjax`."""

import sys

from pagedjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
