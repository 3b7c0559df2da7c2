"""What pip runs: setuptools, plus the native CPU kernels inside a wheel where a compiler and XLA's headers are there.

A wheel asks for jaxlib while it is built, for its headers, and is then py3-none-<platform> with every instruction set
inside. Without a compiler it is plain Python. An editable install compiles nothing: it builds at first use.
"""

import pathlib
import shutil
import sys

import setuptools
from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  the hooks that stay as they are
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from pallas_kernels.cpu.native import build, toolchain  # noqa: E402

FOLDER = pathlib.Path("pallas_kernels", "cpu", "native")


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """jaxlib's headers, where something can be made of them."""
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    try:
        toolchain.isas(), toolchain.compiler()
    except toolchain.BuildError:
        return wanted
    return [*wanted, "jaxlib>=0.10.2"]


class BuildPy(build_py):
    """Copies the package, and the library beside its sources unless the install is editable."""

    native = False

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.native = self.add_library(pathlib.Path(self.build_lib) / FOLDER)

    def add_library(self, folder: pathlib.Path) -> bool:
        """True where there is one now."""
        for old in folder.glob("libjattn_cpu-*.so"):  # of an earlier build in this checkout
            old.unlink()
        try:
            toolchain.compiler()
            library = build.library(prebuilt=False).path
        except (toolchain.BuildError, OSError) as error:
            print(f"jattn: a wheel without native CPU kernels, they are built at first use: {error}", file=sys.stderr)
            return False
        shutil.copy(library, folder)
        (folder / library.name).chmod(0o755)  # a cache is for its owner alone
        return True


class BdistWheel(bdist_wheel):
    """One wheel for every Python of a platform; or for every platform, where it holds Python alone."""

    def run(self) -> None:
        self.run_command("build_py")
        if self.get_finalized_command("build_py").native:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that files go to the platform's folder
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


if __name__ == "__main__":
    setuptools.setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
