"""`python -m pagedjax` is `pagedjax`."""

from pagedjax.cli import main

if __name__ == "__main__":
    main()
