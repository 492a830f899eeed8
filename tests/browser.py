"""A browser without a window: opens a page, and says what it shows and complains about."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class Browser:
    """Chromium, without any network. Each page is opened by a new process."""

    def __init__(self, folder: Path):
        """Skips the test where there is no Chromium. `folder`: for the browser's own files."""
        found = next(filter(None, map(shutil.which, NAMES)), None)
        if found is None:
            pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the PATH")
        self._argv = [found, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                      f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND",
                      "--enable-logging=stderr", "--v=0", "--virtual-time-budget=20000",
                      "--window-size=1320,1000"]

    def open(self, page: Path) -> tuple[str, list[str]]:
        """The document after its scripts have run, and the lines of its console."""
        done = subprocess.run([*self._argv, "--dump-dom", page.resolve().as_uri()], capture_output=True,
                              text=True, timeout=120, check=True)
        return done.stdout, re.findall(r":CONSOLE[^\]]*\] (.*)", done.stderr)

    def picture(self, page: Path, file: Path, height: int) -> None:
        """A picture of the page's first `height` pixels."""
        argv = [word for word in self._argv if not word.startswith("--window-size")]
        subprocess.run([*argv, f"--window-size=1320,{height}", f"--screenshot={file}",
                        page.resolve().as_uri()], capture_output=True, timeout=120, check=True)


def texts(document: str) -> set[str]:
    """The texts of all elements, those of figures included."""
    return {text.strip() for text in re.findall(r">([^<>]+)<", document.partition("<body")[2])}


def figures(document: str) -> int:
    """How many figures plotly has drawn."""
    return len(re.findall(r'class="[^"]*js-plotly-plot', document))
