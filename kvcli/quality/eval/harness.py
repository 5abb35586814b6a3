"""kvcli as a model of lm-evaluation-harness, for tasks that generate (`generate_until`).

    import kvcli.quality.eval.harness  # registers the model by the name of kvcli
    lm_eval.simple_evaluate("kvcli", {"pretrained": "DIR", "method": "freekv", "budget": 2048}, tasks=["ruler"])

Needs the extra `lm-eval`. Tasks that compare likelihoods of given answers are refused: they score a prompt while it is
read, so they would not show what a method does during decoding.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from kvcli.capacity import unnamed
from kvcli.errors import ExitCode, KvcliError
from kvcli.inputs.encoding import EncodedPrompt
from kvcli.inputs.profiles import refuse_mismatch, resolve_profile
from kvcli.models.loading import ModelSpec, open_checkpoint
from kvcli.runtime.engine import engine
from kvcli.runtime.prefill_runner import PrefillRunner
from kvcli.runtime.sampling import Sampling
from kvcli.telemetry.observer import Observer
from kvcli.telemetry.timeline import Timeline


@register_model("kvcli")
class KvcliModel(LM):  # type: ignore[misc, unused-ignore]
    """A checkpoint with a method or profile; further arguments are the method's settings.

    Raises:
        KvcliError: as for `open_checkpoint` and `resolve_profile`; a profile of another model (usage).
    """

    def __init__(
        self,
        pretrained: str | None = None,
        method: str | None = None,
        profile: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,  # noqa: ARG002 - the harness hands it to every model
        max_batch_size: int | None = None,  # noqa: ARG002
        **settings: Any,
    ):
        super().__init__()
        checkpoint = open_checkpoint(ModelSpec(pretrained, device or "auto", dtype))
        self.profile = unnamed.native(resolve_profile(method, profile, settings), checkpoint.geometry)
        refuse_mismatch(self.profile, checkpoint)
        self.model = checkpoint.load()
        self.max_gen_toks = max_gen_toks

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Continue the context of every request by its own settings, one after another."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        sampled = settings.get("do_sample", True)
        sampling = Sampling(
            max_tokens=int(settings.get("max_gen_toks", self.max_gen_toks)),
            temperature=float(settings.get("temperature", 0.0)) if sampled else 0.0,
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", 0)),
            repetition_penalty=float(settings.get("repetition_penalty", 1.0)),
            seed=int(settings.get("seed", 0)),
            stop=tuple([until] if isinstance(until, str) else until),
        )
        ids = self._encode(context)
        with engine(self.model, [len(ids) + sampling.max_tokens]) as ready:
            runner = PrefillRunner(ready, self.profile, sampling, Observer(), Timeline())
            ((sequence, _),) = runner.prefill(0, [EncodedPrompt("request", ids)])
            for _ in ready.decode([sequence]):
                pass
        if sequence.error is not None:
            raise KvcliError(sequence.error, "see kvcli doctor; another --dtype may help")
        return sequence.detokenizer.text

    def _encode(self, context: str) -> list[int]:
        tokenizer = self.model.tokenizer
        # A chat template that was applied to text has already written the first token.
        spelled = bool(tokenizer.bos_token) and context.startswith(str(tokenizer.bos_token))
        ids = list(tokenizer(context, add_special_tokens=not spelled, verbose=False)["input_ids"])
        if not ids:
            raise KvcliError("a request has no tokens", "give the task some text before the answer", ExitCode.USAGE)
        return ids

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:  # noqa: ARG002
        """Refuse, for the reason in the module's docstring.

        Raises:
            KvcliError: always (usage).
        """
        raise _not_generating()

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:  # noqa: ARG002
        """Refuse, for the reason in the module's docstring.

        Raises:
            KvcliError: always (usage).
        """
        raise _not_generating()

    @property
    def tokenizer_name(self) -> str:
        """The key of the harness's caches."""
        return self.model.name

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: ARG002
        """Return the template itself, for the harness's records."""
        return str(self.model.tokenizer.chat_template or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation by the model's chat template."""
        return str(
            self.model.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )


def _not_generating() -> KvcliError:
    return KvcliError(
        "kvcli runs tasks that generate, not those that compare likelihoods of given answers",
        "choose a task whose output_type is generate_until",
        ExitCode.USAGE,
    )
