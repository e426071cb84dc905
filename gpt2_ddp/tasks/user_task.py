"""The code of a task class of one's own: each checkpoint has its source, and only trusted source is
executed.

Who names a class by `--task`, or passes it to `train`, trusts its source on this machine from then
on. Other source in a run folder stays data.
"""

import ast
import hashlib
import inspect
import linecache
import os
import sys
import textwrap
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from accelerate import Accelerator

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.cli import split_flags
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import on_every_rank, on_main
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.files import read_small, user_folder
from gpt2_ddp.project import PACKAGE
from gpt2_ddp.state import CODE, GPTData

T = TypeVar("T")
LARGEST = 2**20
"""Most bytes of a source file."""
installed_packages = cache(packages_distributions)  # it reads the metadata of all


class Code(NamedTuple):
    """The source of a task class. `name`: FILE.py:CLASS or MODULE:CLASS."""

    name: str
    source: bytes

    @property
    def place(self) -> str:
        """The file or module."""
        return self.name.rpartition(":")[0]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    def load(self, base: type[T]) -> type[T]:
        """The class. Executes the source. Raises: UserError if that fails, or no such class extends
        `base`."""
        check_imports(self)
        name = self.name.rpartition(":")[2]
        module = ModuleType(f"task_{self.sha256[:16]}")
        sys.modules[module.__name__] = module
        # tracebacks and docstrings of fields are of this source, whatever the file has now
        lines = self.source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[self.place] = (len(self.source), None, lines, self.place)
        module.__file__ = self.place
        try:
            exec(compile(self.source, self.place, "exec"), vars(module))
        except Exception as error:
            hint = f"cannot be executed ({type(error).__name__}: {error})"
            raise UserError("task", self.name, hint) from error
        kind = getattr(module, name, None)
        if not (isinstance(kind, type) and issubclass(kind, base)):
            hint = f"{self.place} has no such class that extends gpt2_ddp.{base.__name__}"
            raise UserError("task", self.name, hint)
        return kind


def find(name: str) -> Code:
    """The code that `task` names. Raises: UserError if there is none."""
    place, _, kind = name.rpartition(":")
    if not place or not kind:
        file = name.rstrip(":")
        example = f"{file}:CLASS" if file.endswith(".py") else "FILE.py:CLASS, or MODULE:CLASS"
        raise UserError("task", name, f"names no class; write {example}")
    try:
        file = Path(place) if place.endswith(".py") else _file_of_module(place)
        return Code(name, read_small(file, LARGEST))
    except (OSError, ImportError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        advice = "name FILE.py:CLASS, or MODULE:CLASS of an installed module"
        hint = f"cannot be read ({reason}); {advice}"
        raise UserError("task", name, hint) from error


def _file_of_module(name: str) -> Path:
    """The file of a module, found without an import. `find_spec` of a dotted name would import the
    packages above it, whose code nobody has trusted yet. Raises: ImportError, ValueError."""
    package, *parts = name.split(".")
    spec = find_spec(package) if all(part.isidentifier() for part in (package, *parts)) else None
    if spec is None:
        raise ImportError(f"no module {name}")
    if not parts:
        return Path(spec.origin or "")
    files = [
        file
        for folder in spec.submodule_search_locations or ()
        for file in (Path(folder, *parts, "__init__.py"), Path(folder, *parts).with_suffix(".py"))
    ]
    return next((file for file in files if file.is_file()), Path(name))


def of_class(kind: type) -> Code:
    """The code of a class: its whole file, or of a notebook's class its own lines. Raises:
    UserError without either."""
    try:
        file = inspect.getsourcefile(kind)
        if file and os.path.isfile(file):
            is_inside = Path(file).is_relative_to(Path.cwd())
            place = os.path.relpath(file) if is_inside else file
            return Code(f"{place}:{kind.__qualname__}", Path(file).read_bytes())
        source = textwrap.dedent(inspect.getsource(kind))
        return Code(f"<notebook>:{kind.__qualname__}", source.encode())
    except (OSError, TypeError) as error:
        hint = "its source cannot be found; define it in a .py file"
        raise UserError("task", kind.__name__, hint) from error


def check_imports(code: Code) -> None:
    """Raises: UserError for an import of a module of neither Python, an installed package nor this
    one."""
    try:
        nodes = [*ast.walk(ast.parse(code.source))]
    except (SyntaxError, ValueError) as error:
        raise UserError("task", code.name, f"is no Python of this version ({error})") from error
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [
        "." * node.level + str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)
    ]
    known = {*sys.stdlib_module_names, *installed_packages(), PACKAGE.name}
    for name in names:
        if name.partition(".")[0] not in known:  # nothing before a relative import's dot
            advice = "put it into the same file, or install it"
            hint = f"imports {name}, which the run would not record; {advice}"
            raise UserError("task", code.name, hint)


