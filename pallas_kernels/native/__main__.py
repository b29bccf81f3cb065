"""Build the native kernels where this package lies, against the installed jaxlib."""

import argparse
from pathlib import Path

from pallas_kernels.native.build import LIBRARY, BuildError, build


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.native", description=__doc__)
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--objects", type=Path, default=Path("build/native"), help="folder of object files")
    parser.add_argument("flags", nargs="*", help="further compiler flags, after --")
    options = parser.parse_args()
    try:
        build(options.output, options.objects, tuple(options.flags))
    except BuildError as error:
        raise SystemExit(f"the native kernels were not built: {error}") from error


main()
