"""The trainers of TRL: supervised fine-tuning, preferences, reward models, and GRPO on given rollouts."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from penstock.data.formats import NEEDED, PREFERENCE, ROLLOUTS, UNPAIRED
from penstock.runtime.errors import DataError, user_code
from penstock.runtime.files import write_whole

from .arguments import Job
from .rows import Row, Tokens, grouped_order, is_stream, row_errors
from .start import tokenizer_of
from .trainer import Trainer

DPO = {"sigmoid": "dpo:beta={beta},label_smoothing={label_smoothing}", "hinge": "hinge:beta={beta}", "ipo": "ipo:beta={beta}"}
DPO |= {"robust": "robust:beta={beta},label_smoothing={label_smoothing}"}
GRPO = {"grpo": "grpo", "dapo": "dapo", "bnpo": "dapo", "dr_grpo": "dr-grpo"}
PACKING = ("bfd", "bfd_split", "wrapped")
COLUMNS = NEEDED[ROLLOUTS].columns


class SFTTrainer(Trainer):
    """Supervised fine-tuning like TRL's: rows of text, messages, prompt and completion, or tokens, masked as by an SFTConfig.
    `formatting_func(row)` returns the text of a row."""

    def __init__(self, model: Any = None, args: Any = None, *, formatting_func: Callable[[Row], str] | None = None, **options: Any):
        self.formatting_func = formatting_func
        super().__init__(model, args, **options)

    def _describe(self, job: Job) -> None:
        options = vars(self.args)  # TrainingArguments have none of these
        packs, held_out_packs = options.get("packing", False), options.get("eval_packing")
        job.accept("loss_type", options.get("loss_type", "nll"), ("nll", "chunked_nll"))
        job.refuse_if(held_out_packs not in (None, packs), "eval_packing", held_out_packs)
        job.refuse_if(options.get("shuffle_dataset"), "shuffle_dataset", True)
        if packs:
            job.accept("packing_strategy", strategy := options["packing_strategy"], PACKING)
            job.refuse_if(options["max_length"] is None, "max_length", None)
            job.refuse_if(is_stream(self.train_dataset), "packing", True)
            if strategy != "wrapped":
                job.settings |= {"data.packing": "documents", "data.too_long": "split" if strategy == "bfd_split" else "cut"}
        self._tokens = Tokens(self.processing_class, self.args, job, self.formatting_func)

    def _prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        return self._tokens(rows)


class _Answers(Trainer):
    """Rows of answers, tokenised by a run with the tokenizer and the template of the model's folder."""

    def _describe(self, job: Job) -> None:
        job.accept("truncation_mode", getattr(self.args, "truncation_mode", "keep_start"), ("keep_start",))
        job.settings["data.too_long"] = "cut"
        job.plan["batch_size"] *= 2  # a pair; or an answer, and its prompt with another one
        model_tokenizer, tokenizer = tokenizer_of(self._start.tokenizer_folder), self.processing_class
        is_other = model_tokenizer.get_vocab() != tokenizer.get_vocab() or model_tokenizer.eos_token != tokenizer.eos_token
        job.refuse_if(is_other, "processing_class", type(tokenizer).__name__)
        if not is_other and isinstance(tokenizer.chat_template, str) and tokenizer.chat_template != model_tokenizer.chat_template:
            path = Path(self.args.output_dir) / "rows" / "chat_template.jinja"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, tokenizer.chat_template)
            job.settings["data.chat_template"] = str(path)

    def _prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        for number, row in enumerate(rows):
            if missing := [name for name in NEEDED[self.format].columns if row.get(name) is None]:
                raise DataError(f"row {number} of the data set: no {', '.join(missing)}; its columns are {', '.join(row)}")
            yield row

    def _n_tokens(self, row: Row) -> int:
        answers = [row[name] for name in ("chosen", "rejected", "completion") if row.get(name) is not None]
        return max(self._length((row.get("prompt") or answer[:0]) + answer) for answer in answers)

    def _length(self, text: Any) -> int:
        if isinstance(text, str):
            return len(self.processing_class(text=text)["input_ids"]) + 1
        ids: Any = self.processing_class.apply_chat_template(text, tokenize=True, return_dict=True)["input_ids"]
        return len(ids)


