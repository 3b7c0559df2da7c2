"""What pip runs: setuptools, plus the native CPU kernels inside a wheel.

    pip install .       a wheel for this machine, compiled where a C++ compiler is there, else plain Python
    pip install -e .    compiles nothing: the kernels are built at first use
    make wheel          `--build-option=--plat-name=manylinux_2_28_<machine>`: compiled by zig for any Linux of that age

A wheel with kernels is py3-none-<platform>, with every instruction set of the machine inside. While it is built it asks
for jaxlib, for XLA's headers, which are the same on every processor.
"""

import pathlib
import re
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

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from pallas_kernels.cpu.native import build, portable, toolchain  # noqa: E402

FOLDER = pathlib.Path("pallas_kernels", "cpu", "native")
ZIG = "ziglang==0.17.1"


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    """jaxlib's headers, where something can be made of them; zig for a manylinux wheel.

    XLA calls libraries of its own and of older versions of its FFI: a manylinux wheel takes the oldest headers.
    """
    wanted = build_meta.get_requires_for_build_wheel(config_settings)
    jaxlib = re.search(r'"(jaxlib>=[^"]+)"', (ROOT / "pyproject.toml").read_text())[1]
    if "--plat-name=manylinux" in str((config_settings or {}).get("--build-option")):
        return [*wanted, jaxlib.replace(">=", "=="), ZIG]
    try:
        toolchain.isas(), toolchain.compiler()
    except toolchain.BuildError:
        return wanted
    return [*wanted, jaxlib]


class BuildPy(build_py):
    """Copies the package, and the library beside its sources unless the install is editable."""

    platform = None  # a manylinux tag, or None: this machine
    native = False

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.native = self.add_library(pathlib.Path(self.build_lib) / FOLDER)

    def add_library(self, folder: pathlib.Path) -> bool:
        """True where there is one now. A manylinux wheel must have one."""
        for old in folder.glob("libjattn_cpu-*.so"):  # of an earlier build in this checkout
            old.unlink()
        if self.platform:
            library = portable.compile_into(folder, self.platform)
        else:
            try:
                toolchain.compiler()
                library = shutil.copy(build.library(prebuilt=False).path, folder)
            except (toolchain.BuildError, OSError) as error:
                print(f"jattn: a wheel without native kernels, they are built at first use: {error}", file=sys.stderr)
                return False
        pathlib.Path(library).chmod(0o755)  # a cache is for its owner alone
        return True


class BdistWheel(bdist_wheel):
    """One wheel for every Python of a platform; or for every platform, where it holds Python alone."""

    def run(self) -> None:
        build_py = self.get_finalized_command("build_py")
        build_py.platform = self.plat_name if self.plat_name_supplied else None
        self.run_command("build_py")
        if build_py.native:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # so that files go to the platform's folder
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


if __name__ == "__main__":
    setuptools.setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
