"""Profiles: a method with its settings, from TOML and the command line, validated and frozen."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kvcli.errors import KvcliError, usage_error
from kvcli.sizes import Share, parse_count

if TYPE_CHECKING:
    from kvcli.methods.config import MethodConfig
    from kvcli.models.loading import Checkpoint

DEFAULT_PROFILE = "retroinfer"
"""What serves where nothing is named: the settings for a long document and a short answer."""
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class Profile:
    """A method and all of its settings; `paper` names the source of the values.

    `provenance` records the model, the text and the curve of values that `kvcli calibrate` found. A profile that nobody
    named is `unnamed`: a generation chooses another (`kvcli.capacity.unnamed`), whose `chosen` says what and why; where
    only settings are given, it says which method has them. What it `scales` of sink and window is made smaller where
    the budget leaves no room for anything else, and `notice` says so.
    """

    name: str
    method: str
    description: str
    paper: str
    settings: MethodConfig
    provenance: dict[str, Any] = field(default_factory=dict)
    unnamed: bool = field(default=False, compare=False)
    chosen: str | None = field(default=None, compare=False)
    scales: Sequence[str] = field(default=(), compare=False)
    notice: str | None = field(default=None, compare=False)

    @property
    def hash(self) -> str:
        """Twelve hexadecimal digits over method and settings; equal digits request the same behaviour."""
        body = json.dumps([self.method, self.settings.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()[:12]

    def for_prompt(self, tokens: int) -> Profile:
        """Resolve settings that are a share of the prompt, such as a budget, for a prompt of `tokens`.

        Raises:
            KvcliError: the method refuses the resulting values (usage).
        """
        shares = {key: value for key, value in self.settings.model_dump().items() if isinstance(value, Share)}
        if not shares:
            return self
        asked = ", ".join(f"{key} {share}" for key, share in shares.items())
        given = self.settings.model_dump(exclude_unset=True)
        found = given | {key: share.of(tokens) for key, share in shares.items()}
        source = f"{self.method}: {asked} of a prompt of {tokens:,} tokens"
        resolved, notice = _validate(type(self.settings), self.method, found, source, self.scales)
        return replace(self, settings=resolved, notice=notice)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the JSON report, with every setting and the hash."""
        return {
            "name": self.name,
            "method": self.method,
            "description": self.description,
            "paper": self.paper,
            "settings": self.settings.model_dump(mode="json"),
            "hash": self.hash,
            **({"provenance": self.provenance} if self.provenance else {}),
            **({"chosen": self.chosen} if self.chosen else {}),
        }


def profile_names() -> list[str]:
    """List the names of the bundled profiles, sorted: the files, and the defaults of every other method."""
    from kvcli.methods import own_method_names

    files = (entry.name for entry in resources.files("kvcli.profiles").iterdir())
    return sorted({name.removesuffix(".toml") for name in files if name.endswith(".toml")} | {*own_method_names()})


def profiles_by_method() -> dict[str, list[str]]:
    """Group the names of the bundled profiles by method, without importing any method."""
    found: dict[str, list[str]] = {}
    for name in profile_names():
        found.setdefault(_read(name)[1].method, []).append(name)
    return found


_WITHOUT_HOST_KV = "its KV has one form; use --method offload or freekv, or full on a CPU"


