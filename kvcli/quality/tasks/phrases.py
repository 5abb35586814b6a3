"""The sentences that facts, questions and answers are made of, apart from names and numbers."""

import re

CODE_FACTS: tuple[str, ...] = (
    "The access code of {name} is {value}.",
    "Remember that the access code of {name} is {value}.",
    "It is known that the access code of {name} is {value}.",
    "According to the register, the access code of {name} is {value}.",
)
"""All of them end in "{name} is {value}.": the words before the value name what is asked for."""

CODE_QUESTIONS: tuple[str, ...] = (
    "What is the access code of {name}?",
    "Find the access code of {name}.",
    "According to the text above, what is the access code of {name}?",
    "Can you tell me the access code of {name}?",
)

CODE_ANSWER = "The access code of {name} is {value}."
SEVERAL_ANSWER = "{name} is {value}."
"""One sentence of an answer that tells several codes."""

VALUES_QUESTION = "What are all the access codes of {name}?"

NAMES_QUESTION = "What are the access codes of {names}?"

VARIABLE_VALUE = "The value of {name} is {value}."
VARIABLE_QUESTION = "What is the value of {name}?"

WORDS_HEADING = "Here is a list of words:"
WORDS_QUESTION = "What are the three most frequent words in the list above?"
WORDS_ANSWER = "The most frequent words are {names}."

_ALL = (
    *CODE_FACTS,
    *CODE_QUESTIONS,
    CODE_ANSWER,
    VALUES_QUESTION,
    NAMES_QUESTION,
    VARIABLE_VALUE,
    VARIABLE_QUESTION,
    WORDS_HEADING,
    WORDS_QUESTION,
    WORDS_ANSWER,
)

PHRASE_WORDS: tuple[str, ...] = tuple(
    sorted({word for phrase in _ALL for word in re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", phrase))} | {"Answer"})
)
"""Every word that occurs in a fact, a question or an answer."""


def listing(items: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]
