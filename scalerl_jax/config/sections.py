"""Every setting of a run: its default, unit and limits, and where the default is from.

Files under `configs/` hold differences from these defaults.  How to read a field:
`config.settings`.  All of them as tables: docs/settings.md.

One file above 400 lines, because it is where all settings are looked up.
"ScaleRL" is https://arxiv.org/abs/2510.13786, appendix A.3 or the section named.
"""

import dataclasses
from typing import Annotated, Literal

from scalerl_jax.config.settings import ValueRange, With, setting, settings_of

# Kinds of numbers.  A 0 where it may stand means "none", or "found out by itself".
Steps = Annotated[int, ValueRange("optimizer steps", above=0, at_most=10**9)]
StepsOr0 = Annotated[int, ValueRange("optimizer steps", at_least=0, at_most=10**9)]
Tokens = Annotated[int, ValueRange("tokens", above=0, at_most=2**24)]
TokensOr0 = Annotated[int, ValueRange("tokens", at_least=0, at_most=2**24)]
Devices = Annotated[int, ValueRange("devices", above=0, at_most=10**4)]
DevicesOr0 = Annotated[int, ValueRange("devices", at_least=0, at_most=10**4)]
Versions = Annotated[int, ValueRange("versions", at_least=0, at_most=2)]
Processes = Annotated[int, ValueRange("processes", at_least=0, at_most=1000)]
Lag = Annotated[int, ValueRange(at_least=0, at_most=10**4)]
Large = Annotated[int, ValueRange(at_least=0, at_most=2**32 - 1)]
PromptOrNone = Annotated[int, ValueRange(at_least=-1, at_most=10**7)]
PromptsOr0 = Annotated[int, ValueRange("prompts", at_least=0, at_most=10**7)]
Prompts = Annotated[int, ValueRange("prompts", above=0, at_most=10**6)]
Count = Annotated[int, ValueRange(above=0, at_most=10**5)]
CountOr0 = Annotated[int, ValueRange(at_least=0, at_most=10**5)]
Seconds = Annotated[float, ValueRange("s", above=0, at_most=10**7)]
SecondsOr0 = Annotated[float, ValueRange("s", at_least=0, at_most=10**7)]
Mebibytes = Annotated[int, ValueRange("MiB", above=0, at_most=10**7)]
Positive = Annotated[float, ValueRange(above=0)]
NotNegative = Annotated[float, ValueRange(at_least=0)]
Share = Annotated[float, ValueRange(above=0, at_most=1)]
ShareOr0 = Annotated[float, ValueRange(at_least=0, at_most=1)]
Decay = Annotated[float, ValueRange(at_least=0, below=1)]

Mode = Literal["pipeline", "batched"]
MathAnswer = Literal["boxed", "last_number", "boxed_else_last_number"]
Dtype = Literal["float32", "bfloat16"]


