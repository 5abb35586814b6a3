"""`kvcli batch`: its throughput, documents read once, flat memory, and nothing lost to kills.

    python benchmarks/batch.py

- throughput: ragged rows by continuous batching, by static batches in the order of the file and longest first, and by
  `generate` row by row, on a dummy Llama (8 layers, width 1024, fp32). A static batch ends before the next one begins.
- grouped: several questions on one document in one batch, against each in a batch of its own: time of the prefill.
- memory: resident bytes while 10,000 tiny rows run.
- kills: 300 ragged rows, 5 % of them bad, killed (-9) 30 times at random moments and started again; texts are compared
  with those of `generate`, row by row.
- ray: two workers here, one of them killed twice (where Ray is installed).

A part that the results file has is not run again without --again.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
from batch_parts.kills import ended, kills, ray
from batch_parts.speed import grouped, memory, throughput
from common import add_output, save

PARTS = {"throughput": throughput, "grouped": grouped, "kills": kills, "ray": ray, "memory": memory}


def main() -> None:
    """Run what the results file lacks, and write it after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which of them")
    parser.add_argument("--again", action="store_true", help="also those that the file has")
    add_output(parser, "batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(args.output.read_text()) if args.output.exists() else {}
    results.pop("provenance", None)
    for name in args.parts:
        if name in results and not args.again:
            continue
        with tempfile.TemporaryDirectory() as folder:
            pid = os.fork()  # a part of its own process: no thread is there when it forks, and memory is its own
            if pid == 0:
                Path(folder, "result").write_text(json.dumps(PARTS[name](Path(folder))))
                os._exit(0)
            if ended(pid):
                sys.exit(f"{name} failed")
            found = json.loads(Path(folder, "result").read_text())
        print(name, json.dumps(found, indent=1))
        if found is not None:
            results[name] = found
            save(args.output, results)


if __name__ == "__main__":
    main()
