"""`kvcli chat`: documents are read once and talked about."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.cli import asked, options
from kvcli.cli.asked import hush_libraries, profile_of
from kvcli.cli.entries import read_entries, template_of
from kvcli.cli.options import METHOD, OUTPUT, SAMPLING, given, positive_count, require_text
from kvcli.cli.output import write_result
from kvcli.cli.reads import check_files
from kvcli.cli.saved import SAVED
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.ui.escape import visible

if TYPE_CHECKING:
    from kvcli.chat.dialogue import Dialogue

HELP = """\
/method NAME     answer by another method, from the same KV where it can take it
/budget TOKENS   tokens attended per layer and KV head, as in 4K
/set KEY=VALUE   change one setting of the method
/stats           what the last answer took and moved
/save DIR        save the KV of what was read, for kvcli generate --kv DIR
/retry           answer the last question once more
/help            these lines
/quit            end (also Ctrl-D)
Ctrl-C stops an answer; what came of it stays in the conversation."""


class AnswerStopped(KeyboardInterrupt):
    """Ctrl-C, which ends an answer or a line, and not the session."""


def chat(
    context: typer.Context,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Text documents to talk about.", show_default=False)
    ] = None,
    kv: Annotated[
        Path | None,
        SAVED.option("--kv", "DIR", "Begin with a document's saved KV; without FILE, that document.", env=False),
    ] = None,
    system: asked.System = None,
    raw: asked.Raw = False,
    chat_template_kwargs: asked.ChatTemplateKwargs = None,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    tokenizer: options.Tokenizer = None,
    method: asked.Method = None,
    profile: asked.Profile = None,
    settings: asked.Settings = None,
    budget: Annotated[
        str | None, METHOD.option("--budget", "TOKENS", "Tokens attended per layer and KV head, as in 2K or 20%.")
    ] = None,
    kv_dtype: asked.KVDType = None,
    kv_disk: Annotated[str | None, METHOD.option("--kv-disk", "DIR", "", env=False, hidden=True)] = None,
    max_tokens: Annotated[
        int, SAMPLING.option("--max-tokens", "TOKENS", "Longest answer, as in 256 or 16K.", positive_count)
    ] = 1024,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: asked.TopK = 0,
    min_p: asked.MinP = 0.0,
    seed: asked.Seed = 0,
    stop: asked.StopTexts = None,
    as_json: options.AsJson = False,
    output: options.Output = None,
    quiet: Annotated[bool, OUTPUT.flag("--quiet -q", "Only the answers: no progress or notes.", env=True)] = False,
    verbose: Annotated[bool, OUTPUT.flag("--verbose -v", "Settings and versions in /stats as well.", env=True)] = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Talk about long documents, which are read once.

    kvcli chat report.txt --method freekv --budget 2K

    A line is a question, /help lists what else can be said. Questions can be piped
    in, one a line: answers go to stdout, everything else to stderr. --json prints
    all turns at the end, in the form of kvcli generate.

    Exit codes: 0 done, 1 the last answer failed, 2 usage, 3 will not fit in memory,
    143 ended by SIGTERM, 129 by SIGHUP; a pipe's session also by Ctrl-C, 130.
    """
    from kvcli.inputs.sampling import Sampling

    if kv_disk is not None:
        what = "--kv-disk is not for chat: between turns a conversation keeps all of its KV in host memory"
        raise usage_error(what, "ask all questions in one run: kvcli generate FILE --questions FILE --kv-disk DIR")
    check_files({"-o": output}, model=model, load_format=load_format, documents=files, settings=settings)
    require_text({"--system": [system], "--stop": stop, "--chat-template-kwargs": [chat_template_kwargs]})
    if "-" in (files or ()):
        raise usage_error("- is no document here: standard input has the questions", "name a file")
    settled = bool(files or given(context, ["system", "raw", "chat_template_kwargs"]))
    template = template_of(system, raw, chat_template_kwargs, kv, settled)
    document = _documents(files or [], kv)
    hush_libraries(verbose)
    sampling = Sampling(max_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()))
    chosen = profile_of(context, method, profile, settings or [], {"budget": budget, "kv_dtype": kv_dtype})

    from kvcli.chat.dialogue import Dialogue
    from kvcli.models.loading import ModelSpec, open_checkpoint
    from kvcli.ui.console import RunConsole

    console = RunConsole(None, quiet, text_on_screen=sys.stdout.isatty())
    if model is None:
        console.notice("no -m: using the small demo model that comes with kvcli, trained on documents of its own kind")
    with _ctrl_c_stops_answers(), ExitStack() as at_the_end:
        at_the_end.callback(console.stage_done)
        console.stage("load")
        checkpoint = open_checkpoint(ModelSpec(model, device, dtype, load_format, offline, weights, tokenizer))
        dialogue = Dialogue(checkpoint.load(), checkpoint, chosen, sampling, template, document, console)
        dialogue.read(kv)
        console.stage_done()
        session = Session(dialogue, console, verbose, silent=as_json or output is not None)
        try:
            code = session.run(_lines())
        except KeyboardInterrupt:  # what was said is not lost
            code = ExitCode.INTERRUPTED
    if as_json or output is not None:
        texts = "\n\n".join(exchange.text for exchange in dialogue.exchanges) + "\n"
        write_result(output, dialogue.report().to_json() + "\n" if as_json else texts)
    raise typer.Exit(code)


