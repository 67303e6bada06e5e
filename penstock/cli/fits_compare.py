"""`penstock fits`, `compare` and `machines`: choose a model for a machine, or a machine for a model."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import track

from penstock.hwprofiles.device_parts import on_network, part_of
from penstock.hwprofiles.machine_names import matching
from penstock.hwprofiles.quantity import BASES
from penstock.hwprofiles.rented import rented
from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.model.config import without_dropout
from penstock.planner.model.workload import read_model, supported_attention
from penstock.planner.show.price import AROUND, JOB_TITLES, hourly
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.legality import refuse_products
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.policy import COMPUTES, computing, trained
from penstock.runtime.plan.workload import Dtype
from penstock.runtime.units import GB, parse_bytes, show_bytes, show_count

from .options import (
    AS_JSON,
    BYTES,
    COUNT,
    HOST,
    NO_DROPOUT,
    PRICES,
    TOKENS,
    sequences_of_a_step,
    with_batch,
    with_host,
    with_prices,
    with_work,
)
from .outputs import check_page, created, json_text, note, show_table, write_drawing

if TYPE_CHECKING:
    from penstock.planner.show.fits import Fit

Result = TypeVar("Result")
MOST_WORKERS = 8  # a worker holds a planner of about 150 MB
COMMON = "rtx3090-desktop,rtx4090-desktop,rtx4090-server,rtx5090-server,gb10,h100-sxm,gh200"
CHEAPEST = {"cheapest": False, "cheapest_bought": True}  # key of JSON -> bought, not rented
FIT_TITLES = ("gpu", "host memory", "machine", "family", "model", "parameters", "tokens/s")

MASTER = click.option("--master", type=click.Choice(["fp32", "bf16"]), help="Master weights.  [default: fp32]")
COMPUTE = click.option("--compute", type=click.Choice(COMPUTES), help="As in penstock plan.  [default: bf16]")
FILE = click.Path(dir_okay=False, path_type=Path)
HTML = click.option("--html", type=FILE, callback=check_page, help="Also write FILE.html: one page, with a figure and the table.")


@click.command()
@click.argument("machines", nargs=-1)
@click.option("--host-memory", help="Sizes with commas between: 64GB,128GB.  [default: 32GB to 2048GB, by doubling]")
@click.option("--families", help="Families of models with commas between: qwen3,llama.  [default: all that are shipped]")
@click.option("--batch-size", type=COUNT, default=16, show_default=True, help="Sequences of a step.")
@click.option("--tokens", type=TOKENS, help="Also the time and the price of this many tokens: 100M.")
@click.option("--less-state", is_flag=True, help="Also optimizers with smaller state, in rows where a larger model fits.")
@click.option("--search", is_flag=True, help="Speeds of the plans that a search finds, not estimates: some 10 seconds for each.")
@with_work
@with_host
@MASTER
@COMPUTE
@HTML
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
    html: Path | None,
    as_json: bool,
    **work: Any,
) -> None:
    """List the largest model of each family that host memory of 32 to 2048 GB can train, and its approximate speed.

    MACHINES are shipped machines, profile files, or GPUs: rtx4090 is each shipped machine with a name that begins so. A size of
    memory is planned on the machine with the nearest memory; soldered memory does not change. Default: rtx3090, rtx4090, rtx5090
    and h100-sxm.
    """
    from penstock.planner.search.remedy import SMALLER_OPTIMIZERS
    from penstock.planner.show import fits as planned

    groups = {name: _profiles(name) for name in dict.fromkeys(machines or planned.GPUS)}
    for profile in chain(*groups.values()):
        part_of(profile, gpus, hosts, network_gbit)  # raises if the step cannot be shared so
    host = [work.pop(name) for name in HOST]
    groups = {name: [on_network(rented(profile, *host), network_gbit) for profile in profiles] for name, profiles in groups.items()}
    semantics = _part(gpus * hosts, micro_batch=1, **work)
    names = None if families is None else tuple(dict.fromkeys(map(str.strip, families.split(","))))
    if wrong := [name for name in names or () if name not in planned.known()]:
        raise click.UsageError(f"--families: no shipped family {wrong[0]!r}; choose from {', '.join(planned.known())}")
    sizes = planned.HOST_MEMORIES if host_memory is None else tuple(sorted({parse_bytes(n) for n in host_memory.split(",")}))
    groups, remarks = _with_fp8(groups) if semantics.products == "fp8" else (groups, [])
    for (name, profiles), n_bytes in product(groups.items(), sizes):
        if not any(profile.takes(n_bytes) or profile.is_soldered for profile in profiles):
            remarks.append(f"{name}: takes less than {show_bytes(n_bytes)} of memory; this size is left out")
    click.echo("\n".join(remarks), err=True, nl=bool(remarks))
    variants = [semantics]
    if less_state:
        leaner = (_part(gpus * hosts, micro_batch=1, **work | {"optimizer": name, "master": None}) for name in SMALLER_OPTIMIZERS)
        variants += [variant for variant in leaner if variant.state_bytes < semantics.state_bytes]
    # Machines of a family in sequence, because they share the blocks of its models
    families_of_gpus = product(planned.families(semantics, names).items(), groups.items())
    tasks = [(*group, *family, variant, sizes, search, hosts) for family, group in families_of_gpus for variant in variants]
    at_once = len(groups) * len(variants)
    estimates, step = chain.from_iterable(swept(planned.fits, tasks, "models on GPUs", at_once)), semantics.all_ranks
    results = iter(_larger(estimates) if less_state else estimates)
    optimizer = ["optimizer"] if less_state else []
    titles = (*optimizer, *FIT_TITLES[:-1], FIT_TITLES[-1] if search else "about tokens/s", *(JOB_TITLES if tokens else ()))
    row = partial(_row, tokens=tokens, has_optimizer=less_state)
    known = [] if html is None else [*results]  # without a page, a row is printed as soon as it is known
    if as_json:
        rows = [fit.to_json(tokens) for fit in chain(known, results)]
        click.echo(json.dumps({"seq_len": step.seq_len, "batch_size": step.batch_size, "is_estimate": not search, "fits": rows}))
    else:
        click.echo(f"for steps of {step.batch_size} sequences of {step.seq_len:,} tokens", err=True)
        if tokens is not None:
            click.echo(f"time and price of {show_count(tokens)} tokens include {AROUND}", err=True)
        show_table(titles, map(row, chain(known, results)))
    if html is not None:
        from penstock.planner.show.machine_pages import fits_page

        write_drawing(html, fits_page(known, titles, [*map(row, known)], semantics, remarks, created()))


def _with_fp8(groups: Mapping[str, list[Profile]]) -> tuple[dict[str, list[Profile]], list[str]]:
    """Return the machines with FP8 products, and a remark on each other one. ProfileError if none has them."""
    every = [*chain(*groups.values())]
    _ = max(every, key=lambda profile: profile.has_fp8).fp8_rate_fraction  # raises if none has
    able = {name: [profile for profile in profiles if profile.has_fp8] for name, profiles in groups.items()}
    remarks = [f"{profile.name}: has no FP8 products, and is left out" for profile in every if not profile.has_fp8]
    return {name: profiles for name, profiles in able.items() if profiles}, remarks


def _larger(results: Iterable["Fit"]) -> Iterator["Fit"]:
    """Yield the first fit of each machine, memory and family, and then fits with a larger model than those before."""
    largest: dict[tuple[str, str, int, str], int] = {}
    for fit in results:
        key, n = (fit.gpu, fit.machine, fit.host_memory_bytes, fit.family), fit.n_params or 0
        if key not in largest or n > largest[key]:
            largest[key] = n
            yield fit


def _row(fit: "Fit", tokens: int | None, has_optimizer: bool) -> tuple[str, ...]:
    optimizer = [fit.optimizer] if has_optimizer else []
    where = (*optimizer, fit.gpu, f"{fit.host_memory_bytes / GB:g} GB", fit.machine, fit.family)
    job = fit.hourly.job_cells(tokens, fit.tokens_per_s, fit.moved_bytes)
    if fit.model is None or fit.n_params is None or fit.tokens_per_s is None:
        return (*where, "none fits", "-", "-", *job)
    return (*where, fit.model, show_count(fit.n_params), f"{fit.tokens_per_s:,.0f}", *job)


@click.command()
@click.argument("model")
@click.option(
    "--machines", default=COMMON, help=f"Shipped machines, or files of profiles, with commas between; or all.  [default: {COMMON}]"
)
@with_batch
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: each machine's own]")
@click.option("--host-memory", type=BYTES, help="Host memory of every machine, for example 2TB.  [default: the profiles']")
@with_prices
@with_work
@with_host
@NO_DROPOUT
@MASTER
@COMPUTE
@HTML
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
    no_dropout: bool,
    html: Path | None,
    as_json: bool,
    **work: Any,
) -> None:
    """Rank machines for training MODEL, the fastest first. Machines that it does not fit are last, with a change that would fit.

    Prices on the command line apply to every machine.
    """
    from penstock.planner.search.claim import CUT
    from penstock.planner.search.micro_batch import SIZES
    from penstock.planner.show.compare import COLUMNS, Candidate, candidate, cheapest, notes, tied
    from penstock.planner.show.report_lines import exchange_in_words

    described = without_dropout(read_model(model)) if no_dropout else read_model(model)
    n_sequences = sequences_of_a_step(batch_size, tokens_per_step, work["seq_len"])
    prices, host = {name: work.pop(name) for name in PRICES}, [work.pop(name) for name in HOST]
    free = (SIZES if micro_batch is None else SIZES - {"micro_batch"}) | {CUT}
    has_all = click.get_current_context().get_parameter_source("gpus") is ParameterSource.DEFAULT
    tasks, remarks = [], list[str]()
    for machine in _compared(machines, None if has_all else gpus):
        profile, limited = _with_memory(rented(machine.with_prices(**prices), *host), host_memory)
        remarks += limited
        fields = {"batch_size": n_sequences, "micro_batch": micro_batch or 1, **work}
        n, semantics = _most_parts(machine.n_devices, hosts, **fields) if has_all else (gpus, _part(gpus * hosts, **fields))
        if n < profile.n_devices:
            remarks.append(f"{profile.name}: {n} of its {profile.n_devices} GPUs")
        if (exchange := exchange_in_words(profile, n)) is not None:
            remarks.append(f"{profile.name}: {exchange}")
        semantics = replace(semantics, attention=supported_attention(described)[0])  # type: ignore[arg-type]
        tasks.append((described, part_of(profile, n, hosts, network_gbit), semantics, None, free))
    click.echo("\n".join(remarks), err=True, nl=bool(remarks))
    if not tasks:
        raise click.UsageError(f"--machines {machines!r} names none; write for example gh200,h100-sxm")
    ranked = sorted(swept(candidate, tasks, "machines"), key=Candidate.rank)
    about = {"model": described.name or str(described.path), "tokens_per_step": tasks[0][2].all_ranks.tokens_per_step}
    names = {key: (least := cheapest(ranked, bought)) and least[1] for key, bought in CHEAPEST.items()}
    ties = {f"{name}_ties": [c.machine for c in tied(ranked, bought)] for name, bought in CHEAPEST.items()}
    ranking = names | ties | {"machines": [entry.to_json(tokens) for entry in ranked]}
    if as_json:
        click.echo(json.dumps(about | ranking))
    else:
        show_table((*COLUMNS, *(JOB_TITLES if tokens else ())), [entry.row(tokens) for entry in ranked])
        click.echo("\n".join([f"Tokens per step: {about['tokens_per_step']:,}", *notes(ranked, date.today(), tokens)]))
    if html is not None:
        from penstock.planner.show.machine_pages import compare_page

        write_drawing(html, compare_page(about | ranking, ranked, tokens, tasks[0][2], remarks, created()))


@click.command()
@click.argument("name", required=False)
@AS_JSON
def machines(name: str | None, as_json: bool) -> None:
    """List the machines that can be planned for by name, their prices, and the sources of their speeds.

    With NAME: print the profile of this machine, to be edited in a file (penstock machines gb10 > mine.json).

    The last columns divide the device time of a standard step (qwen3-8b, 4 x 4096 tokens) by source: measurements of this device,
    measurements of another device scaled by datasheets, and assumptions. For any other machine, edit the profile of the nearest
    one, or write one with `penstock probe -o`.
    """
    from penstock.planner.predict.provenance import standard

    if name is not None:
        click.echo(json_text(read_profile(name, note).to_json()), nl=False)
        return
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
        suffix = " a GPU" if p.n_devices > 1 else ""
        rent = "no price" if price.usd_per_hour is None else f"{price.usd_per_hour.value:.2f} USD{suffix}"
        memory = " and memory" if price.ram_usd_per_gb else ""
        bought = "no price" if price.usd is None else f"{price.usd.value:,.0f} USD{suffix}{memory}"
        shares = (f"{basis.fraction(kind):.0%}" for kind in BASES)
        rows.append((p.name, p.summary, show_bytes(p.device.memory_bytes.value), host, rent, bought, *shares))
    titles = ("machine", "what it is", "device memory", "host memory", "rent an hour", "bought")
    show_table((*titles, "measured", "on another", "assumed"), rows)


def _with_memory(profile: Profile, n_bytes: int | None) -> tuple[Profile, list[str]]:
    """Return the machine with this host memory; or with its own, and a remark, if that is soldered or it takes less."""
    if n_bytes is None or (profile.takes(n_bytes) and not profile.is_soldered):
        return profile.with_memory(None, n_bytes), []
    remark = f"{profile.name}: has at most {show_bytes(profile.most_host_bytes or 0)} of memory, and is planned with that"
    return profile.with_memory(None, profile.most_host_bytes), [remark]


def _compared(names: str, n_gpus: int | None) -> list[Profile]:
    """Return the named machines without duplicates; for `all`, those with one GPU or with at least `n_gpus` (None: any number)."""
    if names.strip() != "all":
        named = list(chain(*map(_profiles, dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))))
        distinct = [p for i, p in enumerate(named) if p not in named[:i]]  # `h100,h100-sxm`
        profile_names = [p.name for p in distinct]
        if (twice := next((name for i, name in enumerate(profile_names) if name in profile_names[:i]), None)) is not None:
            raise click.UsageError(f"--machines: two different profiles have the name {twice!r}; change `name` in one of the files")
        return distinct
    return [p for p in _profiles() if n_gpus is None or (p.n_devices >= n_gpus and (p.n_devices > 1) == (n_gpus > 1))]


def _profiles(name: str = "") -> list[Profile]:
    """Return the machine of a name or file, or all shipped machines that a name means, or (without a name) of any GPU."""
    shipped = shipped_profiles()
    several = matching(name, shipped) if name else shipped
    if name in shipped or len(several) < 2 or os.path.isfile(name):
        return [read_profile(name, note)]
    return [read_profile(machine) for machine in several]


def _part(
    n_gpus: int,
    master: Dtype | None,
    train: str | None,
    base: Base | None,
    optimizer: str | None,
    compute: str | None,
    **fields: Any,
) -> Semantics:
    """Return one rank's part of a step, with further `fields` of Semantics. PlanError if the ranks cannot share it."""
    from penstock.planner.search.micro_batch import shared_step

    semantics = trained(Semantics(**fields, **computing(compute)), train, base, optimizer, master)
    refuse_products(semantics)
    semantics = shared_step(semantics, n_gpus, has_groups=False) if n_gpus > 1 else semantics
    if (n := semantics.micro_batch) > semantics.batch_size:
        raise PlanError(f"--micro-batch {n} is more than the batch of {semantics.batch_size}; choose at most that")
    return semantics


