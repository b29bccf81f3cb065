"""Load generator and offline benchmarks: `pagedjax bench`, which is `python -m pagedjax.bench`."""
