"""Context-intensive extraction: a list of numbered records, spread over the document, is turned into JSON.

Every record matters, so nothing of the document's facts can be left out; such tasks are reported to break low-rank and
landmark methods. The expected strings are the whole JSON objects: a record counts if all of its fields are right.
"""

import random
import re

from kvcli.quality.tasks.needles import random_value
from kvcli.quality.tasks.rows import Draft, RowRequest, require
from kvcli.quality.tasks.text import NAMES, SLOTS

RECORD = "Record {number}: code {code}, price {price}, for {name} the {person}."
QUESTION = "Turn every record of the text above into JSON."
OBJECT = '{{"record": "{number}", "code": "{code}", "price": "{price}"}}'

_MOST = 48  # records, unless the caller says otherwise


def record(rng: random.Random, number: int) -> tuple[str, str]:
    """Return a record and its JSON object."""
    fields = {
        "number": f"{number:03d}",
        "name": rng.choice(NAMES),
        "person": rng.choice(SLOTS["person"]),
        "code": random_value(rng),
        "price": f"{rng.randrange(1000):03d}",
    }
    return RECORD.format(**fields), OBJECT.format(**fields)


def records_to_json(request: RowRequest, records: int | None = None) -> Draft:
    """`records` records in filler, by default those that fill half of the length and at most 48; all are asked for.

    They stand in the order of their numbers.
    """
    request.refuse_depth()
    rng = request.rng
    longest = max(request.count_tokens(f" {record(random.Random(seed), 1)[0]}") for seed in range(20))
    count = min(max(request.length // (2 * longest), 1), _MOST) if records is None else records
    require(1 <= count <= 999, f"{count} records", "choose between 1 and 999")
    drawn = [record(rng, number) for number in range(1, count + 1)]
    depths = sorted(rng.random() for _ in drawn)
    document, _ = request.hide([stated for stated, _ in drawn], depths, QUESTION)
    objects = tuple(stated for _, stated in drawn)
    return Draft(document, QUESTION, f"[{', '.join(objects)}]", objects, None)


WORDS: tuple[str, ...] = tuple(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", f"{RECORD} {QUESTION}")))
"""Every word of records and question."""