class _Referred(_Answers):
    """A loss with a reference, which is the model of the start."""

    def __init__(self, model: Any = None, ref_model: Any = None, args: Any = None, **options: Any):
        super().__init__(model, args, ref_model=ref_model, **options)


class DPOTrainer(_Referred):
    """Direct preference optimization like TRL's. The reference is the model of the start."""

    format, configuration = PREFERENCE, "DPOConfig"

    def _describe(self, job: Job) -> None:
        super()._describe(job)
        kinds = [self.args.loss_type] if isinstance(self.args.loss_type, str) else self.args.loss_type
        if job.accept("loss_type", kinds[0] if len(kinds) == 1 else str(kinds), DPO):
            job.plan["loss"] = DPO[kinds[0]].format(beta=self.args.beta, label_smoothing=self.args.label_smoothing)


class KTOTrainer(_Referred):
    """Kahneman-Tversky optimization like TRL's. The rows of a batch are the group of a baseline."""

    format, configuration = UNPAIRED, "KTOConfig"

    def _describe(self, job: Job) -> None:
        super()._describe(job)
        args = self.args
        job.accept("loss_type", args.loss_type, ("kto",))
        job.accept("train_sampling_strategy", args.train_sampling_strategy, ("sequential",))  # neighbours share a baseline
        weights = f"desirable_weight={args.desirable_weight},undesirable_weight={args.undesirable_weight}"
        job.plan["loss"] = f"kto:beta={args.beta},{weights},group={args.per_device_train_batch_size}"
        self._longest_prompt = self._longest_answer = 0

    def _n_tokens(self, row: Row) -> int:
        """Return a bound for any prompt with any answer."""
        n_prompt = self._length(row["prompt"])
        self._longest_prompt = max(self._longest_prompt, n_prompt)
        self._longest_answer = max(self._longest_answer, super()._n_tokens(row) - n_prompt + 1)
        return self._longest_prompt + self._longest_answer


class RewardTrainer(_Answers):
    """A reward model of pairs like TRL's: a scoring head on the last token, and the model under it."""

    format, configuration = PREFERENCE, "RewardConfig"

    def _describe(self, job: Job) -> None:
        super()._describe(job)
        job.plan["loss"] = f"reward:center={self.args.center_rewards_coefficient or 0}"
        job.settings["data.too_long"] = "skip"  # TRL removes rows longer than max_length

    def _prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        for row in super()._prepared(rows):
            if row.get("margin") is not None:
                raise DataError("the data set has a column margin, which no loss of Penstock reads; remove it")
            yield row


