"""The reader of YAML files that people write."""

import os
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Largest file, in bytes. The shipped ones have 2,000; the parser would need ten seconds for a megabyte."""


class _Loader(yaml.SafeLoader):
    """Safe types only; refuses aliases and repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConstructorError(None, None, "aliases (*) are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise ConstructorError(None, None, f"the key {key.value} stands there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(file: str, field: str = "--config") -> dict[str, Any]:
    """The sections and keys of a YAML file. A missing file is looked up in the project's folder.

    Raises:
        UserError: the file cannot be read, or holds no mapping.
    """
    path = Path(file)
    try:
        if not os.path.exists(path) and os.path.exists(PROJECT / file):  # `configs/...` from any folder
            path = PROJECT / file
        values = yaml.load(read_small(path, LARGEST).decode(), _Loader)
        str(values)  # raises ValueError for an integer of too many digits
    except (OSError, yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(field, file, f"cannot be read as YAML ({reason})") from error
    if not isinstance(values, dict | None):
        raise UserError(field, file, "should hold sections and keys, like `train: {steps: 100}`")
    return values or {}
