"""`penstock fits`, `compare` and `machines`: which machine trains a model, which model fits a machine."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import track

from penstock.hwprofiles.quantity import BASES
from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.hwprofiles.several import on_network, part_of
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.show.price import JOB_TITLES, hourly
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.policy import trained
from penstock.runtime.plan.workload import Dtype
from penstock.runtime.units import GB, parse_bytes, show_bytes, show_count

from .options import AS_JSON, BYTES, COUNT, PRICES, TOKENS, sequences_of_a_step, with_batch, with_prices, with_work
from .outputs import show_table

if TYPE_CHECKING:
    from penstock.planner.show.fits import Fit

Found = TypeVar("Found")
MOST_WORKERS = 8  # each of which holds a planner, some 150 MB
COMMON = "rtx3090-desktop,rtx4090-desktop,rtx4090-server,rtx5090-server,gb10,h100-sxm,gh200"
FIT_TITLES = ("gpu", "host memory", "machine", "family", "model", "parameters", "tokens/s")

MASTER = click.option("--master", type=click.Choice(["fp32", "bf16"]), help="Master weights.  [default: fp32]")


@click.command()
@click.argument("machines", nargs=-1)
@click.option("--host-memory", help="Sizes with commas between: 64GB,128GB.  [default: 32GB to 2048GB, by doubling]")
@click.option("--families", help="Families of models with commas between: qwen3,llama.  [default: all that are shipped]")
@click.option("--batch-size", type=COUNT, default=16, show_default=True, help="Sequences of a step.")
@click.option("--tokens", type=TOKENS, help="Also the time and the price of this many tokens: 100M.")
@click.option("--less-state", is_flag=True, help="Also optimizers that keep less, in rows where a larger model fits.")
@click.option("--search", is_flag=True, help="Speeds of the plans that a search finds, not estimates: some 10 seconds for each.")
@with_work
@MASTER
@AS_JSON
def fits(
    machines: tuple[str, ...],
    host_memory: str | None,
    families: str | None,
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    less_state: bool,
    search: bool,
    as_json: bool,
    **work: Any,
) -> None:
    """The largest model of each family that host memory of 32 to 2048 GB can train, and about how fast.

    MACHINES are shipped ones, files of profiles, or a GPU that shipped machines begin with: rtx4090 is all of them, and each size
    of memory is asked of the one whose own is nearest; what is soldered stays as it is. Without MACHINES: rtx3090, rtx4090, rtx5090
    and h100-sxm.
    """
    from penstock.planner.search.remedy import LEANER
    from penstock.planner.show import fits as planned

    groups = {name: _profiles(name) for name in dict.fromkeys(machines or planned.GPUS)}
    for profile in chain(*groups.values()):
        part_of(profile, gpus, hosts, network_gbit)  # or say why not
    groups = {name: [on_network(of, network_gbit) for of in profiles] for name, profiles in groups.items()}
    semantics = _part(gpus * hosts, micro_batch=1, **work)
    names = None if families is None else tuple(dict.fromkeys(map(str.strip, families.split(","))))
    if wrong := [name for name in names or () if name not in planned.known()]:
        raise click.UsageError(f"--families: no shipped family {wrong[0]!r}; there are {', '.join(planned.known())}")
    sizes = planned.HOST_MEMORIES if host_memory is None else tuple(sorted({parse_bytes(n) for n in host_memory.split(",")}))
    for (name, of), n_bytes in product(groups.items(), sizes):
        if not any(profile.takes(n_bytes) or profile.is_soldered for profile in of):
            click.echo(f"{name}: takes less than {show_bytes(n_bytes)} of memory, which is left out", err=True)
    of_each = [semantics]
    if less_state:
        leaner = (_part(gpus * hosts, micro_batch=1, **work | {"optimizer": said, "master": None}) for said in LEANER)
        of_each += [of for of in leaner if of.state_bytes < semantics.state_bytes]
    # A family's machines one after the other: they share its models' blocks
    families_of_gpus = product(planned.families(semantics, names).items(), groups.items())
    tasks = [(gpu, of, *family, each, sizes, search, hosts) for family, (gpu, of) in families_of_gpus for each in of_each]
    at_once = len(groups) * len(of_each)
    swept_over, whole = chain.from_iterable(swept(planned.fits, tasks, "models on GPUs", at_once)), semantics.all_ranks
    found = _larger(swept_over) if less_state else swept_over
    if as_json:
        rows = [fit.to_json(tokens) for fit in found]
        click.echo(json.dumps({"seq_len": whole.seq_len, "batch_size": whole.batch_size, "is_estimate": not search, "fits": rows}))
        return
    click.echo(f"for steps of {whole.batch_size} sequences of {whole.seq_len:,} tokens", err=True)
    optimizer = ["optimizer"] if less_state else []
    titles = (*optimizer, *FIT_TITLES[:-1], FIT_TITLES[-1] if search else "about tokens/s", *(JOB_TITLES if tokens else ()))
    show_table(titles, ((*[fit.optimizer for _ in optimizer], *_row(fit, tokens)) for fit in found))


def _larger(found: Iterable["Fit"]) -> Iterator["Fit"]:
    """Of each machine, memory and family the first, and each whose model is larger than all before it."""
    largest: dict[tuple[str, str, int, str], int] = {}
    for fit in found:
        key, n = (fit.gpu, fit.machine, fit.host_memory_bytes, fit.family), fit.n_params or 0
        if key not in largest or n > largest[key]:
            largest[key] = n
            yield fit


def _row(fit: "Fit", tokens: int | None) -> tuple[str, ...]:
    where = (fit.gpu, f"{fit.host_memory_bytes / GB:g} GB", fit.machine, fit.family)
    job = fit.hourly.job_cells(tokens, fit.tokens_per_s)
    if fit.model is None or fit.n_params is None or fit.tokens_per_s is None:
        return (*where, "none fits", "-", "-", *job)
    return (*where, fit.model, show_count(fit.n_params), f"{fit.tokens_per_s:,.0f}", *job)


@click.command()
@click.argument("model")
@click.option(
    "--machines",
    default=COMMON,
    help=f"Shipped machines, or files of profiles, with commas between; or all.  [default: {COMMON}]",
)
@with_batch
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: each machine's own]")
@click.option("--host-memory", type=BYTES, help="Host memory of every machine, for example 2TB.  [default: the profiles']")
@with_prices
@with_work
@MASTER
@AS_JSON
def compare(
    model: str,
    machines: str,
    batch_size: int | None,
    tokens_per_step: int | None,
    micro_batch: int | None,
    host_memory: int | None,
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    as_json: bool,
    **work: Any,
) -> None:
    """Rank machines for training MODEL, the fastest first; those that it does not fit come last, with what would make it fit.

    Prices that are given hold for every machine.
    """
    from penstock.planner.search.claim import CUT
    from penstock.planner.search.micro_batch import SIZES
    from penstock.planner.show.compare import COLUMNS, Candidate, candidate, cheapest, notes
    from penstock.planner.show.words import ALONE

    described = read_model(model)
    n_sequences = sequences_of_a_step(batch_size, tokens_per_step, work["seq_len"])
    prices = {name: work.pop(name) for name in PRICES}
    free = (SIZES if micro_batch is None else SIZES - {"micro_batch"}) | {CUT}
    has_all = click.get_current_context().get_parameter_source("gpus") is ParameterSource.DEFAULT
    tasks = []
    for whole in _compared(machines, None if has_all else gpus):
        profile = whole.with_prices(**prices)
        if host_memory is not None and (profile.is_soldered or not profile.takes(host_memory)):
            most = show_bytes(profile.most_host_bytes or 0)
            click.echo(f"{profile.name}: has at most {most} of memory, and is taken with that", err=True)
            profile = profile.with_memory(None, profile.most_host_bytes)
        else:
            profile = profile.with_memory(None, host_memory)
        of_step = {"batch_size": n_sequences, "micro_batch": micro_batch or 1, **work}
        n, asked = _most_parts(whole.n_devices, hosts, **of_step) if has_all else (gpus, _part(gpus * hosts, **of_step))
        if n < profile.n_devices:
            click.echo(f"{profile.name}: {n} of its {profile.n_devices} GPUs", err=True)
        if n > 1 and profile.peers is None:
            click.echo(f"{profile.name}: {ALONE}", err=True)
        asked = replace(asked, attention=supported_attention(described)[0])  # type: ignore[arg-type]
        tasks.append((described, part_of(profile, n, hosts, network_gbit), asked, None, free))
    if not tasks:
        raise click.UsageError(f"--machines {machines!r} names none; write for example gh200,h100-sxm")
    ranked = sorted(swept(candidate, tasks, "machines"), key=Candidate.rank)
    if as_json:
        rented, bought = ((least := cheapest(ranked, bought)) and least[1] for bought in (False, True))
        about = {"model": described.name or str(described.path), "tokens_per_step": tasks[0][2].all_ranks.tokens_per_step}
        found = {"cheapest": rented, "cheapest_bought": bought, "machines": [of.to_json(tokens) for of in ranked]}
        click.echo(json.dumps(about | found))
        return
    show_table((*COLUMNS, *(JOB_TITLES if tokens else ())), [of.row(tokens) for of in ranked])
    click.echo("\n".join(notes(ranked)))


@click.command()
@AS_JSON
def machines(as_json: bool) -> None:
    """List the machines that can be planned for by name, what they cost, and what their speed rests on.

    The last columns share out the device's seconds of a standard step (qwen3-8b, 4 x 4096 tokens): measurements of this very
    device, those of another, scaled by datasheets, or assumptions. A machine that is not here is a file: that of the nearest, with
    other numbers, or of `penstock probe -o`.
    """
    from penstock.planner.predict.rests_on import standard

    profiles = _profiles()
    if as_json:
        fields = [
            {"name": p.name, "summary": p.summary, "device": p.device.name, "device_memory_bytes": int(p.device.memory_bytes.value)}
            | {"host_memory_bytes": int(p.host.memory_bytes.value), "most_host_bytes": p.most_host_bytes}
            | {"usd_per_hour": asdict(hourly(p)), "numbers": p.count_sources(), "rests_on": standard(p).to_json()}
            for p in profiles
        ]
        click.echo(json.dumps({"machines": fields}))
        return
    rows = []
    for p in profiles:
        price, basis = p.price, standard(p)
        host = show_bytes(p.host.memory_bytes.value) + (", soldered" if p.is_soldered else "")
        each = " a GPU" if p.n_devices > 1 else ""
        rent = "no price" if price.usd_per_hour is None else f"{price.usd_per_hour.value:.2f} USD{each}"
        memory = " and memory" if price.ram_usd_per_gb else ""
        bought = "no price" if price.usd is None else f"{price.usd.value:,.0f} USD{each}{memory}"
        shares = (f"{basis.fraction(of):.0%}" for of in BASES)
        rows.append((p.name, p.summary, show_bytes(p.device.memory_bytes.value), host, rent, bought, *shares))
    titles = ("machine", "what it is", "device memory", "host memory", "rent an hour", "bought")
    show_table((*titles, "measured", "on another", "assumed"), rows)


def _compared(names: str, n_gpus: int | None) -> list[Profile]:
    """The named machines, each once; of all of them those with one GPU, or with as many as are asked for (None: any number)."""
    if names.strip() != "all":
        return list(chain(*map(_profiles, dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))))
    return [p for p in _profiles() if n_gpus is None or (p.n_devices >= n_gpus and (p.n_devices > 1) == (n_gpus > 1))]


def _profiles(name: str = "") -> list[Profile]:
    """The machine of that name or file; or all shipped ones of a GPU, or of any."""
    of_gpu = [shipped for shipped in shipped_profiles() if not name or shipped.startswith(f"{name}-")]
    return [read_profile(shipped) for shipped in of_gpu or [name]]


def _part(
    n_gpus: int, master: Dtype | None, train: str | None, base: Base | None, optimizer: str | None, **fields: Any
) -> Semantics:
    """One rank's part of the work, with further `fields` of Semantics; PlanError where it cannot be shared, or not so."""
    from penstock.planner.search.micro_batch import shared_step

    asked = trained(Semantics(**fields), train, base, optimizer, master)
    asked = shared_step(asked, n_gpus, has_groups=False) if n_gpus > 1 else asked
    if (n := asked.micro_batch) > asked.batch_size:
        raise PlanError(f"--micro-batch {n} is more than the batch of {asked.batch_size}; choose at most that")
    return asked


