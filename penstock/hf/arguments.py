"""Arguments of the trainers of transformers and TRL, read by attribute: a plan's semantics and a run's settings, or a refusal."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.run_config import TABLES
from penstock.runtime.errors import PlanError
from penstock.runtime.units import on_one_line

FIELDS: dict[str, dict[str, str]] = TABLES["training_arguments"]
VALUES: dict[str, str] = TABLES["refused_values"]
NEWER = "this version of Penstock does not know the field; leave it out"
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
SCHEDULES |= {"cosine_with_min_lr": "cosine", "warmup_stable_decay": "warmup-stable-decay"}
MONITORS = ("tensorboard", "wandb", "mlflow")
_LORA_NOTES = {"task_type", "peft_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"}


@dataclass(slots=True)
class Job:
    """A request of a script. `plan`: arguments of `penstock.plan`; `settings`: of a run, by dotted name."""

    plan: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # one line each

    def refuse(self, name: str, value: object, advice: str) -> None:
        self.problems.append(f"{name}={on_one_line(repr(value), 80)}: {advice}")

    def refuse_if(self, is_odd: object, name: str, value: object, **numbers: object) -> None:
        """Refuse a value with the advice of other_trainers.toml, in which `numbers` are filled in."""
        if is_odd:
            self.refuse(name, value, VALUES[name].format(**numbers))

    def accept(self, name: str, value: object, accepted: Collection[Any]) -> bool:
        """Return True for an accepted value. Others are refused."""
        if value not in accepted:
            self.refuse(name, value, f"write {' or '.join(map(str, accepted))}")
        return value in accepted

    def raise_problems(self) -> None:
        """Raise PlanError with a line for each problem."""
        if self.problems:
            raise PlanError("\n".join(self.problems))


def entry_of(name: str, table: Mapping[str, str]) -> str | None:
    """Return the entry of a field in a table with expressions as keys."""
    return next((words for expression, words in table.items() if re.fullmatch(expression, name)), None)


def is_kind(value: object, name: str) -> bool:
    """True for an object of a class of this name, or of a subclass. Its library may be absent."""
    return name in [kind.__name__ for kind in type(value).__mro__]


def changed(arguments: Any, **required: Any) -> dict[str, Any]:
    """Return the fields of a configuration that differ from a default one. `required`: arguments of its constructor."""
    try:
        usual = type(arguments)(**required)
        names = [f.name for f in fields(arguments)]
    except TypeError:
        raise PlanError(f"{type(arguments).__name__}: no configuration of transformers, TRL or PEFT; give one of theirs") from None
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) != getattr(usual, name)}


def read_arguments(arguments: Any, n_ranks: int) -> Job:
    """Return the plan and the settings of a configuration. Each field that is refused, or unknown, is a problem of the job."""
    job = Job()
    for name, value in changed(arguments, output_dir=arguments.output_dir, bf16=arguments.bf16, use_cpu=arguments.use_cpu).items():
        if not any(entry_of(name, FIELDS[kind]) for kind in ("mapped", "same")):
            job.refuse(name, value, entry_of(name, FIELDS["refused"]) or NEWER)
    a, options, is_bf16, clip = arguments, vars(arguments), bool(arguments.bf16), arguments.max_grad_norm
    job.plan = {
        "batch_size": a.per_device_train_batch_size * a.gradient_accumulation_steps * n_ranks,
        "clip_norm": clip if clip else None,
        "compute_dtype": "bf16" if is_bf16 else "fp32",
        "gradient_dtype": None if is_bf16 else "fp32",
        "gpus": n_ranks,
        "deterministic": bool(a.full_determinism),
        "no_dropout": bool(options.get("disable_dropout")),
        "router_loss": options.get("router_aux_loss_coef") or None,
        "loss": f"label-smoothing:{a.label_smoothing_factor}" if a.label_smoothing_factor else None,
    }
    job.settings = {
        **{setting: getattr(a, name) for name, setting in TABLES["run_settings"].items()},
        "deterministic": bool(a.full_determinism),
        "device": "cpu" if a.use_cpu else "auto",
        "monitors": _monitors(job, a.report_to),
        "checkpoint.background": False,
        "checkpoint.minutes": 0,
        "evaluation.first": False,
        "evaluation.max_sequences": 2**31,
    }
    is_mean, optim = a.average_tokens_across_devices, _value(a.optim)
    job.refuse_if(n_ranks > 1 and not is_mean, "average_tokens_across_devices", is_mean)
    job.refuse_if(optim not in ("adamw_torch", "adamw_torch_fused"), "optim", optim)
    job.accept("train_sampling_strategy", order := _value(a.train_sampling_strategy), ("random", "sequential"))
    job.settings["data.shuffle"] = order == "random"
    _read_model_options(job, options.get("model_init_kwargs") or {})
    schedule_of(arguments, 1, job)  # report problems before the data is read
    return job


def _value(name: Any) -> str:
    return str(getattr(name, "value", name))


def _monitors(job: Job, names: Any) -> tuple[str, ...]:
    listed = [names] if isinstance(names, str) else [*(names or [])]
    job.refuse_if(odd := [name for name in listed if name not in (*MONITORS, "none")], "report_to", odd)
    return tuple(name for name in listed if name in MONITORS)


def _read_model_options(job: Job, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        match name:
            case "attn_implementation" if value in ("sdpa", "eager"):
                job.plan["attention"] = value
            case "dtype" | "torch_dtype" if str(value).removeprefix("torch.") == "float32":
                pass  # masters are fp32
            case "quantization_config" if getattr(value, "load_in_8bit", False):
                job.plan["base"] = "int8"
            case "quantization_config" if getattr(value, "bnb_4bit_quant_type", "") == "nf4" and value.load_in_4bit:
                job.plan["base"] = "nf4"
            case "device_map" | "use_cache" | "low_cpu_mem_usage":
                pass  # the plan places weights
            case _:
                job.refuse(f"model_init_kwargs[{name!r}]", value, VALUES["model_init_kwargs"])


def schedule_of(arguments: Any, n_steps: int, job: Job) -> dict[str, Any]:
    """Return the settings of the learning-rate schedule of a run of `n_steps`, by dotted name."""
    kind, options, warmup = _value(arguments.lr_scheduler_type), dict(arguments.lr_scheduler_kwargs or {}), arguments.warmup_steps
    job.accept("lr_scheduler_type", kind, SCHEDULES)
    job.refuse_if(kind == "constant" and warmup, "warmup_steps", warmup)
    least = {"cosine_with_min_lr": "min_lr_rate", "warmup_stable_decay": "min_lr_ratio"}.get(kind)
    if kind == "cosine_with_min_lr" and isinstance(options.get("min_lr"), int | float) and arguments.learning_rate:
        options["min_lr_rate"] = options.pop("min_lr") / arguments.learning_rate
    fraction = options.pop(least, None) if least else None
    decay = options.pop("num_decay_steps", None) if kind == "warmup_stable_decay" else None
    job.refuse_if(options, "lr_scheduler_kwargs", options)
    values = {"kind": SCHEDULES.get(kind), "warmup_steps": arguments.get_warmup_steps(n_steps)}
    values |= {"min_lr_fraction": fraction, "decay_steps": decay}
    return {f"optimizer.schedule.{name}": value for name, value in values.items() if value is not None}


def adapter_of(lora: Any, model_type: str, job: Job) -> str:
    """Return the text of `penstock.plan(train=...)` for a LoraConfig of PEFT. Like in TRL, `no_dropout` includes adapters."""
    if not is_kind(lora, "LoraConfig"):
        job.refuse("peft_config", type(lora).__name__, "give a LoraConfig of PEFT")
        return "all"
    mapped = {"r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora"}
    for name, value in changed(lora).items():
        if name == "modules_to_save" and [*value] == ["score"]:
            continue  # a scoring head is always trained
        if name not in mapped | _LORA_NOTES:
            job.refuse(f"peft_config.{name}", value, "leave it out: adapters are LoRA, or rsLoRA, with the other defaults of PEFT")
    if (targets := lora.target_modules) is None:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

        if (targets := USUAL.get(model_type)) is None:
            job.refuse("peft_config.target_modules", None, f"PEFT has no default for {model_type}; write 'all-linear', or a list")
    if isinstance(targets, str) and targets != "all-linear":
        targets = [f"/{targets}/"]
    named = targets if isinstance(targets, str) else "+".join(sorted(targets or ()))
    dropout = 0.0 if job.plan.get("no_dropout") else lora.lora_dropout
    options = [f"r={lora.r}", f"alpha={lora.lora_alpha:g}", f"dropout={dropout:g}"] + ["rslora"] * bool(lora.use_rslora)
    return f"lora:{','.join(options)},targets={named}"