class Session:
    """Takes lines, each a question or a command, and shows what comes of them; `silent` leaves stdout alone."""

    def __init__(self, dialogue: Dialogue, console: Any, verbose: bool = False, silent: bool = False):
        self.dialogue, self.console, self.verbose, self.silent = dialogue, console, verbose, silent
        self.budget: str | None = None  # what /budget was given last
        self.code = ExitCode.OK

    def run(self, lines: Iterable[str]) -> ExitCode:
        """Take all lines; returns the exit code of the last question."""
        from kvcli.ui.console import print_error

        for line in lines:
            text = line.strip()
            if text in ("/quit", "/exit"):
                break
            try:
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
        name, _, rest = text[1:].partition(" ")
        commands = {"method": self._method, "budget": self._budget, "set": self._set}
        if name in commands:
            commands[name](rest.strip())
        elif name == "stats":
            self._stats()
        elif name == "save":
            if not rest.strip():
                raise usage_error("/save takes a directory", "as in /save report-kv")
            tokens = self.dialogue.save(Path(rest.strip()))
            self.console.notice(f"saved {tokens:,} tokens; kvcli generate FILE --kv {rest.strip()} -p ... asks them")
        elif name == "retry":
            self._answer(self.dialogue.retry())
        elif name == "help":
            print(HELP, file=sys.stderr)
        else:
            raise usage_error(f"no command /{name}", "see /help")

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

    def _method(self, name: str) -> None:
        """Take another method; what /budget was given last goes along."""
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
            raise usage_error(f"{assignment!r} is no KEY=VALUE", "as in /set window=1K, or /budget 4K")
        now = self.dialogue.profile
        self._use(now.method, now.settings.model_dump(exclude_unset=True) | {key.strip(): value.strip()})

    def _use(self, method: str, overrides: dict[str, Any]) -> None:
        from kvcli.inputs.profiles import resolve_profile

        self.dialogue.profile = resolve_profile(method, overrides=overrides)
        settings = self.dialogue.profile.settings.model_dump()
        shown = f", budget {settings['budget']:,}" if "budget" in settings else ""
        self.console.notice(f"the next answer comes from {method}{shown}")

    def _stats(self) -> None:
        from kvcli.ui.console import print_statistics

        if not self.dialogue.exchanges:
            raise usage_error("nothing was asked yet", "ask something")
        answer = self.dialogue.report(last=1)
        kv = answer.sequences[0].kv
        print_statistics(answer, [answer.sequences[0].source], self.verbose)
        self.console.notice(f"read {kv.read_tokens:,} of {answer.sequences[0].prompt_tokens:,} tokens, kept the others")


def _documents(files: list[str], kv: Path | None) -> str:
    """All documents as one text, a blank line between two; without files, the one that was saved.

    Raises:
        KvcliError: one cannot be read.
    """
    from kvcli.inputs.prompts import FailedPrompt

    if not files and kv is None:
        return ""
    texts = []
    for entry in read_entries(files, [], None, "no", kv):
        if isinstance(entry, FailedPrompt):
            raise entry.error
        texts.append(entry.text.rstrip())
    return "\n\n".join(texts)


def _lines() -> Iterator[str]:
    """Lines of standard input; on a terminal with a prompt, history and editing. Ctrl-C drops a line."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - input() gets history and editing by it
    while True:
        try:
            yield input("> ")
        except AnswerStopped:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


@contextmanager
def _ctrl_c_stops_answers() -> Iterator[None]:
    """Within, Ctrl-C raises `AnswerStopped`; other signals end the session as everywhere."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise AnswerStopped

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
