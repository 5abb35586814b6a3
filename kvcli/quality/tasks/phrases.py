"""The texts of task rows: filler by a seeded grammar, names, and the forms of facts, questions and answers.

Every sentence of filler is a template with slots filled from the word lists below. `VOCABULARY` has every word of the
grammar and `PHRASE_WORDS` every word of the forms, so that a small tokenizer can give each one a token.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


NAMES: tuple[str, ...] = _split(
    """
    Abel Ada Adam Adele Agnes Aidan Alan Albert Alec Alfred Alice Alma Alvin Amber Amos Amy Andre Anita Anna Anton
    April Archie Ariel Arlo Arthur Astrid Aubrey Audrey August Aurora Barbara Barney Basil Beatrix Bella Benita
    Bernard Bertha Beryl Bianca Blanche Bonnie Boris Brenda Brian Bridget Bruce Bruno Calvin Camilla Carla Carmen
    Caroline Casper Cecil Celia Cesar Chester Chloe Clara Claude Clement Clifford Conrad Cora Cyril Daisy Dalia
    Damian Daphne Darius David Dennis Derek Dexter Diana Dinah Dolores Dominic Donald Doris Dorothy Douglas Duncan
    Edgar Edith Edmund Edna Edwin Elaine Eleanor Elias Eliza Ella Elliot Elmer Elsa Emil Emma Enid Enoch Eric Erin
    Ernest Esther Ethel Eugene Eunice Eva Evelyn Ezra Fabian Fanny Felix Fergus Fiona Flora Floyd Frances Franklin
    Freda Gabriel Garth Gemma George Gerald Gilbert Gina Gladys Gloria Gordon Greta Gustav Gwen Hanna Harold Harriet
    Harvey Hattie Hazel Hector Heidi Helen Henry Herbert Hilda Homer Horace Howard Hubert Hugo Ida Ingrid Irene Iris
    Irma Isaac Isabel Ivan Ivor Jacob Janet Jasper Jerome Jessica Joanna Joel Joseph Judith Julian Juliet June Karen
    Karl Katrina Keith Kenneth Kirsten Lance Laura Lawrence Leah Lena Leonard Leroy Leslie Lester Lewis Lillian
    Linda Lionel Logan Lola Loretta Louis Lucas Lucy Luther Lydia Mabel Magnus Malcolm Marcus Margot Marina Martha
    Martin Matilda Maurice Maxine Melvin Mildred Milo Miriam Mona Monica Morris Muriel Myra Nadia Naomi Natalie
    Nathan Nelson Nigel Nina Nora Norman Olaf Olga Oliver Olive Orson Oscar Otto Owen Pamela Patrick Paula Pearl
    Percy Peter Philip Phoebe Quentin Rachel Ralph Ramona Raymond Rebecca Regina Rhoda Roland Rosa Rufus Ruth Samuel
    Selma Seth Sidney Silas Simon Sonia Stella Sybil Tabitha Theodore Thelma Tobias Trudy Ursula Valentin Vera
    Victor Vincent Viola Walter Wanda Wendell Wilbur Winifred Yolanda Yvonne Zelda
    """
)

SLOTS: dict[str, Sequence[str]] = {
    name: _split(words)
    for name, words in {
        "adjective": """
            old small quiet busy bright cold warm narrow wide famous simple strong gentle modern heavy golden
            green grey red blue white dusty lonely pleasant steep deep distant crowded empty curious careful
            honest clever patient cheerful proud plain rich poor young rare common useful ancient local foreign
            fresh dry wet calm wild tall short long round wooden
        """,
        "place": """
            town village harbour market river valley bridge mountain station garden museum library school castle
            forest island beach farm mill road square church theatre hotel factory port hill lake field canal
            tower orchard quarry lighthouse border capital suburb coast desert meadow
        """,
        "person": """
            merchant farmer teacher sailor doctor painter baker driver writer singer student soldier guard clerk
            tailor traveller fisherman gardener carpenter engineer captain nurse lawyer mayor hunter miller
            pilot cook weaver potter shepherd visitor neighbour stranger child
        """,
        "people": """
            merchants farmers teachers sailors doctors painters bakers drivers writers singers students soldiers
            guards clerks tailors travellers gardeners carpenters engineers nurses lawyers hunters pilots cooks
            weavers potters visitors neighbours strangers children
        """,
        "goods": """
            wool salt grain silk timber coffee sugar tea copper iron wheat fruit leather glass paper honey
            butter cheese fish rice cotton coal spice wine oil bread cloth pottery
        """,
        "weather": """
            rain snow wind fog frost thunder sunshine hail mist heat
        """,
        "season": """
            spring summer autumn winter
        """,
        "time": """
            morning evening night afternoon week month year day
        """,
        "verb": """
            visited left crossed reached painted described remembered admired found watched measured repaired
            passed entered studied photographed
        """,
        "trade": """
            sold bought carried stored shipped traded delivered collected wanted exported
        """,
        "thing": """
            letter map lamp boat cart clock book coat key basket box ticket bell rope ladder mirror chair table
            candle wagon barrel kettle bottle drum violin blanket
        """,
        "plural": """
            letters maps lamps boats carts clocks books coats baskets boxes tickets bells ropes ladders mirrors
            chairs tables candles wagons barrels bottles blankets
        """,
        "adverb": """
            slowly quickly often rarely always usually quietly suddenly gladly early late again together
        """,
        "event": """
            festival meeting race concert wedding storm flood election fair harvest strike journey dance auction
            parade
        """,
        "count": """
            two three four five six seven eight nine ten twelve twenty forty hundred
        """,
        "group": """
            Many Some Most Few Several
        """,
        "motion": """
            walked travelled moved returned hurried sailed climbed drove ran rode marched
        """,
        "quality": """
            beautiful expensive cheap dangerous safe difficult easy important popular secret dark noisy clean
            strange comfortable
        """,
    }.items()
}
"""The words for the slots of templates."""

_TEMPLATES: tuple[str, ...] = (
    "The {adjective} {person} {verb} the {place} in the {time}.",
    "{group} {people} {trade} {goods} near the {adjective} {place}.",
    "In {season} the {place} was {quality} and the {weather} came {adverb}.",
    "After the {event} the {people} {motion} {adverb} to the {place}.",
    "The {weather} lasted for {count} days, but the {people} stayed in the {place}.",
    "There was a {adjective} {thing} on the {thing} beside the {place}.",
    "A {person} from the {place} {trade} {count} {plural} every {time}.",
    "When the {weather} stopped, the {person} {motion} across the {place}.",
    "It was {quality} to carry {goods} over the {adjective} {place}.",
    "The price of {goods} fell before the {event}, so the {people} were {adjective}.",
    "They {verb} the {place} and {trade} {goods} there until {season}.",
    "On a {adjective} {time} in {season} the {person} opened the {thing} {adverb}.",
    "The road from the {place} to the {place} is {adjective} and {quality}.",
    "{group} of the {plural} in the {place} were {quality}.",
    "During the {event} a {person} lost a {adjective} {thing}.",
    "We {verb} a {place} with {count} {adjective} {plural} and a {adjective} {thing}.",
    "No {person} knew why the {place} was so {quality} that {time}.",
    "The {people} say that {goods} from the {place} has always been {quality}.",
    "If the {weather} comes {adverb}, the {person} takes the {thing} to the {place}.",
    "Every {time} the {person} wrote about the {adjective} {event} at the {place}.",
)


def _words(template: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", re.sub(r"\{[^}]*\}", " ", template))


VOCABULARY: tuple[str, ...] = tuple(
    sorted({word for words in SLOTS.values() for word in words} | {word for t in _TEMPLATES for word in _words(t)})
)
"""Every word of the filler, in each capitalisation in which it occurs."""


def sentence(rng: random.Random, slots: Mapping[str, Sequence[str]] = SLOTS) -> str:
    """Return one sentence of filler, without surrounding spaces, its slots filled from `slots`.

    After "a" a word that begins with a vowel gives way to the next one of its slot: "an" is no word of the grammar.
    """
    return re.sub(r"(\b[Aa] )?\{(\w+)\}", lambda slot: _filled(slot, rng, slots), rng.choice(_TEMPLATES))


def _filled(slot: re.Match[str], rng: random.Random, slots: Mapping[str, Sequence[str]]) -> str:
    article, words = slot[1] or "", slots[slot[2]]
    at = rng.randrange(len(words))
    if not article:
        return words[at]
    return article + next((word for word in (*words[at:], *words) if not _AFTER_AN.match(word)), words[at])


_AFTER_AN = re.compile("[aeio]|u(?!se)")
"""Words of the slots that go with "an": not "useful"."""


def sentences(rng: random.Random, tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Return filler sentences of about `tokens` tokens together, never more."""
    return sentences_of(lambda: sentence(rng), tokens, count_tokens)


