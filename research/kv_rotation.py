"""Does a Hadamard rotation before rounding bring KV in 8 and 4 bits closer to full attention? A trial on real models.

    python research/kv_rotation.py smollm2 documentation.txt code.py table.csv
    python research/kv_rotation.py gemma3.gguf code.py --channels 128        values that share a scale as they once did

Of every prompt all tokens but the newest 128 are rounded, by pages of 32 or one by one, and kept as the model computes
KV; `offload` attends to them. Keys, values or both are multiplied by the Hadamard matrix before rounding, and back
after it (QuaRot, arXiv 2404.00456). It prints the KL from full attention for each text, in thousandths of a nat. The
texts are those of `research/real_models.py`.
"""

import argparse
import json
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from typing_extensions import override

from kvcli.cli import main as kvcli
from kvcli.kernels import quant
from kvcli.kernels.quant import BlockFormat, channel_sizes
from kvcli.kv.dense import RECENT, TokenMajorCache
from kvcli.methods import register
from kvcli.methods.offload import Offload
from kvcli.models.geometry import LayerGeometry

PAGE = 32
ROTATED = {"": (False, False), "-keys": (True, False), "-values": (False, True), "-both": (True, True)}


def hadamard(d: int) -> Tensor:
    """Make the orthogonal Hadamard matrix of d rows, a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < d:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / d**0.5


def rounded(x: Tensor, form: BlockFormat, part: int, rotate: bool) -> Tensor:
    """Round keys (part 0) or values x [Hk, n, d], rotated or not."""
    sizes = channel_sizes(x)[:, None] if form.sized and part == 0 else torch.ones(())
    turn = hadamard(form.d) if rotate else torch.eye(form.d)
    found = form.rounded((x.float() / sizes @ turn).unflatten(1, (-1, form.size)), part)
    return (found.flatten(1, 2) @ turn.T * sizes).to(x.dtype)


def method(held: quant.KVDtype, size: int, rotate: tuple[bool, bool]) -> type[Offload]:
    """Make the method that attends to KV rounded in this way."""

    class Cache(TokenMajorCache):
        @override
        def load(self, k: Tensor, v: Tensor) -> int:
            written, n = super().load(k, v), max(0, k.shape[1] - RECENT) // PAGE * PAGE
            form = BlockFormat.of(held, 2, size, k.shape[2])
            assert form is not None
            for part, x in enumerate((k, v) if n else ()):
                self.kv[part, :n] = rounded(x[:, :n], form, part, rotate[part]).transpose(0, 1)
            return written

    class Rounded(Offload):
        @override
        def new_cache(self, layer: LayerGeometry) -> TokenMajorCache:
            return Cache(layer.num_kv_heads, layer.head_dim, self.context.capacity, self.context.tiers, offload=True)

    return Rounded


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--length", default="2K")
    parser.add_argument("--channels", type=int, default=quant.CHANNELS, help="most channels that share a scale")
    given = parser.parse_args()
    quant.CHANNELS = given.channels
    names = []
    for held, size, rotated in product(("int8", "k8v4", "int4"), (PAGE, 1), ROTATED):
        names.append(f"{held}-{'pages' if size > 1 else 'tokens'}{rotated}")
        register(method(held, size, ROTATED[rotated]), name=names[-1])
    with TemporaryDirectory() as folder:
        kept, tasks = Path(folder) / "kept.jsonl", ",".join(f"fidelity:{text}" for text in given.texts)
        sys.argv = ["kvcli", "eval", "-m", given.model, "--tasks", tasks, "--length", given.length, "--limit", "1"]
        sys.argv += ["--max-tokens", "32", "--method", ",".join(names), "--predictions", str(kept), "--json", "-q"]
        sys.argv += ["-o", f"{folder}/report.json"]
        try:
            kvcli()
        except SystemExit as end:
            if end.code:
                raise
        rows = defaultdict[str, list[float]](list)
        for row in map(json.loads, kept.read_text().splitlines()[1:]):
            rows[row["variant"]].append(1000 * row["kl"])
    for name, found in rows.items():
        print(f"{name:<20}", *(f"{each:8.3f}" for each in found))


if __name__ == "__main__":
    main()
