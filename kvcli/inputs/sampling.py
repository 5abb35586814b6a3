"""How to choose tokens and when to stop, as asked for."""

from dataclasses import dataclass

from kvcli.errors import usage_error


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens and when to stop. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Raises:
        KvcliError: a value is outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_samples: int = 1

    def __post_init__(self) -> None:
        bounds = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or more, and finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
            ("num_samples", self.num_samples >= 1, "at least 1"),
            ("stop", all(self.stop), "no empty string"),
        ]
        for name, holds, wanted in bounds:
            if not holds:
                option = "--" + name.replace("_", "-")
                shown = "" if name == "stop" else getattr(self, name)
                raise usage_error(f"{option} {shown!r} is out of range", f"give {wanted}")
