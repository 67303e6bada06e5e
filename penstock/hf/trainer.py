"""The constructor, attributes and methods of transformers' Trainer, on a plan and a run of Penstock."""

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
from transformers.trainer_pt_utils import log_metrics, save_metrics, save_state
from transformers.trainer_utils import TrainOutput

from penstock import api
from penstock.arguments.objects import write_rows
from penstock.checkpoint.checkpoint import STATE_FILE, latest
from penstock.data.data import read_data
from penstock.data.sampling import MapStyleData
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.workload import read_model, spelled_out
from penstock.ranks import is_follower, joined, n_started
from penstock.results import Planned
from penstock.run_config import PLAN_FILE, TABLES, RunRequest, read_run
from penstock.runtime.errors import CheckpointError, DataError, PlanError
from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.train import parse_train
from penstock.runtime.plan.workload import text_of
from penstock.training import trainer as runs
from penstock.training.inputs import data_request
from penstock.training.references import FILE_NAME
from penstock.training.run_folder import write_settings
from penstock.training.session import open_session
from penstock.training.validation import held_out_loss

from .arguments import Job, adapter_of, entry_of, is_kind, read_arguments, schedule_of
from .loop import STATE_OF_TRAINER, Loop, evaluated
from .rows import Row, collated, is_stream, row_errors, rows_of
from .start import leave_group, profile_of, router_loss_of, start_of, tokenizer_of

LENGTH_STEP = 64  # sequences of a plan are a multiple, for kernels, unless max_length is shorter
UNSET = (None, (None, None))


