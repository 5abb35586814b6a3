"""A dialogue about documents: messages in, texts out, on `kvcli.runtime.conversation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

from kvcli.capacity import memory, pipelines, unnamed
from kvcli.errors import ExitCode, KvcliError, usage_error
from kvcli.inputs.encoding import EncodedPrompt, encode, encode_question, plain_text_notice, refuse_unembedded
from kvcli.inputs.options import KVOptions, Template
from kvcli.inputs.profiles import Profile, profile_notices
from kvcli.inputs.prompts import Prompt
from kvcli.memory.tiers import Footprint
from kvcli.models.geometry import rotates_by_length
from kvcli.models.loading import Checkpoint, Model
from kvcli.runtime.conversation import PAGE, Conversation, NewTurn, in_common
from kvcli.runtime.run_report import run_report, weight_traffic
from kvcli.runtime.sampling import Sampling
from kvcli.runtime.saved.library import KVLibrary
from kvcli.runtime.sequence import RunningSequence
from kvcli.telemetry import report
from kvcli.telemetry.observer import Observer


@dataclass(frozen=True)
class Exchange:
    """A question with its answer, the conversation in tokens before it, the answer's settings, memory and weights."""

    question: str
    ids: Sequence[int]
    answer: report.Sequence
    profile: Profile
    kv: Footprint
    weights: report.WeightTraffic | None

    @property
    def text(self) -> str:
        """The answer."""
        return self.answer.text


