"""What pyproject.toml has no stable words for: C code, the wheel's tag, and the text for a package index."""

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# No contraction of a * b + c, and nothing that CFLAGS may have said of arithmetic: the same bits everywhere.
FLAGS = ["-std=gnu11", "-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-fopenmp"]


class Wheel(bdist_wheel):
    """The C code uses nothing of Python (so it is named .abi3.so): one wheel serves all versions."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def text_for_an_index() -> str:
    """README.md, without what an index page cannot show: pictures of the repository, and links to its files,
    of which the name stays."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[([^\]]*)\]\((?!https?:)[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", lambda link: _named(*link.groups()), text)


def _named(text: str, path: str) -> str:
    return text if path.rpartition("/")[2] == text or path == text else f"{text} (`{path.partition('#')[0]}`)"


# Without a C compiler threed is installed all the same and takes torch's AdamW (threed/optim/native.py).
setup(ext_modules=[Extension("threed.optim._native", ["threed/optim/native.c"], extra_compile_args=FLAGS,
                             extra_link_args=["-fopenmp"],
                             libraries=["m"], optional=True, py_limited_api=True)],
      cmdclass={"bdist_wheel": Wheel},
      long_description=text_for_an_index(), long_description_content_type="text/markdown")
