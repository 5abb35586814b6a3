"""Options of the commands that generate text, and what is made of their values."""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcli.cli.options import (
    METHOD,
    SAMPLING,
    Panel,
    assignments,
    by_precedence,
    complete_methods,
    complete_profiles,
    given,
    number,
    positive_count,
    whole,
)
from kvcli.errors import usage_error

if TYPE_CHECKING:
    from kvcli.inputs.profiles import Profile as ResolvedProfile

INPUT = Panel("Input", env=True)

System = Annotated[str | None, INPUT.option("--system -s", "TEXT", "System message of the conversation.")]
Raw = Annotated[bool, INPUT.flag("--raw", "Leave the chat template out: the model continues the plain text.")]
ChatTemplateKwargs = Annotated[
    str | None, INPUT.option("--chat-template-kwargs", "JSON", "Variables for the chat template.")
]
Method = Annotated[
    str | None,
    METHOD.option(
        "--method",
        "NAME",
        "KV-cache method, see kvcli methods.",
        show_default="freekv",
        autocompletion=complete_methods,
    ),
]
Profile = Annotated[
    str | None,
    METHOD.option(
        "--profile",
        "NAME|FILE.toml",
        "Settings of a method by name or file; a notice if calibrated on another model.",
        show_default="named like the method",
        autocompletion=complete_profiles,
    ),
]
Settings = Annotated[
    list[str] | None, METHOD.option("--set", "KEY=VALUE", "Change one setting of the profile; repeatable.")
]
KVDType = Annotated[
    Literal["auto", "int8", "int4"] | None,
    METHOD.option("--kv-dtype", "NAME", "How KV in host memory is held: auto as computed, int8, int4."),
]
MaxTokens = Annotated[
    int, SAMPLING.option("--max-tokens", "TOKENS", "Longest output, as in 256 or 16K.", positive_count)
]
TopK = Annotated[int, SAMPLING.option("--top-k", "K", "Draw from the K likeliest tokens; 0 for all.", whole)]
MinP = Annotated[
    float, SAMPLING.option("--min-p", "P", "Drop tokens below this share of the likeliest one's, 0 to 1.", number)
]
Seed = Annotated[int, SAMPLING.option("--seed", "N", "Same seed, same text.", whole)]
StopTexts = Annotated[
    list[str] | None, SAMPLING.option("--stop", "TEXT", "End before this text; repeatable.", env=False)
]
IgnoreEos = Annotated[bool, SAMPLING.flag("--ignore-eos", "Go on to --max-tokens past the end-of-text token.")]


def profile_of(
    context: typer.Context, method: str | None, profile: str | None, settings: list[str], short: dict[str, str | None]
) -> ResolvedProfile:
    """Resolve method, profile and settings; what the command line says counts more than the environment."""
    from kvcli.inputs.profiles import known_settings, resolve_profile

    named = by_precedence(context, {"method": method, "profile": profile})
    explicit = given(context, named)
    if len(explicit) == 1:  # --method quest beats KVCLI_PROFILE=freekv instead of contradicting it
        named = {name: named[name] for name in explicit}
    overrides = assignments(settings)
    direct = by_precedence(context, short)
    twice = [key for key in given(context, direct) if key in overrides and given(context, ["settings"])]
    if twice:
        raise usage_error(f"{twice[0]} is set twice, by --set and by its own option", "leave one out")
    # A default from the environment is meant for the methods that have the setting.
    known = known_settings(**named)
    direct = {key: value for key, value in direct.items() if key in known or key in given(context, direct)}
    layers = (direct, overrides) if given(context, ["settings"]) else (overrides, direct)
    return resolve_profile(**named, overrides={**layers[0], **layers[1]})


def json_object(text: str | None) -> dict[str, Any]:
    """Read what --chat-template-kwargs was given."""
    if text is None:
        return {}
    hint = """for example --chat-template-kwargs '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise usage_error(f"--chat-template-kwargs {text[:60]!r}: bad JSON: {error}", hint) from None
    if not isinstance(value, dict):
        raise usage_error(f"--chat-template-kwargs {text!r} is not a JSON object", hint)
    return value


def hush_libraries(verbose: bool) -> None:
    """Keep the libraries' own warnings and bars off stderr, unless asked; to be called before they are imported."""
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
