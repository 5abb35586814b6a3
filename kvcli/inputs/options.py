"""Options, each declared once: the command line, the Python interface and the documentation derive from these fields.

A group is a dataclass whose fields are options; a command takes groups, or some options of one (`Some`). To add an
option to everything that takes a group, add a line to the group. `kvcli.cli.command.command` makes the command line's
form of a group, `keywords` and `take` make the keyword arguments, and docs/from_code.py their table in docs/python.md.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints

from kvcli.errors import usage_error
from kvcli.sizes import parse_bytes, parse_count, parse_count_or_share

if TYPE_CHECKING:
    from kvcli.models.loading import ModelSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One option: its names on the command line, its placeholder, its help, and how it is read.

    An argument of a command has no names. A `default` of `...` makes a value mandatory. `field` and `type` are set once
    the option is part of a group.
    """

    panel: str | None
    default: Any
    names: str
    metavar: str | None
    help: str
    read: Callable[[object], object] | None = None
    """Reads text; raises ValueError."""
    env: bool = False
    """Whether KVCLI_NAME sets it."""
    within: tuple[Callable[[Any], bool], str] | None = None
    """A test for values in range, and the description of that range."""
    make: Callable[[str], Any] | None = None
    """Makes the field's value from text; raises KvcliError."""
    utf8: str | None = None
    """The option's name in the error for bytes that are not text."""
    show: str | bool = True
    """The default as the help shows it."""
    complete: Callable[[str], list[str]] | None = None
    hidden: bool = False
    beside: tuple[str, str, str] | None = None
    """Another field that it needs, and the error and the hint if that is missing."""
    field: str = ""
    type: Any = None

    @property
    def long(self) -> str:
        """The first long name."""
        return next(name.partition("/")[0] for name in self.names.split() if name.startswith("--"))

    @property
    def name(self) -> str:
        """The name as a Python identifier."""
        return self.long[2:].replace("-", "_") if self.names else self.field


class Panel:
    """A part of a command's help; call it in the body of a group to declare an option there."""

    def __init__(self, title: str | None, env: bool = False):
        self._title, self._env = title, env

    def __call__(self, default: Any, names: str, metavar: str | None, help: str, read: Any = None, **more: Any) -> Any:
        """Declare an option, with further fields of `Option` in `more`."""
        option = Option(self._title, default, names, metavar, help, read, **{"env": self._env, **more})
        given = {} if default is ... else {"default": default}
        return field(**({"default_factory": dict} if default == {} else given), metadata={"option": option})

    def flag(self, names: str, help: str, **more: Any) -> Any:
        """Declare an option that takes no value; it is off by default."""
        return self(False, names, "", help, **more)


def argument(default: Any, metavar: str, help: str) -> Any:
    """Declare an argument, which has no name on the command line."""
    return Panel(None)(default, "", metavar, help, show=False)


group = dataclass(frozen=True, kw_only=True)
"""Makes a class of options a group, which is constructed only by the names of its fields."""


class Some:
    """Annotates a group in a command's signature: picks the options that are named, in this order.

    An option can be changed there: `Some("quiet", quiet={"help": "No notes."})`.
    """

    def __init__(self, names: str = "", **changes: Mapping[str, Any]):
        self.names, self.changes = names.split(), changes

    def of(self, group: type) -> list[Option]:
        """Pick and change the options of a group."""
        hints = get_type_hints(group)
        found = [(each, each.metadata.get("option")) for each in fields(group)]
        known = [
            replace(option, field=each.name, type=hints[each.name]) for each, option in found if option is not None
        ]
        by_name = {option.name: option for option in known}
        return [replace(by_name[name], **self.changes.get(name, {})) for name in self.names or by_name]


def made(group: type[T], listed: Iterable[Option], given: Mapping[str, Any]) -> T | None:
    """Make a group from the values given for the `listed` options; None if it lacks a mandatory one.

    A value of None was not given: the group's own default applies.

    Raises:
        KvcliError: an option needs another one, or text is malformed (usage).
    """
    options = {each.field: each for each in listed if given.get(each.name) is not None}
    for each in options.values():
        if each.beside is not None and each.beside[0] not in options:
            raise usage_error(*each.beside[1:])
    if any(each.default is ... and each.field not in options for each in Some().of(group)):
        return None
    return group(**{name: _value(each, given[each.name]) for name, each in options.items()})


def _value(option: Option, given: Any) -> Any:
    """Make the field's value from Typer's."""
    if option.make is not None and isinstance(given, str):
        return option.make(given)
    return tuple(given) if isinstance(given, list) else given


