"""Strict YAML: safe types only, no duplicate keys, numbers as YAML 1.2 has them, errors that name a line."""

import re
from typing import Any

import yaml

from storage.errors import SpecError

_FLOAT = "tag:yaml.org,2002:float"
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_MAPPING = "tag:yaml.org,2002:map"


class _Loader(yaml.SafeLoader):
    """PyYAML follows YAML 1.1: `2e-5` would be text, and `name: 2026-11-29` a date."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_FLOAT, _TIMESTAMP)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
    list("-+.0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
        if key.value in first_lines:
            problem = f"duplicate key {key.value}, first given on line {first_lines[key.value]}; keep one"
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        first_lines[key.value] = key.start_mark.line + 1
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(_MAPPING, _unique_mapping)


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        where: what to call it in an error.

    Raises:
        SpecError: it is not one valid document; names the line, and shows nothing of the content that may be secret.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        # What follows is quoted from the document; an unquoted secret such as `*x` reads as an alias.
        problem = re.sub(r"\b(alias|anchor|tag|handle) ['\"].*", r"\1", error.problem or error.context or "not YAML")
        # `from None` here and below: the cause would print an excerpt of the document, secrets included.
        raise SpecError(f"{where}: {line}{problem}; fix the YAML there") from None
    except yaml.reader.ReaderError as error:
        raise SpecError(f"{where}: character {error.position}: {error.reason}; save it as UTF-8 text") from None
    except ValueError:
        raise SpecError(f"{where}: a value does not fit its YAML tag; remove the tag (`!!...`)") from None
