"""One message for a wrong value in a slot or an option."""

import difflib

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, where: str, section: type[BaseModel], noun: str) -> str:
    """The first error: where it stands, what is wrong, the nearest right name or value."""
    item = error.errors()[0]
    name = str(item["loc"][0]) if item["loc"] else ""
    path = ".".join([where, *map(str, item["loc"])])
    if item["type"] == "extra_forbidden":
        known = known_fields(section, item["loc"][:-1])
        return f"{path}: unknown {noun} {item['loc'][-1]!r}; {nearest(str(item['loc'][-1]), known)}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "model_type" and item["ctx"]["class_name"] == "Scale":
        message = "write a number, or a mapping such as {value: 0.1, learned: vector}"
    hint = ""
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        hint = literal_hint(item)
    return (
        f"{path}={item['input']!r}: {message[0].lower()}{message[1:]}{hint}"
        if name
        else f"{where}: {message}"
    )


def nearest(name: str, known: list[str]) -> str:
    """A hint at the nearest known name, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"


def literal_hint(item: dict) -> str:
    """The nearest of the values that a choice allows."""
    values = [part.strip("'") for part in item["ctx"]["expected"].replace(" or ", ", ").split(", ")]
    near = difflib.get_close_matches(item["input"], values, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def known_fields(section: type[BaseModel], path: tuple) -> list[str]:
    """Names of the fields of the section at ``path`` below ``section``."""
    for part in path:
        field = section.model_fields.get(part)
        if field is None:
            return []
        kinds = [
            kind
            for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not kinds:
            return []
        section = kinds[0]
    return list(section.model_fields)
