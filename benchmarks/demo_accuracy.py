"""How many held-out questions the demo model answers with each method, at equal budgets.

Every document is read once, by exact prefill, into one store a method, but for the methods that read it their own way,
by windows. Each method then decodes greedily on its own.
A row's score is the share of its values that the answer names (RULER's recall).

    python benchmarks/demo_accuracy.py
"""

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from common import add_output, save

from kvcli import report
from kvcli.attention import Hook, attached
from kvcli.decode import decode
from kvcli.kernels.softmax import Softmax
from kvcli.methods import get_method, method_names
from kvcli.methods.base import Method, SequenceContext
from kvcli.model import Model, ModelSpec, load_model
from kvcli.prefill import prefill
from kvcli.profile import Profile, resolve_profile
from kvcli.prompts import Prompt, Template, encode, encode_question
from kvcli.rope import installed
from kvcli.sampling import Sampler, Sampling
from kvcli.sequence import RunningSequence
from kvcli.stats import Counters
from kvcli.store.cache import Tiers
from kvcli.tasks import TASKS, Row, make_row, recall
from kvcli.text import TextStream
from kvcli.timeline import Timeline
from kvcli.windowed import read_prompt

MAX_TOKENS = 80
FRAME = 8  # tokens that the chat template adds


class Tee:
    """Hands a layer's prompt KV to several methods, so that the prompt is read once."""

    def __init__(self, methods: list[Method[Any, Any]]):
        self.methods = methods

        self.query_rows = max(method.query_rows for method in methods)

    def observe(self, layer: int, q: torch.Tensor, k: torch.Tensor, softmax: Softmax) -> None:
        """Show every method how a layer reads the prompt."""
        for method in self.methods:
            method.observe(layer, q, k, softmax)

    def prefill(self, layer: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, softmax: Softmax) -> None:
        """Give every method the KV [Hk, s, d] of a layer and as many of its last queries as it wants."""
        for method in self.methods:
            method.prefill(layer, k, v, q[:, q.shape[1] - min(method.query_rows, q.shape[1]) :], softmax)


@dataclass
class Answer:
    """One method's answer to one row."""

    score: float
    correction: report.Correction
    cache: report.Cache


def answer_row(model: Model, hook: Hook, rotary: Any, row: Row, profiles: dict[str, Profile]) -> dict[str, Answer]:
    """Read the row once, let every method answer it."""
    prompt, layers = Prompt("row", row.document, row.question), model.geometry.layers
    ids, question = encode(prompt, Template(), model.tokenizer), encode_question(prompt, model.tokenizer)
    methods = {}
    for name, profile in profiles.items():
        tiers = Tiers.for_device(model.device, model.dtype)
        context = SequenceContext(
            len(ids) + MAX_TOKENS, tiers, Counters(len(layers)), Timeline(), rotary, question=question
        )
        methods[name] = get_method(profile.method)(profile.settings, layers, context)
    exact = [method for method in methods.values() if method.prefill_window is None]
    shared = prefill(model.module, hook, ids, Tee(exact), layers, lambda _: None)
    eos = {model.tokenizer.eos_token_id}
    answers = {}
    for name, method in methods.items():
        windowed, counters = method.prefill_window is not None, method.context.counters
        logits = read_prompt(model.module, hook, ids, method, layers, lambda _: None) if windowed else shared
        sampler, stream = Sampler(Sampling(), 0, model.device), TextStream(model.tokenizer)
        sequence = RunningSequence(0, name, 0, len(ids), method, counters, sampler, stream, eos, MAX_TOKENS, 0.0)
        sequence.accept(logits)
        for _ in decode(model.module, hook, [sequence], Timeline()):
            pass
        answers[name] = Answer(recall(stream.text, row.outputs), counters.correction(), counters.cache())
    return answers


def profile_of(name: str, sizes: dict[str, float]) -> Profile:
    """Give a method the budget, and the sizes of pages where it has pages; one dense layer, as FreeKV has."""
    fields = get_method(name).Config.model_fields
    known = sizes | {"dense_layers": 1} if "page_size" in fields else {"budget": sizes["budget"]}
    return resolve_profile(method=name, overrides={key: value for key, value in known.items() if key in fields})


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="checkpoint directory; the bundled demo model without it")
    parser.add_argument(
        "--methods", nargs="+", default=["full", "freekv", "quest", "streaming"], choices=method_names()
    )
    parser.add_argument("--tasks", nargs="+", default=["niah_single", "niah_multikey"], choices=TASKS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=50, help="held-out documents of each task and length")
    parser.add_argument("--budget", type=int, default=512, help="tokens attended per layer and KV head")
    parser.add_argument("--sink", type=int, default=64)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=32, help="tokens in a page, for every method that has pages")
    parser.add_argument("--tau", type=float, nargs="+", default=[0.8], help="correction thresholds of freekv")
    parser.add_argument("--seed", type=int, default=0)
    add_output(parser, "demo_accuracy")
    args = parser.parse_args()

    sizes = {"budget": args.budget, "sink": args.sink, "window": args.window, "page_size": args.page_size}
    profiles = {name: profile_of(name, sizes) for name in args.methods if name != "freekv"}
    if "freekv" in args.methods:
        profiles |= {f"freekv tau={tau:g}": profile_of("freekv", sizes | {"tau": tau}) for tau in args.tau}
    model = load_model(ModelSpec(args.model))

    def count_tokens(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False))

    rows, longest = [], max(args.lengths) + MAX_TOKENS
    with attached(model.module) as hook, installed(model.module, [longest]) as rope:
        rotary = rope.rotary(longest)
        for task in args.tasks:
            for length in args.lengths:
                answers: dict[str, list[Answer]] = {name: [] for name in profiles}
                for index in range(args.rows):
                    row = make_row(task, length=length - FRAME, seed=args.seed, index=index, count_tokens=count_tokens)
                    for name, answer in answer_row(model, hook, rotary, row, profiles).items():
                        answers[name].append(answer)
                for name, given in answers.items():
                    checked = sum(answer.correction.heads_checked for answer in given)
                    corrected = sum(answer.correction.heads_corrected for answer in given)
                    requested = sum(answer.cache.pages_requested for answer in given)
                    rows.append(
                        {
                            "task": task,
                            "length": length,
                            "method": name,
                            "rows": len(given),
                            "accuracy": 100 * statistics.mean(answer.score for answer in given),
                            "heads_checked": checked,
                            "heads_corrected": corrected,
                            "pages_requested": requested,
                            "misses": sum(answer.cache.misses for answer in given),
                        }
                    )
                    rate = f"  corrected {corrected / checked:.0%} of {checked} heads" if checked else ""
                    print(f"{task:<16} {length:>6} {name:<16} {rows[-1]['accuracy']:5.1f} %{rate}", flush=True)
    used = {name: profile.as_dict()["settings"] for name, profile in profiles.items()}
    save(args.output, {"model": model.name, "seed": args.seed, "profiles": used, "rows": rows})


if __name__ == "__main__":
    main()
