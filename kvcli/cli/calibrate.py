"""`kvcli calibrate`: the settings that keep a method close to full attention on a model and a kind of text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import options
from kvcli.cli.options import Panel, assignments, at_least, each, number, positive_count, whole
from kvcli.cli.output import OutputWriter, progress
from kvcli.cli.reads import check_files
from kvcli.errors import ExitCode, usage_error

if TYPE_CHECKING:
    from kvcli.quality.calibrate.outcome import Calibration, TensorCalibration

_TEXT, _METHOD = Panel("Text"), Panel("Method")


def calibrate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="What to find: a value (tau, rank, budget, threshold) or a file (heads, gates, skew, pca).",
            show_default=False,
        ),
    ],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Text to find it on; built-in text without.", show_default=False),
    ] = None,
    length: Annotated[int, _TEXT.option("--length", "TOKENS", "Of a prompt.", positive_count)] = 4096,
    steps: Annotated[
        int, _TEXT.option("--steps", "N", "Tokens that follow a prompt and are compared one by one.", positive_count)
    ] = 64,
    samples: Annotated[int, _TEXT.option("--samples", "N", "Passages, at most.", positive_count)] = 16,
    seed: Annotated[int, _TEXT.option("--seed", "N", "Same seed, same built-in text.", whole, env=True)] = 0,
    model: options.Model = None,
    device: options.Device = "auto",
    dtype: options.DType = "auto",
    weights: options.Weights = "auto",
    load_format: options.LoadFormat = "auto",
    offline: options.Offline = False,
    tokenizer: options.Tokenizer = None,
    method: Annotated[str | None, _METHOD.option("--method", "NAME", "Method; by default the target's own.")] = None,
    profile: Annotated[
        str | None, _METHOD.option("--profile", "NAME|FILE.toml", "Settings that are not calibrated.")
    ] = None,
    settings: Annotated[list[str] | None, _METHOD.option("--set", "KEY=VALUE", "One of them; repeatable.")] = None,
    values: Annotated[
        list[str] | None,
        _METHOD.option(
            "--values",
            "KEY=A,B,...",
            "Values to try for a setting instead of the target's own; repeatable, all combinations.",
        ),
    ] = None,
    max_loss: Annotated[
        float,
        _METHOD.option(
            "--max-loss",
            "NATS",
            "KL divergence that a setting may add, two standard errors included.",
            at_least(0, number),
        ),
    ] = 0.01,
    per_layer: Annotated[bool, _METHOD.flag("--per-layer", "Try a value of its own for each layer, too: tau.")] = False,
    output: Annotated[
        Path | None, options.OUTPUT.option("--output -o", "FILE.toml", "Write the profile found.")
    ] = None,
    as_json: options.AsJson = False,
    html: options.Html = None,
    quiet: options.Quiet = False,
    debug: options.Debug = False,  # noqa: ARG001 - read by the guard around every command
) -> None:
    """Find the settings of a method that keep it close to full attention.

    kvcli calibrate tau --method freekv -m DIR book.txt -o mine.toml

    Every value is measured beside full attention on the same text. The cheapest one
    whose loss stays within --max-loss is chosen and becomes a profile for --profile.
    For tau and rank that is the loss added to their closest value, since neither
    makes up for a small budget; the loss from full attention is shown beside it.
    heads, gates, skew and pca are found once for a model and saved beside such a profile.

    Exit codes: 0 done, 1 no value stays within --max-loss, 2 usage, 3 will not fit in
    memory, 130 interrupted, what was measured is shown, 141 stdout was closed.
    """
    if output is not None and output.suffix != ".toml":
        raise usage_error(f"-o {output}: --profile takes files that end in .toml", f"try {output}.toml")
    outputs = {"-o": output, "its file beside it": output and _companion(output), "--html": html}
    check_files(outputs, model=model, load_format=load_format, documents=files, profiles=[profile], settings=settings)

    from kvcli.inputs.profiles import resolve_profile
    from kvcli.models.loading import ModelSpec
    from kvcli.quality.calibrate.matrices import TensorTarget
    from kvcli.quality.calibrate.outcome import TensorCalibration
    from kvcli.quality.calibrate.plan import CalibrationPlan
    from kvcli.quality.calibrate.run import calibrate as run
    from kvcli.quality.calibrate.run import find
    from kvcli.quality.calibrate.sweep import Sweep
    from kvcli.quality.calibrate.targets import target_of
    from kvcli.ui import console

    asked = target_of(target)
    tensors = isinstance(asked, TensorTarget)
    for name, wanted in (("--html", html is not None), ("--values", bool(values)), ("--per-layer", per_layer)):
        if wanted and tensors:
            raise usage_error(f"{name} has no effect on {asked.name}: no values are tried", "leave it out")
    if output is not None and tensors:
        _check_companion(_companion(output))
    named = method if method is not None or profile is not None else asked.method
    plan = CalibrationPlan(
        model=ModelSpec(model, device, dtype, load_format, offline, weights, tokenizer),
        profile=resolve_profile(named, profile, assignments(settings or [])),
        files=files or (),
        length=length,
        steps=steps,
        samples=samples,
        seed=seed,
        max_loss=max_loss,
        values={key: each(text, f"--values {key}", str) for key, text in assignments(values or [], "--values").items()},
        per_layer=per_layer,
    )
    with progress(quiet, demo=model is None) as observer:
        found = run(asked, plan, observer) if isinstance(asked, Sweep) else find(asked, plan, observer)
    writer = OutputWriter()
    writer.result(
        None, found.to_json() + "\n" if as_json else console.render_tables(found.tables(), notes=found.summary())
    )
    if html is not None and not isinstance(found, TensorCalibration):
        from kvcli.quality.calibrate.html import page

        writer.file(html, page(found))
    if not found.complete:
        observer.notice(f"interrupted after {found.provenance['passages']} passages; no profile was written")
        ended = ExitCode.INTERRUPTED
    elif isinstance(found, TensorCalibration):
        ended = _save(found, output, observer.notice, writer)
    else:
        ended = _conclude(found, output, observer.notice, writer)
    writer.finish()
    raise typer.Exit(ended)


def _companion(output: Path) -> Path:
    """The file of tensors that a profile names, beside it."""
    return output.with_suffix(".safetensors")


def _check_companion(path: Path) -> None:
    """Refuse to put tensors over a file that an earlier calibration did not write, such as a checkpoint's weights."""
    from kvcli.quality.calibrate.matrices import is_ours

    if path.exists() and not is_ours(path):
        what = f"the tensors would replace {path}, which no calibration wrote"
        raise usage_error(what, "give -o another name or directory")


def _save(found: TensorCalibration, output: Path | None, say: Callable[[str], None], writer: OutputWriter) -> ExitCode:
    """Write the file and the profile that uses it."""
    if output is None:
        say("nothing was written; name a profile with -o, the file comes to lie beside it")
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
