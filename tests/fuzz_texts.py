"""How is a text that a person, or a model's author, wrote made hostile?

Settings in YAML and TOML: each has ways of its own to refer, to repeat and to run.
"""

import json
from random import Random

import yaml

from .fuzz_mutations import mutate_json, mutate_text

YAML = b"""# a run
plan: plan.json
data: {path: data, format: auto, packing: documents}
out: out
steps: 1_000
optimizer:
  lr: 1e-5
  no_decay: [norm, "bias"]
  schedule:
    kind: cosine
    warmup_steps: 10
evaluation:
  prompts:
    - Hello
    - |
      two
      lines
monitors: [tensorboard]
"""
TOML = b"""plan = "plan.json"
steps = 1_000
[data]
path = "data"
[optimizer]
lr = 1e-5
no_decay = ["norm", "bias"]
[optimizer.schedule]
kind = "cosine"
[evaluation]
prompts = ["Hello", '''two
lines''']
"""

# One a line; what cannot be written so follows.
YAML_SNIPPETS = (
    *rb"""
<<: *a
&a [*a]
*a
!!python/object/apply:os.system ['touch EXECUTED']
!!python/object/apply:os.system ["touch EXECUTED"]
!!python/object/apply:os.popen ['touch EXECUTED']
!!python/object/new:os.system ['touch EXECUTED']
!!python/object/apply:subprocess.Popen [[touch, EXECUTED]]
!!python/object/new:type {args: [x, [], {}]}
!!python/name:os.system
!!binary ////
!!timestamp 2001-13-45
!!set {a}
!local x
1: 2
null: 3
? [a, b]
? {a: 1}
2001-13-45
12:30:45
0x_
.nan
-.inf
1e999
0o9
---
...
%YAML 9.9
%TAG ! tag:evil,2000:
'
"\ud800"
"\x00"
|
>-
trust_remote_code: true
~
""".split(b"\n"),
    b"a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\nd: [*c, *c, *c, *c]",
    *(b"[" * 2000, b"{a: " * 2000, b"- " * 2000, b"? " * 2000, b"\t", b"\xef\xbb\xbf", b"\x00", b"\xff", b"9" * 5000, b"\xc2\x85"),
)
TOML_SNIPPETS = (
    *rb"""
[[data]]
[data]
a.b.c = 1
x = nan
x = inf
x = 1e999
x = 2001-13-45
x = 1979-05-27T07:32:00Z
x = 0x
x = "\ud800"
x = "\u0000"
x =
x = []
x = {}
x = [{}, 1, "a"]
trust_remote_code = true
steps = -1
plan = 1
lr = true
'''
""".split(b"\n"),
    *(b"a" + b".a" * 2000 + b" = 1", b"x = " + b"[" * 2000, b"x = " + b"{a=" * 2000, b"steps = " + b"9" * 5000, b"\x00", b"\xff"),
)


def mutate_yaml(data: bytes, rng: Random) -> bytes:
    """As text; as JSON, which YAML includes; or with a line's value that only YAML has."""
    match rng.randrange(4):
        case 0:
            try:
                return mutate_json(json.dumps(yaml.safe_load(data)).encode(), rng)
            except Exception:  # the library raises whatever its own code meets
                return mutate_text(data, rng, YAML_SNIPPETS)
        case 1:
            return _with_a_value(data, b": ", rng.choice(YAML_SNIPPETS), rng)
        case _:
            return mutate_text(data, rng, YAML_SNIPPETS)


def mutate_toml(data: bytes, rng: Random) -> bytes:
    """As text, or with another line's value."""
    if rng.random() < 0.4:
        return _with_a_value(data, b" = ", rng.choice(TOML_SNIPPETS).partition(b" = ")[2], rng)
    return mutate_text(data, rng, TOML_SNIPPETS)


def _with_a_value(data: bytes, mark: bytes, value: bytes, rng: Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = lines[at].partition(mark)[0] + mark + value
    return b"\n".join(lines)
