"""Chat templates: programs that come with a checkpoint, run with bounds on their time and memory."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

from kvcli.errors import KvcliError, usage_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
"""Time that a template gets. Templates of real models take milliseconds, also around millions of tokens."""
_MEMORY = 4 << 30  # bytes, besides what the texts take
_COPIES = 16  # bytes by character: a few copies of a text on its way through the template


def render_chat_template(
    tokenizer: PreTrainedTokenizerBase, conversation: Sequence[dict[str, str]], variables: Mapping[str, Any]
) -> str:
    """Put a conversation into the text that the model was trained on, up to where its answer begins.

    Raises:
        KvcliError: the template fails, takes too long or too much memory, or gives no text (usage).
    """
    size = _COPIES * sum(len(message["content"]) for message in conversation)
    try:
        with _bounded(SECONDS, _MEMORY + size):
            rendered = tokenizer.apply_chat_template(
                list(conversation), tokenize=False, add_generation_prompt=True, **variables
            )
    except TimeoutError:
        raise _refused(f"has not ended after {SECONDS:g} seconds") from None
    except MemoryError:
        raise _refused("takes too much memory") from None
    except RecursionError:
        raise _refused("calls itself without an end") from None
    except Exception as error:  # whatever a program may raise
        raise _refused(f"refuses the prompt: {' '.join(str(error).split()) or type(error).__name__}") from error
    if not isinstance(rendered, str) or not rendered:
        raise _refused("gives no text")
    return rendered


@contextmanager
def _bounded(seconds: float, memory: int) -> Iterator[None]:
    """Within, the main thread gets a TimeoutError after `seconds`, and no `memory` bytes more than it has.

    Other threads have no such alarm; they run without bounds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def time_is_up(*_: object) -> None:
        raise TimeoutError

    limits = resource.getrlimit(resource.RLIMIT_AS)
    wanted = psutil.Process().memory_info().vms + memory
    before = signal.signal(signal.SIGALRM, time_is_up)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with suppress(ValueError, OSError):  # the system may allow less already
            resource.setrlimit(resource.RLIMIT_AS, (wanted, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _refused(what: str) -> KvcliError:
    hint = "use --raw, which leaves the template out, or another --system or --chat-template-kwargs"
    return usage_error(f"the chat template {what}", hint)
