"""The fields of a request to the API: the table of options, under the names that other servers and clients use."""

from __future__ import annotations

import base64
import binascii
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from cogvideox_flax.errors import InputError
from cogvideox_flax.generate.request import (
    MAX_SEED,
    GenerationRequest,
    Option,
    check_option,
    expected,
    help_of,
    option_names,
    options_of,
    types_of,
)
from cogvideox_flax.io.values import is_finite_number, short_repr

MEDIA_FIELDS = {
    "input_reference": "image",
    "last_frame_reference": "last_image",
    "video_reference": "video",
    "mask_reference": "mask_video",
    "control_reference": "control_video",
}
"""Field of the API -> option of the request; the options' own names are taken, too."""

LEFT_OUT = ("num_videos", "compiled_loop", "force")
"""Options that the API does not have: `n` is the first, a compiled loop cannot be cancelled or watched, and sizes at
which the model gives no usable video are not for strangers to choose."""

MAX_FIELDS, MAX_NAME = 100, 64
"""Fields of a request, and characters of an unknown one for which a known name is looked for."""

DEFAULTS = {"seed": "a new one"}
"""Options whose default is another one in the API."""

MAX_PROMPT, MAX_N, MAX_METADATA = 20_000, 8, 16

SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")

OWN_FIELDS = {
    "model": ("string", "name of a model of this server; default: its first"),
    "size": ("string", "WIDTHxHEIGHT in pixels, in place of width and height"),
    "seconds": ("number", "length, in place of num_frames: the nearest that the model makes"),
    "n": ("integer", f"videos with seed, seed + 1, ...: 1 to {MAX_N}; above 1 the answer is a list"),
    "recipe": ("object", "recipe of a video; the other fields override it"),
    "metadata": ("object", f"up to {MAX_METADATA} texts by name, returned unchanged"),
}
"""Fields of the API that are no options: JSON type, help."""


class FieldError(InputError):
    """Fields of a request that cannot be served: `faults` holds a field, or "", and a message for each."""

    def __init__(self, faults: list[tuple[str, str]]):
        super().__init__("; ".join(message for _, message in faults))
        self.faults = faults


@dataclass(frozen=True)
class CreateRequest:
    """A request for videos, read.

    options: field of the request -> value, images, clips and adapters as paths in the gallery.
    seconds: as asked; None: `num_frames`, or the model's.
    made_by: release and dtype of the recipe, as far as there is one.
    """

    model: str | None
    options: dict[str, Any]
    seconds: float | None
    n: int
    metadata: dict[str, str] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


def api_names() -> dict[str, str]:
    """Every name of a field that is an option, to the option."""
    names = {name: own for name, own in option_names().items() if own not in LEFT_OUT}
    return {"prompt": "prompt", **names, **MEDIA_FIELDS}


def read_fields(
    values: Mapping[str, Any],
    media: Callable[[str, Any], str],
    adapter: Callable[[str], str],
    base: Mapping[str, Any],
) -> CreateRequest:
    """Read the fields of a request.

    Args:
        values: of JSON; texts where they came out of a form.
        media: field and value of an image or clip -> its path in the gallery.
        adapter: name -> its path in the gallery.
        base: options that stand where the request says nothing.

    Raises:
        FieldError: with all fields that cannot be served.
    """
    if len(values) > MAX_FIELDS:
        raise FieldError([("", f"the request has {len(values)} fields; expected at most {MAX_FIELDS}")])
    faults: list[tuple[str, str]] = []
    names, options, own = api_names(), dict[str, Any](), dict[str, Any]()
    for key, value in values.items():
        try:
            if key == "recipe":
                given_too = {names[name] for name in values if name in names}
                own[key] = _recipe(_json(key, value, dict), given_too)
            elif key in OWN_FIELDS:
                own[key] = _own(key, value)
            elif (name := names.get(key)) is None:
                raise InputError(_unknown(key, names))
            elif name in options:
                raise InputError(f"{key} is {name}, which was given already; give it once")
            elif name in MEDIA_FIELDS.values():
                options[name] = media(key, value)
            elif name == "lora":
                options[name] = [_adapter(each, adapter) for each in _json(key, value, list)]
            elif name == "prompt":
                options[name] = _prompt(value)
            else:
                options[name] = _option(name, value)
        except (InputError, ValueError, OverflowError) as e:
            faults.append((key, str(e)))
    recipe, made_by = own.get("recipe", ({}, {}))
    given = options
    options = {name: value for name, value in base.items() if name != "model"} | recipe | given
    if "prompt" not in options and not any(key == "prompt" for key, _ in faults):
        faults.append(("prompt", "prompt is missing; expected a text"))
    if "size" in own:
        faults += [
            ("size", f"size and {side} were given; give one of them") for side in ("width", "height") if side in values
        ]
        options["width"], options["height"] = own["size"]
    if "seconds" in own and "num_frames" in given:
        faults.append(("seconds", "seconds and num_frames were given; give one of them"))
    if faults:
        raise FieldError(faults)
    count, seed = own.get("n", 1), options.get("seed", 0)
    if seed + count - 1 > MAX_SEED:
        raise FieldError([("n", f"n is {count} from seed {seed}; expected seeds up to {MAX_SEED}")])
    return CreateRequest(own.get("model"), options, own.get("seconds"), count, own.get("metadata", {}), made_by)


