"""`python -m pagedjax.bench` is `pagedjax bench`."""

import sys

from pagedjax.bench.command import main
from pagedjax.engine.huge_pages import restart_with_huge_pages

if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main())