def take(group: type[T], given: dict[str, Any], names: str = "") -> T | None:
    """Make a group of the keyword arguments among `given` that are its options, and remove them from `given`.

    Raises:
        KvcliError: an option does not take its value (usage).
    """
    listed = Some(names).of(group)
    values = [(each, given.pop(each.name)) for each in listed if each.name in given]
    return made(group, listed, {each.name: _read(each, value) for each, value in values if value is not None})


def _read(option: Option, value: Any) -> Any:
    """Read a keyword argument, which may be text as on the command line."""
    if option.read is not None and (isinstance(value, str) or option.within is None):
        try:
            value = option.read(value)
        except ValueError as error:
            raise usage_error(f"{option.name} is {value}", str(error)) from None
    if option.type in (Path, Path | None):
        return Path(value)
    return [value] if option.type == tuple[str, ...] and isinstance(value, str) else value


def keywords(function: Callable[[Any], T]) -> Callable[..., T]:
    """Let a function of one group take the group's options as keyword arguments; the first may be positional."""
    (group,) = (hint for name, hint in get_type_hints(function).items() if name != "return")

    @wraps(function)
    def called(*first: Any, **given: Any) -> T:
        return function(take(group, dict(signature.bind(*first, **given).arguments)))

    kinds = chain([inspect.Parameter.POSITIONAL_OR_KEYWORD], repeat(inspect.Parameter.KEYWORD_ONLY))
    signature = inspect.Signature(
        [
            inspect.Parameter(each.name, kind, default=each.default, annotation=each.type)
            for each, kind in zip(Some().of(group), kinds, strict=False)
        ]
    )
    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def check_ranges(group: Any) -> None:
    """Refuse values that are out of the range of their options.

    Raises:
        KvcliError: names the option and its range (usage).
    """
    for each in fields(group):
        option, value = each.metadata["option"], getattr(group, each.name)
        if option.within is not None and not option.within[0](value):
            shown = "" if each.name == "stop" else value
            raise usage_error(f"{option.long} {shown!r} is out of range", f"give {option.within[1]}")


def at_least(least: int, read: Callable[[str], float]) -> Callable[[object], Any]:
    """Make a function that reads a value by `read` and refuses one below `least`."""

    def reads(text: object) -> float:
        if (value := read(str(text))) < least:
            raise ValueError(f"{text} is not at least {least}")
        return value

    return reads


