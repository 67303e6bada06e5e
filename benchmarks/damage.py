"""Random damage to files, for `fuzz.py`: values, entries, lines and bytes are removed, changed, repeated or inserted."""

import json
from random import Random
from typing import Any

NESTED = json.loads("[" * 400 + "]" * 400)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**53, 2**64, -(2**63), 10**30, 0.5, -0.0, 5e-324, 1.7e308, float("nan"), float("inf")),
    *("", " ", "\0", "a\nb", "\x1b[31mred", "\u202e", "\ud800", "x" * 5000, "..", "/dev/zero", "../outside/secret.json"),
    *("../outside/secret.safetensors", "evil", "evil.Evil", "{{ 7 * 7 }}", "__import__('os').getcwd()", "(a+)+$", "1e999", "none"),
    *([], {}, [[]], [None], NESTED, [0] * 3000, {f"k{i}": i for i in range(2000)}),
    {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True},
)
SNIPPETS = (
    *(b"\0", b"\n", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"{", b"}", b"[" * 3000, b"9" * 4400, b"1e999", b"NaN", b"-", b": ", b","),
    *(b"&a [*a]", b"*a", b"<<: *a", b"!!python/object/apply:os.system ['touch EXECUTED']", b"? [a]", b"a.b.c = 1", b"a" * 9000),
    *(b"{{ cycler.__init__.__globals__.os.system('touch EXECUTED') }}", b"{{ range(10**9)|list }}", b"{% for m in messages %}"),
)


def damaged(data: bytes, rng: Random) -> bytes:
    """Return the file with one damaged value, entry, line or range of bytes."""
    if rng.random() < 0.2:
        return _bytes(data, rng)
    header = int.from_bytes(data[:8], "little")
    if data[8:9] == b"{" and header < len(data):  # safetensors
        changed = _tree(data[8 : 8 + header], rng)
        return len(changed).to_bytes(8, "little") + changed + data[8 + header :]
    lines = data.split(b"\n")
    i = rng.randrange(len(lines))
    if data[:1] == b"{" and data.count(b"\n{"):  # JSONL
        return b"\n".join([*lines[:i], _tree(lines[i], rng), *lines[i + 1 :]])
    if data[:1] in b"{[":
        return _tree(data, rng)
    name, mark, _ = lines[i].partition(rng.choice((b": ", b" = ", b",")))
    return b"\n".join([*lines[:i], name + mark + rng.choice(SNIPPETS), *lines[i + 1 :]])


def _tree(data: bytes, rng: Random) -> bytes:
    """Return JSON with one value or entry changed."""
    try:
        root = [json.loads(data)]
    except ValueError:
        return _bytes(data, rng)
    places: list[tuple[Any, Any]] = []
    todo: list[Any] = [root]
    while todo:
        node = todo.pop()
        keys = range(len(node)) if isinstance(node, list) else node
        places += [(node, key) for key in keys]
        todo += [node[key] for key in keys if isinstance(node[key], list | dict)]
    node, key = rng.choice(places[1:] or places)
    value = node[key]
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1 if isinstance(value, int | float):
            node[key] = rng.choice((value + 1, -value, value * 2, value / 3, str(value)))
        case 1 if isinstance(value, str):
            node[key] = rng.choice((value[: len(value) // 2], value + " ", value.upper(), value * 2))
        case 2 if isinstance(node, dict):
            node[rng.choice((f"{key}x", "", "__class__", "trust_remote_code"))] = value
        case 3:
            node[key] = rng.choice(([value], {"x": value}, rng.choice(places)[0]))
        case _:
            node[key] = rng.choice(VALUES)
    try:
        return json.dumps(root[0] if root else None).encode()
    except ValueError:  # the container now contains itself
        return data[:-1]


def _bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes truncated, cut out, changed, repeated or inserted."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    put_in = rng.choice((bytes([rng.randrange(256)]), rng.choice(SNIPPETS)))
    return rng.choice((data[:a], data[:a] + data[b:], data[:b] + data[a:], data[:a] + put_in + data[a + 1 :]))
