"""Logging, set up the same in every process of a server."""

import logging
from collections.abc import Mapping

PACKAGES = ("pagedjax", "serving", "pallas_kernels")
_FORMAT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


def log_at(level: str) -> None:
    """Log to standard error: our packages from this level on ("info"), others from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=_FORMAT)
    set_level(level)


def set_level(level: str) -> None:
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def levels() -> dict[str, int]:
    """The levels of our packages, to be handed to another process."""
    return {package: logging.getLogger(package).getEffectiveLevel() for package in PACKAGES}


def begin(levels: Mapping[str, int]) -> None:
    """Log to standard error as another process does."""
    logging.basicConfig(level=logging.WARNING, format=_FORMAT)
    for package, level in levels.items():
        logging.getLogger(package).setLevel(level)
