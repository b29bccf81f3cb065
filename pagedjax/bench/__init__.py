"""Load generator and offline benchmarks: `pagedjax bench`, which is `python -m pagedjax.bench`."""

from pagedjax.bench.command import add_arguments, main, run

__all__ = ["add_arguments", "main", "run"]