def resolve_profile(
    method: str | None = None, profile: str | None = None, overrides: Mapping[str, str | object] | None = None
) -> Profile:
    """Find the profile that a command line asks for and apply `overrides` on top.

    `profile` is a name of `profile_names()` or a path that ends in .toml. Without it, the profile named after the
    method is taken, or the method's own defaults if there is none; without both, `DEFAULT_PROFILE`, or `full` for KV as
    bfloat16. The form of KV alone, `kv_dtype`, leaves the profile `unnamed`. An override that is
    a string is read as a TOML value, a bare word as a string, and 4K as a count of tokens. A small budget scales sink
    and window, unless they are among the overrides.

    Raises:
        KvcliError: an unknown name, key or value, with the nearest known name; bad TOML, with line and column; a
            profile of another method (usage).
    """
    from kvcli.methods import get_method

    unnamed, chosen = method is None and profile is None, None
    if unnamed and (overrides or {}).get("kv_dtype") == "bfloat16":
        method, unnamed = "full", False
        chosen = "no --method: using full attention, which keeps KV as bfloat16"
    name, found, known = _found(method, profile)
    if unnamed and set(overrides or ()) - {"kv_dtype"}:
        unnamed, chosen = False, f"no --method: using {found.method}, the default where settings are given"
    for key in [*found.settings, *(overrides or {})]:
        if key not in known:
            hint = _WITHOUT_HOST_KV if key == "kv_dtype" else nearest(key, known, "settings")
            raise usage_error(f"{found.method} has no setting {shown(key)}", hint)
    method_class = get_method(found.method)
    settings = dict(found.settings)
    for key, value in (overrides or {}).items():
        settings[key] = _override(method_class.Config, key, value)
    scales = [
        key for key in ("sink", "window") if key in method_class.Config.model_fields and key not in (overrides or {})
    ]
    resolved, notice = _validate(method_class.Config, found.method, settings, scales=scales)
    return Profile(
        name,
        found.method,
        method_class.title if found.description is None else found.description,
        method_class.paper if found.paper is None else found.paper,
        resolved,
        found.provenance,
        unnamed=unnamed,
        chosen=chosen,
        scales=scales,
        notice=notice,
    )


def known_settings(method: str | None = None, profile: str | None = None) -> list[str]:
    """List the settings that `resolve_profile` can override, without importing torch; raises what it would raise."""
    return _found(method, profile)[2]


def reference_profile() -> Profile:
    """Return the profile that serves as the reference of every measurement."""
    return resolve_profile(method="full")


def verifying_profile(device: str) -> Profile:
    """Return the profile of full attention that checks drafts on `device`; on a GPU its KV lies in host memory."""
    return resolve_profile(method="offload" if device == "cuda" else "full")


def profile_mismatch(profile: Profile, checkpoint: Checkpoint) -> str | None:
    """Return a sentence that `profile` was calibrated on another model than `checkpoint`, or None if it was not."""
    from kvcli.models.loading import fingerprint

    made_for = profile.provenance.get("model_hash")
    if made_for is None or made_for == fingerprint(checkpoint):
        return None
    return (
        f"profile {profile.name} was calibrated for {profile.provenance.get('model', 'another model')} ({made_for}), "
        f"not for {checkpoint.name}, where its loss is unknown"
    )


def profile_notices(profile: Profile, checkpoint: Checkpoint, shortest: int) -> list[str]:
    """List what a user of `profile` should know before a run whose shortest prompt has `shortest` tokens.

    The first line says which method serves and why, where nobody named one.
    """
    told = profile.chosen, profile.for_prompt(shortest).notice, profile_mismatch(profile, checkpoint)
    return [each for each in told if each]


def refuse_mismatch(profile: Profile, checkpoint: Checkpoint) -> None:
    """Raise KvcliError (usage) if `profile` was calibrated on another model.

    Measurements of quality call this: a bad figure would be blamed on a profile that never promised a good one. A
    generation only shows the notice of `profile_mismatch` and continues.
    """
    if (elsewhere := profile_mismatch(profile, checkpoint)) is not None:
        hint = "calibrate it for this model, or remove [provenance] from the file to measure it anyway"
        raise usage_error(elsewhere, hint)


def _found(method: str | None, profile: str | None) -> tuple[str, ProfileFile, list[str]]:
    """Find the name of a profile, its content, and the names of all settings of its method."""
    from kvcli.methods.card import setting_names

    known = setting_names(method) if method is not None else None
    name = profile or method or DEFAULT_PROFILE
    if profile is None and method is not None and name not in profile_names():
        found = ProfileFile(method=method)
    else:
        name, found = _read(name)
    if method is not None and found.method != method:
        what = f"--profile {name} is a profile of {found.method}, not of --method {method}"
        raise usage_error(what, "leave --method out")
    return name, found, setting_names(found.method) if known is None else known


