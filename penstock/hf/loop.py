"""Loop of a run: callbacks of transformers at their moments, logs, evaluations, checkpoints, the best one."""

import json
import math
import operator
import time
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import SaveStrategy, TrainOutput, speed_metrics

from penstock.checkpoint.checkpoint import complete_checkpoints, latest
from penstock.checkpoint.retention import remove
from penstock.data.sampling import MapStyleData
from penstock.runtime.errors import PlanError
from penstock.runtime.executor import say
from penstock.runtime.files import write_whole
from penstock.training import trainer as runs
from penstock.training.validation import held_out_loss

STATE_OF_TRAINER = "hf_trainer_state.json"  # next to Penstock's trainer_state.json, with the fields of a TrainerState


class Loop:
    """State and events of a run of a `Trainer`, with a turn after each step. `n_each`: steps in an epoch."""

    def __init__(self, trainer: Any, run: runs.Trainer, n_each: float) -> None:
        self.trainer, self.run_, self.args, self.n_each = trainer, run, trainer.args, n_each
        self.handler, self.folder = trainer.callback_handler, Path(trainer.args.output_dir)
        session, trainer.state = run.session, self._first_state()
        state = trainer.state
        state.max_steps, state.global_step = session.n_steps, session.first_step
        state.num_train_epochs = math.ceil(session.n_steps / n_each)
        state.compute_steps(self.args, session.n_steps)
        self.first_step, self.losses, self.n_logged = session.first_step, list[float](), 0
        self.samples_per_step = session.plan.semantics.all_ranks.batch_size // session.plan.semantics.objective.rows_each

    def _first_state(self) -> Any:
        """Return a new state, or that of the checkpoint to resume, with its callbacks if args say so."""
        resumed = self.run_.session.inputs.state
        if resumed is None:
            return TrainerState(train_batch_size=self.args.per_device_train_batch_size, stateful_callbacks=self._exported)
        for path in (resumed.path / STATE_OF_TRAINER, self.folder / STATE_OF_TRAINER):
            state: Any = TrainerState.load_from_json(str(path)) if path.is_file() else TrainerState()
            if state.global_step == resumed.step:
                for callback in self._exported if self.args.restore_callback_states_from_checkpoint else ():
                    saved = state.stateful_callbacks.get(type(callback).__name__)
                    for name, value in {**saved["args"], **saved["attributes"]}.items() if isinstance(saved, dict) else ():
                        setattr(callback, name, value)
                return state
        say(f"{resumed.path}: without {STATE_OF_TRAINER}: log_history begins here")
        return TrainerState(stateful_callbacks=self._exported)

    @property
    def _exported(self) -> list[Any]:
        """Callbacks with a state that checkpoints hold."""
        return [cb for cb in [*self.handler.callbacks, self.trainer.control] if isinstance(cb, ExportableState)]

    def _event(self, name: str, *values: Any) -> None:
        trainer = self.trainer
        trainer.control = getattr(self.handler, name)(self.args, trainer.state, trainer.control, *values)
        if trainer.control.should_epoch_stop:
            raise PlanError(f"a callback set should_epoch_stop in {name}: an epoch has all its rows; set should_training_stop")

    def run(self) -> TrainOutput:
        """Train to the end, or until a callback stops."""
        state, began_s = self.trainer.state, time.time()
        state.epoch = self._epoch(state.global_step)
        self._event("on_train_begin")
        if self.args.eval_on_start:
            self._evaluate(held_out_loss(self.run_.session))
        self._event("on_epoch_begin")
        self._event("on_step_begin")
        for turn in self.run_.turns():
            self._step(turn)
        self._saved(latest(self.folder))
        n_done = state.global_step - self.first_step
        loss = sum(self.losses) / max(n_done, 1)
        metrics = speed_metrics("train", began_s, num_samples=n_done * self.samples_per_step, num_steps=n_done)
        metrics["train_loss"] = loss
        self._log(metrics)
        self._event("on_train_end")
        return TrainOutput(state.global_step, loss, metrics)

    def _epoch(self, n_done: int) -> float:
        """Return the epochs after `n_done` steps; its last step may have fewer batches than gradient_accumulation_steps."""
        data, n = self.run_.session.inputs.data, int(self.args.gradient_accumulation_steps)
        if not isinstance(data, MapStyleData) or not data.by_epoch or self.n_each != data.n_steps:
            return n_done / self.n_each
        n_batches = math.ceil(data.n_sequences * n / self.samples_per_step)
        epoch, steps = divmod(n_done, data.n_steps)
        return epoch + min(steps * n, n_batches) / n_batches

    def _step(self, turn: runs.Turn) -> None:
        """Perform the events after a step, and those before the next."""
        trainer, metrics, state = self.trainer, turn.metrics[-1], self.trainer.state
        self.losses.append(metrics.loss)
        state.global_step, state.epoch = metrics.step, self._epoch(metrics.step)
        self._event("on_step_end")
        self._obey(turn, metrics)
        n_epochs = math.floor(metrics.step / self.n_each + 1e-9)
        is_end_of_epoch = n_epochs > math.floor((metrics.step - 1) / self.n_each + 1e-9)
        if is_end_of_epoch or trainer.control.should_training_stop:
            self._event("on_epoch_end")
            self._obey(turn, metrics)
        if trainer.control.should_training_stop:
            turn.stop()
            return
        if is_end_of_epoch:
            self._event("on_epoch_begin")
        self._event("on_step_begin")

    def _obey(self, turn: runs.Turn, metrics: runs.Metrics) -> None:
        """Log, evaluate and save if the callbacks say so."""
        control = self.trainer.control
        if control.should_log and len(self.losses) > self.n_logged:
            recent = self.losses[self.n_logged :]
            self.n_logged = len(self.losses)
            self._log({"loss": sum(recent) / len(recent), "grad_norm": metrics.grad_norm, "learning_rate": metrics.lr})
        if control.should_evaluate:
            is_best = self._evaluate(turn.evaluate())
            if self.args.save_strategy == SaveStrategy.BEST:
                control.should_save = is_best
        if control.should_save:
            self._write_state(self.folder)  # in case the run is killed between the next two lines
            self._saved(turn.save())
            self._event("on_save")
        control.should_log = control.should_evaluate = control.should_save = False

    def _log(self, logs: dict[str, float]) -> None:
        state = self.trainer.state
        logs["epoch"] = state.epoch
        state.log_history.append({**logs, "step": state.global_step})
        self._event("on_log", logs)

    def _evaluate(self, values: dict[str, float]) -> bool:
        """Log the metrics of an evaluation. Return True if they are the best so far."""
        metrics, args, state = evaluated(values), self.args, self.trainer.state
        self._log(metrics)
        self._event("on_evaluate", metrics)
        if args.metric_for_best_model is None:
            return False
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise PlanError(f"metric_for_best_model: no {name} in an evaluation; evaluations report {', '.join(metrics)}")
        is_better = operator.gt if args.greater_is_better else operator.lt
        if state.best_metric is not None and not is_better(metrics[name], state.best_metric):
            return False
        state.best_metric = metrics[name]
        state.best_global_step = state.global_step
        return True

    def _saved(self, checkpoint: Path | None) -> None:
        """Add the state of the trainer to a checkpoint, and delete older ones than the limit, never the best."""
        state: Any = self.trainer.state
        if checkpoint is None:
            return
        best = self.folder / f"checkpoint-{state.best_global_step}"
        state.best_model_checkpoint = str(best) if best.is_dir() else state.best_model_checkpoint
        self._write_state(checkpoint)
        if (limit := self.args.save_total_limit) is not None and limit > 0:
            paths = [path for _, path in complete_checkpoints(self.folder)]
            retained = {paths[-1], best} & {*paths}
            n = max(limit, len(retained))
            removable = [path for path in paths if path not in retained]
            remove(removable[: len(paths) - n])

    def _write_state(self, folder: Path) -> None:
        state: Any = self.trainer.state
        for callback in self._exported:
            state.stateful_callbacks[type(callback).__name__] = callback.state()
        write_whole(folder / STATE_OF_TRAINER, json.dumps(vars(state), indent=2, sort_keys=True) + "\n")


def evaluated(values: dict[str, float]) -> dict[str, float]:
    """Return the metrics of an evaluation by the names of transformers."""
    return {("eval_runtime" if name == "eval_s" else name): value for name, value in values.items()}
