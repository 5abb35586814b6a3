"""Steps and memory with weights streamed from the disk, against the same with all of them in memory.

Two made-up checkpoints in bfloat16 read 1,000 characters and go on: one of 3.0 GB (32 layers of a Qwen2),
one of 2.1 GB whose layers have 64 experts, of which a token uses 4. Each case is a `kvcli generate` of its own; all are
run in turn, round after round, and a ratio is taken within each. Tokens are sampled, and have to be the same. Peaks are
of the process, libraries included, and of a memory control group where one is given.

    python benchmarks/streamed_weights.py --at DIR                 # DIR gets the checkpoints, 5.1 GB
    python benchmarks/streamed_weights.py --at DIR --cgroup GROUP  # GROUP: an empty group of the memory controller
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from common import arguments, ratios, said, save, spread
from transformers import AutoConfig, AutoModelForCausalLM

from kvcli.models.loading import ModelSpec, open_checkpoint

DOCUMENT = Path(__file__).parent.parent / "examples" / "needle-8k.txt"
CHARACTERS, STEPS = 1_000, 16
DENSE = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 32,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
CASES: dict[str, dict[str, list[str]]] = {
    "dense": {
        "disk": ["--weights-on", "disk"],
        "disk, 1 GB": ["--weights-on", "disk", "--weights-memory", "1GB"],
        "memory": [],
    },
    "experts": {
        "disk": ["--weights-on", "disk"],
        "disk, 1 GB": ["--weights-on", "disk", "--weights-memory", "1GB"],
        "disk, 1.6 GB": ["--weights-on", "disk", "--weights-memory", "1.6GB"],
        "memory": [],
    },
}


def made(path: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of random weights, with the tokenizer of the bundled model; return where it is."""
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        tokenizer = open_checkpoint(ModelSpec(None)).tokenizer
        kind_of, sizes = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind_of, vocab_size=len(tokenizer), tie_word_embeddings=False, **sizes),
            dtype=torch.bfloat16,
        )
        model.get_input_embeddings().weight.data.normal_()  # so large that routers tell tokens apart
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(path)
    return path


def ran(model: Path, document: Path, how: list[str], group: Path | None) -> dict[str, Any]:
    """Run one case, and return its report, with the group's peak."""
    command = [sys.executable, "-m", "kvcli", "generate", document, "-m", model, "--method", "full", "--raw"]
    command += ["--max-tokens", STEPS + 1, "--ignore-eos", "--dtype", "bfloat16", "--device", "cpu", "--json", "-q"]
    command += ["--temperature", 1, "--seed", 1]  # random weights give nearly random tokens

    own = None if group is None else group / "case"  # a group of its own: what was read before does not count

    def enter() -> None:
        if own is not None:
            (own / "cgroup.procs").write_text(str(os.getpid()))

    if own is not None:
        own.mkdir()
    done = subprocess.run([*map(str, command), *how], capture_output=True, text=True, check=False, preexec_fn=enter)
    peak = None
    if own is not None:  # the older and the newer hierarchy name it differently
        named = [own / name for name in ("memory.max_usage_in_bytes", "memory.peak")]
        peak = int(next(file for file in named if file.exists()).read_text())
        own.rmdir()
    if done.returncode:
        sys.exit(done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report | {"group_peak": peak}


def main() -> None:
    """Run all cases in turn, and save what they took."""
    parser = arguments(__doc__, "streamed_weights")
    parser.add_argument("--at", type=Path, required=True, help="directory for the checkpoints; they are kept there")
    parser.add_argument("--cgroup", type=Path, help="an empty group of the memory controller, for its peak")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES), help="one of the two checkpoints")
    given = parser.parse_args()
    document = given.at / "document.txt"
    given.at.mkdir(parents=True, exist_ok=True)
    document.write_text(DOCUMENT.read_text()[:CHARACTERS])
    rows = []
    for kind, config in (("dense", DENSE), ("experts", EXPERTS)):
        if given.only not in (None, kind):
            continue
        model, steps = made(given.at / kind, config), defaultdict[str, list[float]](list)
        reports: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(given.rounds):
            for name, how in CASES[kind].items():
                report = ran(model, document, how, given.cgroup)
                reports[name].append(report)
                steps[name].append(report["sequences"][0]["timing"]["p50_ms"])
        written = {tuple(each["sequences"][0]["token_ids"]) for of_case in reports.values() for each in of_case}
        for name, of_case in reports.items():
            streamed, groups = of_case[-1]["streamed_weights"], [each["group_peak"] for each in of_case]
            row = {
                "checkpoint": kind,
                "weights": name,
                "same_tokens": len(written) == 1,
                "prompt_tokens": of_case[0]["sequences"][0]["prompt_tokens"],
                "step_over_memory": ratios(steps[name], steps["memory"]),
                "process_peak_bytes": spread([each["memory"]["process_peak_bytes"] for each in of_case]),
                "group_peak_bytes": None if None in groups else spread(groups),
                "streamed": streamed,
            }
            rows.append(row)
            print(f"{kind}, {name}: step {said(row['step_over_memory'])} of that in memory", flush=True)
    save(given.output, {"rounds": given.rounds, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
