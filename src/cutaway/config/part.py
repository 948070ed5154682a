"""The one base class of everything in a configuration: frozen data that refuses what it does not know."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from cutaway.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


def _within_reach(value: float) -> float:
    """Numbers whose square, log or inverse no dtype holds make NaN somewhere; no model uses any."""
    if value != 0 and not 1e-30 < abs(value) < 1e30:
        raise ValueError(f"input should be between 1e-30 and 1e30 in size, not {value}")
    return value


Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Number = Annotated[float, AfterValidator(_within_reach)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_within_reach)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A frozen piece of a configuration. Unknown keys are errors that name what is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    import difflib  # only mistakes need it

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
        """The schema with what stands under each field. Pydantic's own way reads the sources at every import."""
        from cutaway.config.field_notes import field_notes

        described = handler(core_schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, note in field_notes(cls).items():
            properties[name]["description"] = note
        return described

    def replace(self, paths: Mapping[str, Any] | None = None, /, **changes: Any) -> Self:
        """A validated copy with some fields changed; deeper ones by their paths, as {"decoder.block.ffn.hidden": 8}.

        A path through several parts, as a pattern of blocks, means each of them.
        """
        below: dict[str, dict[str, Any]] = {}
        for path, value in (paths or {}).items():
            name, _, rest = path.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = value
            else:
                changes[name] = value
        changes |= {name: _replaced(getattr(self, name, None), name, inner) for name, inner in below.items()}
        return type(self).model_validate({name: getattr(self, name) for name in type(self).model_fields} | changes)


def _replaced(part: Any, name: str, paths: dict[str, Any]) -> Any:
    if isinstance(part, tuple) and part and all(isinstance(each, Part) for each in part):
        return tuple(each.replace(paths) for each in part)
    if not isinstance(part, Part):
        raise ConfigError(f"{name}.{next(iter(paths))}: there is no part named '{name}' here that could be changed")
    return part.replace(paths)


TAGGED = Field(discriminator="kind")
"""Marks a union whose members are told apart by their `kind`."""


def default_kind(kind: str) -> BeforeValidator:
    """The member of a tagged union that a table without a `kind` means."""
    return BeforeValidator(lambda data: {"kind": kind} | data if isinstance(data, dict) else data)


def explain(error: ValidationError, data: Any, tags: int = 1) -> ConfigError:
    """One sentence for each thing that is wrong, each starting with the path of the bad key, before which pydantic puts
    so many tags."""
    lines = []
    problems = error.errors(include_url=False)
    for item in problems[:5]:
        path = _path_in(item["loc"][tags:], data, missing=item["type"] == "missing")
        message = _plain(item).removesuffix(".")
        lines.append(f"{path}: {message[:1].lower() + message[1:]}" if path else message)
    lines += [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return ConfigError("; ".join(lines))


def _plain(item: ErrorDetails) -> str:
    context, given = item.get("ctx", {}), item["input"]
    if item["type"] == "union_tag_invalid":
        tag = context["discriminator"].strip("'")
        return f"unknown {tag} '{context['tag']}'; allowed here: {context['expected_tags'].replace(chr(39), '')}"
    if item["type"] == "union_tag_not_found":
        return f"this part needs a {context['discriminator']}"
    if item["type"] in ("unknown_key", "value_error"):
        return item["msg"].removeprefix("Value error, ")
    if item["type"] == "missing":
        return "this key is required"
    return item["msg"] + (f", not {given!r}" if isinstance(given, str | int | float | bool | None) else "")


def _path_in(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> str:
    """Pydantic's location without the union tags, which the user never wrote as keys."""
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
