"""Turn groups of `kvcli.inputs.options` into Typer options, and their values back into groups."""

from __future__ import annotations

import inspect
import os
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from kvcli.errors import usage_error
from kvcli.inputs.options import Compared, MethodOptions, Option, Some, made, positive_count, token_budget

if TYPE_CHECKING:
    from kvcli.inputs.options import Input, ModelOptions, Template
    from kvcli.inputs.profiles import Profile
    from kvcli.inputs.prompts import FailedPrompt, Prompt
    from kvcli.inputs.variants import Variant

T = TypeVar("T")


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters are groups: each group is replaced by its options, in order.

    `Annotated[group, Some(...)]` picks options of the group. A group that may be None is None unless the option that it
    requires is given.
    """
    groups: dict[str, tuple[type, list[Option]]] = {}
    parameters, hints = [], {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        if hint is typer.Context:
            hints[name] = hint
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
            continue
        bare, some = get_args(hint) if get_origin(hint) is Annotated else (hint, Some())
        optional = get_origin(bare) in (Union, types.UnionType)
        group = get_args(bare)[0] if optional else bare
        groups[name] = group, some.of(group)
        for each in groups[name][1]:
            default, hints[each.name] = _in_typer(each, optional)
            parameters.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default))

    @wraps(function)
    def called(**given: Any) -> None:
        values: dict[str, Any] = {}
        listed = [each for _, picked in groups.values() for each in picked]
        _require_text({each.utf8: given[each.name] for each in listed if each.utf8 is not None})
        for name, (group, picked) in groups.items():
            values[name] = made(group, picked, given)
        own = {name: value for name, value in given.items() if hints[name] is typer.Context}
        function(**own, **values)

    called.__doc__ = _flowing(function.__doc__ or "")
    called.__annotations__ = hints
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    )
    return called


def _flowing(text: str) -> str:
    """Join the lines of each paragraph but of commands, so that a help page breaks them where the terminal ends."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(each if each.startswith("kvcli ") else each.replace("\n", " ") for each in paragraphs)


def _in_typer(option: Option, optional: bool) -> tuple[Any, Any]:
    """Return the default and the annotation of an option."""
    kind, default = option.type, option.default
    if default is ...:
        default, kind = (None, kind | None) if optional else (inspect.Parameter.empty, kind)
    if kind == tuple[str, ...]:
        default, kind = (None, list[str] | None) if default == () else (default, list[str])
    if option.make is not None:
        default, kind = None, str | None
    if not option.names:
        return default, Annotated[kind, typer.Argument(metavar=option.metavar, help=option.help, show_default=False)]
    settings: dict[str, Any] = {} if option.show is True else {"show_default": option.show}
    return default, Annotated[
        kind,
        typer.Option(
            *option.names.split(),
            metavar=option.metavar,
            help=option.help,
            parser=option.read,
            rich_help_panel=option.panel,
            envvar="KVCLI_" + option.long[2:].replace("-", "_").upper() if option.env else None,
            show_envvar=False,
            autocompletion=option.complete,
            hidden=option.hidden,
            **settings,
        ),
    ]


def _require_text(values: Mapping[str, Any]) -> None:
    """Refuse values that are not UTF-8 text: Python keeps other bytes of a command line as lone surrogates.

    Raises:
        KvcliError: names the option of such a value (usage).
    """
    for name, value in values.items():
        for text in [value] if isinstance(value, str) else value or ():
            if any("\ud800" <= character <= "\udfff" for character in text):
                hint = "check the encoding of the terminal or script"
                raise usage_error(f"{name} holds bytes that are not UTF-8 text", hint)


def assignments(settings: Iterable[str], name: str = "--set") -> dict[str, str]:
    """Parse KEY=VALUE assignments given to --set, or to the option `name`; the last value of a key wins."""
    values: dict[str, str] = {}
    for assignment in settings:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise usage_error(f"{name} {assignment!r} is not KEY=VALUE", f"for example {name} budget=4K")
        method, dot, setting = key.strip().rpartition(".")
        values[f"{method}{dot}{setting.replace('-', '_')}"] = value.strip()
    return values


def names(text: str | None, name: str) -> list[str]:
    """Split a comma-separated list given to the option `name`."""
    return each(text, name, str)


def each(text: str | None, name: str, read: Callable[[str], T]) -> list[T]:
    """Read the entries of a comma-separated list given to the option `name`; a list that is given has at least one."""
    if text is None:
        return []
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise usage_error(f"{name} {text!r} has an empty entry", "separate the entries by single commas")
    try:
        return [read(entry) for entry in entries]
    except ValueError as error:
        raise usage_error(f"{name}: {error}", f"fix it, or leave {name} out") from None


def distinct(text: str | None, name: str) -> list[int]:
    """Read a comma-separated list of counts and drop duplicates."""
    return list(dict.fromkeys(each(text, name, positive_count)))


