"""Every setting of a run: its name, unit, default and where the default is from.

Files under `configs/` hold differences from these defaults.  `resolve` turns the
ConfigDict that the command line edits into frozen dataclasses and refuses unknown
names, wrong types and impossible combinations before anything is compiled.

"ScaleRL" below is https://arxiv.org/abs/2510.13786, appendix A.3 unless noted.
"""

import dataclasses
import json
import math
import typing
from typing import Any

import ml_collections

from scalerl_jax.config.bases import ask_polaris as ask_polaris
from scalerl_jax.config.bases import based_on as based_on
from scalerl_jax.config.bases import scalerl_baseline as scalerl_baseline
from scalerl_jax.config.bases import vanilla_grpo as vanilla_grpo
from scalerl_jax.config.critic import CriticConfig
from scalerl_jax.config.objective import ObjectiveConfig
from scalerl_jax.config.validation import validate

Mode = typing.Literal["pipeline", "batched"]
Order = typing.Literal["shuffled", "easy_to_hard", "progressive"]
Schedule = typing.Literal["constant", "cosine"]
Dtype = typing.Literal["float32", "bfloat16"]
Remat = typing.Literal["none", "dots", "attention", "full"]
LearnerAttention = typing.Literal["auto", "blockwise", "splash", "cudnn"]
KvOnUpdate = typing.Literal["keep", "recompute"]
Attention = typing.Literal["auto", "paged", "gathered", "pallas", "cudnn"]
Unjudged = typing.Literal["exclude", "wrong"]
MathAnswer = typing.Literal["boxed", "last_number", "boxed_else_last_number"]
LiveStop = typing.Literal["never", "alarm", "plateau"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: its shape, where its weights come from, its number formats."""

    architecture: str = "checkpoint"  # or a name in `model.architecture.ARCHITECTURES`
    # Hugging Face directory or id of its hub, or GGUF file; empty: random weights
    checkpoint: str = ""
    compute_dtype: Dtype = "float32"  # activations and matmuls, the head apart
    param_dtype: Dtype = "float32"  # the learner's master weights
    sampler_dtype: Dtype = "float32"  # weights and KV cache of the sampler
    float32_head: bool = True  # both sides; ScaleRL section 3.2
    remat: Remat = "none"  # what of a layer is computed again; model/transformer.py
    attention: LearnerAttention = "auto"  # by machine; see model/attention_kernels.py
    attention_block: int = 512  # queries, and keys, that blockwise attention takes
    scan_layers: bool = True  # False: unrolled; for few layers, on a CPU
    head_chunk_tokens: int = 1024  # of a device, whose logits exist at one time
    head_chunk_vocab: int = 16384  # logits of each that exist at one time
    # Patterns of whole names ("embedding", "layers/.*norm"): not trained;
    # learner/optimizer.py
    frozen: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts: which tasks, how many, how they are shown to the policy."""

    # Names in `data.tasks.TASKS`, and of data sets, "@SPLIT" after them or not;
    # data/datasets.py
    tasks: tuple[str, ...] = ("chain_sum",)
    directory: str = ""  # of prepared data sets; empty: ~/.cache/scalerl_jax/data
    train_prompts: int = 8192  # in equal parts per task; 0: all that data sets hold
    # Share of the draws of each of `tasks`; empty: one shuffled stream of all.
    task_weights: tuple[float, ...] = ()
    # Words; a training prompt that shares so many in a row with an evaluation prompt
    # is dropped, as one that equals it is; 13 as in GPT-3's appendix C,
    # https://arxiv.org/abs/2005.14165; 0: only equal ones.
    overlap_ngram: int = 13
    tokenizer: str = ""  # tokenizer.json or its directory; empty: the checkpoint's
    template: str = "{question}<think>"  # "chat": the tokenizer's own chat template
    system_prompt: str = ""  # of a chat; empty: what the data set says, or nothing
    user_template: str = "{question}"  # the user's message of a chat: how to answer
    enable_thinking: bool = True  # as Qwen3's template takes it
    # The answer is what follows the last of these; empty: all; "auto": the thinking,
    # if the model does any; build/thinking.py
    answer_after: str = "</think>"
    max_history_pass_rate: float = 0.9  # from here on a prompt is not sampled again
    no_positive_resampling: bool = True  # ScaleRL section 3.2
    # easy_to_hard: sorted, no shuffle (Tan et al., https://arxiv.org/abs/2509.25300);
    # progressive: evenly among the easiest, ever more of them; data/curriculum.py
    order: Order = "shuffled"
    # JSON lines of pass rates, which `python -m scalerl_jax.data difficulty` makes;
    # "measured": the run's own, after a first epoch that is shuffled and open.
    difficulty: str = ""
    open_share: float = 0.1  # of the prompts, open at step 0 of `progressive`
    open_steps: int = 0  # optimizer steps until all of them are


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """What a verdict is worth, and what a verifier may take."""

    correct: float = 1.0  # ScaleRL: +1 and -1
    wrong: float = -1.0  # ScaleRL
    # A rollout whose verifier timed out or failed.  exclude: it leaves loss, baseline,
    # history and pass rates, and is counted and charged; wrong: it is a wrong answer.
    unjudged: Unjudged = "exclude"
    # Of the rollouts of 10 batches, or of an evaluation; with more the run stops.
    max_unjudged_share: float = 0.1
    timeout_s: float = 10.0  # per answer; then killed and marked verifier_timeout
    # Verifier processes, and as many for evaluation; 0: cores less two, at most 32.
    num_workers: int = 0
    memory_mib: int = 4096  # of a verifier process, beside its imports
    math_answer: MathAnswer = "boxed"  # where a completion's final answer is
    code_cpu_s: int = 6  # of a solution; of a program, for each input
    code_memory_mib: int = 1024  # of a solution, which has threads and one process
    code_packages: str = ""  # directory that solutions may import from; empty: none
    # How far a printed or returned number with a decimal point may be from the expected
    # y: by this times max(1, |y|), as in programming contests; 0: equal numbers only.
    code_float_tolerance: float = 0.0


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """One optimizer step's rollouts, and how they are laid out for the device."""

    num_prompts: int = 48  # N, of an optimizer step; ScaleRL
    group_size: int = 16  # G, completions of a prompt; ScaleRL
    # Passes over each window of rollouts: an optimizer step per batch and pass.
    epochs: int = 1
    # Generate other groups in place of those without reward variance (DAPO), at most
    # max_refills of them per group; verl's DAPO generates 10 batches for one at most.
    dynamic_sampling: bool = False
    max_refills: int = 9  # groups that take the place of one
    packing: bool = True  # several rollouts in a row; never changes the gradient
    row_tokens: int = 16384  # S; at least the longest prompt + completion
    # R; a multiple of mesh.data * mesh.fsdp, 0: just that
    rows_per_microbatch: int = 8
    # The prompt of a group computed once: room for prompts, and for completions, of a
    # microbatch on one of the mesh.data * mesh.fsdp shards; 0: not shared.
    shared_tokens: int = 0
    own_tokens: int = 0  # room for completions, beside shared_tokens


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Generation: slots, lengths and the distribution that is sampled from."""

    slots: int = 256  # sequences decoded together
    max_prompt_tokens: int = 2048  # of a sequence; ScaleRL
    max_completion_tokens: int = 14336  # ScaleRL: 12,288 thinking + 2,048 answer
    # (first step, completion tokens) of each stage, growing; empty: always the most.
    length_stages: tuple[tuple[int, int], ...] = ()
    tokens_per_call: int = 16  # decode steps between two looks of the host
    prefill_tokens: int = 512  # of the largest prefill chunk
    cache_tokens: int = 0  # held by the KV cache; 0: every slot at its full length
    page_size: int = 32  # tokens of a sequence that are cached together
    kv_on_update: KvOnUpdate = "keep"  # recompute: cached again under new params
    attention: Attention = "auto"  # by machine; see sampler/attention.py
    temperature: float = 1.0  # not stated in ScaleRL
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1.0: off
    min_p: float = 0.0  # 0.0: off

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters that are on; the temperature is none."""
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return tuple(name for name in on if on[name])


@dataclasses.dataclass(frozen=True)
class InterruptionConfig:
    """Forced end of thinking, at a length drawn evenly from [min, max] tokens."""

    enabled: bool = True  # ScaleRL
    min_tokens: int = 10_000  # ScaleRL: [10k, 12k]
    max_tokens: int = 12_000  # ScaleRL
    phrase: str = (  # ScaleRL section 4, version 1
        "Okay, time is up. Let me stop thinking and formulate a final answer now. "
        "</think>"
    )
    # Once the text holds it, in whichever tokens, no interruption follows.
    end_of_thinking: str = "</think>"


@dataclasses.dataclass(frozen=True)
class QueueConfig:
    """How far the sampler may run ahead of the learner."""

    mode: Mode = "pipeline"  # batched: PPO-off-policy-k with k = max_staleness
    # Optimizer steps; PipelineRL-8 in ScaleRL; batch.epochs - 1: in turn.  In batched
    # mode the steps on what is generated together: k / batch.epochs batches.
    max_staleness: int = 8
    # Batches of N finished groups: while so many wait, for verdicts or the learner, no
    # group starts; 0: as many wait as max_staleness allows.  rollout/pacing.py
    max_waiting: int = 1
    batch_timeout_s: float = 3600.0  # the learner's wait for a batch
    group_timeout_s: float = 3600.0  # a running group older than this is dropped


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then constant or falling along a cosine."""

    learning_rate: float = 5e-7  # ScaleRL
    warmup_steps: int = 100  # ScaleRL
    schedule: Schedule = "constant"  # ScaleRL
    decay_steps: int = 0  # where the cosine ends; 0: at train.num_steps
    final_share: float = 0.0  # of the learning rate, from there on
    # Rollouts of the batch that learning_rate is meant for: it is scaled by the square
    # root of num_prompts * group_size over them (IsoCompute: 1024); 0: as it stands.
    base_rollouts: int = 0
    beta1: float = 0.9  # not stated in ScaleRL; MiniMax-M1: 0.9 and 0.95
    beta2: float = 0.95  # as beta1
    eps: float = 1e-15  # ScaleRL
    weight_decay: float = 0.01  # ScaleRL
    max_grad_norm: float = 1.0  # global norm; 0: no clipping; not stated in ScaleRL
    stochastic_rounding: bool = False  # of params narrower than float32


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop, and when it must stop."""

    num_steps: int = 1000  # optimizer steps in all
    max_skipped_steps: int = 10  # in a row: no gradient to take, or a non-finite one
    # Mean |behavior - trainer| at the start; 0.02 is for bfloat16, float32 meets 1e-4.
    max_mismatch_nats: float = 0.02
    cut_off_warning_share: float = 0.1  # ScaleRL section 4: a sign of collapse


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Pass rate on fixed held-out prompts at a pinned version."""

    every: int = 100  # optimizer steps; ScaleRL
    # Names like `data.tasks`, each asked whole; empty: held out from those.
    sets: tuple[str, ...] = ()
    num_prompts: int = 1000  # held out, in equal parts per task; ScaleRL
    samples_per_prompt: int = 16  # ScaleRL
    temperature: float = 1.0  # as in training
    logged_rollouts: int = 4  # readable rollouts per evaluation


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """The run's own scaling curve, fitted beside the training; scaling/live.py."""

    live: bool = False  # fit again after each evaluation; into TensorBoard, in a thread
    stop: LiveStop = "never"  # end the run: at an alarm, or at its plateau
    patience: int = 3  # evaluations in a row outside the forecast's band: an alarm
    min_gain: float = 0.01  # pass rate that twice the compute must still promise


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the whole state of a run is saved, and how many saves are kept."""

    every: int = 50  # optimizer steps
    keep: int = 3  # newest checkpoints


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Where a run is looked at, beside the display and the files of its directory."""

    wandb_project: str = ""  # at Weights & Biases, with the extra [wandb]; empty: none
    # First and last optimizer step of a profiler's trace, for TensorBoard and Perfetto.
    profile_steps: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of the learner by axis, and those of the sampler."""

    data: int = 1  # replicas of the learner's state
    fsdp: int = 1  # shards of the learner's state; 0: as many as fit the devices
    context: int = 1  # shards of the tokens of a row
    tensor: int = 1  # shards of heads and hidden units
    sampler_devices: int = 0  # the last of the device list; 0: share the learner's
    chip: str = ""  # name in the ledger; empty: as JAX names the device


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0  # of prompts' order, sampling and random weights
    # Directory of compiled programs, for faster starts; empty: none are kept
    compile_cache: str = "~/.cache/scalerl_jax/programs"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    batch: BatchConfig = BatchConfig()
    sampler: SamplerConfig = SamplerConfig()
    interruption: InterruptionConfig = InterruptionConfig()
    queue: QueueConfig = QueueConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig = CriticConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    scaling: ScalingConfig = ScalingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()


def defaults() -> ml_collections.ConfigDict:
    """The defaults above, as what `configs/*.py` and the command line edit."""
    return ml_collections.ConfigDict(dataclasses.asdict(Config()))


def to_json(config: Config) -> dict[str, Any]:
    """The resolved settings as JSON values, to be written beside the results."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def resolve(config: ml_collections.ConfigDict) -> Config:
    """Frozen and checked settings from what a file and the command line gave."""
    check(config)
    resolved = build(Config, config.to_dict())
    validate(resolved)
    return resolved


def check(config: object) -> None:
    """Refuse what no config file should give.

    Raises:
        ValueError: there is no such file, or its get_config returns something else.
    """
    try:
        known = hasattr(config, "to_dict")
    except OSError as error:  # how ml_collections keeps that the file is missing
        said = str(error)
        reason = said[max(0, said.rfind("[Errno")) :]
        raise ValueError(f"--config cannot be read: {reason}") from error
    if not known:
        raise ValueError(
            f"--config is missing, or get_config in the file returns "
            f"{type(config).__name__}; it must return an ml_collections.ConfigDict, "
            f"such as scalerl_jax.config.defaults()"
        )


def build(cls: type, values: dict[str, Any], *, prefix: str = "") -> Any:
    """A dataclass of settings from nested values; names and types are checked."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in fields:
            raise ValueError(
                f"{prefix}{name} is not a setting; choose from "
                f"{[prefix + known for known in fields]}"
            )
    made = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{name} = {value!r} must be a section")
            made[name] = build(hints[name], value, prefix=f"{prefix}{name}.")
        else:
            made[name] = _typed(hints[name], value, setting=f"{prefix}{name}")
    return cls(**made)


def _typed(hint: Any, value: Any, *, setting: str) -> Any:
    if typing.get_origin(hint) is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(
                f"{setting} = {value!r}; choose from {sorted(typing.get_args(hint))}"
            )
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{setting} = {value!r} must be a tuple")
        item = typing.get_args(hint)[0]
        return tuple(_typed(item, part, setting=f"{setting}[]") for part in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{setting} = {value} must be a finite number")
    if type(value) is not hint:
        raise ValueError(
            f"{setting} = {value!r} is of type {type(value).__name__}; "
            f"it must be of type {hint.__name__}"
        )
    return value
