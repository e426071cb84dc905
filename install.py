"""Installs a requirements file into this Python's environment: by uv, which takes seconds, or by
pip, which takes minutes.

    .venv/bin/python install.py requirements.txt

uv reads no configuration of pip. So uv is given pip's index, links, constraints, hosts,
certificate, proxy and cache, of its files and of `PIP_...` variables. pip installs if one of its
other settings decides what is installed, if there is no uv, and if uv fails. `INSTALLER=pip` or
`uv` in the environment chooses one of them.
"""

import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration for `pip install`; the later ones override the earlier ones."""

VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "cert": ("SSL_CERT_FILE",),
    "proxy": ("HTTPS_PROXY", "HTTP_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "cache-dir": ("UV_CACHE_DIR",),
}
"""uv's variables for a setting of pip; the second one of an index is that of older releases. URLs
may hold passwords, so they are no words of a command, which other users could read."""

WORDS = {"constraint": "--constraint", "no-index": "--no-index", "no-cache-dir": "--no-cache"}
"""uv's flag for other settings of pip."""

NO_EFFECT = {
    "break-system-packages", "compile", "config-file", "disable-pip-version-check", "log",
    "no-color", "no-compile", "no-input", "no-python-version-warning", "no-warn-script-location",
    "progress-bar", "quiet", "require-virtualenv", "retries", "root-user-action", "verbose",
}  # fmt: skip
"""Settings of pip that do not change what is installed."""

OFF = ("0", "false", "no", "n", "off", "f")


def pip_settings(listing: str) -> dict[str, str]:
    """pip's settings for `pip install`, by their long names, from the output of `pip config
    list`."""
    settings: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in SECTIONS:
        for name, _, value in lines:
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return settings


def for_uv(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Words and variables that give pip's settings to uv. Raises: ValueError, with the names of
    settings that uv does not have."""
    words: list[str] = []
    variables: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in settings.items():
        if name == "constraint":
            words += [word for file in value.split() for word in (WORDS[name], file)]
        elif name in WORDS:
            words += [] if value.lower() in OFF else [WORDS[name]]
        elif name in VARIABLES:
            separator = "," if name == "find-links" else " "
            text = separator.join(value.split())
            variables |= {variable: text for variable in VARIABLES[name] if text}
        elif name not in NO_EFFECT:
            unknown.append(name)
    if unknown:
        raise ValueError(", ".join(unknown))
    if "UV_CACHE_DIR" in variables:
        variables["UV_CACHE_DIR"] = str(Path(variables["UV_CACHE_DIR"], "uv"))
    # as pip, which takes the newest release of all places
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return words, variables


def find_uv() -> str | None:
    """The command uv: of this environment, of the user, or new in this environment."""
    folder = Path(sys.executable).parent
    command = shutil.which("uv", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    if not command:
        installation = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "uv"]
        subprocess.run(installation, capture_output=True)
        command = shutil.which("uv", path=str(folder))
    return command


def run(words: list[str], variables: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and standard error of a command. Prints every 5 s how much is installed."""
    begun = time.monotonic()
    with subprocess.Popen(
        words, env=os.environ | variables, stderr=subprocess.PIPE, text=True
    ) as process:
        while True:
            try:
                _, errors = process.communicate(timeout=5)
                return process.returncode, errors
            except subprocess.TimeoutExpired:
                size = subprocess.check_output(["du", "-sm", sys.prefix], text=True).split()[0]
                seconds = time.monotonic() - begun
                print(f"installing: {size} MB after {seconds:.0f} s", flush=True)


def install_by_uv(file: str) -> str:
    """Installs by uv. Returns why it did not; an empty text if it did."""
    listing = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    try:
        words, variables = for_uv(pip_settings(listing))
    except ValueError as error:
        return f"pip is configured with {error}, which uv does not have"
    command = find_uv()
    if not command:
        return "there is no uv here, and pip does not find it"
    installation = [command, "pip", "install", "--quiet", "--python", sys.executable]
    code, errors = run([*installation, *words, "-r", file], variables)
    return f"uv failed:\n{errors.rstrip()}" if code else ""


def main(file: str) -> int:
    """Installs the file; returns the exit code."""
    chosen = os.environ.get("INSTALLER", "")
    if chosen not in ("", "pip", "uv"):
        print(f"error: INSTALLER = {chosen}: should be pip or uv", file=sys.stderr)
        return 2
    if chosen != "pip":
        problem = install_by_uv(file)
        if not problem:
            return 0
        if chosen == "uv":
            print(f"error: INSTALLER = uv: {problem}", file=sys.stderr)
            return 1
        print(f"note: {problem}\npip installs instead: one to three minutes, once", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "-r", file]
    code, errors = run(pip, {})
    print(errors, end="", file=sys.stderr)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