def _most_parts(n: int, n_hosts: int, **work: Any) -> tuple[int, Semantics]:
    """Return the GPUs per host that can share a step (`n`, or `n` halved until it works), and one rank's part."""
    for fewer in (n >> i for i in range(n.bit_length() - 1)):
        with suppress(PlanError):
            return fewer, _part(fewer * n_hosts, **work)
    return 1, _part(n_hosts, **work)


def swept(work: Callable[..., Result], tasks: Sequence[tuple[Any, ...]], label: str, at_once: int = 1) -> Iterator[Result]:
    """Yield `work(*task)` in order, computed on all cores. A terminal shows the progress, a file gets one line. If tasks are
    numerous, a process takes `at_once` of them at a time."""
    console = Console(stderr=True)
    if len(tasks) > 1 and not console.is_terminal:
        click.echo(f"planning {len(tasks)} {label}", err=True)
    show = partial(track, description=label, total=len(tasks), console=console, transient=True, disable=not console.is_terminal)
    n_workers = min(len(os.sched_getaffinity(0)), len(tasks), MOST_WORKERS)
    if n_workers <= 1:
        yield from (work(*task) for task in show(tasks))
        return
    context, n_each = multiprocessing.get_context("spawn"), at_once if len(tasks) >= 4 * n_workers * at_once else 1
    pool = ProcessPoolExecutor(n_workers, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
    try:
        yield from show(pool.map(work, *zip(*tasks, strict=True), chunksize=n_each))
    except BrokenProcessPool:
        raise PenstockError("a search process was killed, perhaps for lack of memory; ask for fewer machines") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():  # still running after an interruption
            child.terminate()
