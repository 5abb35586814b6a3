"""Streaming text: turn tokens into pieces that never break a character or show the beginning of a stop string."""

from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvcli.memory.state import Settled

_TEXT = "<|message|>"
_MARKS = ("<|start|>", "<|channel|>", _TEXT)
"""Special tokens of the Harmony format: before a message's author, before its channel, before its text."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamingDetokenizer:
    """Decodes one sequence incrementally and watches for stop strings.

    A piece is released once no later token can change it: an incomplete character at the end, or a tail that may yet
    become a stop string, is held back. New tokens are decoded together with the few before them, because the spelling
    of a token can depend on its left neighbour (the space that begins a word). The stream of the tokenizers library
    (`DecodeStream`) serves only its own tokenizers, and never releases an incomplete end.

    Models of the Harmony format (gpt-oss) answer in several messages: each begins with the name of its channel in
    brackets, on a line of its own.
    """

    not_state: ClassVar[tuple[str, ...]] = ("tokenizer", "_skipped", "_marks")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""  # released
        self.stopped = False
        self._held = ""  # decoded, not released
        self._ids: list[int] = []
        self._context = self._decoded = 0  # ids[context:decoded] are the left neighbours of what is not decoded yet
        self._skipped: dict[int, bool] = {}  # by token: special, with no text
        special = tokenizer.get_added_vocab()
        self._marks = {special[mark]: mark for mark in _MARKS} if special.keys() >= {*_MARKS} else {}
        self._header: list[int] | None = None  # the tokens of a message's header, until its text begins

    def push(self, token: int) -> str:
        """Add a token; return the piece of text that is now certain. Sets `stopped` at a stop string."""
        if token in self._marks:
            return self._pass_mark(self._marks[token])
        if self._skips(token):
            return ""
        if self._header is not None:
            self._header.append(token)
            return ""
        self._ids.append(token)
        piece = self._new_text()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:  # else the neighbours stay, for what comes next begins no text
            self._context = self._decoded
        self._decoded = len(self._ids)
        self._held += piece
        found = [at for at in (self._held.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(self._held) - max((_overlap(self._held, stop) for stop in self.stop), default=0))

    def finish(self) -> str:
        """Release what was held back; no more tokens come."""
        if self.stopped:
            return ""
        self._held += self._new_text()
        self._decoded = len(self._ids)
        return self._release(len(self._held))

    def settled(self) -> list[Settled]:
        """List what no later token changes: tokens are only added."""
        return [Settled(self._ids, 0, len(self._ids))]

    def _pass_mark(self, mark: str) -> str:
        """Pass a mark of a message; where its text begins, release what came before and name the channel."""
        if mark != _TEXT:
            self._header = []
            return ""
        before = self.finish()
        self._context = self._decoded
        channel, self._header = str(self.tokenizer.decode(self._header or [])).strip(), None
        self._held = "\n\n" * bool(self.text) + f"[{channel}]\n" * bool(channel)
        return before + self._release(len(self._held))

    def _skips(self, token: int) -> bool:
        """Tell whether a token is left out as special: it is no neighbour of the text around it."""
        if token not in self._skipped:
            decode = self.tokenizer.decode
            self._skipped[token] = not decode([token], skip_special_tokens=True) and bool(decode([token]))
        return self._skipped[token]

    def _new_text(self) -> str:
        known = self.tokenizer.decode(self._ids[self._context : self._decoded], skip_special_tokens=True)
        both = self.tokenizer.decode(self._ids[self._context :], skip_special_tokens=True)
        return str(both[len(known) :])

    def _release(self, size: int) -> str:
        piece, self._held = self._held[:size], self._held[size:]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest tail of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
