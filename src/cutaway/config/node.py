"""ConfigNode, the frozen base class of all configuration classes, and the text of configuration errors."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from cutaway.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def _check_magnitude(value: float) -> float:
    """Return the number; raise ValueError if its square or inverse could overflow, which would lead to NaN."""
    if value != 0 and not 1e-30 < abs(value) < 1e30:
        raise ValueError(f"input should be between 1e-30 and 1e30 in magnitude, not {value}")
    return value


PositiveInt = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
FiniteFloat = Annotated[float, AfterValidator(_check_magnitude)]
PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_check_magnitude)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class ConfigNode(BaseModel):
    """A frozen configuration object. An unknown key raises an error that lists the allowed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    import difflib  # imported only for the error message

                    allowed = sorted(cls.model_fields)
                    near = difflib.get_close_matches(str(key), allowed, n=1)
                    hint = f" (did you mean '{near[0]}'?)" if near else ""
                    raise PydanticCustomError(
                        "unknown_key",
                        "unknown key '{key}'{hint}; allowed here: {allowed}",
                        {"key": str(key), "hint": hint, "allowed": ", ".join(allowed)},
                    )
        return data

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: "CoreSchema", handler: "GetJsonSchemaHandler", /
    ) -> "JsonSchemaValue":
        """Add field docstrings as descriptions (pydantic's use_attribute_docstrings is slow at import)."""
        from cutaway.config.field_docstrings import read_field_docstrings

        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, docstring in read_field_docstrings(cls).items():
            properties[name]["description"] = docstring
        return schema

    def replace(self, paths: Mapping[str, Any] | None = None, /, **changes: Any) -> Self:
        """Return a validated copy with changed fields. `paths` changes nested fields: {"decoder.block.ffn.hidden": 8}.

        A path through a tuple, such as a pattern of blocks, applies to each element.
        """
        below: dict[str, dict[str, Any]] = {}
        for path, value in (paths or {}).items():
            name, _, rest = path.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = value
            else:
                changes[name] = value
        changes |= {name: _replace_nested(getattr(self, name, None), name, inner) for name, inner in below.items()}
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)


def _replace_nested(node: Any, name: str, paths: dict[str, Any]) -> Any:
    if isinstance(node, tuple) and node and all(isinstance(each, ConfigNode) for each in node):
        return tuple(each.replace(paths) for each in node)
    if not isinstance(node, ConfigNode):
        raise ConfigError(
            f"{name}.{next(iter(paths))}: '{name}' is not a nested configuration; change the field itself"
        )
    return node.replace(paths)


KIND_DISCRIMINATOR = Field(discriminator="kind")
"""Field annotation of a tagged union, discriminated by `kind`."""


def default_kind(kind: str) -> BeforeValidator:
    """Return a validator for a tagged union: it adds `kind` to a dict that has no key `kind`."""
    return BeforeValidator(lambda data: {"kind": kind} | data if isinstance(data, dict) else data)


def build_config_error(
    error: ValidationError,
    data: Any,
    num_tags: int = 1,
    suggest_key: Callable[[str, str], str | None] = lambda section, key: None,
) -> ConfigError:
    """Convert a pydantic error to a ConfigError with one sentence per problem, each starting with the key path.

    `data` is the validated data. `num_tags` is the number of union tags that pydantic puts before each key path.
    `suggest_key` maps the section and the name of an unknown key, to which no key of the section is similar, to the
    path of the key that is meant.
    """
    lines = []
    problems = error.errors(include_url=False)
    for item in problems[:5]:
        path = _format_error_path(item["loc"][num_tags:], data, missing=item["type"] == "missing")
        message = _format_error_detail(item, path, suggest_key).removesuffix(".")
        lines.append(f"{path}: {message[:1].lower() + message[1:]}" if path else message)
    lines += [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return ConfigError("; ".join(lines))


def _format_error_detail(item: ErrorDetails, path: str, suggest_key: Callable[[str, str], str | None]) -> str:
    context, given = item.get("ctx", {}), item["input"]
    if item["type"] == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        return f"unknown {tag} '{context['tag']}'; allowed here: {context['expected_tags'].replace(chr(39), '')}"
    if item["type"] == "union_tag_not_found":
        return f"this table needs the key {context['discriminator']}"
    if item["type"] == "unknown_key" and not context["hint"] and (near := suggest_key(path, context["key"])):
        return f"unknown key '{context['key']}' (did you mean '{near}'?); allowed here: {context['allowed']}"
    if item["type"] in ("unknown_key", "value_error"):
        return item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return "this key is required"
    if item["type"] == "tuple_type":
        return "this must be a list" + (f", such as [{json.dumps(given)}]" if isinstance(given, str) else "")
    return item["msg"] + (f", not {given!r}" if isinstance(given, str | int | float | bool | None) else "")


def _format_error_path(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> str:
    """The key path of a pydantic location, without union tags, which are not keys of the data."""
    names: list[str] = []
    here = data
    for depth, item in enumerate(loc, start=1):
        try:
            here = (dict(here) if isinstance(here, BaseModel) else here)[item]
        except (KeyError, IndexError, TypeError):
            if not (missing and depth == len(loc)):
                continue
        names.append(f"[{item}]" if isinstance(item, int) else f".{item}")
    return "".join(names).lstrip(".")