_LORA = With("model.lora.rank")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank factors that are trained in place of the policy's own weights."""

    rank: CountOr0 = setting(
        0, "of the factors; 0: the weights themselves are trained; docs/lora.md"
    )
    alpha: Positive = setting(
        32.0,
        "the factors' product is scaled by alpha / rank",
        "https://thinkingmachines.ai/blog/lora",
        needs=_LORA,
    )
    targets: tuple[str, ...] = setting(
        (),
        'patterns of whole names ("layers/query"); empty: all matrices of attention '
        "and feed-forwards, experts among them",
        needs=_LORA,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: its shape, where its weights come from, its number formats."""

    architecture: str = setting(
        "checkpoint", "the checkpoint's, or one of `model.sizes.ARCHITECTURES`"
    )
    checkpoint: str = setting(
        "",
        "Hugging Face directory or id of its hub, or GGUF file of a family in "
        "docs/checkpoints.md; empty: random weights",
    )
    compute_dtype: Dtype = setting("float32", "activations and matmuls, not the head")
    param_dtype: Dtype = setting("float32", "the learner's master weights")
    sampler_dtype: Dtype = setting("float32", "weights and KV cache of the sampler")
    float32_head: bool = setting(True, "logits of sampler and learner", "ScaleRL 3.2")
    remat: Literal["none", "dots", "attention", "full", "auto"] = setting(
        "none",
        "what of a layer is computed again; model/transformer.py; auto: on TPUs the "
        "least that the memory allows, elsewhere full",
    )
    attention: Literal["auto", "blockwise", "splash", "cudnn"] = setting(
        "auto", "the learner's; auto: by machine; model/attention_kernels.py"
    )
    attention_block: Tokens = setting(512, "queries, and keys, of blockwise attention")
    scan_layers: bool = setting(True, "False: unrolled; for few layers, on a CPU")
    head_chunk_tokens: Tokens = setting(
        1024, "tokens of a device whose logits exist at one time"
    )
    head_chunk_vocab: Tokens = setting(
        16384, "entries of the vocabulary whose logits exist at one time"
    )
    frozen: tuple[str, ...] = setting(
        (),
        'patterns of whole names ("embedding", "layers/.*norm") that are not trained; '
        "model/trainable.py",
    )
    lora: LoraConfig = LoraConfig()


_CHAT = With("data.template", "chat")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts: which tasks, how many, how they are shown to the policy."""

    tasks: tuple[str, ...] = setting(
        ("chain_sum",),
        "names in `data.tasks.TASKS`, gym:NAME@LEVEL(setting=value) of reasoning_gym, "
        "and data sets, with @SPLIT or without; docs/data.md",
    )
    directory: str = setting(
        "", "prepared data sets, perhaps gs://...; empty: ~/.cache/scalerl_jax/data"
    )
    train_prompts: PromptsOr0 = setting(8192, "in equal parts per task; 0: all")
    task_weights: tuple[float, ...] = setting(
        (), "share of the draws of each of data.tasks; empty: one shuffled stream"
    )
    next_task_at: ShareOr0 = setting(
        0.0,
        "pass rate of the last open one of data.tasks from which the next one opens, "
        "as levels of a curriculum; 0: all are open; data/mixture.py",
    )
    next_task_prompts: Count = setting(
        64, "the task's newest prompts, whose pass rate that is"
    )
    overlap_ngram: CountOr0 = setting(
        13,
        "a training prompt that shares so many words in a row with an evaluation "
        "prompt is dropped, as equal ones are; 0: only equal ones",
        "GPT-3, https://arxiv.org/abs/2005.14165, appendix C",
    )
    tokenizer: str = setting("", "a file or directory; empty: the checkpoint's")
    template: str = setting(
        "{question}<think>", 'form of a prompt; "chat": the tokenizer\'s own template'
    )
    system_prompt: str = setting(
        "", "of a chat; empty: what the data set says, or nothing", needs=_CHAT
    )
    user_template: str = setting(
        "{question}", "the user's message of a chat: how to answer", needs=_CHAT
    )
    enable_thinking: bool = setting(True, "as Qwen3's template takes it", needs=_CHAT)
    answer_after: str = setting(
        "</think>",
        "the answer is what follows the last of these; empty: all of the completion; "
        '"auto": the thinking, if the model does any; wiring/prompts.py',
    )
    max_history_pass_rate: Share = setting(
        0.9, "pass rate from which a prompt is not sampled again", "ScaleRL 3.2"
    )
    no_positive_resampling: bool = setting(
        True, "leave prompts out that are nearly always solved", "ScaleRL 3.2"
    )
    order: Literal["shuffled", "easy_to_hard", "progressive"] = setting(
        "shuffled",
        "easy_to_hard: sorted, no shuffle; progressive: evenly among the easiest, ever "
        "more of them; data/curriculum.py",
        "easy_to_hard: Tan et al., https://arxiv.org/abs/2509.25300",
    )
    difficulty: str = setting(
        "",
        "JSON lines of pass rates, which `scalerl data difficulty` makes; "
        '"measured": the run\'s own, after a first epoch that is shuffled and '
        "open",
        needs=With("data.order", "easy_to_hard", "progressive"),
    )
    open_share: Share = setting(0.1, "of the prompts, open at step 0 of progressive")
    open_steps: StepsOr0 = setting(0, "until all prompts are open in progressive")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Rewards of verdicts, and what a verifier may take."""

    correct: float = setting(1.0, "reward of a correct answer", "ScaleRL")
    wrong: float = setting(-1.0, "reward of any other answer", "ScaleRL")
    passed_at: float = setting(
        1.0,
        "reward, of the environment's own scale, from which a completion has passed: "
        "pass rates, history and fits go by that; docs/environments.md",
    )
    weights: tuple[float, ...] = setting(
        (), "of each function of `environment`, in a sum; empty: 1 each"
    )
    max_magnitude: Positive = setting(
        100.0, "of what a function of `environment` returns; more is a bad_reward"
    )
    max_concurrent: Count = setting(
        16, "calls of async functions at once, in each verifier process"
    )
    variables: tuple[str, ...] = setting(
        (),
        "of the process's environment, that `environment` is given, a key perhaps; it "
        "has no others of the user's",
    )
    per_turn: bool = setting(
        False,
        "the tokens of a turn also get the reward that an environment gave this turn, "
        "less the group's mean of that turn",
    )
    unjudged: Literal["exclude", "wrong"] = setting(
        "exclude",
        "a rollout whose verifier timed out or failed; exclude: it leaves loss, "
        "baseline, history and pass rates, and is counted and charged; wrong: it is a "
        "wrong answer",
    )
    max_too_costly_share: ShareOr0 = setting(
        0.1,
        "of a prompt's completions that may be unjudged because judging them takes all "
        "of timeout_s or memory_mib; more than these are wrong answers, all of them; "
        "at most max_unjudged_share, so that completions alone never stop a run",
    )
    max_unjudged_share: Share = setting(
        0.1, "of the rollouts of 10 batches, or of an evaluation; above, the run stops"
    )
    timeout_s: Seconds = setting(
        10.0, "per answer; then too_costly, or verifier_timeout if nothing computes"
    )
    num_workers: Processes = setting(
        0, "verifiers, and as many for evaluation; 0: cores less two, at most 32"
    )
    memory_mib: Mebibytes = setting(4096, "of a verifier process, beside its imports")
    math_answer: MathAnswer = setting("boxed", "where a completion's final answer is")
    code_cpu_s: Count = setting(6, "of a solution; of a program, for each input")
    code_memory_mib: Mebibytes = setting(1024, "of a solution: one process")
    code_packages: str = setting("", "directory of packages for solutions")
    code_float_tolerance: NotNegative = setting(
        0.0,
        "how far a printed or returned number with a decimal point may be from the "
        "expected y: by this times max(1, |y|); 0: equal numbers only",
        "as in programming contests",
    )


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """Turns of an episode with an `environment`, and what stands between them."""

    max_turns: Count = setting(
        8, "sampled turns; then the environment is asked for its end"
    )
    max_observation_tokens: Tokens = setting(
        1024, "of what an environment says to a turn; more is a bad_observation"
    )
    timeout_s: SecondsOr0 = setting(
        0.0,
        "from an episode's beginning to its last turn, verifier_timeout above; 0: "
        "queue.group_timeout_s alone",
    )
    between: str = setting(
        "\n{observation}\n",
        "written behind a turn, with what the environment says in place of "
        "{observation}, where data.template is a text; a chat template writes its own",
    )
    tools: tuple[str, ...] = setting(
        ("calculator",),
        "calculator, python, search: of environment = tools; docs/environments.md",
    )
    documents: str = setting("", "directory of text files for the tool search")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """One optimizer step's rollouts, and how they are laid out for the device."""

    num_prompts: Prompts = setting(48, "N, of an optimizer step", "ScaleRL")
    group_size: Count = setting(16, "G, completions of a prompt", "ScaleRL")
    epochs: Count = setting(1, "passes over each window, a step per batch")
    dynamic_sampling: bool = setting(
        False,
        "generate other groups in place of those without reward variance, at most "
        "max_refills of them per group",
        "True: DAPO",
    )
    max_refills: CountOr0 = setting(
        9, "refills per group, at most", "verl's DAPO: 10 batches for one at most"
    )
    packing: bool = setting(True, "several rollouts in a row; never changes gradients")
    row_tokens: Tokens = setting(16384, "S; at least the longest prompt + completion")
    rows_per_microbatch: CountOr0 = setting(
        8, "R; a multiple of mesh.data * mesh.fsdp, 0: just that"
    )
    shared_tokens: TokensOr0 = setting(
        0,
        "room for prompts, computed once for their group, of a microbatch on one of "
        "the mesh.data * mesh.fsdp shards; 0: not shared",
    )
    own_tokens: TokensOr0 = setting(0, "room for completions, beside shared_tokens")


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Generation: slots, lengths and the distribution that is sampled from."""

    slots: CountOr0 = setting(
        256,
        "sequences decoded together; 0: on TPUs as many as are best, and a cache for "
        "them; planning/chooser.py",
    )
    max_prompt_tokens: Tokens = setting(2048, "of a sequence", "ScaleRL")
    max_completion_tokens: Tokens = setting(
        14336, "of a sequence: 12,288 thinking + 2,048 answer", "ScaleRL"
    )
    length_stages: tuple[tuple[int, int], ...] = setting(
        (), "(first step, completion tokens) of each, growing; empty: always the most"
    )
    tokens_per_call: Tokens = setting(16, "decode steps between two looks of the host")
    prefill_tokens: Tokens = setting(512, "of the largest prefill chunk")
    cache_tokens: Large = setting(0, "of the KV cache; 0: every slot at its limit")
    page_size: Tokens = setting(32, "tokens of a sequence that are cached together")
    kv_on_update: Literal["keep", "recompute"] = setting(
        "keep", "the KV cache at new params; recompute: cached again under them"
    )
    attention: Literal["auto", "paged", "gathered", "pallas", "cudnn"] = setting(
        "auto", "of the sampler; auto: by machine; sampler/attention.py"
    )
    temperature: Positive = setting(1.0, "of sampling", "not in ScaleRL")
    top_k: TokensOr0 = setting(0, "likeliest tokens to sample from; 0: off")
    top_p: Share = setting(1.0, "share of the likeliest tokens; 1.0: off")
    min_p: NotNegative = setting(0.0, "least probability over the highest; 0.0: off")

    @property
    def filters(self) -> tuple[str, ...]:
        """Names of the filters that are on; the temperature is none."""
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return tuple(name for name in on if on[name])


@dataclasses.dataclass(frozen=True)
class InterruptionConfig:
    """Forced end of thinking, at a length drawn evenly from [min, max] tokens."""

    enabled: bool = setting(True, "interrupt long thinking", "ScaleRL")
    min_tokens: TokensOr0 = setting(
        10_000, "shortest thinking that is interrupted", "ScaleRL: [10k, 12k]"
    )
    max_tokens: TokensOr0 = setting(12_000, "longest thinking", "ScaleRL")
    phrase: str = setting(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. "
        "</think>",
        "forced in, and conditioned on without a loss",
        "ScaleRL 4, version 1",
    )
    end_of_thinking: str = setting(
        "</think>", "once the text holds it, in any tokens, no interruption follows"
    )


@dataclasses.dataclass(frozen=True)
class QueueConfig:
    """The queue between sampler and learner, which bounds staleness."""

    mode: Mode = setting("pipeline", "batched: PPO-off-policy-k", "ScaleRL")
    max_staleness: Lag = setting(
        8,
        "optimizer steps between sampling and use; batch.epochs - 1: in turn; batched: "
        "the steps on what is generated together, k / batch.epochs batches",
        "ScaleRL: PipelineRL-8",
    )
    max_waiting: Lag = setting(
        1,
        "batches of N finished groups: while so many wait, for verdicts or learner, "
        "no group starts; 0: as many wait as max_staleness allows; "
        "controller/queue.py",
    )
    batch_timeout_s: Seconds = setting(
        3600.0, "the learner's wait for a batch, and for a sampling thread that hangs"
    )
    group_timeout_s: Seconds = setting(3600.0, "an older running group is dropped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """What a config knows of a loss; `objective.terms` has its function."""

    settings: tuple[str, ...] = ()  # of the objective: the function's keywords
    ratio: Literal["none", "token", "sequence_mean", "sequence_sum"] = "token"
    clips: bool = False  # a token can lose its gradient
    # The anchor of the ratio if the loss fixes it, and objective.anchor has no say.
    anchor: Literal["behavior", "recomputed"] | None = None
    paper: str

    @property
    def of_sequences(self) -> bool:
        """Return whether a token's loss depends on other tokens of its sequence."""
        return self.ratio.startswith("sequence")


_CLIP = ("clip_low", "clip_high")
LOSSES = {
    "cispo": Loss(
        settings=("max_importance_ratio", "min_importance_ratio"),
        paper="MiniMax-M1, 2506.13585, eq. 4; ScaleRL, 2510.13786, eq. 4",
    ),
    "clipped": Loss(
        settings=_CLIP,
        clips=True,
        paper="PPO, 1707.06347; GRPO, 2402.03300; DAPO, 2503.14476",
    ),
    "decoupled": Loss(
        settings=(*_CLIP, "max_importance_ratio"),
        clips=True,
        anchor="recomputed",
        paper="Hilton et al., 2110.00641; AReaL, 2505.24298",
    ),
    "dppo": Loss(
        settings=("mask_low", "mask_high"),
        clips=True,
        paper="2602.04879",
    ),
    "dual_clip": Loss(
        settings=(*_CLIP, "dual_clip"),
        clips=True,
        paper="Ye et al., 1912.09729",
    ),
    "gspo": Loss(
        settings=_CLIP,
        ratio="sequence_mean",
        clips=True,
        paper="2507.18071, eq. 5",
    ),
    "gspo_token": Loss(
        settings=_CLIP,
        ratio="sequence_mean",
        clips=True,
        paper="2507.18071, eq. 13",
    ),
    "reinforce": Loss(
        ratio="none",
        paper="Williams 1992",
    ),
    "sequence_truncated_is": Loss(
        settings=("max_importance_ratio",),
        ratio="sequence_sum",
        anchor="behavior",
        paper="Liu et al. 2025, https://richardli.xyz/rl-collapse",
    ),
    "truncated_is": Loss(
        settings=("max_importance_ratio",),
        anchor="behavior",
        paper="Yao et al. 2025, https://fengyao.notion.site/off-policy-rl",
    ),
}

_KL = With("objective.kl_coefficient")
_OVERLONG = With("objective.overlong_cache_tokens")


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """The loss: ScaleRL's is CISPO, prompt average, batch-normalised advantages."""

    loss: str = setting(
        "cispo", "formulas: docs/settings.md", "ScaleRL 3.2", choices=LOSSES
    )
    anchor: Literal["behavior", "recomputed"] = setting(
        "behavior",
        "whose log-probabilities the ratio is over: the sampler's, or the trainer's "
        "own of the params at the start of the window",
    )
    clip_low: NotNegative = setting(0.0, "the ratio stays above 1 - clip_low")
    clip_high: NotNegative = setting(0.0, "the ratio stays below 1 + clip_high")
    dual_clip: NotNegative = setting(
        0.0, "most that a punished token's ratio counts; above 1 + clip_high"
    )
    max_importance_ratio: NotNegative = setting(
        5.0, "absolute cap of the ratio", "ScaleRL finds 4, 5 and 8 alike"
    )
    min_importance_ratio: NotNegative = setting(
        0.0, "floor of CISPO's ratio", "ScaleRL"
    )
    allow_sampling_filters: bool = setting(
        False,
        "allow a ratio over the sampler's log-probabilities beside top-k, top-p or "
        "min-p, whose share of the distribution it then is",
    )
    correction_cap: NotNegative = setting(
        0.0,
        "beside a recomputed anchor: cap of recomputed over behavior (TIS); 0: none",
    )
    mask_low: NotNegative = setting(0.0, "DPPO: most that a probability may fall")
    mask_high: NotNegative = setting(0.0, "DPPO: most that a probability may rise")
    aggregation: Literal["constant", "prompt", "sample", "token"] = setting(
        "prompt", "what counts alike; algo/advantages.py", "ScaleRL 3.2"
    )
    advantage: Literal["critic", "group_mean", "leave_one_out"] = setting(
        "group_mean", "what is taken off a reward; algo/advantages.py", "ScaleRL 2"
    )
    advantage_normalization: Literal[
        "batch", "none", "prompt", "reward_std", "running"
    ] = setting("batch", "what advantages are divided by", "ScaleRL 3.2")
    advantage_eps: NotNegative = setting(1e-6, "added to the advantages' divisor")
    zero_variance_filter: bool = setting(
        True, "drop groups of equal verdicts", "ScaleRL 3.2"
    )
    kl_coefficient: NotNegative = setting(
        0.0, "of KL(policy || reference); 0: no reference is held"
    )
    kl_estimator: Literal["none", "k1", "k2", "k3"] = setting(
        "none", "per token; algo/regularizers.py", needs=_KL
    )
    kl_in: Literal["loss", "reward"] = setting("loss", "where the KL counts", needs=_KL)
    reference_every: StepsOr0 = setting(
        0, "between refreshes of the reference; 0: never refreshed", needs=_KL
    )
    entropy_coefficient: NotNegative = setting(0.0, "of the entropy bonus")
    regularize: Literal["all", "easy"] = setting(
        "all", "prompts that have KL and entropy bonus", "easy: IsoCompute, 2603.12151"
    )
    regularize_from_pass_rate: ShareOr0 = setting(
        0.0,
        "least pass rate of an easy group",
        "IsoCompute: 0.3",
        needs=With("objective.regularize", "easy"),
    )
    overlong_cache_tokens: TokensOr0 = setting(
        0, "L_cache of the soft punishment of long completions; 0: none", "DAPO"
    )
    overlong_max_tokens: TokensOr0 = setting(
        0, "L_max; 0: sampler.max_completion_tokens", "DAPO", needs=_OVERLONG
    )
    overlong_on: Literal["all", "correct"] = setting(
        "all", "completions that are punished", "ScaleRL: correct", needs=_OVERLONG
    )
    cut_off_completions: Literal["keep", "mask", "wrong"] = setting(
        "keep",
        "completions without EOS; mask: no loss on them, and their group's baseline "
        "still counts them; wrong: their reward is that of a wrong answer",
    )
    routing_replay: Literal["off", "on"] = setting(
        "off",
        "on: the learner sends each token to the experts that the sampler chose for "
        "it; of mixtures only",
        "R3, 2510.11370",
    )
    expert_balance: NotNegative = setting(
        0.0,
        "of an auxiliary loss that evens out how many tokens a mixture's experts take, "
        "in each microbatch; it alone depends on how a batch is cut into these",
        "Switch Transformers, 2101.03961: 0.01",
    )
    expert_bias_rate: NotNegative = setting(
        0.0,
        "what a step adds to, or takes from, the bias with which an expert is chosen, "
        "by how many tokens it took; 0: there is no bias",
        "DeepSeek-V3, 2412.19437: 0.001",
    )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's learned value function; settings that it lacks are the policy's.

    "ORZ" is Open-Reasoner-Zero, https://arxiv.org/abs/2503.24290, section 2.
    """

    learning_rate: Positive = setting(5e-6, "on the policy's schedule", "ORZ")
    warmup_steps: StepsOr0 = setting(50, "of the critic's own", "ORZ")
    minibatches: Count = setting(
        1,
        "parts of a batch, an optimizer step of the critic on each, for one of the "
        "policy",
        "ORZ: 12",
    )
    pretrain_steps: StepsOr0 = setting(
        0, "first steps, which change the critic alone", "VAPO, 2504.05118, 4.1: 50"
    )
    value_clip: NotNegative = setting(
        0.0,
        "most that a value may move from what it was at the start of its window, in "
        "the unit of the reward; 0: no limit",
        "ORZ's code: 0.2",
    )
    gamma: ShareOr0 = setting(1.0, "discount per token", "ORZ")
    gae_lambda: ShareOr0 = setting(1.0, "of GAE; 0.95 forgets over long ones", "ORZ")


_TEACHER = With("teacher.checkpoint", words="given")


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """A policy that teaches: at each token that the student sampled, the KL to it.

    On-policy distillation: Agarwal et al., https://arxiv.org/abs/2306.13649; Lu, "On-
    Policy Distillation", Thinking Machines Lab, 2025.
    """

    checkpoint: str = setting(
        "",
        "whose log-probabilities teach: a Hugging Face directory or GGUF file with the "
        "policy's tokenizer; empty: there is no teacher; docs/distillation.md",
    )
    coefficient: Positive = setting(
        1.0,
        "of log p(teacher) - log p(behavior), which a token's advantage gets",
        "Lu 2025",
        needs=_TEACHER,
    )
    alone: bool = setting(
        False,
        "rewards give no advantage: verdicts are metrics alone",
        needs=_TEACHER,
    )


_COSINE = With("optimizer.schedule", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, then constant or falling along a cosine."""

    learning_rate: Positive = setting(5e-7, "after the warm-up", "ScaleRL")
    warmup_steps: StepsOr0 = setting(100, "of a rate that grows from 0", "ScaleRL")
    schedule: Literal["constant", "cosine"] = setting(
        "constant", "of the rate after the warm-up", "ScaleRL"
    )
    decay_steps: StepsOr0 = setting(
        0, "until the cosine's end; 0: train.num_steps", needs=_COSINE
    )
    final_share: ShareOr0 = setting(0.0, "of the rate, from there on", needs=_COSINE)
    base_rollouts: CountOr0 = setting(
        0,
        "rollouts of the batch that learning_rate is meant for: it is scaled by the "
        "square root of num_prompts * group_size over them; 0: as it stands",
        "IsoCompute: 1024",
    )
    beta1: Decay = setting(0.9, "of AdamW's first moment", "not ScaleRL; MiniMax-M1")
    beta2: Decay = setting(0.95, "of AdamW's second moment", "not ScaleRL; MiniMax-M1")
    eps: Positive = setting(1e-15, "of AdamW", "ScaleRL")
    weight_decay: NotNegative = setting(0.01, "of AdamW", "ScaleRL")
    max_grad_norm: NotNegative = setting(
        1.0, "global; 0: no clipping", "not in ScaleRL"
    )
    stochastic_rounding: bool = setting(False, "of params narrower than float32")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop, and when it must stop."""

    num_steps: Steps = setting(1000, "optimizer steps of the run")
    max_skipped_steps: Steps = setting(
        10, "in a row without a gradient, or not finite: the run stops"
    )
    max_mismatch_nats: Positive = setting(
        0.02, "mean |behavior - trainer| at the start; for bfloat16: float32 meets 1e-4"
    )
    cut_off_warning_share: Share = setting(
        0.1, "of the completions: a sign of collapse", "ScaleRL 4"
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Pass rate on fixed held-out prompts at a pinned version."""

    every: Steps = setting(100, "between two evaluations", "ScaleRL")
    sets: tuple[str, ...] = setting(
        (), "names like `data.tasks`, each asked whole; empty: held out from those"
    )
    num_prompts: Prompts = setting(1000, "held out, in equal parts per task", "ScaleRL")
    samples_per_prompt: Count = setting(16, "completions of each prompt", "ScaleRL")
    temperature: Positive = setting(1.0, "as in training")
    logged_rollouts: CountOr0 = setting(4, "to read, of each evaluation")
    concurrent: bool = setting(
        False,
        "the run goes on meanwhile; generators then hold the params of that version "
        "beside the newest, and take turns",
    )


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """The run's own scaling curve, fitted beside the training; scaling/live.py."""

    live: bool = setting(False, "fit again after each evaluation, in a thread")
    stop: Literal["never", "alarm", "plateau"] = setting(
        "never",
        "end the run: at an alarm, or at its plateau",
        needs=With("scaling.live", True),
    )
    patience: Count = setting(3, "in a row outside the forecast's band: an alarm")
    min_gain: NotNegative = setting(
        0.01, "pass rate that twice the compute must still promise"
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the whole state of a run is saved, and how many saves are kept."""

    every: Steps = setting(50, "between two checkpoints")
    keep: Count = setting(3, "newest ones")
    background: bool = setting(
        True, "written beside the run, which waits for the copy on the host only"
    )


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Places to look at a run, beside the display and the files of its directory."""

    wandb_project: str = setting("", "at Weights & Biases; extra [wandb]")
    profile_steps: tuple[int, ...] = setting(
        (),
        "first and last optimizer step of a profiler's trace, for TensorBoard and "
        "Perfetto; empty: none",
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices of the learner by axis."""

    data: DevicesOr0 = setting(
        1, "replicas of the learner's state; 0: what mesh.fsdp = 0 leaves over"
    )
    fsdp: DevicesOr0 = setting(1, "shards of that state; 0: as many as fit")
    expert: Devices = setting(
        1,
        "parts that the experts of a mixture are in, each on other ones of the shards; "
        "a divisor of fsdp; 1: every shard has a part of each expert",
    )
    context: Devices = setting(1, "shards of the tokens of a row")
    tensor: DevicesOr0 = setting(
        1,
        "shards of heads and hidden units; 0: on TPUs the fewest with which the "
        "learner fits, else 1",
    )
    chip: str = setting("", "name in the ledger; empty: as JAX names the device")
    processes: Devices = setting(
        1,
        "of the learner, each with an even share of its devices; with --ray; on TPUs "
        "one on each host of its chips, for which 1 stands too",
    )

    @property
    def num_devices(self) -> int:
        """Devices of the learner; 0 where `fsdp` is left to what there is."""
        return self.data * self.fsdp * self.context * self.tensor


@dataclasses.dataclass(frozen=True)
class GeneratorsConfig:
    """Replicas that generate, each with an engine and verifiers of its own."""

    count: CountOr0 = setting(
        1,
        "replicas; 0: as many as the devices allow, on TPUs in the split with the "
        "shortest step; planning/chooser.py",
    )
    devices: DevicesOr0 = setting(
        0,
        "of each replica, a divisor of the kv heads, or of a mixture's experts; 0: "
        "mesh.tensor, or, on TPUs with "
        "count = 0, what is best",
    )
    placement: Literal["auto", "apart", "shared"] = setting(
        "auto",
        "apart: on the last of the device list; shared: on the learner's own, one "
        "program after the other; auto: apart where generators.devices is set and "
        "there are enough",
    )
    processes: Devices = setting(
        1,
        "of each replica, each with an even share of its devices; with --ray; on TPUs "
        "one on each host of its chips, for which 1 stands too",
    )
    versions: Versions = setting(
        2,
        "of the params that a replica's devices hold; 2: that in use and the next; 1: "
        "the next takes its place between two steps, from the host's memory, with "
        "--ray; 0: what makes a step shorter on TPUs of several hosts, else 2",
    )
    start_timeout_s: Seconds = setting(600.0, "the wait for a replica to come up")
    silence_timeout_s: Seconds = setting(
        120.0, "a replica that does not answer for so long is replaced"
    )
    reissue_after_s: SecondsOr0 = setting(
        0.0, "an older group is begun again by a free replica; 0: never"
    )
    base_every: Count = setting(
        20,
        "versions from one that is published in full to the next, the others as what "
        "has changed; with --ray",
    )
    channel: Literal["directory", "objects"] = setting(
        "directory",
        "of published params, with --ray; directory: files in --workdir; objects: "
        "Ray's object store, and files where it has no room",
    )
    losses: Count = setting(
        5, "replicas lost in a row, with no group finished between: the run ends"
    )


@dataclasses.dataclass(frozen=True)
class DebugConfig:
    """Looks into a run that seems wrong; each costs time."""

    trace_prompt: PromptOrNone = setting(
        -1,
        "number of a training prompt, from 0: its first rollout is printed at each of "
        "its stops, whenever it is trained on; controller/tracing.py; -1: none is",
    )


PACKAGES = "env:"  # begins the name of a package's environment, and of its prompts


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: Large = setting(0, "of prompts' order, sampling and random weights")
    environment: str = setting(
        "",
        "reward functions of your own, FILE.py:FUNCTION or several, "
        "FILE.py:FUNCTION,FUNCTION; or what makes an environment of several turns, "
        "FILE.py:MAKER, or its name, such as tools; or prompts and rewards of a "
        "package for verifiers, env:PACKAGE(setting=value); empty: each prompt's own "
        "verifier; "
        "docs/environments.md",
    )
    compile_cache: str = setting(
        "~/.cache/scalerl_jax/programs",
        "directory of compiled programs, for faster starts; empty: none are kept",
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    episode: EpisodeConfig = EpisodeConfig()
    batch: BatchConfig = BatchConfig()
    sampler: SamplerConfig = SamplerConfig()
    interruption: InterruptionConfig = InterruptionConfig()
    queue: QueueConfig = QueueConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig = setting(
        CriticConfig(), needs=With("objective.advantage", "critic")
    )
    teacher: TeacherConfig = TeacherConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    scaling: ScalingConfig = ScalingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    mesh: MeshConfig = MeshConfig()
    generators: GeneratorsConfig = GeneratorsConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def steps_per_window(self) -> int:
        """Optimizer steps on the rollouts that are taken together."""
        batched = self.queue.mode == "batched"
        return self.queue.max_staleness if batched else self.batch.epochs


SETTINGS = settings_of(Config)  # by dotted name
