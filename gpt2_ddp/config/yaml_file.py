"""YAML files as people write them, read without surprises."""

import os
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Bytes of a file, at most; ours have 2,000, and a megabyte would be parsed for ten seconds."""


class _Loader(yaml.SafeLoader):
    """Plain values, each written once: no file is larger in memory than on disk, and no key hides another."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Raises: ConstructorError where `*` repeats more than a single value."""
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)
        if alias and not isinstance(node, yaml.ScalarNode):
            raise ConstructorError(None, None, "only single values can be repeated with *", alias.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Raises: ConstructorError for a key that stands there twice."""
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if str(key.value) in seen:
                raise ConstructorError(None, None, f"the key {key.value} stands there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Raises: ConstructorError for a value that is none of its kind."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # not of too many digits to be shown
        except (ValueError, LookupError, AttributeError) as error:  # such as the date 2020-99-99
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"cannot be read as {kind}", node.start_mark) from error
        return value


def read_yaml(file: str, field: str = "--config") -> dict[str, Any]:
    """The sections and keys in a YAML file; one that is not there is looked for in the project's folder.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    path = Path(file)
    try:
        if not os.path.exists(path) and os.path.exists(PROJECT / file):  # `configs/...` from any folder
            path = PROJECT / file
        values = yaml.load(read_small(path, LARGEST).decode(), _Loader)
    except RecursionError as error:
        raise UserError(field, file, "is nested too deeply; write sections and keys") from error
    except OSError as error:
        raise UserError(field, file, f"cannot be read ({error.strerror}); name an existing YAML file") from error
    except UnicodeDecodeError as error:
        raise UserError(field, file, "is not a text file; name a YAML file") from error
    except yaml.YAMLError as error:
        raise UserError(field, file, f"is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(field, file, "should hold sections and keys, like `train: {steps: 100}`")
    return values
