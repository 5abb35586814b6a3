"""What every method writes on a CPU, for `gpu.py` to hold a GPU's texts against.

    python benchmarks/texts.py

The bundled model answers a question about `examples/needle-4k.txt` in fp32. Anew after a change of what methods choose.
"""

from typing import Any

from common import arguments, save
from gpu_parts.agreement import written

from kvcli.methods import method_names


def main() -> None:
    """Write the token ids and the texts."""
    asked = arguments(__doc__, "texts").parse_args()
    found: dict[str, Any] = {}
    for (row,) in written("cpu", method_names()):
        print(f"{row['case']:<20} {row['text']!r}", flush=True)
        found[row["case"]] = {"ids": row["ids"], "text": row["text"]}
    save(asked.output, {"methods": found})


if __name__ == "__main__":
    main()
