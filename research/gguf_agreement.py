"""Does kvcli compute what a GGUF file says? Held against transformers and llama.cpp, on a pretrained model.

    python research/real_models.py fetch
    python research/gguf_agreement.py                          # SmolLM2: results/gguf_agreement.json
    python research/gguf_agreement.py gemma3 -o gemma3.json

Five stretches of each of the four texts of `research/real_models.py` are 256 tokens long, and 512 more are fed one by
one: 10,240 steps. After each step the likeliest next token of kvcli, whose weights stay packed, is compared with that
of transformers, which unpacks all of them to fp32 and reads the stretch at once.

llama.cpp (package xllamacpp) then continues the 20 stretches greedily by 200 tokens, and so does kvcli. llama.cpp
rounds activations to 8 bits and KV to 16, so its text parts from kvcli's where two tokens are nearly as likely. `same`
counts how many tokens are the same from the first one on.
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from real_models import MODELS, RESULTS, ROOT, fetch, texts
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import GgufConfig

sys.path.insert(0, str(ROOT / "benchmarks"))

from common import save

from kvcli.inputs.profiles import reference_profile
from kvcli.models.loading import Model, ModelSpec, load_model
from kvcli.runtime.engine import engine
from kvcli.runtime.sampling import Sampling, TeacherForcing

PROMPT, FED, STRETCHES = 256, 512, 5
GREEDY = 200


def stretches(model: Model) -> list[list[int]]:
    """Cut five stretches out of each text, at equal distances."""
    found = []
    for path in texts().values():
        ids = model.tokenizer(path.read_text(), verbose=False)["input_ids"]
        apart = (len(ids) - PROMPT - FED) // STRETCHES
        found += [ids[each * apart :][: PROMPT + FED] for each in range(STRETCHES)]
    return found


def steps(model: Model, ids: list[int], fed: int | None) -> tuple[list[torch.Tensor], list[int]]:
    """Read a prompt; feed the `fed` tokens after it, or generate: the logits after every step, and the tokens."""
    prompt, following = ids[:PROMPT], ids[PROMPT : PROMPT + (fed or 0)]
    with engine(model, [PROMPT + (fed or GREEDY)]) as ready:
        method = ready.method(reference_profile(), ready.context(PROMPT, fed or GREEDY))
        (logits,) = ready.prefill(prompt, [method])
        sampling = Sampling(max_tokens=(fed or GREEDY - 1) + 1, ignore_eos=True, temperature=0)
        forced = TeacherForcing([*following[1:], 0]) if fed else None
        first = following[0] if fed else int(logits.argmax())
        sequence = ready.sequence(method, sampling, sampler=forced, first_token=first)
        rows = []
        for _ in ready.decode([sequence]):
            assert sequence.logits is not None
            rows.append(sequence.logits.clone())
        return rows, list(sequence.token_ids)


def against_transformers(model: Model, file: Path) -> dict[str, Any]:
    """Compare the likeliest token after every fed one."""
    how = GgufConfig(dequantize=True)
    peer: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=how
    ).eval()
    same, kls = 0, []
    for ids in stretches(model):
        ours = torch.stack(steps(model, ids, FED)[0]).double().log_softmax(-1)
        theirs = peer(input_ids=torch.tensor([ids]), logits_to_keep=FED).logits[0].double().log_softmax(-1)
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        kls.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    return {"steps": len(kls) * FED, "same_top": same / (len(kls) * FED), "kl": fmean(kls)}


def against_llama_cpp(model: Model, file: Path) -> dict[str, Any]:
    """Compare greedy texts."""
    import xllamacpp

    asked = xllamacpp.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.verbosity = str(file), 1024, 1, 1
    server = xllamacpp.Server(asked)
    how = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True, "return_tokens": True}
    same = []
    for ids in stretches(model):
        body = json.dumps({"prompt": ids[:PROMPT], "n_predict": GREEDY, **how}).encode()
        url = f"{server.listening_address}/completion"
        with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as answer:
            theirs = json.load(answer)["tokens"]
        ours = steps(model, ids, None)[1]
        differ = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
        same.append(differ[0] if differ else GREEDY)
    first, whole = (sum(each >= least for each in same) / len(same) for least in (1, GREEDY))
    version = {"xllamacpp": xllamacpp.__version__}
    return version | {"prompts": len(same), "same_first": first, "whole": whole, "median": median(same), "same": same}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2", choices=MODELS)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "gguf_agreement.json")
    given = parser.parse_args()
    file = fetch(given.model)
    model = load_model(ModelSpec(str(file)))
    found: dict[str, Any] = {"model": given.model}
    for peer, compare in {"llama.cpp": against_llama_cpp, "transformers": against_transformers}.items():
        with torch.inference_mode():
            found[peer] = compare(model, file)
        print(peer, found[peer])
        save(given.output, found)


if __name__ == "__main__":
    main()