def _read(name: str) -> tuple[str, ProfileFile]:
    """Read the profile `name`, a bundled name or a path; its settings are not validated."""
    if name.endswith(".toml") or "/" in name:
        path, label = Path(name), Path(name).name.removesuffix(".toml")
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            hint = f"profiles by name: {', '.join(profile_names())}"
            raise usage_error(f"profile {name}: {getattr(error, 'strerror', error)}", hint) from None
    elif (file := resources.files("kvcli.profiles") / f"{name}.toml").is_file():
        data, label = file.read_bytes(), name
    elif name in profile_names():
        return name, ProfileFile(method=name)
    else:
        raise usage_error(f"unknown profile {name!r}", nearest(name, profile_names(), "profiles"))
    return label, parse_profile(name, data)


def _override(config: type[MethodConfig], key: str, value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_toml(f"{json.dumps(key)} = {value}").get(key)
    except tomllib.TOMLDecodeError:
        parsed = value
    except ValueError as error:
        raise usage_error(f"--set {error}", "see kvcli methods") from None
    if isinstance(parsed, str) and _counts_tokens(config, key):
        with suppress(ValueError):  # validation names the value and the type it should have
            return parse_count(parsed)
    return parsed


def _counts_tokens(config: type[MethodConfig], key: str) -> bool:
    field = config.model_fields.get(key)
    extra = field.json_schema_extra if field is not None else None
    return isinstance(extra, dict) and extra.get("unit") == "tokens"


def _validate(
    config: type[MethodConfig],
    method: str,
    settings: dict[str, Any],
    source: str | None = None,
    scales: Sequence[str] = (),
) -> tuple[MethodConfig, str | None]:
    """Make a method's settings; return them, and a notice if what it `scales` is `_smaller` than it was."""
    try:
        found = config(**settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if scales and not first["loc"] and (smaller := _smaller(config, settings, scales)) is not None:
            return smaller
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            message = f"{first['loc'][0]} = {shown(first['input'])}: {message[0].lower()}{message[1:]}"
        raise usage_error(f"{source or method}: {message}", f"see kvcli methods {method}") from None
    if scales and _crowded(found) and (smaller := _smaller(config, settings, scales)) is not None:
        return smaller
    return found, None


def _crowded(settings: MethodConfig) -> bool:
    """Tell whether sink and window take more than half of the budget, and more than their part of the method's own.

    Else a budget that is little more than both would choose next to nothing, and a smaller one, which is scaled, more.
    """
    own = {key: field.default for key, field in type(settings).model_fields.items()}
    budget, usual = getattr(settings, "budget", None), own.get("budget")
    if not isinstance(budget, int) or isinstance(budget, Share) or not isinstance(usual, int):
        return False
    fixed: int = sum(getattr(settings, key, 0) for key in ("sink", "window"))
    part: float = (own.get("sink", 0) + own.get("window", 0)) / usual
    return fixed > budget * max(0.5, part)


_FEW = 16  # tokens


def _smaller(
    config: type[MethodConfig], settings: Mapping[str, Any], scales: Sequence[str]
) -> tuple[MethodConfig, str] | None:
    """Scale sizes and pages as the budget is to the method's own; None if that does not help either.

    Sink and window keep at least `_FEW` tokens in whole pages, but the smallest budgets have no sink. The sink keeps no
    more: few tokens attract attention for being first, and others take what pages could have had. A few large pages
    hold less of the attention than many small ones (`docs/results.md` for both).
    """
    fields, budget = config.model_fields, settings.get("budget")
    usual = fields["budget"].default if "budget" in fields else None
    if not isinstance(budget, int) or isinstance(budget, Share) or not isinstance(usual, int) or budget >= usual:
        return None
    before: dict[str, int] = {key: settings.get(key, fields[key].default) for key in scales}
    page = settings.get("page_size", fields["page_size"].default if "page_size" in fields else 1)
    pages: dict[str, int] = {}
    if config.smallest_page is not None and "page_size" not in settings:
        scaled_page = 1 << max(0, (page * budget // usual).bit_length() - 1)  # a power of two
        pages["page_size"] = page = max(scaled_page, min(page, config.smallest_page))
    few = -(-_FEW // page) * page
    scaled: dict[str, int] = {
        key: min(size, few if key == "sink" else max(size * budget // usual // page * page, few))
        for key, size in before.items()
    }
    for after in (scaled, {key: 0 if key == "sink" else size for key, size in scaled.items()}):
        with suppress(ValidationError):
            found = config(**(dict(settings) | pages | after))
            was, now = ([f"{key} {size:,}" for key, size in each.items()] for each in (before, after))
            options = [f"--{key}" for key in after]
            if pages:
                now, options = [*now, f"pages of {page} tokens"], [*options, "--page-size"]
            room, using, by = map(_listed, (was, now, options))
            return found, f"budget {budget:,} is small for {room}: using {using}; to set them, use {by}"
    return None


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


class ProfileFile(BaseModel):
    """The content of a profile's file; the method validates the settings."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str
    description: str | None = None
    paper: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, JsonValue] = Field(default_factory=dict)


def parse_profile(name: str, data: bytes) -> ProfileFile:
    """Parse a profile's file; a byte order mark is dropped.

    Raises:
        KvcliError: not UTF-8 text, bad TOML (with line and column), an unknown key, or a value of a wrong type (usage).
    """
    try:
        found = parse_toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise usage_error(f"profile {name}: not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except ValueError as error:
        raise usage_error(f"profile {name}: bad TOML: {error}", "values: 2048, 0.9, true, or text in quotes") from None
    try:
        return ProfileFile(**found)
    except ValidationError as error:
        raise _refused(name, error, found) from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML whose numbers are finite and fit into 64 bits, with any line ends.

    Raises:
        ValueError: the problem, in one line.
    """
    try:
        found = tomllib.loads(text.replace("\r\n", "\n"))
        _check_numbers("", found)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:
        # Python refuses to convert numbers of thousands of digits, with advice that does not apply here.
        raise ValueError("a number is beyond 64 bits" if "digits" in str(error) else str(error)) from None
    return found


def shown(value: object) -> str:
    """Format a value for a message: text in quotes, long values cut."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def nearest(name: str, known: Iterable[str], kind: str) -> str:
    """Make a hint from the known name nearest to `name`, or from all known names if none is near."""
    known = list(known)
    if close := get_close_matches(name, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"{kind}: {', '.join(known)}" if known else f"it takes no {kind}"


def _name(key: str) -> str:
    return key if key.isidentifier() else shown(key)


def _check_numbers(key: str, value: object) -> None:
    if isinstance(value, dict):
        for name, entry in value.items():
            _check_numbers(name, entry)
    elif isinstance(value, list):
        for entry in value:
            _check_numbers(key, entry)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{_name(key)} is beyond 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{_name(key)} = {value} is not a finite number")


def _refused(name: str, error: ValidationError, found: dict[str, Any]) -> KvcliError:
    problem = error.errors(include_url=False)[0]
    key = str(problem["loc"][0])
    keys = list(ProfileFile.model_fields)
    if problem["type"] == "extra_forbidden":
        hint = nearest(key, keys, "keys") if get_close_matches(key, keys) else "settings go below [settings]"
        return usage_error(f"profile {name}: unknown key {shown(key)}", hint)
    if problem["type"] == "missing":
        return usage_error(f"profile {name}: no method", 'add a line such as method = "freekv"')
    if len(problem["loc"]) > 1:
        place = ".".join(map(str, problem["loc"][:2]))
        return usage_error(
            f"profile {name}: {place} = {shown(problem['input'])} is not a JSON value", "put it in quotes"
        )
    expected = "a table" if key in ("settings", "provenance") else "text in quotes"
    return usage_error(f"profile {name}: {key} = {shown(found[key])} is not {expected}", "see kvcli methods NAME")
