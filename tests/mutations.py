"""Mutations of files, the same for a seed: bytes changed, cut and repeated; values of JSON replaced."""

import json
import random

VALUES = [
    None, True, 0, -1, 3, 2**63, 10**400, 0.5, 1e308, "", "x", "9" * 5000, "../../etc/passwd", "a" * 300, "\0", [],
    [[], 3], [1], {}, {"a": {"b": []}}, "flash_attention_2", "float99",
]  # fmt: skip


def mutated_bytes(data, seed):
    """The data with one to three places changed."""
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        length = rng.choice([0, 1, 1, 4, 20])
        insert = rng.choice(
            [b"", b"[" * 3000, b"\x00", b"\xff", b"9" * 5000, b"1e400", b'"', b"=", b"{", b"-0x" + b"f" * 99]
        )
        data = data[:at] + insert + data[at + length :]
    return data


def mutated_json(value, seed):
    """The value with one to three of its entries replaced, taken away or given another name, at any depth."""
    rng = random.Random(seed)
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.7:
                place = place[key]
                continue
            if rng.random() < 0.2:
                del place[key]
            elif isinstance(place, dict) and rng.random() < 0.1:
                place[rng.choice(["", "x" * 300, "..", "metadata"])] = place.pop(key)
            else:
                place[key] = json.loads(json.dumps(rng.choice(VALUES)))
            break
    return value
