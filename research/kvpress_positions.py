"""The prompt tokens that methods keep, against those that kvpress keeps: same model, text and number of tokens.

    python -m venv kvpress && kvpress/bin/pip install kvpress gguf     # apart: it needs transformers below 5.3
    kvpress/bin/python research/kvpress_positions.py keep -o kept.npz  # after research/real_models.py fetch
    python research/kvpress_positions.py compare kept.npz              # Markdown; figures in research/results

Both read SmolLM2-135M from its GGUF file and 2,048 tokens of a text. A quarter of the tokens stays in every layer and
KV head. The table says which part of the tokens that kvpress keeps are kept here, of those that compete.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcli" / "real_models"
MODEL, TEXT, TOKENS, KEPT = CACHE / "smollm2.gguf", CACHE / "documentation.txt", 2048, 512

# By a name: kvpress's class with its settings, the method with its own, and how many first and last tokens stay anyway.
PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], tuple[int, int]]] = {
    "StreamingLLM": ("StreamingLLMPress", {"n_sink": 4}, "streaming", {"sink": 4}, (0, 0)),
    "TOVA": ("TOVAPress", {}, "tova", {}, (0, 1)),
    "SnapKV, no pooling": (
        *("SnapKVPress", {"window_size": 32, "kernel_size": 1}),
        *("snapkv", {"window": 32, "kernel": 1}, (0, 32)),
    ),
    "SnapKV, 7 neighbours": (
        *("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
        *("snapkv", {"window": 32, "kernel": 7}, (0, 32)),
    ),
    "PyramidKV, no pooling": (
        *("PyramidKVPress", {"window_size": 8, "kernel_size": 1}),
        *("pyramidkv", {"window": 8, "kernel": 1}, (0, 8)),
    ),
    "ExpectedAttention": (
        *("ExpectedAttentionPress", {"n_sink": 4, "epsilon": 0.01}),
        *("expected_attention", {"sink": 4, "window": 0}, (4, 0)),
    ),
    "KVzip": ("KVzipPress", {"n_sink": 0}, "kvzip", {"sink": 0, "window": 0}, (0, 0)),
}


def keep(output: Path) -> None:
    """Save the positions that kvpress keeps, [layers, Hk, kept] by name, and the prompt's ids."""
    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"pretrained_model_name_or_path": MODEL.parent, "gguf_file": MODEL.name}
    tokenizer, model = AutoTokenizer.from_pretrained(**place), AutoModelForCausalLM.from_pretrained(**place)
    model = model.to(torch.float32).eval()
    ids = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :TOKENS]
    found = {"ids": ids[0].numpy()}
    for name, (press_name, settings, *_) in PAIRS.items():
        press = getattr(kvpress, press_name)(compression_ratio=1 - KEPT / TOKENS, **settings)
        if press_name == "KVzipPress":
            scores = repeated_scores(press, model, tokenizer, ids)
            sizes = [KEPT] * len(scores)  # its own choice is among all heads and layers together
        else:
            scores, score = [], press.score
            press.score = lambda *given, scores=scores, score=score: scores.append(score(*given)) or scores[-1]
            with torch.no_grad(), press(model):
                cache = model(ids, use_cache=True).past_key_values
            sizes = [layer.keys.shape[2] for layer in cache.layers]
        kept = np.zeros((len(sizes), *scores[0].shape[1:]), bool)
        for layer, (found_scores, size) in enumerate(zip(scores, sizes, strict=True)):
            np.put_along_axis(kept[layer], found_scores[0].topk(size, dim=-1).indices.numpy(), True, -1)
        found[name] = kept
    np.savez_compressed(output, **found)


def repeated_scores(press: Any, model: Any, tokenizer: Any, ids: torch.Tensor) -> Any:
    """Score tokens as KVzipPress does, which cuts nothing then: [layers, 1, Hk, n]."""
    from kvpress.presses import kvzip_press
    from transformers import DynamicCache

    found = []
    press.compress_post = lambda _: found.append(press.score_val.clone())
    tokenizer.chat_template = None  # else it takes the beginning of the text for that of a chat
    kvzip_press.AutoTokenizer.from_pretrained = lambda _: tokenizer
    with torch.no_grad(), press(model):
        model(input_ids=ids, past_key_values=DynamicCache())  # it reads on from a cache that it was given
    return found[0]


def compare(path: Path) -> Iterator[dict[str, Any]]:
    """Give for each pair the part of kvpress's tokens that are kept here, the mean over layers and KV heads."""
    from kvcli.inputs.profiles import resolve_profile
    from kvcli.models.loading import ModelSpec, open_checkpoint
    from kvcli.runtime.engine import engine

    file = np.load(path)
    ids, model = file["ids"].tolist(), open_checkpoint(ModelSpec(str(MODEL), device="cpu", dtype="float32")).load()
    with engine(model, [TOKENS + 1]) as ready:
        for name, (_, _, method_name, settings, (first, last)) in PAIRS.items():
            profile = resolve_profile(method_name, overrides={"budget": KEPT, **settings})
            method = ready.method(profile, ready.context(len(ids), 1))
            ready.prefill(ids, [method])
            ours = torch.stack([method.retrieval[layer.index].attended() for layer in ready.layers]).numpy()
            open_to_choice = slice(first, ours.shape[-1] - last)
            ours, theirs = ours[..., open_to_choice], file[name][..., open_to_choice]
            both = (ours & theirs).sum(-1) / np.maximum(1, theirs.sum(-1))
            yield {
                "name": name,
                "method": method_name,
                "same": float(both.mean()),
                "least": float(both.min()),
                "kept": [float(kept.sum(-1).mean()) for kept in (ours, theirs)],
            }


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["keep", "compare"])
    parser.add_argument("file", type=Path, nargs="?", help="what keep has written")
    parser.add_argument("-o", "--output", type=Path, help="where to write")
    given = parser.parse_args()
    if given.what == "keep":
        keep(given.output or Path("kept.npz"))
        return
    rows = []
    print("| kvpress | method here | same tokens | in the worst head |\n| --- | --- | --- | --- |")
    for row in compare(given.file):
        rows.append(row)
        print(f"| {row['name']} | `{row['method']}` | {row['same']:.1%} | {row['least']:.1%} |", flush=True)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from common import save

    save(given.output or ROOT / "research" / "results" / "kvpress_positions.json", {"kept": KEPT, "rows": rows})


if __name__ == "__main__":
    main()
