"""The native kernels as an optional extension; everything else is in pyproject.toml.

Without a C++ compiler, or with one that can't, the installation goes on without them: `pagedjax info` says so.
"""

import importlib.util
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("pallas_kernels/native")


def load_build():
    # By path: importing the package would import JAX, which is not here.
    spec = importlib.util.spec_from_file_location("native_build", Path(__file__).parent / FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Leaves the compiling to pallas_kernels/native/build.py: one file is compiled several times with other flags."""

    def build_extension(self, ext: Extension) -> None:
        build = load_build()
        try:
            build.build(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp) / "native")
        except build.BuildError as error:
            raise CompileError(str(error)) from error

    def get_ext_filename(self, fullname: str) -> str:
        # No Python version in the name: nothing in it depends on Python.
        return str(Path(*fullname.split(".")).with_suffix(".so"))


sources = sorted(map(str, FOLDER.glob("*.cc")))  # so that an editable installation knows when to build again
native = Extension("pallas_kernels.native._pagedjax_native", sources=sources, optional=True)
# Editable by path: with import hooks, a script that lies beside a clone named pagedjax would find that folder first.
setup(ext_modules=[native], cmdclass={"build_ext": BuildNative}, options={"editable_wheel": {"mode": "compat"}})
