"""Cost of writing a checkpoint every ten steps of a run.

`python -m benchmarks.checkpointing HOME` prints a page of Markdown: the demo's model, plan and data, in one process. Every other
stretch of ten steps starts with a checkpoint and is compared with the next stretch without one, so that other load on the machine
affects both. Checkpoints are written in the background and, in other runs of the same process, with lanes drained. The same number
of bytes is then written and hashed without training. Exit code 1 if a background write costs more than 3 %.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import penstock
from benchmarks.common import provenance
from benchmarks.small import BATCH_SIZE, CONFIG, SEQ_LEN, state_bytes, write_chats
from penstock.runtime.units import GB, show_bytes

INTERVAL = 10  # steps between checkpoints, for the reported cost
TARGET_FRACTION = 0.03
WAYS = ("background", "drained")
LOOK_S = 0.02  # polling interval, long enough to cost nothing
PIECE_BYTES = 16 * 2**20
N_PLAIN = 3


@dataclass(slots=True)
class Observed:
    """End times of steps, and write intervals of checkpoints."""

    ends_s: list[float] = field(default_factory=list)
    written_s: dict[str, list[float]] = field(default_factory=dict)

    def durations_s(self) -> list[float]:
        return [times_s[-1] - times_s[0] for times_s in self.written_s.values() if len(times_s) > 1]

    def is_writing(self, from_s: float, to_s: float) -> bool:
        return any(times_s[0] < to_s and times_s[-1] > from_s for times_s in self.written_s.values())


def stretches(ends_s: Sequence[float], interval: int) -> list[tuple[float, float]]:
    """Pair the seconds of stretches with and without a checkpoint. The first two are warm-up."""
    marks_s = [ends_s[step - 1] for step in range(2 * interval, len(ends_s) + 1, interval)]
    times_s = [b - a for a, b in pairwise(marks_s)]
    return list(zip(times_s[::2], times_s[1::2], strict=False))


def costs(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the relative cost of a checkpoint per stretch: median over pairs, minimum, maximum."""
    shares = sorted(with_s / without_s - 1 for with_s, without_s in pairs)
    return median(shares), shares[0], shares[-1]


@contextmanager
def watched(out: Path, observed: Observed) -> Iterator[None]:
    """Poll which checkpoint is being written, in a thread."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for name in os.listdir(out):
                if name.startswith("checkpoint-") and name.endswith(".partial"):
                    observed.written_s.setdefault(name, []).append(time.perf_counter())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run(plan: Path, home: Path, way: str, first_step: int, n_steps: int) -> Observed:
    """Train `n_steps` more, with a checkpoint after every second interval."""
    observed = Observed()
    settings = {
        "tokenizer": "bytes", "optimizer.weight_decay": 0.1, "checkpoint.every": 2 * INTERVAL, "checkpoint.keep": 2,
        "checkpoint.background": way == "background",
    }  # fmt: skip
    with watched(home / "run", observed):
        penstock.train(
            plan, home / "chats.jsonl", out=home / "run", steps=first_step + n_steps, lr=6e-4, device="cpu", resume=first_step > 0,
            from_scratch=True, settings=settings, on_step=lambda metrics: observed.ends_s.append(time.perf_counter()),
        )  # fmt: skip
    return observed


def planned(home: Path) -> Path:
    """Return the plan for this machine, after probing it."""
    model = home / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_chats(home / "chats.jsonl", home / "held-out.jsonl")
    sizes = {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE, "device_memory_bytes": state_bytes(CONFIG) // 4}
    plan = penstock.plan(model, penstock.probe("cpu", quick=True), **sizes)
    return plan.save(home / "plan.json")


def plainly(folder: Path, n_bytes: int) -> tuple[float, float]:
    """Return bytes per second of a synced write of `n_bytes`, and of their SHA-256."""
    piece = os.urandom(min(PIECE_BYTES, n_bytes))
    n_pieces = -(-n_bytes // len(piece))

    def write() -> None:
        with (folder / "plain").open("wb", buffering=0) as file:
            for _ in range(n_pieces):
                file.write(piece)
            os.fsync(file.fileno())
        (folder / "plain").unlink()

    def sum_up() -> None:
        sha256 = hashlib.sha256()
        for _ in range(n_pieces):
            sha256.update(piece)

    return n_pieces * len(piece) / _least_s(write), n_pieces * len(piece) / _least_s(sum_up)


def _least_s(work: Callable[[], None]) -> float:
    times_s = []
    for _ in range(N_PLAIN):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return median(times_s)


def measured(home: Path, n_rounds: int, n_pairs: int) -> tuple[dict[str, list[Observed]], int]:
    """Run both ways alternately, each resumed from the last. Return their times, and the size of a checkpoint."""
    plan, out, n_steps, n_done = planned(home), home / "run", 2 * INTERVAL * (n_pairs + 1), 0
    out.mkdir()
    observations: dict[str, list[Observed]] = {way: [] for way in WAYS}
    for number in range(n_rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            observations[way].append(run(plan, home, way, n_done, n_steps))
            n_done += n_steps
            print(f"{n_done} steps", file=sys.stderr, flush=True)
    return observations, sum(path.stat().st_size for path in (out / f"checkpoint-{n_done}").iterdir())


def page(observations: dict[str, list[Observed]], n_bytes: int, plain: tuple[float, float]) -> Iterator[str]:
    """Yield the results as Markdown."""
    yield "| checkpoints | cost, median | lowest to highest | pairs | seconds to write | GB/s |\n|---|---:|---|---:|---:|---:|"
    for way, runs in observations.items():
        share, low, high = costs([pair for observed in runs for pair in stretches(observed.ends_s, INTERVAL)])
        n_pairs = sum(len(stretches(observed.ends_s, INTERVAL)) for observed in runs)
        written_s = median([s for observed in runs for s in observed.durations_s()] or [LOOK_S])
        rate = n_bytes / written_s / GB
        yield f"| {way} | {share:+.1%} | {low:+.1%} to {high:+.1%} | {n_pairs} | {written_s:.2f} | {rate:.2f} |"
    steps = [(b - a, observed.is_writing(a, b)) for observed in observations["background"] for a, b in pairwise(observed.ends_s)]
    during, alone = ([s for s, is_writing in steps if is_writing is wanted] for wanted in (True, False))
    yield f"\nA checkpoint holds {show_bytes(n_bytes)}."
    if during and alone:
        yield (
            f"A step while one is written in the background takes {median(during):.3f} s (median of {len(during)}), another "
            f"{median(alone):.3f} s (of {len(alone)})."
        )
    bound_s = n_bytes / plain[0], n_bytes / plain[1]
    yield (
        f"A plain synced write of the same bytes: {bound_s[0]:.2f} s ({plain[0] / GB:.2f} GB/s); their SHA-256: "
        f"{bound_s[1]:.2f} s ({plain[1] / GB:.2f} GB/s)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="runs of either way")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of stretches with and without a checkpoint, per run")
    options = parser.parse_args()
    home = options.home.resolve()
    shutil.rmtree(home, ignore_errors=True)
    observations, n_bytes = measured(home, options.rounds, options.pairs)
    print(f"{provenance()}\n")
    print("\n".join(page(observations, n_bytes, plainly(home, n_bytes))))
    share, _, _ = costs([pair for observed in observations["background"] for pair in stretches(observed.ends_s, INTERVAL)])
    if share > TARGET_FRACTION:
        sys.exit(f"a checkpoint every {INTERVAL} steps costs {share:.1%} of the time, more than {TARGET_FRACTION:.0%}")


if __name__ == "__main__":
    main()
