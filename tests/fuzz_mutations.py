"""How is a good file made hostile?

Each function takes a file that is good, or was mutated before, and returns another: mostly of the same form, so that it comes past
the parser, with values of a wrong type, numbers without end, deep nesting, keys that stand twice, texts that are paths, code or
control characters. What it does is a function of the random numbers alone.
"""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutate = Callable[[bytes, Random], bytes]

MAX_BYTES = 2**20  # of a mutated file: what is about size is tested with files made for that
OUTSIDE = "@OUTSIDE@"  # replaced by the path of a folder that nothing may look into, just before the file is written


class Raw(str):
    """Text that stands in JSON as it is."""


class Pairs(list):
    """A JSON object, in which a key may stand twice."""


NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 255, 256, 4096, 10**5, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63)),
    *(10**30, 0.5, -0.0, 1e-300, 5e-324, 1.7e308, Raw("1e999"), Raw("-1e999"), Raw("NaN"), Raw("Infinity"), Raw("1e-999")),
    *(Raw("9" * 400), Raw("9" * 5000), Raw("0." + "3" * 500), Raw("1E400")),
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    *("", " ", "\0", "a\nb", "\r\n", "\x1b[31mred\x1b[0m", "\u202egnp.exe", "\u2028", "\ufeff", Raw('"\\ud800"'), "é" * 300),
    *("../outside/secret.json", "../outside/secret.safetensors", "../../outside/secret.json", f"{OUTSIDE}/secret.json"),
    *(f"{OUTSIDE}/secret.safetensors", f"file://{OUTSIDE}/secret.json", f"{OUTSIDE}", "..", ".", "/", "/dev/zero", "/dev/stdin"),
    *("/proc/self/environ", "~", "link.json", "pipe", "a/../../outside/secret.json", "model.safetensors\0.json", "x" * 5000),
    *("http://127.0.0.1:9/x", "kernels-community/flash-attn", "gpt2", "evil", "evil.Evil", "evil--evil.Evil"),
    *("{0.__class__}", "%s%n", "{{ 7 * 7 }}", "__import__('os').getcwd()", "os.system", "!!python/name:os.system", "${HOME}"),
    *("(a+)+$", "(?:" * 200 + ")" * 200, "[", "nan", "1e999", "true", "null", "auto", "none", "-1", "١٢"),
)  # fmt: skip
TREES: tuple[Any, ...] = (
    *([], Pairs(), [[]], [None], Pairs([("", None)]), [0] * 3000, ["x"] * 3000, Pairs((f"k{i}", i) for i in range(2000))),
    *(Raw("[" * 300 + "]" * 300), Raw("[" * 100_000), Raw('{"a":' * 5000 + "1" + "}" * 5000), Raw('{"a":1,"a":2}')),
    Pairs([("auto_map", Pairs([("AutoConfig", "evil.Evil"), ("AutoModelForCausalLM", "evil.Evil")])), ("trust_remote_code", True)]),
)  # fmt: skip
PLAIN: tuple[Any, ...] = (None, True, False)


# -- JSON ---------------------------------------------------------------------------------------------------------------


def read_json(data: bytes) -> Any:
    """The tree in a text; ValueError or RecursionError where there is none."""
    return json.loads(data.decode("utf-8"), object_pairs_hook=Pairs)


def write_json(tree: Any) -> bytes:
    """The text of a tree, raw pieces as they are."""
    return "".join(_text(tree)).encode("utf-8", "surrogatepass")


def _text(tree: Any) -> list[str]:
    match tree:
        case Raw():
            return [str(tree)]
        case Pairs():
            inner = [[json.dumps(key), ": ", *_text(value)] for key, value in tree]
            return ["{", *(piece for i, item in enumerate(inner) for piece in ([", "] if i else []) + item), "}"]
        case list():
            inner = [_text(value) for value in tree]
            return ["[", *(piece for i, item in enumerate(inner) for piece in ([", "] if i else []) + item), "]"]
        case _:
            return [json.dumps(tree)]


def places(tree: Any) -> list[tuple[Any, int]]:
    """Every (list, index) below a tree; in a Pairs the index is that of a pair."""
    found: list[tuple[Any, int]] = []
    todo = [tree]
    while todo:
        here = todo.pop()
        if isinstance(here, list):
            found += [(here, i) for i in range(len(here))]
            todo += [item[1] if isinstance(here, Pairs) else item for item in here]
    return found


def _value(where: list[Any], i: int) -> Any:
    return where[i][1] if isinstance(where, Pairs) else where[i]


