"""`kvcli chat`: read documents once and talk about them."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli.command import command, hush_libraries, model_of, profile_of, read_entries, template_of
from kvcli.cli.output import check_files, demo_notice, write_result
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs import options
from kvcli.ui.escape import visible

if TYPE_CHECKING:
    from kvcli.chat import Dialogue
    from kvcli.inputs.profiles import Profile

SAMPLING = "max_tokens temperature top_p top_k min_p repetition_penalty seed stop"
"""The options that say how tokens are chosen, each also a command of a session."""
HELP = """\
/method NAME     answer with another method; reuses the KV if the method can
/budget TOKENS   tokens attended per layer and KV head, as in 4K
/set KEY=VALUE   change one setting of the method
/temperature T   change how tokens are chosen; also /max-tokens N, /top-p P,
                 /top-k K, /min-p P, /repetition-penalty R, /seed N, /stop TEXT
/system TEXT     change the system message; without TEXT remove it
/stats           show the statistics of the last answer
/save DIR        save the KV, for kvcli generate --kv DIR
/retry           answer the last question again
/help, /?        show these lines
/quit            end the session (also Ctrl-D)
Lines between three double quotes (\"\"\") are one question.
Ctrl-C stops an answer; its text so far stays in the conversation."""


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C, which ends an answer or a line, and not the session."""


@command
def chat(
    context: typer.Context,
    asked: Annotated[options.Input, options.Some("files", files={"help": "Text documents to talk about."})],
    kv: Annotated[
        options.KVOptions,
        options.Some("kv", kv={"help": "Start from saved KV; without FILE, from its document."}),
    ],
    template: options.Template,
    model: options.ModelOptions,
    method: Annotated[
        options.MethodOptions,
        options.Some(
            "method profile set budget kv_dtype",
            budget={"help": "Tokens attended per layer and KV head, as in 2K or 20%.", "show": True},
        ),
    ],
    disk: Annotated[options.DiskOptions | None, options.Some("kv_disk", kv_disk={"help": "", "hidden": True})],
    sampling: Annotated[
        options.Sampling,
        options.Some(
            SAMPLING,
            max_tokens={"default": 1024, "help": "Most tokens per answer, as in 256 or 16K."},
        ),
    ],
    output: Annotated[
        options.Output,
        options.Some(
            "json output quiet verbose debug",
            quiet={"help": "Show only the answers: no progress or notes."},
            verbose={"help": "Also show settings and versions in /stats."},
        ),
    ],
) -> None:
    """Chat about long documents; each is prefilled once.

    kvcli chat report.txt --method freekv --budget 2K

    Every line is a question, and so are the lines between three double quotes; /help
    lists the commands. You can pipe questions in. Answers go to stdout, everything else
    to stderr. --json prints all turns at the end, in the format of kvcli generate.

    Exit codes: 0 done, 1 the last answer failed, 2 usage, 3 will not fit in memory,
    143 ended by SIGTERM, 129 by SIGHUP; with piped questions also 130 by Ctrl-C.
    """
    if disk is not None:
        what = "chat does not take --kv-disk: between turns it keeps all KV in host memory"
        raise usage_error(what, "ask all questions in one run: kvcli generate FILE --questions FILE --kv-disk DIR")
    model, taken = model_of(model, kv.use)
    check_files({"-o": output.output}, model, asked.files, settings=method.settings)
    if "-" in asked.files:
        raise usage_error("- cannot be a document: standard input has the questions", "name a file")
    template = template_of(context, template, kv.use, settled=bool(asked.files))
    document = _documents(asked, kv.use)
    hush_libraries(output.verbose)
    chosen = profile_of(context, method)

    from kvcli.chat import Dialogue
    from kvcli.models.loading import open_checkpoint
    from kvcli.ui.console import RunConsole

    silent = output.as_json or output.output is not None
    console = RunConsole(None, output.quiet, text_on_screen=sys.stdout.isatty())
    if model.model is None:
        console.notice(demo_notice(asked.files))
    if taken is not None:
        console.notice(taken)
    with _ctrl_c_stops_answers(), ExitStack() as at_the_end:
        at_the_end.callback(console.stage_done)
        console.stage("load")
        checkpoint = open_checkpoint(model.spec())
        dialogue = Dialogue(checkpoint.load(), checkpoint, chosen, sampling, template, document, console)
        dialogue.read(kv.use)
        console.stage_done()
        session = Session(dialogue, console, output.verbose, silent)
        if sys.stdin.isatty() and console.console.is_terminal:
            session.greet()
        try:
            code = session.run(Lines())
        except KeyboardInterrupt:  # what was said is not lost
            code = ExitCode.INTERRUPTED
    if silent:
        texts = "\n\n".join(exchange.text for exchange in dialogue.exchanges) + "\n"
        write_result(output.output, dialogue.report().to_json() + "\n" if output.as_json else texts)
    raise typer.Exit(code)


class Session:
    """Takes lines, each a question or a command, and shows the results; `silent` leaves stdout alone."""

    def __init__(self, dialogue: Dialogue, console: Any, verbose: bool = False, silent: bool = False):
        self.dialogue, self.console, self.verbose, self.silent = dialogue, console, verbose, silent
        self.budget: str | None = None  # the last value of /budget
        self.code = ExitCode.OK

    def greet(self) -> None:
        """Say what will answer, and how to find out more."""
        checkpoint, profile = self.dialogue.checkpoint, self.dialogue.answering
        method = "a method chosen for the first question" if profile is None else _named(profile)
        self.console.notice(f"{checkpoint.name} answers with {method}; /help lists commands, Ctrl-D ends")

    def run(self, lines: Iterable[str | KvcliError]) -> ExitCode:
        """Take all lines; return the exit code of the last question."""
        from kvcli.ui.console import print_error

        for line in lines:
            text = "" if isinstance(line, KvcliError) else line.strip()
            if text in ("/quit", "/exit"):
                break
            try:
                if isinstance(line, KvcliError):
                    raise line
                if text:
                    self._take(text)
            except AnswerStopped:
                self._show("\n")
                self.console.stage_done()
            except KvcliError as error:
                self.console.stage_done()
                print_error(error)
                self.code = error.exit_code
        return self.code

    def _take(self, text: str) -> None:
        if not text.startswith("/"):
            self._answer(self.dialogue.ask(text))
            return
        name, *rest = text[1:].split(maxsplit=1) or [""]
        commands: dict[str, Callable[[str], None]] = {
            "method": self._method,
            "budget": self._budget,
            "set": self._set,
            **{each.replace("_", "-"): partial(self._sample, each) for each in SAMPLING.split()},
            "system": self._system,
            "stats": lambda _: self._stats(),
            "save": self._save,
            "retry": lambda _: self._answer(self.dialogue.retry()),
            "help": lambda _: print(HELP, file=sys.stderr),
            "?": lambda _: print(HELP, file=sys.stderr),
        }
        if (found := commands.get(name.replace("_", "-"))) is None:
            near = get_close_matches(name, [*commands, "quit"], n=1)
            raise usage_error(
                f"unknown command /{name}", f"did you mean /{near[0]}? See /help" if near else "see /help"
            )
        found("".join(rest))

    def _answer(self, pieces: Iterator[str]) -> None:
        """Show an answer as it comes, a line end after it."""
        last = ""
        for piece in pieces:
            self.console.stage_done()
            self._show(piece)
            last = piece
        self.code = ExitCode.OK
        self._show("" if last.endswith("\n") else "\n")

    def _show(self, text: str) -> None:
        if not self.silent:
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            if text and sys.stdout.isatty():
                self.console.line_open = not text.endswith("\n")

    def _method(self, name: str) -> None:
        """Take another method, with the last value of /budget."""
        from kvcli.inputs.profiles import known_settings

        if not name:
            raise usage_error("/method takes a name", "see kvcli methods")
        takes_it = self.budget is not None and "budget" in known_settings(name, None)
        self._use(name, {"budget": self.budget} if takes_it else {})

    def _budget(self, tokens: str) -> None:
        self._set(f"budget={tokens}")
        self.budget = tokens

    def _set(self, assignment: str) -> None:
        key, equals, value = assignment.partition("=")
        if not (equals and value):
            raise usage_error(f"{assignment!r} is not KEY=VALUE", "as in /set window=1K, or /budget 4K")
        now = self.dialogue.profile
        self._use(now.method, now.settings.model_dump(exclude_unset=True) | {key.strip(): value.strip()})

    def _sample(self, name: str, text: str) -> None:
        """Change how tokens are chosen."""
        if not text:
            raise usage_error(
                f"/{name.replace('_', '-')} takes a value", "as the option of this name; see kvcli chat --help"
            )
        value = getattr(options.take(options.Sampling, {name: text}, name), name)
        self.dialogue.sampling = replace(self.dialogue.sampling, **{name: value})
        self.console.notice(f"{name.replace('_', ' ')} {text}, from the next answer on")

    def _system(self, text: str) -> None:
        self.dialogue.instruct(text or None)
        self.console.notice(
            ("system message changed" if text else "system message removed") + ", from the next answer on"
        )

    def _save(self, folder: str) -> None:
        if not folder:
            raise usage_error("/save takes a directory", "as in /save report-kv")
        tokens = self.dialogue.save(Path(folder))
        self.console.notice(
            f'saved {tokens:,} tokens. To ask about them: kvcli generate --kv {shlex.quote(folder)} -p "..."'
        )

    def _use(self, method: str, overrides: dict[str, Any]) -> None:
        from kvcli.inputs.profiles import resolve_profile

        self.dialogue.profile = resolve_profile(method, overrides=overrides)
        self.console.notice(f"the next answers use {_named(self.dialogue.profile)}")

    def _stats(self) -> None:
        from kvcli.ui.console import print_statistics

        if not self.dialogue.exchanges:
            raise usage_error("nothing was asked yet", "ask a question first")
        answer = self.dialogue.report(last=1)
        kv = answer.sequences[0].kv
        print_statistics(answer, [answer.sequences[0].source], self.verbose)
        self.console.notice(
            f"prefilled {kv.read_tokens:,} of {answer.sequences[0].prompt_tokens:,} tokens, reused the others"
        )


def _named(profile: Profile) -> str:
    """Name a method with its budget, if it has one."""
    budget = getattr(profile.settings, "budget", None)
    shown = f"{budget:,}" if isinstance(budget, int) else budget
    return profile.method if budget is None else f"{profile.method}, budget {shown}"


def _documents(asked: options.Input, kv: Path | None) -> str:
    """Join all documents into one text, with a blank line between two; without files, return the saved one.

    Raises:
        KvcliError: one cannot be read.
    """
    from kvcli.inputs.prompts import FailedPrompt

    if not asked.files and kv is None:
        return ""
    texts = []
    for entry in read_entries(asked, kv):
        if isinstance(entry, FailedPrompt):
            raise entry.error
        texts.append(entry.text.rstrip())
    return "\n\n".join(texts)


_QUOTES = '"""'


class Lines:
    """Lines of standard input, those between three double quotes as one text.

    On a terminal there are a prompt, history and editing, and Ctrl-C drops what was typed. A line that is not UTF-8
    text is an error in its place.
    """

    def __init__(self) -> None:
        self._block: list[str] | None = None  # lines after quotes that are not closed yet

    def __iter__(self) -> Iterator[str | KvcliError]:
        for line in self._typed() if sys.stdin.isatty() else self._piped():
            if isinstance(line, KvcliError):
                yield line
                continue
            text = line.strip()
            if self._block is None and not text.startswith(_QUOTES):
                yield text
                continue
            if self._block is None:
                self._block, line, text = [], text[3:], text[3:]
            closed = text.endswith(_QUOTES)
            self._block.append(line.rstrip().removesuffix(_QUOTES) if closed else line.rstrip("\r\n"))
            if closed:
                block, self._block = self._block, None
                yield "\n".join(block).strip()
        if self._block is not None:
            yield usage_error("three double quotes are not closed", 'end the text with """')

    def _piped(self) -> Iterator[str | KvcliError]:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield _not_text(f"line {number} of standard input", error)

    def _typed(self) -> Iterator[str | KvcliError]:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() gets history and editing by it
        while True:
            try:
                yield input("> " if self._block is None else "... ")
            except UnicodeDecodeError as error:
                yield _not_text("the line", error)
            except AnswerStopped:
                self._block = None
                print(file=sys.stderr)
            except EOFError:
                print(file=sys.stderr)
                return


def _not_text(line: str, error: UnicodeDecodeError) -> KvcliError:
    what = f"{line} is not UTF-8 text (byte {error.start})"
    return usage_error(what, "check the encoding of the file or terminal; the other lines are used")


@contextmanager
def _ctrl_c_stops_answers() -> Iterator[None]:
    """Raise `AnswerStopped` on Ctrl-C within this context; other signals end the session as everywhere."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise AnswerStopped

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