class Dialogue:
    """A document (or none) and the conversation about it; `profile` and `sampling` are those of the next answer.

    With a chat template the messages are rendered anew at every turn, and the unchanged beginning is not read again.
    Without one, a blank line separates questions and answers.
    """

    def __init__(
        self,
        model: Model,
        checkpoint: Checkpoint,
        profile: Profile,
        sampling: Sampling,
        template: Template,
        document: str = "",
        observer: Observer | None = None,
    ):
        self.model, self.checkpoint, self.template, self.document = model, checkpoint, template, document
        self.profile = unnamed.native(profile, checkpoint.geometry)
        self.sampling, self.observer = sampling, observer or Observer()
        self.exchanges: list[Exchange] = []
        self.conversation = Conversation(model, self.observer)
        self.attempts = 0  # of the last question, after the first
        self._warned = False  # that the conversation is longer than the model was made for
        self._chosen: Profile | None = None  # that of the last answer, if nobody named one
        self._read_as = template  # that of what the conversation has read
        self._shown: set[str] = set()  # notices

    @property
    def answering(self) -> Profile | None:
        """The profile that the next answer comes from; None if it will be chosen for the first question."""
        return self._chosen if self.profile.unnamed else self.profile

    def instruct(self, system: str | None) -> None:
        """Take another system message, or none, from the next answer on; give notice if that means to read again.

        Raises:
            KvcliError: the chat template has no place for it, and what was there stays (usage).
        """
        before, known = self.template, self.conversation.ids
        self.template = replace(before, system=system)
        try:
            self._tokens("", "A", [])  # refuses the message where nothing would read it
            common = in_common(known, self._tokens(self.document, "A", self.exchanges))
        except KvcliError:
            self.template = before
            raise
        if 2 * common < len(known):
            what = "the chat template puts the system message before the document"
            self.observer.notice(f"{what}: the next answer prefills {len(known) - common:,} tokens again")

    def read(self, saved: Path | None = None) -> None:
        """Read the document before the first question, if the method can use that; show notices on model and profile.

        The part of it in the directory `saved` is loaded.

        Raises:
            KvcliError: it will not fit (exit code 3), or the template refuses it (usage).
        """
        said = self.checkpoint.notices(self.sampling.repetition_penalty)
        for notice in filter(None, [*said, plain_text_notice(self.checkpoint, self.template)]):
            self.observer.notice(notice)
        method = memory.planned_method(self.profile, self.checkpoint.geometry, 1, self.checkpoint.dtype)
        if saved is not None and (method.prefill_window is not None or method.observes):
            raise usage_error(f"method {self.profile.method!r} cannot use saved KV", "leave --kv out")
        if not self.document or method.prefill_window is not None or method.observes:
            return
        one, other = (self._tokens(self.document, question, []) for question in "AZ")
        ids = one[: in_common(one, other)]
        refuse_unembedded(ids, self.checkpoint, "chat")
        self._settled(ids)
        if ids:
            find = None if saved is None else self._library(KVOptions(use=saved), self.template).find
            self.conversation.read(ids, len(ids) + self.sampling.max_tokens, find)

    def ask(self, question: str) -> Iterator[str]:
        """Answer a question about the document and the conversation; yield the text as it comes.

        An answer that is broken off stays as far as it came.

        Raises:
            KvcliError: the conversation will not fit (exit code 3), or cannot be continued.
        """
        self.attempts = 0
        yield from self._answer(question)

    def retry(self) -> Iterator[str]:
        """Answer the last question once more and replace its answer; sampled tokens are drawn anew.

        Raises:
            KvcliError: nothing was asked yet (usage); as in `ask`.
        """
        if not self.exchanges:
            raise usage_error("nothing was asked yet", "ask something")
        self.attempts += 1
        yield from self._answer(self.exchanges.pop().question)

    def save(self, folder: Path) -> int:
        """Save the KV of what was read, as `kvcli generate --save-kv` does; return its number of tokens.

        Raises:
            KvcliError: nothing was read yet, or the directory is not new (usage); it cannot be written (runtime).
        """
        document = self.exchanges[0].question if self.exchanges and not self.document else self.document
        library = self._library(KVOptions(save=folder), self._read_as)
        prompt = EncodedPrompt("chat", self.conversation.ids, prompt=Prompt("chat", document))
        return self.conversation.save(lambda ids, rope: library.writers(prompt, ids, rope, None))

    def report(self, last: int | None = None) -> report.Report:
        """Report the conversation: an entry for each answer, or for the `last` ones."""
        chosen = self.exchanges if last is None else self.exchanges[-last:]
        profile = chosen[-1].profile if chosen else self.profile
        kv = chosen[-1].kv if chosen else Footprint()
        streamed = [each.weights for each in chosen if each.weights is not None]
        weights = reduce(report.WeightTraffic.plus, streamed) if streamed else None
        return run_report(self.model, profile, [each.answer for each in chosen], kv, weights=weights)

    def _library(self, options: KVOptions, template: Template) -> KVLibrary:
        return KVLibrary(options, self.checkpoint, template, ["chat"], self.observer.notice)

    def _answer(self, question: str) -> Iterator[str]:
        ids = self._tokens(self.document, question, self.exchanges)
        refuse_unembedded(ids, self.checkpoint, "chat")
        profile = self._settled(ids)
        asked = NewTurn(ids, encode_question(Prompt("", "", question), self.checkpoint.tokenizer), self.attempts)
        pipeline = pipelines.choose("auto", profile, self.checkpoint)
        steps = self.conversation.answer(asked, profile, self.sampling, pipeline)
        sequence: RunningSequence | None = None
        try:
            with closing(steps):
                for running, piece in steps:
                    sequence, self._read_as = running, self.template
                    if piece:
                        yield piece
        finally:
            if sequence is not None:
                self._note(question, ids, sequence, profile)
        if sequence is not None and sequence.error is not None:
            raise KvcliError(sequence.error)

    def _note(self, question: str, ids: Sequence[int], sequence: RunningSequence, profile: Profile) -> None:
        if sequence.running:
            sequence.end("interrupted")
        entry = replace(sequence.report(), source=f"turn {len(self.exchanges) + 1}", question=question)
        kv = sequence.method.footprint() + self.conversation.footprint()
        read, decoded = self.conversation.taken()
        streams = self.checkpoint.geometry.streaming is not None
        weights = weight_traffic(read, decoded, len(entry.timing.decode_ms)) if streams else None
        self.exchanges.append(Exchange(question, ids, entry, profile, kv, weights))

    def _tokens(self, document: str, question: str, said: Sequence[Exchange]) -> list[int]:
        """Encode the conversation up to the beginning of the answer to `question`."""
        tokenizer, first = self.checkpoint.tokenizer, said[0].question if said else question
        prompt = Prompt("chat", document, first) if document else Prompt("chat", first)
        if self.template.raw or tokenizer.chat_template is None:
            if not said:
                return encode(prompt, self.template, tokenizer)
            last = said[-1]
            ended = last.answer.finish_reason == "eos"
            answer = last.answer.token_ids[: len(last.answer.token_ids) - ended]
            more = tokenizer(f"\n\n{question}", add_special_tokens=False, verbose=False)["input_ids"]
            return [*last.ids, *answer, *more]
        questions, turns = [*(each.question for each in said), question], []
        for each, following in zip(said, questions[1:], strict=True):
            told = each.text if each.answer.answer is None else each.answer.answer  # without what was thought
            turns += [{"role": "assistant", "content": told}, {"role": "user", "content": following}]
        return encode(prompt, self.template, tokenizer, turns)

    def _settled(self, ids: Sequence[int]) -> Profile:
        """Choose the profile of a turn if nobody named one; show notices that are new.

        Raises:
            KvcliError: the turn will not fit (exit code 3); a budget that is a share of it is too small for the method
                (usage).
        """
        checkpoint, sampling, profile, tokens = self.checkpoint, self.sampling, self.profile, len(ids)
        if profile.unnamed:
            costs = checkpoint.geometry, checkpoint.dtype, checkpoint.place, [tokens + sampling.max_tokens]
            profile = unnamed.choose(profile, *costs, partial(self._lack, ids))
            if self._chosen is None or profile.hash != self._chosen.hash:
                self._chosen = profile
            profile = self._chosen  # its line names the length when it was chosen, and so is shown once
        self._show(profile_notices(profile, checkpoint, tokens))
        if (lacking := self._lack(ids, profile)) is not None:
            way_out = "use a smaller --budget, --dtype or --max-tokens, or a shorter document"
            raise KvcliError(lacking, way_out, ExitCode.WILL_NOT_FIT)
        beyond = checkpoint.geometry.beyond_positions(tokens + sampling.max_tokens, checkpoint.name)
        if beyond is not None and not self._warned and not memory.reads_by_windows(profile, checkpoint):
            self._show([f"{beyond}: the text may be poor"])
            self._warned = True
        return profile

    def _show(self, notices: Sequence[str]) -> None:
        """Show the notices that were not shown before."""
        for notice in notices:
            if notice not in self._shown:
                self._shown.add(notice)
                self.observer.notice(notice)

    def _lack(self, ids: Sequence[int], profile: Profile) -> str | None:
        """Say of which memory a turn, with what is kept of the conversation, needs more than is free; None if it fits.

        The weights are in memory already, and so is what earlier turns left, unless it is read anew.
        """
        checkpoint, sampling, tokens = self.checkpoint, self.sampling, len(ids)
        known = in_common(self.conversation.ids, ids) // PAGE * PAGE
        if rotates_by_length(checkpoint.config, len(self.conversation.ids), tokens + sampling.max_tokens):
            known = 0
        need = memory.need(
            *(profile, checkpoint.geometry, checkpoint.dtype, [tokens], sampling.max_tokens, 1),
            device=checkpoint.place,
        )
        token = sum(2 * each.num_kv_heads * each.head_dim for each in checkpoint.geometry.layers)
        kept = Footprint(host=token * (tokens - known) * checkpoint.dtype.itemsize)
        wanted, free = replace(need, weights=0, kv=need.kv + kept), memory.available(checkpoint.place)
        return memory.shortage(f"a conversation of {tokens:,} tokens", wanted, checkpoint.place, free)