def _put(where: list[Any], i: int, value: Any) -> None:
    where[i] = (where[i][0], value) if isinstance(where, Pairs) else value


def hostile_value(rng: Random) -> Any:
    """A value that fits nowhere."""
    return deepcopy(rng.choice(rng.choice((NUMBERS, TEXTS, TREES, PLAIN))))


def _near(value: Any, rng: Random, texts: list[str]) -> Any:
    """A value of the same type, which may come further than one of another."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, value << 20, 0, rng.choice(NUMBERS)))
        case float():
            return rng.choice((value * 1e6, value / 1e6, -value, 1 / value if value else 0.0, rng.choice(NUMBERS)))
        case str() if not isinstance(value, Raw):
            return rng.choice((_near_text(value, rng, texts), _near_text(value, rng, texts), rng.choice(TEXTS)))
        case _:
            return hostile_value(rng)


def _near_text(text: str, rng: Random, texts: list[str]) -> str:
    words = text.split(" ")
    at = rng.randrange(len(words))
    numbers = list(re.finditer(r"\d+", text))
    match rng.randrange(6):
        case 0 if numbers:
            found = rng.choice(numbers)
            other = rng.choice(
                (str(int(found[0][:300]) + rng.choice((-1, 1))), "0", "999999999", "9" * 30, str(rng.choice(NUMBERS)))
            )
            return text[: found.start()] + other + text[found.end() :]
        case 1:
            return " ".join(words[:at] + words[at + 1 :])
        case 2:
            return " ".join([*words[:at], words[at], *words[at:]])
        case 3 if texts:
            return rng.choice(texts)
        case 4:
            cut = rng.randrange(len(text) + 1)
            return text[:cut] + rng.choice(("\0", "\n", "\x1b[2J", "/", "..", "\u202e", " ", "\U0010ffff")) + text[cut:]
        case _:
            return text[: rng.randrange(len(text) + 1)]


def mutated(tree: Any, rng: Random) -> Any:
    """The tree with one thing changed, in place where it can be."""
    found = places(tree)
    if not found:
        return hostile_value(rng)
    where, i = rng.choice(found)
    kind = rng.randrange(12)
    if kind <= 2:
        _put(where, i, hostile_value(rng))
    elif kind <= 5:
        texts = [v for w, j in rng.sample(found, min(len(found), 20)) if isinstance(v := _value(w, j), str)]
        _put(where, i, _near(_value(where, i), rng, texts))
    elif kind == 6:
        del where[i]
    elif kind == 7:  # a part of the file in another place
        other, j = rng.choice(found)
        part = _value(other, j)
        if len(_text(part)) < 5000:
            _put(where, i, deepcopy(part))
    elif kind == 8 and isinstance(where, Pairs):  # another key, or one that stands twice
        key, value = where[i]
        other = rng.choice((key + "x", key[:-1], key.upper(), "", "__class__", "auto_map", "\0", "x" * 300, rng.choice(where)[0]))
        where.insert(rng.randrange(len(where) + 1), (other, rng.choice((value, hostile_value(rng)))))
    elif kind == 9 and not isinstance(where, Pairs) and len(_text(where[i])) < 500:
        where[i:i] = [where[i]] * rng.choice((1, 2, 10, 300))
    elif kind == 10 and len(where) > 1:
        j = rng.randrange(len(where))
        where[i], where[j] = where[j], where[i]
    elif len(_text(_value(where, i))) < 1000:
        inner = _value(where, i)
        _put(where, i, rng.choice(([inner], Pairs([("x", inner)]), [inner, inner], Raw("[" * 50 + "1" + "]" * 50))))
    return tree


def mutate_json(data: bytes, rng: Random) -> bytes:
    """A JSON file with one to eight things changed; one in ten is broken as a text too."""
    try:
        tree = read_json(data)
    except (ValueError, RecursionError):
        return mutate_text(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        tree = mutated(tree, rng)
    text = write_json(tree)
    if len(text) > MAX_BYTES:
        return data
    return mutate_text(text, rng) if rng.random() < 0.1 else text


# -- other texts --------------------------------------------------------------------------------------------------------

SNIPPETS = (
    *(b"\0", b"\n", b"\r\n", b"\t", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b'"', b"{", b"}", b"[" * 3000),
    *(
        b"9" * 4400,
        b"1e999",
        b"-",
        b":",
        b",",
        b"&a [*a]",
        b"*a",
        b"<<: *a",
        b"../outside/secret.json",
        b"NaN",
        b"\xf4\x90\x80\x80",
    ),
)


def mutate_text(data: bytes, rng: Random, snippets: tuple[bytes, ...] = SNIPPETS) -> bytes:
    """A few cuts, repeats and insertions anywhere, or by lines."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        match rng.randrange(8):
            case 0:
                data = data[:a]
            case 1:
                data = data[:a] + data[min(b, a + rng.choice((1, 4, 50))) :]
            case 2 if len(data) < 2**18:
                data = data[:b] + data[a:b] * rng.choice((1, 1, 3)) + data[b:]
            case 3:
                data = data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :]
            case 4 | 5:
                lines = data.split(b"\n")
                at = rng.randrange(len(lines))
                lines[at:at] = [rng.choice((rng.choice(lines), rng.choice(snippets)))]
                data = b"\n".join(lines)
            case _:
                data = data[:a] + rng.choice(snippets) + data[a:]
    return data


