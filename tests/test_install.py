"""install.py: pip's configuration is given to uv, or pip installs."""

import subprocess
import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT))
import install

LISTING = """\
:env:.find-links='/other/wheels'
:env:.disable-pip-version-check='1'
global.index-url='https://user:secret@mirror.example/simple'
global.extra-index-url='https://one.example/simple\\nhttps://two.example/simple'
global.find-links='/wheels'
install.constraint='a.txt b.txt'
global.constraint='c.txt'
global.trusted-host='mirror.example'
freeze.timeout='1'
"""
"""Of `pip config list`, which sorts by section."""


def test_settings_of_pip_by_its_own_precedence():
    """A variable overrides the section of the command, which overrides `global`."""
    assert install.pip_settings(LISTING) == {
        "index-url": "https://user:secret@mirror.example/simple",
        "extra-index-url": "https://one.example/simple\nhttps://two.example/simple",
        "find-links": "/other/wheels",
        "constraint": "a.txt b.txt",
        "trusted-host": "mirror.example",
        "disable-pip-version-check": "1",
    }


def test_pip_itself_lists_them_so(tmp_path, monkeypatch):
    """Of a file and of a variable, by this environment's pip."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nfind-links =\n    /one\n    /two\nno-index = true\n"
        "[install]\nconstraint = pins.txt\n"
    )
    for name in [name for name in install.os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "false")
    words = [sys.executable, "-m", "pip", "config", "list"]
    settings = install.pip_settings(subprocess.check_output(words, text=True))
    expected = {"find-links": "\n/one\n/two", "no-index": "false", "constraint": "pins.txt"}
    assert settings.items() >= expected.items()


def test_settings_are_given_to_uv():
    words, variables = install.for_uv(install.pip_settings(LISTING))
    assert words == ["--constraint", "a.txt", "--constraint", "b.txt"]
    assert variables == {
        "UV_DEFAULT_INDEX": "https://user:secret@mirror.example/simple",
        "UV_INDEX_URL": "https://user:secret@mirror.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_EXTRA_INDEX_URL": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/other/wheels",
        "UV_INSECURE_HOST": "mirror.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    empty = {"find-links": "", "constraint": "", "quiet": "1"}
    assert install.for_uv(empty) == ([], {"UV_INDEX_STRATEGY": "unsafe-best-match"})
    settings = {"no-index": "true", "find-links": "/a\n/b", "cache-dir": "/c", "timeout": "9"}
    words, variables = install.for_uv(settings)
    assert words == ["--no-index"]
    assert variables["UV_FIND_LINKS"] == "/a,/b"
    assert variables["UV_CACHE_DIR"] == "/c/uv"
    assert variables["UV_HTTP_TIMEOUT"] == "9"
    assert install.for_uv({"no-index": "0", "no-cache-dir": "off"})[0] == []
    with pytest.raises(ValueError, match=r"^no-binary, require-hashes$"):
        install.for_uv({"no-binary": "numpy", "cert": "/x", "require-hashes": "1", "quiet": "1"})


@pytest.fixture
def ran(monkeypatch):
    """The commands that install; those of uv fail if `ran.fails`."""

    class Ran(list):
        fails = False
        listing = ""

    ran = Ran()

    def run(words, variables):
        ran.append((words, variables))
        is_pip = "-m" in words
        return (0, "") if is_pip or not ran.fails else (2, "no such wheel\n")

    monkeypatch.delenv("INSTALLER", raising=False)
    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install, "find_uv", lambda: "uv")
    monkeypatch.setattr(install.subprocess, "check_output", lambda *_, **__: ran.listing)
    return ran


def installers(ran):
    return ["pip" if "-m" in words else "uv" for words, _ in ran]


def test_uv_installs_and_pip_where_uv_cannot(ran, monkeypatch, capsys):
    assert install.main("r.txt") == 0
    ((words, variables),) = ran
    assert words == ["uv", "pip", "install", "--quiet", "--python", sys.executable, "-r", "r.txt"]
    assert variables == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for fault, note in (
        ({"fails": True}, "note: uv failed:\nno such wheel\npip installs instead"),
        ({"listing": "global.user='1'\n"}, "note: pip is configured with user, which uv does not"),
    ):
        ran.clear()
        vars(ran).update(fault)
        assert install.main("r.txt") == 0
        assert installers(ran)[-1] == "pip"
        assert note in capsys.readouterr().out
        vars(ran).clear()
    ran.clear()
    monkeypatch.setattr(install, "find_uv", lambda: None)
    assert install.main("r.txt") == 0
    assert installers(ran) == ["pip"]
    assert "note: there is no uv here" in capsys.readouterr().out


def test_one_of_them_may_be_chosen(ran, monkeypatch, capsys):
    monkeypatch.setenv("INSTALLER", "pip")
    assert install.main("r.txt") == 0
    assert installers(ran) == ["pip"]
    monkeypatch.setenv("INSTALLER", "uv")
    ran.fails = True
    assert install.main("r.txt") == 1
    assert "error: INSTALLER = uv: uv failed" in capsys.readouterr().err
    monkeypatch.setenv("INSTALLER", "conda")
    assert install.main("r.txt") == 2
    assert capsys.readouterr().err == "error: INSTALLER = conda: should be pip or uv\n"