def _unknown(key: str, names: Mapping[str, str]) -> str:
    close = get_close_matches(key, [*names, *OWN_FIELDS], 1) if len(key) <= MAX_NAME else []
    return f"there is no field {short_repr(key)}; " + (f"did you mean {close[0]}?" if close else "see /openapi.json")


def _json(key: str, value: Any, kind: type) -> Any:
    """A value of a JSON type, which a form holds as text."""
    if isinstance(value, str) and kind is not str:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as e:
            raise InputError(f"{key} is {short_repr(value)}; expected JSON") from e
    if not isinstance(value, kind):
        words: dict[Any, str] = {dict: "a JSON object", list: "a JSON array", str: "a text"}
        raise InputError(f"{key} is {short_repr(value)}; expected {words[kind]}")
    return value


def _prompt(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"prompt is {short_repr(value)}; expected a text")
    if len(value) > MAX_PROMPT:
        raise InputError(f"prompt has {len(value)} characters; expected at most {MAX_PROMPT}")
    return value


def _option(name: str, value: Any) -> Any:
    """A value of an option, of JSON or of a form."""
    option = options_of(GenerationRequest).get(name, Option(""))
    if isinstance(value, str):
        if option.choices is not None and value in option.choices:
            return option.choices[value]
        if not _takes_text(name):
            with suppress(ValueError, RecursionError):  # which `check_option` answers
                value = json.loads(f"[{value}]" if option.length is not None and "[" not in value else value)
    return check_option(name, value)


def _takes_text(name: str) -> bool:
    hint = types_of(GenerationRequest)[name]
    return str in (hint, *typing.get_args(hint))


def _adapter(value: Any, adapter: Callable[[str], str]) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or set(value) - {"name", "scale"}:
        raise InputError(f'lora holds {short_repr(value)}; expected {{"name": TEXT, "scale": NUMBER}}')
    if not is_finite_number(scale := value.get("scale", 1.0)):
        raise InputError(f"lora: scale is {short_repr(scale)}; expected a number")
    return {"file": adapter(value["name"]), "scale": float(scale)}


def _own(key: str, value: Any) -> Any:
    match key:
        case "model":
            return _json(key, value, str)
        case "size":
            if not isinstance(value, str) or (match := SIZE.fullmatch(value)) is None:
                raise InputError(f"size is {short_repr(value)}; expected WIDTHxHEIGHT, such as 720x480")
            return int(match[1]), int(match[2])
        case "seconds":
            return _number(key, value, 1e-3, 1e5)
        case "n":
            return int(_number(key, value, 1, MAX_N, whole=True))
        case _:
            texts = _json(key, value, dict)
            if len(texts) > MAX_METADATA or not all(
                isinstance(text, str) and len(text) <= 512 for text in texts.values()
            ):
                raise InputError(f"metadata: expected up to {MAX_METADATA} texts of at most 512 characters")
            return texts


