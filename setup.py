"""What pyproject.toml has no stable words for: C code. Without a C compiler threed is installed all the same,
and takes torch's AdamW on the host (threed/native.py)."""

from setuptools import Extension, setup

# No contraction of a * b + c, and nothing that CFLAGS may have said of arithmetic: the same bits everywhere.
FLAGS = ["-std=gnu11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-fopenmp"]

setup(ext_modules=[Extension("threed._native", ["threed/native.c"], extra_compile_args=FLAGS,
                             extra_link_args=["-fopenmp"],
                             libraries=["m"], optional=True)])