def whole(text: object) -> int:
    """Read a whole number."""
    try:
        return int(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def number(text: object) -> float:
    """Read a finite number."""
    try:
        value = float(str(text))
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def positive(text: object) -> float:
    """Read a finite number above zero."""
    if (value := number(text)) <= 0:
        raise ValueError(f"{text} is not above 0")
    return value


def size(text: object) -> int:
    """Read a number of bytes."""
    return parse_bytes(str(text))


positive_count = at_least(1, parse_count)
"""Reads a count of at least one: 512, 32K, 1M."""
positive_size = at_least(1, parse_bytes)
"""Reads a number of bytes of at least one: 24GiB."""
token_budget = at_least(1, parse_count_or_share)
"""Reads a count as `positive_count` does, or a share of the prompt: 20%."""


def device_name(text: object) -> str:
    """Read the name of a device or several; whether they exist is checked later."""
    if re.fullmatch(r"auto|(cpu|cuda(:[0-9]{1,4})?)(,(cpu|cuda:[0-9]{1,4}))*", str(text)) is None:
        raise ValueError(f"{text!r} is not auto, cpu, cuda or cuda:N, nor several as in cuda:0,cuda:1")
    return str(text)


def output_file(text: object) -> Path | None:
    """Read the value of -o: - is stdout, as if the option were not given."""
    return None if str(text) == "-" else Path(str(text))


def json_object(text: str) -> dict[str, Any]:
    """Read the value of --chat-template-kwargs.

    Raises:
        KvcliError: it is not a JSON object (usage).
    """
    hint = """for example --chat-template-kwargs '{"enable_thinking": false}'"""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise usage_error(f"--chat-template-kwargs {text[:60]!r}: bad JSON: {error}", hint) from None
    if not isinstance(value, dict):
        raise usage_error(f"--chat-template-kwargs {text!r} is not a JSON object", hint)
    return value


def complete_methods(incomplete: str) -> list[str]:
    """Complete names of methods in a shell."""
    from kvcli.methods import method_names

    return [name for name in method_names() if name.startswith(incomplete)]


def complete_profiles(incomplete: str) -> list[str]:
    """Complete names of profiles in a shell."""
    from kvcli.inputs.profiles import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


INPUT, MODEL, METHOD, SAMPLING = (Panel(name, env=True) for name in ("Input", "Model", "Method", "Sampling"))
SAVED, METHODS, OUTPUT, GOING_ON = Panel("Saved KV", env=True), Panel("Methods"), Panel("Output"), Panel("Checkpoints")

QuestionFirst = Literal["no", "only", "both"]
"""The place of the question: after the document, only before it, or both."""
_KV_DTYPE = ("--kv-dtype", "NAME", "Form of KV: auto (as computed), bfloat16 (on a CPU), int8, k8v4, int4.")


@dataclass(frozen=True)
class Input:
    """Documents, and the questions on them."""

    files: tuple[str, ...] = argument((), "FILE", "Text documents; - is standard input.")
    prompts: tuple[str, ...] = INPUT(
        (), "--prompt -p", "TEXT", "Question to ask after each document; repeatable.", env=False, utf8="-p"
    )
    questions: str | None = INPUT(
        None, "--questions", "FILE", "More questions: one per line, or JSONL with question and id.", env=False
    )
    question_first: QuestionFirst = INPUT(
        "no", "--question-first", None, "Put the question before the document (only), or before and after it (both)."
    )
    turns: bool = INPUT.flag("--turns", "Ask the questions in order, each after the previous answer.")


@dataclass(frozen=True)
class Template:
    """How a prompt becomes a conversation: system message, chat template or not, extra template variables."""

    system: str | None = INPUT(None, "--system -s", "TEXT", "System message of the conversation.", utf8="--system")
    raw: bool = INPUT.flag("--raw", "Skip the chat template: the model continues the plain text.")
    kwargs: dict[str, Any] = INPUT(
        {},
        *("--chat-template-kwargs", "JSON", "Variables for the chat template."),
        make=json_object,
        utf8="--chat-template-kwargs",
    )


@dataclass(frozen=True)
class KVOptions:
    """`use` is the directory of a document's KV, `save` the one to save it to, `cache` a store of `cache_bytes`.

    Each of several documents is saved in a directory of its name in `save`.
    """

    use: Path | None = SAVED(
        None, "--kv", "DIR", "Reuse KV of --save-kv, with any method that prefills exactly.", env=False
    )
    save: Path | None = SAVED(None, "--save-kv", "DIR", "Save the KV in a new directory, for --kv.", env=False)
    cache: Path | None = SAVED(
        None, "--kv-cache", "DIR", "Store of KV: reuse the beginning of a prompt, save the rest."
    )
    cache_bytes: int | None = SAVED(
        None,
        *("--kv-cache-size", "SIZE", "Largest size of the store, as in 200GiB; removes the least recently used."),
        size,
        show="unlimited",
        beside=("cache", "--kv-cache-size needs a store", "name one with --kv-cache"),
    )

    @property
    def any(self) -> bool:
        """Tell whether KV is to be loaded or saved."""
        return not (self.use is None and self.save is None and self.cache is None)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how and where to load it."""

    model: str | None = MODEL(
        None,
        *("--model -m", "DIR|FILE|ID"),
        "Checkpoint directory, GGUF file or hub id. Default: the bundled demo model.",
    )
    device: str = MODEL(
        "auto", "--device", "NAME", "Device: auto, cpu, cuda, cuda:1; several as in cuda:0,cuda:1.", device_name
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = MODEL(
        "auto", "--dtype", "NAME", "Dtype of weights and KV: auto, bfloat16, float16, float32."
    )
    weights: Literal["auto", "wide", "int8", "int4", "fp8"] = MODEL(
        "auto", "--weights", "NAME", "auto: as stored; wide: unpacked; int8, int4, fp8: quantised on loading."
    )
    weights_on: Literal["device", "host", "disk"] = MODEL(
        "device",
        *("--weights-on", None),
        "Stream weights that do not fit: to a GPU from the host, to a CPU from the disk.",
    )
    weights_memory: int | None = MODEL(
        None,
        *("--weights-memory", "SIZE", "Memory for weights on the device with --weights-on, as in 8GiB."),
        positive_size,
        show="as little as possible",
    )
    load_format: Literal["auto", "dummy"] = MODEL(
        "auto", "--load-format", None, "dummy: random weights for a shape or a config.json."
    )
    offline: bool = MODEL.flag("--offline", "Use local files only, never the hub.")
    tokenizer: str | None = MODEL(
        None, "--tokenizer", "DIR|ID", "Load the tokenizer from here instead of the checkpoint."
    )

    def spec(self, **changed: Any) -> ModelSpec:
        """Return the loader's spec, with some fields `changed`."""
        from kvcli.models.loading import ModelSpec

        options = {**vars(self), **changed}
        return ModelSpec(options.pop("model"), **options)


@dataclass(frozen=True)
class MethodOptions:
    """A method and its settings: by name or by a profile, changed by KEY=VALUE or by options of their own."""

    method: str | None = METHOD(
        None,
        *("--method", "NAME", "KV-cache method; see kvcli methods."),
        show="full if it fits, else retroinfer",
        complete=complete_methods,
    )
    profile: str | None = METHOD(
        None,
        *("--profile", "NAME|FILE.toml"),
        "Method and settings, by name or file; warns if calibrated for another model.",
        show="named like the method",
        complete=complete_profiles,
    )
    settings: tuple[str, ...] = METHOD((), "--set", "KEY=VALUE", "Change one setting of the profile; repeatable.")
    budget: str | None = METHOD(
        None,
        *("--budget", "TOKENS", "Tokens attended per layer and KV head, as in 2K, or 20% of the prompt."),
        show="the profile's; freekv: 2K",
    )
    sink: str | None = METHOD(None, "--sink", "TOKENS", "First tokens, always attended.")
    window: str | None = METHOD(None, "--window", "TOKENS", "Most recent tokens, always attended.")
    tau: str | None = METHOD(None, "--tau", "0..1", "Query similarity below which a head is corrected.")
    page_size: str | None = METHOD(None, "--page-size", "TOKENS", "Tokens per page, recalled together.")
    kv_dtype: Literal["auto", "bfloat16", "int8", "k8v4", "int4"] | None = METHOD(None, *_KV_DTYPE)

    def short(self) -> dict[str, str | None]:
        """Return the settings that have options of their own."""
        return {name: value for name, value in vars(self).items() if name not in ("method", "profile", "settings")}


@dataclass(frozen=True)
class Compared:
    """Several methods to compare, each with every budget."""

    method: str | None = METHODS(None, "--method", "A,B", "Methods to compare. Default: full,freekv.")
    profile: str | None = METHODS(
        None, "--profile", "A,B", "Profiles in addition: names, files, or a set (paper-freekv)."
    )
    budget: str | None = METHODS(
        None, "--budget", "TOKENS,...", "Budgets to run every method with; 20% is a share of the prompt."
    )
    settings: tuple[str, ...] = METHODS(
        (), "--set", "KEY=VALUE", "Setting for all methods that have it, or METHOD.KEY=VALUE; repeatable."
    )
    kv_dtype: Literal["auto", "bfloat16", "int8", "k8v4", "int4"] | None = METHODS(None, *_KV_DTYPE)
    ablate: bool = METHODS.flag("--ablate", "Add each method with its parts switched off one by one.")


@dataclass(frozen=True)
class DiskOptions:
    """A directory for KV that host memory is not to hold, and the bytes of host memory that cache it.

    None means half of the free host memory.
    """

    folder: Path = METHOD(
        ...,
        *("--kv-disk", "DIR", "Spill KV beyond --host-memory to temporary files in DIR."),
        env=False,
    )
    host_memory: int | None = METHOD(
        None,
        *("--host-memory", "SIZE", "Host memory for KV with --kv-disk, all sequences together, as in 32GiB."),
        positive_size,
        env=False,
        show="half of the free memory",
        beside=("folder", "--host-memory needs --kv-disk", "name a directory with --kv-disk"),
    )


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and when to stop.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off.

    Raises:
        KvcliError: a value is outside its range.
    """

    max_tokens: int = SAMPLING(
        256,
        *("--max-tokens", "TOKENS", "Most tokens to generate, as in 256 or 16K."),
        positive_count,
        within=(lambda n: n >= 1, "at least 1"),
    )
    temperature: float = SAMPLING(
        0.0,
        *("--temperature", "T", "0 is greedy; higher is more random."),
        number,
        within=(lambda t: 0 <= t < float("inf"), "0 (greedy) or more, and finite"),
    )
    top_p: float = SAMPLING(
        1.0,
        *("--top-p", "P", "Sample from the likeliest tokens with this total probability, 0 to 1."),
        number,
        within=(lambda p: 0 < p <= 1, "above 0 and at most 1"),
    )
    top_k: int = SAMPLING(
        0,
        *("--top-k", "K", "Sample from the K likeliest tokens; 0 for all."),
        whole,
        within=(lambda k: k >= 0, "0 (off) or more"),
    )
    min_p: float = SAMPLING(
        0.0,
        *("--min-p", "P", "Drop tokens below this share of the highest probability, 0 to 1."),
        number,
        within=(lambda p: 0 <= p <= 1, "between 0 and 1"),
    )
    repetition_penalty: float = SAMPLING(
        1.0,
        *("--repetition-penalty", "R", "Above 1, make tokens of the prompt and the output less likely; 1 is off."),
        number,
        within=(lambda r: 0 < r < float("inf"), "above 0, and finite"),
    )
    seed: int = SAMPLING(
        0,
        "--seed",
        "N",
        "Random seed: the same seed gives the same text.",
        whole,
        within=(lambda n: 0 <= n < 2**63, "between 0 and 2**63 - 1"),
    )
    stop: tuple[str, ...] = SAMPLING(
        (),
        *("--stop", "TEXT", "Stop before this text; repeatable."),
        env=False,
        utf8="--stop",
        within=(all, "no empty string"),
    )
    ignore_eos: bool = SAMPLING.flag("--ignore-eos", "Continue to --max-tokens past the end-of-text token.")
    num_samples: int = SAMPLING(
        1, "--num-samples", "N", "Samples per prompt.", whole, within=(lambda n: n >= 1, "at least 1")
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def alike(self) -> str | None:
        """Return a notice if all samples will be the same."""
        if self.num_samples == 1 or self.temperature > 0:
            return None
        return f"--num-samples {self.num_samples} without --temperature: all samples will be the same"


@dataclass(frozen=True)
class Keep:
    """Where to keep a running generation, and the number of steps between writes."""

    directory: Path = GOING_ON(
        ..., "--checkpoint", "DIR", "Save the run in a new directory; continue it with --resume."
    )
    every: int = GOING_ON(32, "--every", "N", "Tokens between two writes of the checkpoint.", positive_count)


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """How the steps of a generation run, and what checks them."""

    pipeline: Literal["auto", "blocking", "overlapped"] = METHOD(
        "auto",
        *("--pipeline", None),
        "blocking: one phase after another; overlapped: one CUDA graph; auto: overlapped on a GPU if possible.",
    )
    """How a step runs, see `kvcli.runtime.pipeline.Pipeline`."""
    lossless: int | None = METHOD(
        None,
        *("--lossless", "N"),
        "Write the text of full attention: the method drafts up to N tokens; full attention, with its KV in host"
        " memory, checks them.",
        at_least(1, whole),
    )
    """Let full attention check this many drafted tokens in one pass, see `kvcli.runtime.lossless`."""
    audit: int | None = OUTPUT(
        None,
        *("--audit", "N"),
        "Compare every N-th step with full attention; needs a full KV cache on the device.",
        at_least(1, whole),
        env=True,
    )
    """Compare every so many steps with full attention, see `kvcli.quality.fidelity`."""


@dataclass(frozen=True)
class Tracing:
    """What to show of the time of steps."""

    timeline: bool = OUTPUT.flag("--timeline", "Show time, corrections and recall of each step.", env=True)
    trace: Path | None = OUTPUT(None, "--trace", "FILE", "Write spans as Chrome trace JSON.")


@dataclass(frozen=True)
class Output:
    """Where results go, in which form, and what else is shown."""

    stats: bool | None = OUTPUT(None, "--stats/--no-stats", "", "Show statistics at the end; on unless -q.", env=True)
    as_json: bool = OUTPUT.flag("--json", "Print one JSON object instead of text.")
    output: Path | None = OUTPUT(None, "--output -o", "FILE", "Write to FILE instead of stdout.", output_file)
    html: Path | None = OUTPUT(None, "--html", "FILE", "Also write a page with charts, as one offline file.")
    figure: Path | None = OUTPUT(None, "--figure", "FILE", "Also draw one picture for a paper: .svg, .pdf or .png.")
    quiet: bool = OUTPUT.flag("--quiet -q", "Show only the result: no progress or notes.", env=True)
    verbose: bool = OUTPUT.flag("--verbose -v", "Also show settings, versions and per-layer counts.", env=True)
    debug: bool = OUTPUT.flag("--debug", "Show the traceback of an error.", env=True)
    """Read by the guard around every command."""


GENERATION: dict[type, str] = {
    MethodOptions: "method profile",
    Input: "question_first",
    Template: "",
    Sampling: "",
    Stepping: "",
    KVOptions: "",
    DiskOptions: "",
    Keep: "",
}
"""The keyword arguments of a generation from Python; all others are settings of the method."""