def _number(key: str, value: Any, low: float, high: float, whole: bool = False) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or not low <= number <= high or (whole and number != int(number)):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{key} is {short_repr(value)}; expected {kind} from {low:g} to {high:g}")
    return number


def _recipe(recipe: dict[str, Any], given: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a recipe, and the release and dtype that it names.

    Its images, clips and adapters are files of another machine, which are given anew.

    Args:
        given: options that the request gives beside it.

    Raises:
        InputError: it states what no option gives, or a file that is not given.
    """
    from cogvideox_flax.generate.recipe import UNREPEATABLE

    names = set(api_names().values())
    settings: dict[str, Any] = {name: recipe[name] for name in ("prompt", "negative_prompt", "seed") if name in recipe}
    settings |= _json("settings", recipe.get("settings", {}), dict)
    made_by = {"release": recipe.get("release"), "dtype": settings.pop("dtype", None)}
    options: dict[str, Any] = {}
    for name, value in settings.items():
        if name in given or value is None:
            continue
        if name in MEDIA_FIELDS.values() or name == "lora":
            raise InputError(f"the recipe was made with {name}: give the file again as {name}")
        if name not in names:
            raise InputError(f"the recipe states {short_repr(name)}, which no field of a request gives")
        options[name] = _prompt(value) if name == "prompt" else check_option(name, value)
    if stated := [name for name in (*UNREPEATABLE, "row") if recipe.get(name)]:
        raise InputError(f"the recipe states {' and '.join(stated)}, which no field of a request gives")
    return options, {name: value for name, value in made_by.items() if value is not None}


def data_url(text: str, most: int) -> bytes:
    """The bytes of a data: URL.

    Raises:
        InputError: another URL, no base64, or more than `most` bytes.
    """
    if not text.startswith("data:"):
        raise InputError("only data: URLs are read here; upload the file to /v1/files and name its id")
    head, _, data = text.partition(",")
    if not head.endswith(";base64") or len(data) > most * 4 // 3 + 4:
        raise InputError(f"a data: URL holds base64 of at most {most} bytes here; upload the file to /v1/files")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise InputError("the data: URL is no base64") from e


# --- descriptions, for forms and for /openapi.json


def describe_field(name: str) -> dict[str, Any]:
    """A field as JSON Schema, with what a form needs: its group, and whether most people want it."""
    option, hint = options_of(GenerationRequest)[name], types_of(GenerationRequest)[name]
    fields = GenerationRequest.__dataclass_fields__
    description, default = help_of(fields[name]), option.unset or fields[name].default
    if name in DEFAULTS:
        description, default = description.replace(f"default: {default}", f"default: {DEFAULTS[name]}"), DEFAULTS[name]
    schema: dict[str, Any] = {"description": description, "x-group": option.group, "x-common": option.common}
    if isinstance(default, int | float) and not isinstance(default, bool):
        default = f"{default:g}"
    if default and isinstance(default, str):
        schema["x-default"] = default
    if name in MEDIA_FIELDS.values():
        return schema | {"$ref": "#/components/schemas/FileReference"}
    if name == "lora":
        item = {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}, "scale": {"type": "number"}},
        }
        return schema | {"type": "array", "items": item}
    if option.choices is not None:
        schema |= {"type": "string", "enum": list(option.choices), "x-values": list(option.choices.values())}
    else:
        kind = {bool: "boolean", int: "integer", float: "number", str: "string"}
        one = next((kind[each] for each in (bool, int, float, str) if each in (hint, *typing.get_args(hint))), "number")
        number: dict[str, Any] = {"type": one}
        if option.range is not None:
            number["exclusiveMinimum" if option.range.is_open else "minimum"] = option.range.low
            number |= {} if option.range.high is None else {"maximum": option.range.high}
        if option.length is not None:
            number = {"type": "array", "items": {**number, "type": "integer" if "int" in str(hint) else "number"}}
            number |= {"minItems": option.length, "maxItems": option.length} if option.length else {"minItems": 1}
        schema |= number
    if option.unit:
        schema["x-unit"] = option.unit
    schema["x-expected"] = expected(option, hint)
    return schema


def field_names() -> list[str]:
    """The options that the API has, in the order of the table."""
    return [name for name in options_of(GenerationRequest) if name not in LEFT_OUT]