def _most_parts(n: int, n_hosts: int, **work: Any) -> tuple[int, Semantics]:
    """So many GPUs of each host, or half of them, or half of that, as can share the work; and one's part."""
    for fewer in (n >> i for i in range(n.bit_length() - 1)):
        with suppress(PlanError):
            return fewer, _part(fewer * n_hosts, **work)
    return 1, _part(n_hosts, **work)


def swept(work: Callable[..., Found], tasks: Sequence[tuple[Any, ...]], what: str, at_once: int = 1) -> Iterator[Found]:
    """`work` of each task, in their order, on all cores; a terminal shows the progress. Where they are many, one process does
    `at_once` of them."""
    console = Console(stderr=True)
    show = partial(track, description=what, total=len(tasks), console=console, transient=True, disable=not console.is_terminal)
    n_workers = min(len(os.sched_getaffinity(0)), len(tasks), MOST_WORKERS)
    if n_workers <= 1:
        yield from (work(*task) for task in show(tasks))
        return
    context, n_each = multiprocessing.get_context("spawn"), at_once if len(tasks) >= 4 * n_workers * at_once else 1
    pool = ProcessPoolExecutor(n_workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
    try:
        yield from show(pool.map(work, *zip(*tasks, strict=True), chunksize=n_each))
    except BrokenProcessPool:
        raise PenstockError("a process that searched was ended, perhaps for want of memory; ask for fewer machines") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # after an interruption some are still at work
            child.terminate()