class Trainer:
    """Trains on tokenised rows, `input_ids` and `labels`, by cross entropy.

    `model`: a folder, a shipped name, a name in the local Hub cache, or a model object, which is saved first. `args`,
    `peft_config`, `callbacks` and data sets: as for transformers. `penstock_plan`: a plan or its file; `machine`: one to
    plan for, by default this one, which is probed once. PlanError has one line for each argument that is refused.
    """

    format, configuration = "tokens", "TrainingArguments"
    log_metrics, save_metrics, save_state = log_metrics, save_metrics, save_state

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: Iterable[Any] | None = None,
        peft_config: Any = None,
        *,
        penstock_plan: "Planned | PlanFile | str | Path | None" = None,
        machine: str | Path | Profile | None = None,
        **unsupported: Any,
    ) -> None:
        if not is_kind(args, self.configuration):
            raise PlanError(f"args is a {type(args).__name__}; give a {self.configuration}")
        self.args, self.data_collator = args, data_collator
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._start = start_of(model)
        job = self._read_job(peft_config, unsupported)
        name = self._start.tokenizer_folder if self._start.saved is None else model.config.name_or_path
        self.processing_class: Any = processing_class or tokenizer_of(name)
        if not callable(getattr(self.processing_class, "save_pretrained", None)):
            raise PlanError(f"processing_class is a {type(processing_class).__name__}; give a tokenizer of transformers")
        if self._start.saved is not None:
            self.processing_class.save_pretrained(self._start.saved.name)
        self._describe(job)
        is_smoothed = str(job.plan["loss"]).startswith("label-smoothing")
        job.refuse_if(args.label_smoothing_factor and not is_smoothed, "label_smoothing_factor", args.label_smoothing_factor)
        job.refuse_if(not isinstance(callbacks, list | tuple | None), "callbacks", callbacks)
        is_plan = isinstance(penstock_plan, Planned | PlanFile | str | Path | None)
        job.refuse_if(not is_plan, "penstock_plan", type(penstock_plan).__name__)
        job.raise_problems()
        self._job, out = job, Path(args.output_dir)
        self._longest = 0
        batch, max_steps = job.plan["batch_size"], args.max_steps if args.max_steps > 0 else None
        train = self._written(out, "train", self._ordered(rows_of(train_dataset, max_steps and max_steps * batch)))
        held_out = None if eval_dataset is None else self._written(out, "eval", self._prepared(rows_of(eval_dataset, None)))
        self._settings = {
            "model": self._start.folder,
            "adapter": self._start.adapter,
            "out": str(out),
            "plan": str(out / PLAN_FILE),
            "data.path": str(train),
            "data.format": self.format,
            "data.packing": "one",
            "data.sampler": "penstock" if "data.packing" in job.settings else "transformers",
            "evaluation.data": None if held_out is None else str(held_out),
            **job.settings,
        }
        if is_stream(train_dataset):
            self._settings["data.shuffle"] = False
        self.plan = self._planned(penstock_plan, machine)
        self.state: TrainerState = TrainerState()
        handler = CallbackHandler([DefaultFlowCallback, *(callbacks or [])], None, self.processing_class, None, None)
        self.callback_handler, self.control = handler, handler.on_init_end(args, self.state, TrainerControl())
        self.add_callback, self.pop_callback = handler.add_callback, handler.pop_callback
        self.remove_callback = handler.remove_callback
        self._result: Path | None = None  # checkpoint of the trained weights

    # -- construction --------------------------------------------------------------------------------------------------

    def _read_job(self, peft_config: Any, unsupported: dict[str, Any]) -> Job:
        args, start = self.args, self._start
        job = read_arguments(args, n_started())
        for name in [name for name, value in unsupported.items() if value not in UNSET]:
            advice = entry_of(name, TABLES["trainer_arguments"]) or "no such argument here; leave it out"
            job.refuse(name, unsupported[name], advice)
        config = read_model(start.folder).config
        self._n_ids = text_of(config).get("vocab_size")
        if start.lora is not None or peft_config is not None:
            job.plan["train"] = adapter_of(peft_config or start.lora, config.get("model_type", ""), job)
        job.refuse_if(start.lora is not None and peft_config is not None, "peft_config", type(peft_config).__name__)
        if getattr(args, "router_aux_loss_coef", 0.0) is None:
            job.plan["router_loss"] = router_loss_of(config)
        is_collated = self.data_collator is None or type(self)._prepared is Trainer._prepared
        job.refuse_if(not is_collated, "data_collator", type(self.data_collator).__name__)
        job.refuse_if(args.eval_strategy != "no" and self.eval_dataset is None, "eval_strategy", str(args.eval_strategy))
        return job

    def _describe(self, job: Job) -> None:
        """Add the loss and the kind of rows to the job. A subclass has its own."""

    def _prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows to write. A subclass has its own."""
        return collated(rows, self.data_collator)

    def _ordered(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the training rows in the order of the file."""
        return self._prepared(rows)

    def _n_tokens(self, row: Row) -> int:
        """Return the length of a row, or a bound on it."""
        if self._n_ids is not None and (largest := max(row["input_ids"], default=0)) >= self._n_ids:
            raise DataError(f"a token {largest}; the model has ids 0 to {self._n_ids - 1}; give the model's own processing_class")
        return len(row["input_ids"])

    def _written(self, out: Path, name: str, rows: Iterator[Row]) -> Path:
        """Write rows without columns that are None, and note the longest. DataError for no rows."""

        def measured() -> Iterator[Row]:
            number = -1
            for number, row in enumerate(rows):
                with row_errors(number, row):
                    self._longest = max(self._longest, self._n_tokens(row))
                yield {column: value for column, value in row.items() if value is not None}
            if number < 0:
                raise DataError(f"{name}_dataset: no rows with a token to learn; give rows")

        return write_rows(measured(), path=out / "rows" / f"{name}.jsonl")

    def _planned(self, plan: Any, machine: Any) -> PlanFile:
        """Return the given plan if it is one of these arguments, or search one and print it."""
        max_length, requested = getattr(self.args, "max_length", None), self._job.plan
        length = -(-self._longest // LENGTH_STEP) * LENGTH_STEP
        seq_len = length if max_length is None else min(max_length, length)
        if plan is None:
            fields = {name: value for name, value in requested.items() if value is not None or name == "clip_norm"}
            planned = api.plan(self._start.folder, profile_of(machine), seq_len=seq_len, **fields)
            if not is_follower():
                print(planned)
            return planned.file
        file = plan.file if isinstance(plan, Planned) else plan if isinstance(plan, PlanFile) else PlanFile.read(Path(plan))
        semantics, problems = file.plan.semantics.all_ranks, Job()
        wanted = {name: requested.get(name) for name in ("batch_size", "clip_norm", "compute_dtype")}
        train = replace(semantics, train=parse_train(requested.get("train") or "all"))
        wanted["train"] = spelled_out(file.plan.model, train).train
        wanted["objective"] = parse_objective(requested["loss"] or "cross-entropy")
        held = {name: getattr(semantics, name) for name in wanted} | {"ranks": file.plan.semantics.ranks}
        for name, value in (wanted | {"ranks": requested["gpus"]}).items():
            if held[name] != value:
                problems.refuse(f"penstock_plan: {name}", str(held[name]), f"args ask for {value}; change one of them")
        if semantics.seq_len < min(self._longest, seq_len):
            advice = f"the longest row has {self._longest} tokens; plan with that"
            problems.refuse("penstock_plan: seq_len", semantics.seq_len, advice)
        problems.raise_problems()
        return file

    # -- runs ------------------------------------------------------------------------------------------------------------

    def _request(self, out: Path, resume: bool | str | os.PathLike[str] | None) -> tuple[RunRequest, float]:
        """Return the run, and its number of steps in an epoch."""
        if not isinstance(resume, bool | str | os.PathLike | None):
            raise PlanError(f"resume_from_checkpoint is a {type(resume).__name__}; give True, or the folder of a checkpoint")
        settings = {name: value for name, value in self._settings.items() if value is not None} | {"out": str(out)}
        n_each = self._steps_per_epoch(settings)
        n_steps = self._n_steps(n_each)
        settings |= {"steps": n_steps} | schedule_of(self.args, n_steps, Job())
        resume_from = None if resume is None or isinstance(resume, bool) else os.fspath(resume)
        if resume_from is not None and Path(resume_from).parent.resolve() == out.resolve():
            resume_from = Path(resume_from).name
        return RunRequest(read_run(None, settings), self.plan, resume=resume is True, resume_from=resume_from), n_each

    def _n_steps(self, n_each: float) -> int:
        """Return the steps of a run with `n_each` in an epoch."""
        max_steps: int = self.args.max_steps
        return max_steps if max_steps > 0 else math.ceil(self.args.num_train_epochs * n_each)

    def _steps_per_epoch(self, settings: dict[str, Any]) -> float:
        data = read_data(data_request(read_run(None, settings), self.plan.plan, Path(self._start.folder)))
        assert isinstance(data, MapStyleData)
        return data.n_steps if data.by_epoch else data.n_sequences / data.samples_per_step

    def train(self, resume_from_checkpoint: "bool | str | os.PathLike[str] | None" = None) -> TrainOutput:
        """Train to the end, or until a callback stops. `resume_from_checkpoint`: True for the last one of `output_dir`, or a path.
        Return `global_step`, `training_loss` and `metrics`. On several ranks the programs of the others end here."""
        request, n_each = self._request(Path(self.args.output_dir), resume_from_checkpoint)
        leave_group()
        with joined(request) as ranks, open_session(request, ranks) as session:
            run = runs.Trainer(session, validations=(), every=1)
            write_settings(replace(request, file=session.inputs.request.file))
            output = Loop(self, run, n_each).run()
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        self._result = latest(Path(self.args.output_dir)) if best is None else Path(best)
        return output

    def evaluate(self) -> dict[str, float]:
        """Return the loss of `eval_dataset` under the trained weights, or before training under those of the start."""
        if self.eval_dataset is None:
            raise PlanError("evaluate: the trainer has no eval_dataset; give one")
        with TemporaryDirectory(prefix="penstock-evaluation-") as folder:
            reference = Path(self.args.output_dir) / FILE_NAME
            if self._result is not None and reference.exists():
                shutil.copy(reference, folder)
            request, _ = self._request(Path(folder), self._result)
            with open_session(request) as session:
                metrics = evaluated(held_out_loss(session))
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def save_model(self, output_dir: "str | os.PathLike[str] | None" = None) -> None:
        """Write the trained model, or its adapter, for transformers or PEFT, with the tokenizer, and without the optimizer."""
        if self._result is None:
            raise CheckpointError("save_model: nothing is trained yet; call train() before")
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._result.iterdir():
            if path.is_file() and path.name not in (STATE_FILE, STATE_OF_TRAINER) and not path.name.startswith("optimizer-"):
                shutil.copy(path, folder)
        self.processing_class.save_pretrained(folder)

    def is_world_process_zero(self) -> bool:
        return not is_follower()

    is_local_process_zero = is_world_process_zero
