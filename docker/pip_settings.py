"""Writes pip's settings on this machine for the build of the image: docker/build.sh.

    python docker/pip_settings.py FILE FOLDER

FILE gets pip's configuration. FOLDER gets what it names on this machine: constraint files, folders
of wheels, indexes in folders, client certificates. During the build, FOLDER is /run/pip. Standard
library only.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

MOUNTED = "/run/pip"
CERTIFICATE = "/run/secrets/ca"  # docker/build.sh brings it, as a secret
PATHS = (
    "constraint",
    "build-constraint",
    "requirement",
    "find-links",
    "index-url",
    "extra-index-url",
    "client-cert",
)
"""Settings whose words may be paths or `file:` URLs of this machine."""
LINE = re.compile(r"(?P<section>:env:|global|install)\.(?P<name>[a-z-]+)='(?P<value>.*)'")


def main(file: str, folder: str) -> None:
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    Path(file).write_text(settings(listed, Path(folder)), encoding="utf-8")


def settings(listed: str, folder: Path) -> str:
    """The configuration file of the output of `pip config list`, in which the environment's
    settings come first and win. Copies what they name into `folder`."""
    found: dict[str, str] = {}
    for line in listed.splitlines():
        if match := LINE.fullmatch(line):
            found.setdefault(match["name"], match["value"].replace("\\n", " ").strip())
    if "cert" in found:
        found["cert"] = CERTIFICATE
    for name in found:
        if name in PATHS:
            found[name] = " ".join(brought(word, folder) for word in found[name].split())
    return "\n".join(["[global]", *(f"{name} = {value}" for name, value in found.items())]) + "\n"


def brought(word: str, folder: Path) -> str:
    """A word of a setting for the build. The file or folder that it names on this machine is
    brought into `folder`."""
    is_url = word.startswith("file:")
    path = Path(unquote(urlsplit(word).path) if is_url else os.path.expanduser(word)).absolute()
    if not path.exists():
        return word
    # pages of an index link to packages beside it
    top = path.parent if path.name == "simple" else path
    place = Path(str(len(list(folder.iterdir()))), top.name)
    copy(top, folder / place)
    there = f"{MOUNTED}/{place / path.relative_to(top)}"
    return f"file://{quote(there)}" if is_url else there


def copy(source: Path, target: Path) -> None:
    """Copies a file or folder, by hard links where the disk is the same."""

    def link(one: str, other: str) -> None:
        try:
            os.link(os.path.realpath(one), other)
        except OSError:
            shutil.copyfile(one, other)

    target.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link)
    else:
        link(str(source), str(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