def sentences_of(draw: Callable[[], str], tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Draw sentences until the next one would make them exceed `tokens` tokens together.

    Each sentence is counted with the space before it.
    """
    found: list[str] = []
    while (tokens := tokens - count_tokens(" " + (drawn := draw()))) >= 0:
        found.append(drawn)
    return found


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
"""One sentence of an answer that lists several codes."""

VALUES_QUESTION = "What are all the access codes of {name}?"

NAMES_QUESTION = "What are the access codes of {names}?"

VARIABLE_VALUE = "The value of {name} is {value}."
VARIABLE_QUESTION = "What is the value of {name}?"

WORDS_HEADING = "Here is a list of words:"
WORDS_QUESTION = "What are the three most frequent words in the list above?"
WORDS_ANSWER = "The most frequent words are {names}."

DIRECT_QUESTION = "Give only the access code of {name}."
DIRECT_ANSWER = "{value}."
LATE_QUESTION = "What are the access codes of {names}, and then that of the value of {variable}?"

COUNTING_QUESTION = "How many times does {name} occur in the list above?"
COUNTING_ANSWER = "{name} occurs {count} times."

COMMON_QUESTION = "What are the ten most common words in the list above?"
COMMON_ANSWER = "The most common words are {words}."

RECORD = "Record {number}: code {code}, price {price}, for {name} the {person}."
RECORDS_QUESTION = "Turn every record of the text above into JSON."
RECORD_OBJECT = '{{"record": "{number}", "code": "{code}", "price": "{price}"}}'

_FORMS: tuple[str, ...] = (
    *(*CODE_FACTS, *CODE_QUESTIONS, CODE_ANSWER, SEVERAL_ANSWER, VALUES_QUESTION, NAMES_QUESTION),
    *(VARIABLE_VALUE, VARIABLE_QUESTION, DIRECT_QUESTION, DIRECT_ANSWER, LATE_QUESTION, RECORD, RECORDS_QUESTION),
    *(WORDS_HEADING, WORDS_QUESTION, WORDS_ANSWER, COMMON_QUESTION, COMMON_ANSWER, COUNTING_QUESTION, COUNTING_ANSWER),
)

PHRASE_WORDS: tuple[str, ...] = tuple(sorted({"Answer"}.union(*map(_words, _FORMS))))
"""Every word that occurs in a fact, a question or an answer."""


def listing(items: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]
