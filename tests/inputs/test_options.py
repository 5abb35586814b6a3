"""Options declared once: what a group of them gives the command line and Python."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import kvcli
from kvcli.cli.command import command
from kvcli.errors import KvcliError
from kvcli.inputs.options import (
    GENERATION,
    DiskOptions,
    KVOptions,
    Panel,
    Sampling,
    Some,
    Template,
    at_least,
    take,
    whole,
)

PART = Panel("Part", env=True)


@dataclass(frozen=True)
class Animals:
    """A group with one option of each kind."""

    names: tuple[str, ...] = PART((), "--fox-name", "TEXT", "What foxes are called; repeatable.")
    dogs: int = PART(2, "--dogs", "N", "How many dogs.", at_least(1, whole))
    lazy: bool = PART.flag("--lazy", "They lie down.")


def by_command(*arguments, some=None, **environment):
    seen = []

    def program(animals: Annotated[Animals, some or Some()], disk: DiskOptions | None) -> None:
        seen.extend((animals, disk))

    program.__annotations__ = {"animals": Annotated[Animals, some or Some()], "disk": DiskOptions | None}
    app = typer.Typer()
    app.command()(command(program))
    result = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=True)
    return result, seen


def test_a_command_gets_its_groups_whole():
    _, seen = by_command("--fox-name", "a", "--fox-name", "b", "--lazy", KVCLI_DOGS="3")
    assert seen == [Animals(("a", "b"), 3, True), None]
    assert by_command()[1] == [Animals(), None]


def test_a_group_is_there_with_the_option_that_it_needs():
    assert by_command("--kv-disk", "x", "--host-memory", "1KiB")[1][1] == DiskOptions(Path("x"), 1024)
    assert isinstance(by_command("--host-memory", "1KiB")[0].exception, KvcliError)


def test_some_options_of_a_group_and_another_default():
    _, seen = by_command(some=Some("dogs", dogs={"default": 5}))
    assert seen[0] == Animals(dogs=5)
    assert by_command("--lazy", some=Some("dogs"))[0].exit_code == 2


def test_keyword_arguments_are_read_as_on_the_command_line():
    given = {"max_tokens": "1K", "stop": "end", "kv_disk": "x", "host_memory": "1KiB", "budget": 5}
    sampling, disk = take(Sampling, given), take(DiskOptions, given)
    assert (sampling, disk) == (Sampling(1024, stop=("end",)), DiskOptions(Path("x"), 1024))
    assert given == {"budget": 5}, "what is no option of the groups stays"
    assert take(Template, {"chat_template_kwargs": {"a": 1}}) == take(Template, {"chat_template_kwargs": '{"a": 1}'})


@pytest.mark.parametrize(
    ("group", "given", "words"),
    [
        (DiskOptions, {"kv_disk": "x", "host_memory": "much"}, "host_memory is much"),
        (DiskOptions, {"host_memory": 5}, "--host-memory needs --kv-disk"),
        (KVOptions, {"kv_cache_size": "1GiB"}, "--kv-cache-size needs a store"),
        (Sampling, {"top_p": 2}, "--top-p 2 is out of range"),
    ],
)
def test_a_keyword_argument_that_cannot_be_is_refused(group, given, words):
    with pytest.raises(KvcliError) as raised:
        take(group, given)
    assert words in raised.value.what


def test_keywords_have_a_signature_and_refuse_what_they_do_not_know():
    parameters = inspect.signature(kvcli.load).parameters
    assert list(parameters)[:2] == ["model", "device"]
    assert parameters["dtype"].default == "auto"
    with pytest.raises(TypeError, match="devise"):
        kvcli.load(devise="cpu")


def test_every_option_of_a_generation_is_called_alike_on_the_command_line_and_in_python():
    from kvcli.cli.generate import generate

    listed = inspect.signature(generate).parameters
    assert [o.name for group, names in GENERATION.items() for o in Some(names).of(group) if o.name not in listed] == []