def compared(chosen: Compared) -> list[Variant]:
    """Resolve the methods and profiles to compare; without any, full and freekv, for which native may stand in."""
    from kvcli.inputs.variants import variants

    methods, profiles = names(chosen.method, "--method"), names(chosen.profile, "--profile")
    budgets = each(chosen.budget, "--budget", token_budget)
    wanted = assignments(chosen.settings) | ({} if chosen.kv_dtype is None else {"kv_dtype": chosen.kv_dtype})
    found = variants(methods or ([] if profiles else ["full", "freekv"]), profiles, budgets, wanted)
    if not (methods or profiles or budgets or wanted or chosen.ablate):
        full, retrieval = found
        found = [full, replace(retrieval, profile=replace(retrieval.profile, unnamed=True))]
    return found


def given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """Return those of `names` that the command line itself sets (neither the environment nor a default)."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def by_precedence(context: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are set, those of the environment first, so that the command line's override them."""
    present = {name: value for name, value in values.items() if value is not None}
    from_command_line = set(given(context, present))
    return {name: present[name] for name in sorted(present, key=lambda name: name in from_command_line)}


def profile_of(context: typer.Context, chosen: MethodOptions) -> Profile:
    """Resolve method, profile and settings; the command line takes precedence over the environment."""
    from kvcli.inputs.profiles import known_settings, resolve_profile

    named = by_precedence(context, {"method": chosen.method, "profile": chosen.profile})
    explicit = given(context, named)
    if len(explicit) == 1:  # --method quest beats KVCLI_PROFILE=freekv instead of contradicting it
        named = {name: named[name] for name in explicit}
    overrides = assignments(chosen.settings)
    direct = by_precedence(context, chosen.short())
    by_set = bool(given(context, ["set"]))
    twice = [key for key in given(context, direct) if key in overrides and by_set]
    if twice:
        raise usage_error(f"{twice[0]} is set twice, by --set and by its own option", "leave one out")
    # A default from the environment is meant for the methods that have the setting.
    known = known_settings(**named)
    direct = {key: value for key, value in direct.items() if key in known or key in given(context, direct)}
    layers = (direct, overrides) if by_set else (overrides, direct)
    return resolve_profile(**named, overrides={**layers[0], **layers[1]})


def read_entries(given: Input, kv: Path | None) -> list[Prompt | FailedPrompt]:
    """Read documents and questions, and ask every question on every document.

    Without files, the document saved in the directory `kv` is used; without that, the questions stand alone.

    Raises:
        KvcliError: something cannot be read, or there is nothing to read (usage).
    """
    from kvcli.inputs.prompts import ALONE, STDIN, Prompt, ask, read_prompts, read_questions

    files, first = given.files, given.question_first
    if given.questions == STDIN and STDIN in files:
        raise usage_error("standard input (-) is named twice", "name it once")
    asked = read_questions(given.prompts, given.questions)
    if not files and kv is not None:
        from kvcli.runtime.saved.manifest import read_manifest

        saved = read_manifest(kv).asked
        return ask([Prompt(saved.source, saved.text)], asked, first)
    if not files and asked:
        return [Prompt(ALONE, each.text, id=each.id) for each in asked]
    return ask(read_prompts(files), asked, first)


def template_of(context: typer.Context, asked: Template, kv: Path | None, settled: bool = False) -> Template:
    """Return the template as asked, or the one saved in the directory `kv` if the command line sets no option of it.

    `settled` keeps the template as asked.

    Raises:
        KvcliError: `kv` is not a directory of saved KV (usage).
    """
    if kv is None or settled or given(context, ["system", "raw", "chat_template_kwargs"]):
        return asked

    from kvcli.runtime.saved.manifest import read_manifest

    saved = read_manifest(kv).asked
    return replace(asked, system=saved.system, raw=saved.raw, kwargs=saved.chat_template_kwargs)


def model_of(asked: ModelOptions, kv: Path | None) -> tuple[ModelOptions, str | None]:
    """Return the model as asked, or without one the model that the KV in the directory `kv` was saved with; a notice.

    Raises:
        KvcliError: `kv` is not a directory of saved KV, or its model is not where it was (usage).
    """
    if asked.model is not None or kv is None:
        return asked, None

    from kvcli.runtime.saved.manifest import read_manifest

    saved = read_manifest(kv).model
    if saved.model == "demo":
        return asked, None
    if Path(saved.model).is_absolute() and not Path(saved.model).exists():
        raise usage_error(f"{kv}: saved with {saved.model}, which does not exist", "name the model's new path with -m")
    dtype: Any = saved.dtype if asked.dtype == "auto" else asked.dtype
    return replace(asked, model=saved.model, dtype=dtype), f"no -m: using {saved.model}, the model of {kv}"


def hush_libraries(verbose: bool) -> None:
    """Keep warnings and progress bars of libraries off stderr unless `verbose`; call this before importing them."""
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
