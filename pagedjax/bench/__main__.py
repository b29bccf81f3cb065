"""`python -m pagedjax.bench` is `pagedjax bench`."""

import sys

from pagedjax.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
