"""Resident memory of a run: it matches the plan after many steps of chats of any length."""

import json
import os
import random
import re
import subprocess
import sys

from penstock.hwprofiles.probe.probe import BEYOND_TORCH_BYTES
from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.footprint import host_needs
from tests.running import SCRATCH, penstock
from tests.tiny import tiny_config
from tests.tour import ROOT

SEQ_LEN = 256
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 272}
# A user's command; resident memory with torch alone, as probed (torch for CUDA takes more than the shipped profile), and the
# system's peak: `ru_maxrss` begins with the parent's value. Packages for tests are not installed there: transformers imports
# every package that it finds.
RUN = """
import re, sys
from pathlib import Path
import torch
from penstock.hwprofiles.probe.cpu import resident_bytes
print("resident bytes", resident_bytes(), file=sys.stderr)
sys.modules |= dict.fromkeys(("accelerate", "bitsandbytes", "peft", "psutil"))
from penstock.cli.main import main
try:
    main()
finally:
    kibibytes = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]
    print("resident bytes", int(kibibytes) * 1024, file=sys.stderr)
"""


def write_chats(path, n_chats):
    """Write chats of any length up to a sequence's, in letters, which are one byte-level token each."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(n_chats):
            texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 90))) for _ in range(2)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def test_chats_of_any_length_take_the_memory_that_was_planned(tmp_path):
    """Allow a tenth, in a separate process; the compiler takes memory only if its cache is empty. Without length classes the matrix
    library alone takes twice that."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3", **SIZES)))
    write_chats(tmp_path / "chats.jsonl", 300)
    sizes = ("--seq-len", SEQ_LEN, "--batch-size", 2, "--micro-batch", 1, "--loss-tile-tokens", SEQ_LEN)
    result = penstock("plan", tmp_path, "--machine", "cpu-2core", *sizes, "--policy", "megatrain", "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    plan = PlanFile.read(tmp_path / "plan.json").plan
    words = ["run", tmp_path / "plan.json", "--data", tmp_path / "chats.jsonl", "--packing", "documents", "--steps", 30]
    command = [sys.executable, "-c", RUN, *map(str, words), *SCRATCH, "--lr", "1e-3", "--out", str(tmp_path / "out")]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    torch_bytes, most_bytes = map(int, re.findall(r"resident bytes (\d+)", run.stderr))
    on_device = plan.device_arena_bytes + plan.kept_bytes + plan.transient_bytes
    needs = host_needs(plan)
    planned_bytes = on_device + sum(needs.values()) + torch_bytes + BEYOND_TORCH_BYTES
    assert 0.9 * (planned_bytes - needs["compiler"]) <= most_bytes <= 1.1 * planned_bytes
