"""Builds the package dp_c10d for the torch of this Python:  pip install examples/torch

$CC, $CXX and $STB_CFLAGS are as in the Makefile. pip builds in a place without torch, so that is
asked for in a Python of its own.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
ASK = """
import json, torch
names = "COMPILER_TYPE", "STDLIB", "BUILD_ABI"
pybind = {name: getattr(torch._C, "_PYBIND11_" + name, None) for name in names}
print(json.dumps([torch.__version__, torch.__path__[0], pybind]))
"""


def torch_here():
    """The version and the folder of torch, and what its pybind11 was told (until 2.8)."""
    try:
        return json.loads(subprocess.check_output([sys.executable, "-I", "-c", ASK]))
    except subprocess.CalledProcessError:
        sys.exit(f"dp_c10d: {sys.executable} has no torch: pip install torch, and then this")


def version():
    with open(os.path.join(ROOT, "dp.h"), encoding="utf-8") as header:
        return re.search(r" v([0-9.]+) ", header.readline()).group(1)


class Build(build_ext):
    def build_extension(self, ext):
        torch, folder, pybind = torch_here()
        out = self.get_ext_fullpath(ext.name)
        library = os.path.join(self.build_temp, "dp.o")
        include = os.path.join(folder, "include")
        os.makedirs(os.path.dirname(out), exist_ok=True)
        os.makedirs(self.build_temp, exist_ok=True)
        self.run_one(os.environ.get("CC", "cc"), "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden",
                     *os.environ.get("STB_CFLAGS", "-isystem /usr/include/stb").split(),
                     "-DDP_IMPLEMENTATION", "-x", "c", "-c", os.path.join(ROOT, "dp.h"),
                     "-o", library)
        self.run_one(os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", "-shared",
                     *(f'-DPYBIND11_{name}="{value}"' for name, value in pybind.items() if value),
                     "-isystem", include, "-isystem", os.path.join(include, "torch/csrc/api/include"),
                     "-isystem", sysconfig.get_paths()["include"],
                     os.path.join(HERE, "c10d.cpp"), library,
                     "-o", out,
                     "-L" + os.path.join(folder, "lib"),
                     "-Wl,-rpath,$ORIGIN/../torch/lib",
                     "-ltorch_python", "-ltorch_cpu", "-lc10", "-lpthread", "-lm")
        with open(os.path.join(os.path.dirname(out), "_built.py"), "w", encoding="utf-8") as built:
            built.write(f'TORCH = "{torch}"\n')

    def run_one(self, *command):
        print(" ".join(command))
        subprocess.run(command, check=True)


BESIDE = os.path.join(ROOT, "build", "torch", "pip")  # and not among the sources
os.makedirs(BESIDE, exist_ok=True)
setup(version=version(), ext_modules=[Extension("dp_c10d._c10d", ["c10d.cpp"])],
      cmdclass={"build_ext": Build},
      options={"build": {"build_base": BESIDE}, "egg_info": {"egg_base": BESIDE}})