class GRPOTrainer(Trainer):
    """Group-relative policy optimization on given rollouts. A row has `prompt_ids`, `completion_ids`, `logprobs` and `rewards`; or
    `rollout_func(prompts, trainer)` and `reward_funcs`, as for TRL, are called once for each prompt, before training. The old
    log-probabilities are those of the rows."""

    format, configuration = ROLLOUTS, "GRPOConfig"

    def __init__(self, model: Any = None, reward_funcs: Any = None, args: Any = None, *, rollout_func: Any = None, **options: Any):
        self.rollout_func, functions = rollout_func, [] if reward_funcs is None else reward_funcs
        self.reward_funcs = [*functions] if isinstance(functions, list | tuple) else [functions]
        super().__init__(model, args, **options)

    def _describe(self, job: Job) -> None:
        args, n_batch, functions, weights = self.args, job.plan["batch_size"], self.reward_funcs, self.args.reward_weights
        n_accumulated = args.gradient_accumulation_steps
        if not job.accept("loss_type", args.loss_type, GRPO):
            return
        job.refuse_if(args.steps_per_generation != n_accumulated, "steps_per_generation", args.steps_per_generation)
        job.accept("scale_rewards", args.scale_rewards, ("group", True, "none", False))
        if args.loss_type == "bnpo" and n_accumulated * job.plan["gpus"] > 1:
            job.refuse("loss_type", "bnpo", "write dapo: the loss of a step is a mean over all of its tokens")
        job.refuse_if(args.beta and args.use_bias_correction_kl, "use_bias_correction_kl", True)
        is_odd = (self.rollout_func is None) != (not functions) or not all(map(callable, functions))
        job.refuse_if(is_odd, "reward_funcs", functions)
        job.refuse_if(weights and len(weights) != len(functions), "reward_weights", weights, n_functions=len(functions))
        job.refuse_if(n_batch % args.num_generations, "num_generations", args.num_generations, n_batch=n_batch)
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        longest = f",max_completion_length={args.max_completion_length}" if args.loss_type == "dr_grpo" else ""
        job.plan["loss"] = f"{GRPO[args.loss_type]}:epsilon_low={args.epsilon},epsilon_high={high},beta={args.beta}{longest}"
        job.settings["data.shuffle"] = False  # the file is in the order of the steps

    def _ordered(self, rows: Iterator[Row]) -> Iterator[Row]:
        args, prompts = self.args, [*rows]
        n_each = self._job.plan["batch_size"] // args.num_generations
        self._n_each: int = len(prompts) // n_each * args.num_iterations
        n_steps, seed = self._n_steps(self._n_each), args.seed if args.shuffle_dataset else None
        order = [*chain.from_iterable(grouped_order(len(prompts), n_each, args.num_iterations, n_steps, seed))]
        groups = {i: self._group(i, prompts[i]) for i in dict.fromkeys(order)}
        return (groups[i] for i in order)

    def _steps_per_epoch(self, settings: dict[str, Any]) -> float:
        return self._n_each

    def _prepared(self, rows: Iterator[Row]) -> Iterator[Row]:
        return (self._group(number, row) for number, row in enumerate(rows))

    def _group(self, number: int, row: Row) -> Row:
        with row_errors(number, row):
            group = row if self.rollout_func is None else self._rolled_out(number, row)
            kind = "rewards" if group.get("advantages") is None else "advantages"
            if missing := [name for name in (*COLUMNS, kind) if group.get(name) is None]:
                raise DataError(f"row {number} of the data set: no {', '.join(missing)}; give rollouts, or rollout_func")
            if len(group["completion_ids"]) != (n := self.args.num_generations):
                raise DataError(f"row {number}: {len(group['completion_ids'])} completions, and num_generations is {n}; change one")
            if self.args.scale_rewards in ("none", False) and kind == "rewards":
                mean = sum(group["rewards"]) / n
                group = {**group, "advantages": [reward - mean for reward in group["rewards"]]}
            return {name: group.get(name) for name in (*COLUMNS, "rewards", "advantages")}

    def _rolled_out(self, number: int, row: Row) -> Row:
        """Return the group of a prompt: one call of `rollout_func`, and of each reward function."""
        n, prompts = self.args.num_generations, [row["prompt"]] * self.args.num_generations
        with user_code("rollout_func"):
            output = self.rollout_func(prompts, self)
        texts = self.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
        if isinstance(row["prompt"], list):  # a conversation
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [value] * n for name, value in row.items() if name != "prompt"}
        columns |= {name: values for name, values in output.items() if name not in COLUMNS}
        weights, totals = self.args.reward_weights or [1.0] * len(self.reward_funcs), [0.0] * n
        is_scored = [False] * n
        for weight, function in zip(weights, self.reward_funcs, strict=True):
            with user_code(f"reward function {getattr(function, '__name__', function)}"):
                rewards = function(prompts=prompts, completions=texts, completion_ids=output["completion_ids"], **columns)
                totals = [total + weight * (reward or 0.0) for total, reward in zip(totals, rewards, strict=True)]
                is_scored = [known or reward is not None for known, reward in zip(is_scored, rewards, strict=True)]
        if not all(is_scored):
            raise DataError(f"row {number}: completion {is_scored.index(False)} has no reward of any function; leave out the row")
        return {"prompt_ids": output["prompt_ids"][0], "rewards": totals, **{name: output[name] for name in COLUMNS[1:]}}

    def _n_tokens(self, row: Row) -> int:
        return len(row["prompt_ids"]) + max(map(len, row["completion_ids"]))
