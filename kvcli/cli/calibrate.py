"""`kvcli calibrate`: find the settings that keep a method close to full attention on a model and a kind of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli.command import assignments, command, each
from kvcli.cli.output import OutputWriter, check_files, progress
from kvcli.errors import ExitCode, usage_error
from kvcli.inputs import options

if TYPE_CHECKING:
    from kvcli.quality.calibrate.outcome import Calibration, TensorCalibration

_TEXT, _METHOD = options.Panel("Text"), options.Panel("Method")


@options.group
class Text:
    """The target of a calibration, and its text."""

    target: str = options.argument(
        ..., "TARGET", "What to find: a value (tau, rank, budget, threshold) or a file (heads, gates, skew, pca)."
    )
    files: tuple[str, ...] = options.argument((), "[FILE]...", "Text to calibrate on. Default: built-in text.")
    length: int = _TEXT(4096, "--length", "TOKENS", "Tokens of each prompt.", options.positive_count)
    steps: int = _TEXT(64, "--steps", "N", "Tokens after each prompt, compared one by one.", options.positive_count)
    samples: int = _TEXT(16, "--samples", "N", "Most passages to use.", options.positive_count)
    seed: int = _TEXT(0, "--seed", "N", "Random seed of the built-in text.", options.whole, env=True)


@options.group
class Wanted:
    """The method, the settings to try, and how close it has to stay."""

    method: str | None = _METHOD(None, "--method", "NAME", "Method. Default: the target's own.")
    profile: str | None = _METHOD(
        None, "--profile", "NAME|FILE.toml", "Profile of the settings that are not calibrated."
    )
    settings: tuple[str, ...] = _METHOD((), "--set", "KEY=VALUE", "Change one of these settings; repeatable.")
    values: tuple[str, ...] = _METHOD(
        (),
        *("--values", "KEY=A,B,..."),
        "Values to try for a setting, instead of the target's own; repeat for all combinations.",
    )
    max_loss: float = _METHOD(
        0.01,
        *("--max-loss", "NATS", "KL divergence that a setting may add, including two standard errors."),
        options.at_least(0, options.number),
    )
    per_layer: bool = _METHOD.flag("--per-layer", "Also try a separate value for each layer (tau).")


@command
def calibrate(
    text: Text,
    model: options.ModelOptions,
    wanted: Wanted,
    output: Annotated[
        options.Output,
        options.Some(
            "output json html quiet debug",
            output={"metavar": "FILE.toml", "help": "Write the profile to FILE.toml.", "read": None},
        ),
    ],
) -> None:
    """Find the settings of a method that keep it close to full attention.

    kvcli calibrate tau --method freekv -m DIR book.txt -o mine.toml

    Compares every value with full attention on the same text. Chooses the cheapest one
    whose loss stays within --max-loss, and writes it as a profile for --profile. For tau
    and rank this is the loss added to their closest value, since neither makes up for a
    small budget; the loss from full attention is shown next to it. heads, gates, skew
    and pca are found once per model and saved next to the profile.

    Exit codes: 0 done, 1 no value stays within --max-loss, 2 usage, 3 will not fit in
    memory, 130 interrupted (shows what was measured), 141 stdout was closed.
    """
    file, html, values = output.output, output.html, wanted.values
    if file is not None and file.suffix != ".toml":
        raise usage_error(f"-o {file}: --profile takes files that end in .toml", f"try {file}.toml")
    outputs = {"-o": file, "the file next to it": file and _companion(file), "--html": html}
    check_files(outputs, model, text.files, [wanted.profile], settings=wanted.settings)

    from kvcli.inputs.profiles import resolve_profile
    from kvcli.quality.calibrate.outcome import TensorCalibration
    from kvcli.quality.calibrate.plan import CalibrationPlan
    from kvcli.quality.calibrate.run import calibrate as run
    from kvcli.quality.calibrate.run import find
    from kvcli.quality.calibrate.sweep import Sweep
    from kvcli.quality.calibrate.targets import target_of
    from kvcli.quality.calibrate.tensors import TensorTarget
    from kvcli.ui import console

    asked = target_of(text.target)
    tensors = isinstance(asked, TensorTarget)
    for name, given in (("--html", html is not None), ("--values", bool(values)), ("--per-layer", wanted.per_layer)):
        if given and tensors:
            raise usage_error(f"{name} has no effect on {asked.name}: no values are tried", "leave it out")
    if file is not None and tensors:
        _check_companion(_companion(file))
    named = wanted.method if wanted.method is not None or wanted.profile is not None else asked.method
    plan = CalibrationPlan(
        model=model.spec(),
        profile=resolve_profile(named, wanted.profile, assignments(wanted.settings)),
        files=text.files,
        length=text.length,
        steps=text.steps,
        samples=text.samples,
        seed=text.seed,
        max_loss=wanted.max_loss,
        values={key: each(tried, f"--values {key}", str) for key, tried in assignments(values, "--values").items()},
        per_layer=wanted.per_layer,
    )
    with progress(output.quiet, demo=model.model is None) as observer:
        found = run(asked, plan, observer) if isinstance(asked, Sweep) else find(asked, plan, observer)
    writer = OutputWriter()
    writer.result(
        None, found.to_json() + "\n" if output.as_json else console.render_tables(found.tables(), notes=found.summary())
    )
    if html is not None and not isinstance(found, TensorCalibration):
        from kvcli.quality.calibrate.html import page

        writer.file(html, page(found))
    if not found.complete:
        observer.notice(f"interrupted after {found.provenance['passages']} passages; no profile was written")
        ended = ExitCode.INTERRUPTED
    elif isinstance(found, TensorCalibration):
        ended = _save(found, file, observer.notice, writer)
    else:
        ended = _conclude(found, file, observer.notice, writer)
    writer.finish()
    raise typer.Exit(ended)


def _companion(output: Path) -> Path:
    """Return the file of tensors next to a profile, which names it."""
    return output.with_suffix(".safetensors")


def _check_companion(path: Path) -> None:
    """Refuse to overwrite a file that no calibration wrote, such as a checkpoint's weights, with tensors."""
    from kvcli.quality.calibrate.tensors import is_ours

    if path.exists() and not is_ours(path):
        what = f"the tensors would replace {path}, which calibrate did not write"
        raise usage_error(what, "give -o another name or directory")


def _save(found: TensorCalibration, output: Path | None, say: Callable[[str], None], writer: OutputWriter) -> ExitCode:
    """Write the file and the profile that uses it."""
    if output is None:
        say("nothing was written; to save the profile and its file, name it with -o")
        return ExitCode.OK
    beside = _companion(output)
    if writer.file(beside, found.tensor_file()) and writer.file(output, found.to_toml(beside)):
        say(f"written to {output} and {beside}; use them with --profile {output}")
    return ExitCode.OK


def _conclude(found: Calibration, output: Path | None, say: Callable[[str], None], writer: OutputWriter) -> ExitCode:
    """Write the chosen profile, or say why there is none."""
    if found.chosen is None:
        say(found.choice.reason)
        if output is not None:
            say(f"{output} was not written; allow a larger --max-loss, or calibrate the budget first")
        return ExitCode.RUNTIME
    if output is not None and writer.file(output, found.to_toml()):
        say(f"written to {output}; use it with --profile {output}")
    return ExitCode.OK