def mutate_lines(data: bytes, rng: Random) -> bytes:
    """A JSONL file: a line or two as JSON, sometimes the text."""
    if rng.random() < 0.2:
        return mutate_text(data, rng)
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        lines[at] = mutate_json(lines[at], rng) if lines[at] else rng.choice((b"", b"[]", b"1", b'{"text": ""}', b'"x"'))
    return b"\n".join(lines)


ODD_FIELDS = (
    *(
        "",
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "1e-320",
        "4",
        "9" * 40,
        "B/s",
        "rows",
        "fp8",
        "cublas\x00",
        "../h100-sxm",
        "cpu-2core",
    ),
    *("tokens=0;width=1", "tokens=9007199254740991;width=9007199254740991", "m=1;m=2;k=3;n=4", "gpus=1;bytes=1", "gpus=64;bytes=1"),
    *("model=../outside/secret;batch=1;seq=1", "model=no-such;batch=1;seq=1", "model=llama-3.1-8b;batch=99999;seq=9999999"),
    *("batch=1;seq=1;heads=1;kv_heads=2;head_dim=1", "batch=1;seq=1;heads=1;kv_heads=1;head_dim=4096;causal=7", ";;=", "m"),
)


def mutate_rows(data: bytes, rng: Random) -> bytes:
    """A CSV file: fields of a row or two, sometimes the text."""
    if rng.random() < 0.2:
        return mutate_text(data, rng)
    rows = [line.split(",") for line in data.decode("utf-8", "replace").split("\n")]
    for _ in range(rng.choice((1, 1, 2))):
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = rng.choice((rng.choice(rng.choice(rows)), rng.choice(ODD_FIELDS)))
    return "\n".join(map(",".join, rows)).encode()


def mutate_plan_text(data: bytes, rng: Random) -> bytes:
    """A plan's text: a header's JSON, an arena, an op, or the text."""
    if rng.random() < 0.2:
        return mutate_text(data, rng)
    lines = data.decode("utf-8", "replace").split("\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        key, _, rest = lines[at].partition(" ")
        if rest.startswith(("{", "[")):
            lines[at] = f"{key} {mutate_json(rest.encode(), rng).decode('utf-8', 'replace')}"
        else:
            lines[at] = (
                f"{key} {_near_text(rest, rng, lines[-9:])}" if rng.random() < 0.8 else _near_text(lines[at], rng, lines[-9:])
            )
        if rng.random() < 0.1:
            lines[at] = rng.choice(
                ("arena x host 1000000x1 " + "1000000x1 " * 300, "arena x host 1x-5", "arena weights device 9x9")
            )
    return "\n".join(lines).encode("utf-8", "replace")


# -- files of tensors ---------------------------------------------------------------------------------------------------


def mutate_tensors(data: bytes, rng: Random) -> bytes:
    """A safetensors file: its header as JSON, the header's length, or the bytes."""
    n_header = int.from_bytes(data[:8], "little")
    header, rest = data[8 : 8 + n_header], data[8 + n_header :]
    match rng.randrange(6):
        case 0:
            length = rng.choice(
                (0, 1, n_header - 1, n_header + 1, len(data), 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**8)
            )
            return max(length, 0).to_bytes(8, "little") + header + rest
        case 1:
            return mutate_text(data, rng)
        case 2:
            return data[:8] + header + rest[: rng.randrange(len(rest) + 1)] + rest[: rng.choice((0, 0, 8))]
        case _:
            header = mutate_json(header, rng)
            header += b" " * (-len(header) % 8)
            return len(header).to_bytes(8, "little") + header + rest