def recorded(checkpoint: Checkpoint) -> Code | None:
    """The code in a checkpoint. Raises: UserError if its file is missing or another one."""
    data = checkpoint.state.task
    own_code = data.code if isinstance(data, GPTData) else None
    if not own_code:
        return None
    file = checkpoint.path / CODE
    with suppress(OSError, ValueError):
        code = Code(own_code.name, read_small(file, LARGEST))
        if code.sha256 == own_code.sha256:
            return code
    hint = f"is not the source of {own_code.name} that the run recorded"
    raise UserError("checkpoint", file, hint)


def trusted(checkpoint: Checkpoint, trust: bool = False) -> Code | None:
    """The code in a checkpoint; None without any. Raises: UserError for code that was never given
    on this machine, unless `trust`."""
    code = recorded(checkpoint)
    if code and not trust and not is_trusted(code):
        file = checkpoint.path / CODE
        advice = f"give --trust_run_code true, or train with --task {code.name}"
        hint = f"its code was never given on this machine; read {file}, then {advice}"
        raise UserError("task", code.name, hint)
    return code


def is_trusted(code: Code) -> bool:
    """Whether somebody gave this source on this machine."""
    with suppress(OSError):
        return code.sha256 in _registry().read_text(encoding="utf-8").split()
    return False


def check_trust(code: Code) -> None:
    """Raises: UserError for source that nobody gave on this machine."""
    if not is_trusted(code):
        raise _untrusted(code, "was never given on this machine")


def _untrusted(code: Code, state: str) -> UserError:
    """The user error of code that no flag --task names."""
    advice = f"if you trust it, give --task {code.name}"
    return UserError("task", code.name, f"its code {state}; {advice}")


def trust(code: Code) -> None:
    """Records that somebody gave this source on this machine."""
    if not is_trusted(code):
        with suppress(OSError):  # without a home, the code has to be given again
            _registry().parent.mkdir(parents=True, exist_ok=True)
            with _registry().open("a", encoding="utf-8") as file:
                file.write(f"{code.sha256}\n")


def _registry() -> Path:
    """The file with the SHA-256 of each trusted source. Raises: OSError for a user without a
    home."""
    return user_folder("XDG_STATE_HOME", ".local/state") / PACKAGE.name / "trusted_code"


def make(
    base: type[T],
    config: TrainingConfig,
    accelerator: Accelerator,
    saved: Checkpoint | None,
    given: type[T] | None = None,
) -> T:
    """The task of a run with a class of one's own, which extends `base`: `given` by the caller,
    named by `config.task`, or recorded in `saved`. The main process's source is that of all ranks.
    Collective. Raises: UserError."""
    code = on_main(partial(_settle, config, saved, given))
    kind: Any = given or on_every_rank(partial(code.load, base))
    kind.code = code
    return kind(config.model_copy(update={"task": code.name}), accelerator, saved)


def _settle(config: TrainingConfig, saved: Checkpoint | None, given: type | None) -> Code:
    """The code to train with. Prints a note if it differs from the run's. Raises: UserError."""
    before = recorded(saved) if saved else None
    file = saved.path / CODE if saved else ""
    if given:
        code = of_class(given)
        check_imports(code)
    else:
        name = config.task or (before.name if before else "")
        try:
            code = find(name)
        except UserError:
            if not (saved and before and before.name == name) or os.path.isfile(before.place):
                raise
            trusted(saved)
            return before
        is_named = split_flags(TrainingConfig, sys.argv)[1].get("task") == name
        if not is_named and before not in (None, code):
            raise _untrusted(code, f"differs from the run's in {file}")
        if not is_named:
            check_trust(code)
    trust(code)
    if saved and not before and saved.step > saved.state.progress.first_step:
        advice = "choose another run_name, or start from it with train.branch_from"
        hint = f"the run was started without it; {advice}"
        raise UserError("task", code.name, hint)
    if before and before != code:
        print_line(f"note: the code of {code.name} differs from that of {before.name} in {file}")
    return code
