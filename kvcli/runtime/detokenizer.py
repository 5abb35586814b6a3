"""Streaming text: turn tokens into pieces that never break a character or show the beginning of a stop string."""

import re
from collections.abc import Sequence
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from kvcli.memory.state import Settled

_TEXT = "<|message|>"
_MARKS = ("<|start|>", "<|channel|>", _TEXT)
"""Special tokens of the Harmony format: before a message's author, before its channel, before its text."""
_ANALYSIS, _FINAL = "[analysis]", "final"
_END = re.compile(r"\W/[\w:]*think\w*\W", re.IGNORECASE)
"""The token after a model's thoughts: </think>, [/THINK] and the like."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamingDetokenizer:
    """Decodes one sequence incrementally and watches for stop strings.

    A piece is released once no later token can change it: an incomplete character at the end, or a tail that may yet
    become a stop string, is held back. New tokens are decoded together with the few before them, because the spelling
    of a token can depend on its left neighbour (the space that begins a word). The stream of the tokenizers library
    (`DecodeStream`) serves only its own tokenizers, and never releases an incomplete end.

    Models of the Harmony format (gpt-oss) answer in several messages: each begins with the name of its channel in
    brackets, on a line of its own.

    Models that reason first put their thoughts between two tokens of their own, `<think>` and `</think>` or the like,
    of which the first may stand in the prompt; or into channels before the final one. `thoughts` tells them apart.
    """

    not_state: ClassVar[tuple[str, ...]] = ("tokenizer", "_skipped", "_marks", "_begins", "_ends")

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
        self._ends = {token: mark for mark, token in special.items() if _END.fullmatch(mark)}
        self._begins = {mark.replace("/", "") for mark in self._ends.values()}
        self._thoughts: tuple[int, int] | None = None  # where thoughts end in the text, and where the answer begins

    @property
    def thoughts(self) -> tuple[str, str] | None:
        """The thoughts and the answer; None for a text in which no thoughts end."""
        if self._thoughts is None:
            return None
        end, begin = self._thoughts
        thoughts = self.text[:end].strip()
        for mark in self._begins:
            thoughts = thoughts.removeprefix(mark).strip()
        return thoughts.removeprefix(_ANALYSIS).strip(), self.text[begin:].strip()

    def push(self, token: int) -> str:
        """Add a token; return the piece of text that is now certain. Sets `stopped` at a stop string."""
        before = len(self.text) + len(self._held)
        piece = self._push(token)
        if token in self._ends and self._thoughts is None:
            self._thoughts = before, len(self.text) + len(self._held)
        return piece

    def _push(self, token: int) -> str:
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
        end = len(self.text)
        self._held = "\n\n" * bool(self.text) + f"[{channel}]\n" * bool(channel)
        piece = before + self._release(len(self._held))
        if channel == _FINAL and end:
            self._thoughts = end, len(self.text)
        return piece

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
