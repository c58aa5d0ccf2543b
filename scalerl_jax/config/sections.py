"""Every setting of a run: its default, unit and limits, and where the default is from.

Files under `configs/` hold differences from these defaults.  How to read a field:
`config.settings`.  All of them as tables: docs/settings.md.

One file above 400 lines, because it is where all settings are looked up.
"ScaleRL" is https://arxiv.org/abs/2510.13786, appendix A.3 or the section named.
"""

import dataclasses
from typing import Annotated, Literal

from scalerl_jax.config.settings import ValueRange, With, setting, settings_of

# Kinds of numbers.  Where 0 is allowed, it means "none" or "chosen automatically".
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
Gibibytes = Annotated[float, ValueRange("GiB", above=0, at_most=10**6)]
Positive = Annotated[float, ValueRange(above=0)]
NotNegative = Annotated[float, ValueRange(at_least=0)]
Share = Annotated[float, ValueRange(above=0, at_most=1)]
ShareOr0 = Annotated[float, ValueRange(at_least=0, at_most=1)]
Decay = Annotated[float, ValueRange(at_least=0, below=1)]

Mode = Literal["pipeline", "batched"]
MathAnswer = Literal["boxed", "last_number", "boxed_else_last_number"]
Dtype = Literal["float32", "bfloat16"]

HEAD_CHUNK_VOCAB = 16_384  # where nothing is known of the memory

_LORA = With("model.lora.rank")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank factors that are trained in place of the policy's own weights."""

    rank: CountOr0 = setting(
        0, "rank of the factors; 0: the weights themselves are trained; docs/lora.md"
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
        "and feed-forwards, including experts",
        needs=_LORA,
    )
    adapter: str = setting(
        "",
        "directory of the factors to begin with, from `scalerl export --adapter` or "
        "peft; empty: factors whose product is 0",
        needs=_LORA,
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The policy: its shape, where its weights come from, its number formats."""

    architecture: str = setting(
        "checkpoint", "checkpoint: read from it; or one of `model.sizes.ARCHITECTURES`"
    )
    checkpoint: str = setting(
        "",
        "Hugging Face directory, hub id, or GGUF file of a family in "
        "docs/checkpoints.md; empty: random weights",
    )
    compute_dtype: Dtype = setting("float32", "activations and matmuls except the head")
    param_dtype: Dtype = setting("float32", "the learner's master weights")
    sampler_dtype: Dtype = setting("float32", "weights and KV cache of the sampler")
    float32_head: bool = setting(
        True, "compute the logits of sampler and learner in float32", "ScaleRL 3.2"
    )
    head_weights_dtype: Dtype = setting(
        "float32",
        "dtype to which the learner rounds the head's weights; bfloat16: as the "
        "sampler has them, and half the passes of its float32 products on TPUs",
        needs=With("model.sampler_dtype", "bfloat16"),
    )
    remat: Literal["none", "dots", "attention", "full", "auto"] = setting(
        "none",
        "what is recomputed in the backward pass of a layer; auto: on "
        "devices of machines/chips.py the least that the memory allows, elsewhere "
        "full; model/transformer.py",
    )
    attention: Literal["auto", "blockwise", "splash", "cudnn"] = setting(
        "auto", "the learner's kernel; auto: by machine; model/attention_kernels.py"
    )
    attention_block: Tokens = setting(
        512, "queries, and keys, in a block of blockwise attention"
    )
    scan_layers: bool = setting(
        True, "scan over the layers; False: unrolled, for few layers on a CPU"
    )
    head_chunk_tokens: Tokens = setting(
        1024, "tokens per device whose logits are in memory at one time"
    )
    head_chunk_vocab: TokensOr0 = setting(
        HEAD_CHUNK_VOCAB,
        "vocabulary entries whose logits are in memory at one time; 0: where they are "
        "split by planning/chooser.py, all of a device's if they fit, so that they are "
        "computed once; else 16,384",
    )
    frozen: tuple[str, ...] = setting(
        (),
        "patterns of whole names of weights that are not trained: "
        '("embedding", "layers/.*norm"); model/trainable.py',
    )
    lora: LoraConfig = LoraConfig()


_CHAT = With("data.template", "chat")
_ENVIRONMENT = With("environment", words="given")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts: which tasks, how many, in which form the policy sees them."""

    tasks: tuple[str, ...] = setting(
        ("chain_sum",),
        "names in `data.tasks.TASKS`, gym:NAME@LEVEL(setting=value) of reasoning_gym, "
        "or data sets, with or without @SPLIT; docs/data.md",
    )
    directory: str = setting(
        "",
        "directory of prepared data sets, also gs://...; empty: "
        "~/.cache/scalerl_jax/data",
    )
    train_prompts: PromptsOr0 = setting(
        8192, "training prompts, in equal parts per task; 0: all"
    )
    task_weights: tuple[float, ...] = setting(
        (), "each task's share of the draws; empty: one shuffled stream of all tasks"
    )
    next_task_at: ShareOr0 = setting(
        0.0,
        "pass rate of the last open one of data.tasks from which the next one opens, "
        "as levels of a curriculum; 0: all are open; data/mixture.py",
    )
    next_task_prompts: Count = setting(
        64,
        "the task's newest prompts, whose pass rate that is",
        needs=With("data.next_task_at"),
    )
    overlap_ngram: CountOr0 = setting(
        13,
        "a training prompt is dropped if it equals an evaluation prompt or shares this "
        "many consecutive words with one; 0: only if it equals one",
        "GPT-3, https://arxiv.org/abs/2005.14165, appendix C",
    )
    tokenizer: str = setting("", "file or directory; empty: the checkpoint's")
    template: str = setting(
        "{question}<think>", 'text of a prompt; "chat": the tokenizer\'s chat template'
    )
    system_prompt: str = setting(
        "", "system message of a chat; empty: the data set's, or none", needs=_CHAT
    )
    user_template: str = setting(
        "{question}",
        "user message of a chat, with instructions on how to answer",
        needs=_CHAT,
    )
    enable_thinking: bool = setting(
        True, "the argument of this name of Qwen3's chat template", needs=_CHAT
    )
    answer_after: str = setting(
        "</think>",
        "the answer is the text after the last occurrence of this; empty: the whole "
        'completion; "auto": the tag that ends thinking, empty if the model does not '
        "think; wiring/prompts.py",
    )
    max_history_pass_rate: Share = setting(
        0.9,
        "pass rate from which on a prompt is not sampled again",
        "ScaleRL 3.2",
        needs=With("data.no_positive_resampling", True),
    )
    no_positive_resampling: bool = setting(
        True, "leave out prompts that reached max_history_pass_rate", "ScaleRL 3.2"
    )
    order: Literal["shuffled", "easy_to_hard", "progressive"] = setting(
        "shuffled",
        "easy_to_hard: sorted by pass rate; progressive: drawn evenly from a growing "
        "set of the easiest; data/curriculum.py",
        "easy_to_hard: Tan et al., https://arxiv.org/abs/2509.25300",
    )
    difficulty: str = setting(
        "",
        "JSON lines of pass rates, made by `scalerl data difficulty`; "
        '"measured": the run\'s own pass rates, after a first epoch of all prompts, '
        "shuffled",
        needs=With("data.order", "easy_to_hard", "progressive"),
    )
    open_share: Share = setting(
        0.1,
        "progressive: share of the prompts open at step 0",
        needs=With("data.order", "progressive"),
    )
    open_steps: StepsOr0 = setting(0, "progressive: step from which on all are open")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Rewards of verdicts, and the limits of a verifier."""

    correct: float = setting(1.0, "reward of a correct answer", "ScaleRL")
    wrong: float = setting(-1.0, "reward of any other answer", "ScaleRL")
    passed_at: float = setting(
        1.0,
        "least reward, on the environment's own scale, of a completion that counts as "
        "passed in pass rates, history and fits; docs/environments.md",
    )
    weights: tuple[float, ...] = setting(
        (), "weight of each function of `environment` in their sum; empty: 1 each"
    )
    max_magnitude: Positive = setting(
        100.0,
        "largest |reward| of a function of `environment`; above: a bad_reward",
        needs=_ENVIRONMENT,
    )
    max_concurrent: Count = setting(
        16,
        "concurrent calls of async functions in each verifier process",
        needs=_ENVIRONMENT,
    )
    variables: tuple[str, ...] = setting(
        (),
        "environment variables that `environment` may read, such as an API key; it "
        "gets no others of the user's",
    )
    per_turn: bool = setting(
        False,
        "the advantage of a turn's tokens also gets the environment's reward for this "
        "turn, less the group's mean for it",
    )
    unjudged: Literal["exclude", "wrong"] = setting(
        "exclude",
        "a rollout whose verifier timed out or failed; exclude: it is left out of "
        "loss, baseline, history and pass rates, but counted, with its compute; "
        "wrong: it is a wrong answer",
    )
    max_too_costly_share: ShareOr0 = setting(
        0.1,
        "share of a prompt's completions that may be unjudged because judging them "
        "exceeds timeout_s or memory_mib; with more, all such ones are wrong answers; "
        "at most max_unjudged_share, so that completions alone never stop a run",
        needs=With("reward.unjudged", "exclude"),
    )
    max_unjudged_share: Share = setting(
        0.1,
        "largest unjudged share of the rollouts of 10 batches, or of an evaluation; "
        "above it the run stops",
    )
    timeout_s: Seconds = setting(
        10.0,
        "time to judge an answer; above it: too_costly, or verifier_timeout if the "
        "verifier hardly computed",
    )
    num_workers: Processes = setting(
        0,
        "verifier processes, and the same number for evaluation; 0: CPU cores minus 2, "
        "at most 32",
    )
    memory_mib: Mebibytes = setting(
        4096, "memory of a verifier process, without its imports"
    )
    math_answer: MathAnswer = setting("boxed", "where a completion's final answer is")
    code_cpu_s: Count = setting(
        6, "CPU seconds of a solution; of a whole program: for each input"
    )
    code_memory_mib: Mebibytes = setting(1024, "memory of a solution's one process")
    code_packages: str = setting("", "directory of packages that solutions may import")
    code_float_tolerance: NotNegative = setting(
        0.0,
        "a printed or returned number with a decimal point may differ from the "
        "expected y by this times max(1, |y|); 0: equal numbers only",
        "as in programming contests",
    )


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
    """Turns of an episode with an `environment`, and the text between them."""

    max_turns: Count = setting(
        8, "sampled turns at most; then the environment is asked for the final reward"
    )
    max_observation_tokens: Tokens = setting(
        1024, "longest answer of an environment to a turn; more is a bad_observation"
    )
    timeout_s: SecondsOr0 = setting(
        0.0,
        "from an episode's start to its last turn; above it: verifier_timeout; 0: only "
        "queue.group_timeout_s",
    )
    between: str = setting(
        "\n{observation}\n",
        "text after a turn, with {observation} replaced by the environment's answer; "
        "unused with data.template = chat, which has its own",
    )
    tools: tuple[str, ...] = setting(
        ("calculator",),
        "tools of environment = tools: calculator, python, interpreter, search; "
        "docs/environments.md",
    )
    documents: str = setting("", "directory of text files for the tool search")


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """One optimizer step's rollouts, and how they are laid out for the device."""

    num_prompts: Prompts = setting(48, "N, prompts per optimizer step", "ScaleRL")
    group_size: Count = setting(16, "G, completions per prompt", "ScaleRL")
    epochs: Count = setting(
        1, "passes over each window, with one optimizer step per batch"
    )
    dynamic_sampling: bool = setting(
        False,
        "replace groups without reward variance by newly generated ones, at most "
        "max_refills times per group",
        "True: DAPO",
    )
    max_refills: CountOr0 = setting(
        9,
        "refills per group, at most",
        "verl's DAPO: 10 batches for one at most",
        needs=With("batch.dynamic_sampling", True),
    )
    packing: bool = setting(
        True, "pack several rollouts into a row; never changes gradients"
    )
    row_tokens: Tokens = setting(16384, "S; at least the longest prompt + completion")
    row_segments: Count = setting(
        128,
        "rollouts in a row, at most; on GPUs cuDNN's backward pass reserves 8 bytes x "
        "R x row_segments x S x heads x head_dim: 16 is often enough",
    )
    rows_per_microbatch: CountOr0 = setting(
        8, "R; a multiple of mesh.data * mesh.fsdp; 0: this product"
    )
    short_rows: bool = setting(
        False,
        "cut the rows of a step's last microbatch to 1/4, 1/2 or 3/4 of row_tokens, if "
        "its rollouts fit: less padding, for three programs more; not with "
        "shared_tokens or mesh.context above 1",
    )
    shared_tokens: TokensOr0 = setting(
        0,
        "tokens reserved for prompts, each computed once for its group, in a "
        "microbatch on one of the mesh.data * mesh.fsdp shards; 0: not shared",
    )
    own_tokens: TokensOr0 = setting(
        0, "tokens reserved for completions, with shared_tokens"
    )

    @property
    def packed_segments(self) -> int:
        """Rollouts in a row, at most: 1 without packing."""
        return self.row_segments if self.packing else 1


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Generation: slots, lengths and the distribution that is sampled from."""

    slots: CountOr0 = setting(
        256,
        "sequences decoded together; 0: on devices of machines/chips.py the best "
        "number, with a cache for it; planning/chooser.py",
    )
    max_prompt_tokens: Tokens = setting(2048, "longest prompt", "ScaleRL")
    max_completion_tokens: Tokens = setting(
        14336, "longest completion: 12,288 thinking + 2,048 answer", "ScaleRL"
    )
    length_stages: tuple[tuple[int, int], ...] = setting(
        (),
        "growing limits of the completion, pairs of (first step, completion tokens); "
        "empty: always max_completion_tokens",
    )
    tokens_per_call: Tokens = setting(
        16, "decode steps per call, between two checks by the host"
    )
    prefill_tokens: Tokens = setting(512, "tokens of the largest prefill chunk")
    cache_tokens: Large = setting(
        0, "tokens of the KV cache; 0: room for every slot at its longest"
    )
    page_size: Tokens = setting(32, "tokens per page of the KV cache")
    kv_dtype: Literal["model", "int8"] = setting(
        "model",
        "the KV cache's dtype; model: model.sampler_dtype; int8: integers, and a scale "
        "per token and head; sampler/stored.py",
    )
    weights_dtype: Literal["model", "int8"] = setting(
        "model",
        "the dtype of the layers' matrices; model: model.sampler_dtype; int8: "
        "integers, and a scale per output; dense models; model/quantized.py",
    )
    prefix_cache: bool = setting(
        True,
        "prompts that begin alike, and the turns of an episode, share pages of the KV "
        "cache; never in synchronous runs (queue.max_staleness=0)",
    )
    kv_on_update: Literal["keep", "recompute"] = setting(
        "keep", "keep or recompute the KV cache of running sequences at new params"
    )
    attention: Literal["auto", "paged", "gathered", "pallas", "cudnn"] = setting(
        "auto", "the sampler's kernel; auto: by machine; sampler/attention.py"
    )
    temperature: Positive = setting(1.0, "sampling temperature", "not in ScaleRL")
    top_k: TokensOr0 = setting(0, "sample from this many likeliest tokens; 0: off")
    top_p: Share = setting(
        1.0, "sample from the fewest likeliest tokens with this probability; 1.0: off"
    )
    min_p: NotNegative = setting(
        0.0, "least probability, relative to the likeliest token's; 0.0: off"
    )

    @property
    def filters(self) -> tuple[str, ...]:
        """Return the names of the active filters; the temperature is no filter."""
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return tuple(name for name in on if on[name])

    def tokens_of(self, slots: int) -> int:
        """Return the cache's tokens with which every slot has room at its longest.

        It has whole pages, and one more for the copy of a prompt's last one.
        """
        pages = -(
            -(self.max_prompt_tokens + self.max_completion_tokens) // self.page_size
        )
        return (slots * pages + 1) * self.page_size


@dataclasses.dataclass(frozen=True)
class InterruptionConfig:
    """Forced end of thinking, at a length drawn uniformly from [min, max] tokens."""

    enabled: bool = setting(True, "interrupt long thinking", "ScaleRL")
    min_tokens: TokensOr0 = setting(
        10_000, "shortest thinking that is interrupted", "ScaleRL: [10k, 12k]"
    )
    max_tokens: TokensOr0 = setting(12_000, "longest thinking", "ScaleRL")
    phrase: str = setting(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. "
        "</think>",
        "text that is forced in; the policy is conditioned on it, without a loss",
        "ScaleRL 4, version 1",
    )
    end_of_thinking: str = setting(
        "</think>", "text, in any tokens, after which no interruption follows"
    )


@dataclasses.dataclass(frozen=True)
class QueueConfig:
    """The queue between sampler and learner, which bounds staleness."""

    mode: Mode = setting(
        "pipeline", "pipeline: PipelineRL-k; batched: PPO-off-policy-k", "ScaleRL"
    )
    max_staleness: Lag = setting(
        8,
        "k, largest number of optimizer steps between sampling and use; batch.epochs - "
        "1: the synchronous loop; batched: steps on one window, whose k / batch.epochs "
        "batches are generated together",
        "ScaleRL: PipelineRL-8",
    )
    max_waiting: Lag = setting(
        2,
        "no group starts while this many batches of N finished groups wait, for "
        "verdicts or the learner; starts are paced so that a quarter of it is left "
        "when the learner takes a batch; 0: only max_staleness bounds them; "
        "controller/queue.py",
    )
    batch_timeout_s: Seconds = setting(
        3600.0, "longest wait of the learner for a batch, or for a hung sampling thread"
    )
    group_timeout_s: Seconds = setting(
        3600.0, "a group that runs longer than this is dropped"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss as the config's checks need it; `objective.terms` has its function."""

    settings: tuple[str, ...] = ()  # names in ObjectiveConfig: the function's keywords
    ratio: Literal["none", "token", "sequence_mean", "sequence_sum"] = "token"
    clips: bool = False  # a token can lose its gradient
    # The anchor of the ratio if the loss fixes it, whatever objective.anchor is.
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
        "cispo",
        "loss per token: Losses in docs/settings.md",
        "ScaleRL 3.2",
        choices=LOSSES,
    )
    anchor: Literal["behavior", "recomputed"] = setting(
        "behavior",
        "the log-probabilities in the ratio's denominator: the sampler's, or the "
        "trainer's, recomputed with the params at the start of the window",
    )
    clip_low: NotNegative = setting(0.0, "the ratio stays above 1 - clip_low")
    clip_high: NotNegative = setting(0.0, "the ratio stays below 1 + clip_high")
    dual_clip: NotNegative = setting(
        0.0, "bound on the ratio of a punished token; above 1 + clip_high"
    )
    max_importance_ratio: NotNegative = setting(
        5.0, "absolute cap of the ratio", "ScaleRL finds 4, 5 and 8 alike"
    )
    min_importance_ratio: NotNegative = setting(
        0.0, "floor of CISPO's ratio", "ScaleRL"
    )
    allow_sampling_filters: bool = setting(
        False,
        "allow top-k, top-p or min-p with a ratio over the sampler's "
        "log-probabilities, which then are of the filtered distribution",
    )
    correction_cap: NotNegative = setting(
        0.0,
        "with a recomputed anchor: cap of the weight recomputed / behavior (TIS); 0: "
        "no weight",
    )
    mask_low: NotNegative = setting(0.0, "DPPO: largest fall of a probability")
    mask_high: NotNegative = setting(0.0, "DPPO: largest rise of a probability")
    aggregation: Literal["constant", "prompt", "sample", "token"] = setting(
        "prompt",
        "unit that has equal weight in the loss; algo/advantages.py",
        "ScaleRL 3.2",
    )
    advantage: Literal["critic", "group_mean", "leave_one_out"] = setting(
        "group_mean",
        "baseline subtracted from a reward; algo/advantages.py",
        "ScaleRL 2",
    )
    advantage_normalization: Literal[
        "batch", "none", "prompt", "reward_std", "running"
    ] = setting("batch", "what advantages are divided by", "ScaleRL 3.2")
    advantage_eps: NotNegative = setting(1e-6, "added to the advantages' divisor")
    zero_variance_filter: bool = setting(
        True, "drop groups of equal verdicts", "ScaleRL 3.2"
    )
    kl_coefficient: NotNegative = setting(
        0.0, "weight of KL(policy || reference); 0: no reference is held"
    )
    kl_estimator: Literal["none", "k1", "k2", "k3"] = setting(
        "none", "estimator per token; algo/regularizers.py", needs=_KL
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "whether the KL is part of the loss or of the reward", needs=_KL
    )
    reference_every: StepsOr0 = setting(
        0, "steps between refreshes of the reference; 0: never refreshed", needs=_KL
    )
    entropy_coefficient: NotNegative = setting(0.0, "weight of the entropy bonus")
    regularize: Literal["all", "easy"] = setting(
        "all",
        "prompts to which KL and entropy bonus apply",
        "easy: IsoCompute, 2603.12151",
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
        0,
        "L_max; 0: sampler.max_completion_tokens, also while sampler.length_stages has "
        "a lower limit, at which nothing is punished then",
        "DAPO",
        needs=_OVERLONG,
    )
    overlong_on: Literal["all", "correct"] = setting(
        "all", "completions that are punished", "ScaleRL: correct", needs=_OVERLONG
    )
    cut_off_completions: Literal["keep", "mask", "wrong"] = setting(
        "keep",
        "completions without EOS; mask: they have no loss, but count in their group's "
        "baseline; wrong: their reward is that of a wrong answer",
    )
    routing_replay: Literal["off", "on"] = setting(
        "off",
        "on: the learner routes each token to the experts that the sampler chose; "
        "mixtures only",
        "R3, 2510.11370",
    )
    expert_balance: NotNegative = setting(
        0.0,
        "weight of the load-balancing loss of a mixture's experts, per microbatch; the "
        "only loss that depends on how a batch is cut into microbatches",
        "Switch Transformers, 2101.03961: 0.01",
    )
    expert_bias_rate: NotNegative = setting(
        0.0,
        "what a step adds to the router's bias of an underloaded expert and takes from "
        "an overloaded one's; 0: no bias",
        "DeepSeek-V3, 2412.19437: 0.001",
    )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's learned value function; all other settings are the policy's.

    "ORZ" is Open-Reasoner-Zero, https://arxiv.org/abs/2503.24290, section 2.
    """

    learning_rate: Positive = setting(
        5e-6, "the critic's learning rate, on the policy's schedule", "ORZ"
    )
    warmup_steps: StepsOr0 = setting(50, "warm-up of the critic's rate", "ORZ")
    minibatches: Count = setting(
        1,
        "the critic's optimizer steps per step of the policy, each on one part of the "
        "batch",
        "ORZ: 12",
    )
    pretrain_steps: StepsOr0 = setting(
        0, "first steps, which change only the critic", "VAPO, 2504.05118, 4.1: 50"
    )
    value_clip: NotNegative = setting(
        0.0,
        "largest change of a value from the start of its window, in the unit of the "
        "reward; 0: no limit",
        "ORZ's code: 0.2",
    )
    gamma: ShareOr0 = setting(1.0, "discount per token", "ORZ")
    gae_lambda: ShareOr0 = setting(
        1.0, "lambda of GAE; 0.95 forgets over long completions", "ORZ"
    )


_ENDPOINT = With("teacher.endpoint", words="given")


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """On-policy distillation: a KL to a teacher at each token the student sampled.

    Agarwal et al., https://arxiv.org/abs/2306.13649; Lu, "On-Policy Distillation",
    Thinking Machines Lab, 2025.
    """

    checkpoint: str = setting(
        "",
        "the teacher: a Hugging Face directory or GGUF file with the policy's "
        "tokenizer; empty: no teacher; docs/distillation.md",
    )
    endpoint: str = setting(
        "",
        "in place of a checkpoint: the URL, up to /v1, of a server that gives log-"
        "probabilities of prompts, ours or vLLM's",
    )
    model: str = setting(
        "",
        "name of the endpoint's model; empty: the first that it lists",
        needs=_ENDPOINT,
    )
    key_variable: str = setting(
        "",
        "environment variable that holds the endpoint's key; empty: no key is sent",
        needs=_ENDPOINT,
    )
    timeout_s: Seconds = setting(
        120.0, "time limit of one request to the endpoint", needs=_ENDPOINT
    )
    retries: CountOr0 = setting(
        6, "retries of a failed request, after which the run stops", needs=_ENDPOINT
    )
    concurrent: Count = setting(
        16, "requests to the endpoint at one time", needs=_ENDPOINT
    )
    coefficient: Positive = setting(
        1.0,
        "weight of log p(teacher) - log p(behavior), added to a token's advantage",
        "Lu 2025",
    )
    alone: bool = setting(
        False,
        "rewards give no advantage; verdicts still retire prompts "
        "(data.no_positive_resampling), and a rollout without one is left out",
    )

    @property
    def on(self) -> bool:
        """Return whether there is a teacher."""
        return bool(self.checkpoint or self.endpoint)


_ROWS = With("warmstart.rows", words="given")


@dataclasses.dataclass(frozen=True)
class WarmstartConfig:
    """Supervised steps of `scalerl warmstart`; all other settings are the run's."""

    rows: tuple[str, ...] = setting(
        (),
        "files of chats or of prompts and completions, and directories of runs with "
        "tracking.train_rollouts; docs/distillation.md",
    )
    epochs: Count = setting(1, "passes over all rows", needs=_ROWS)
    batch_rows: Count = setting(64, "rows of an optimizer step", needs=_ROWS)
    learning_rate: Positive = setting(
        1e-5, "rate after the warm-up, on optimizer.schedule", needs=_ROWS
    )
    warmup_steps: StepsOr0 = setting(10, "linear warm-up from 0", needs=_ROWS)
    choose: Literal["passed", "best"] = setting(
        "passed",
        "which rollouts of each prompt of a run are learned; best: those of its "
        "highest reward, passed or not",
        needs=_ROWS,
    )
    per_prompt: CountOr0 = setting(
        0,
        "most rollouts of a prompt: higher rewards, then later ones; 0: all",
        needs=_ROWS,
    )


_COSINE = With("optimizer.schedule", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up, then a constant rate or a cosine decay."""

    learning_rate: Positive = setting(5e-7, "rate after the warm-up", "ScaleRL")
    warmup_steps: StepsOr0 = setting(100, "linear warm-up from 0", "ScaleRL")
    schedule: Literal["constant", "cosine"] = setting(
        "constant", "the rate after the warm-up", "ScaleRL"
    )
    decay_steps: StepsOr0 = setting(
        0,
        "steps of the policy after which the cosine ends; 0: at train.num_steps",
        needs=_COSINE,
    )
    final_share: ShareOr0 = setting(
        0.0, "share of learning_rate after the cosine's end", needs=_COSINE
    )
    base_rollouts: CountOr0 = setting(
        0,
        "rollouts per batch that learning_rate is meant for: the rate is multiplied by "
        "sqrt(num_prompts * group_size / base_rollouts); 0: unchanged",
        "IsoCompute: 1024",
    )
    beta1: Decay = setting(
        0.9, "decay of AdamW's first moment", "not ScaleRL; MiniMax-M1"
    )
    beta2: Decay = setting(
        0.95, "decay of AdamW's second moment", "not ScaleRL; MiniMax-M1"
    )
    eps: Positive = setting(1e-15, "AdamW's epsilon", "ScaleRL")
    weight_decay: NotNegative = setting(0.01, "AdamW's weight decay", "ScaleRL")
    max_grad_norm: NotNegative = setting(
        1.0, "bound on the global norm; 0: no clipping", "not in ScaleRL"
    )
    stochastic_rounding: bool = setting(
        False, "round params narrower than float32 stochastically"
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop, and when it stops with an error."""

    num_steps: Steps = setting(1000, "optimizer steps of the run")
    max_skipped_steps: Steps = setting(
        10,
        "the run stops after this many steps in a row without a gradient or with one "
        "that is not finite",
    )
    max_mismatch_nats: Positive = setting(
        0.02,
        "largest mean |behavior - trainer| at the start; the default is for bfloat16, "
        "float32 stays below 1e-4",
    )
    cut_off_warning_share: Share = setting(
        0.1,
        "share of completions cut off above which the run warns of a collapse",
        "ScaleRL 4",
    )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Pass rate on fixed held-out prompts at a pinned version."""

    every: Steps = setting(100, "steps between two evaluations", "ScaleRL")
    sets: tuple[str, ...] = setting(
        (),
        "names as in `data.tasks`, whose prompts are all asked; empty: prompts held "
        "out from data.tasks",
    )
    num_prompts: Prompts = setting(
        1000, "held-out prompts, in equal parts per task", "ScaleRL"
    )
    samples_per_prompt: Count = setting(16, "completions of each prompt", "ScaleRL")
    temperature: Positive = setting(1.0, "sampling temperature, as in training")
    logged_rollouts: CountOr0 = setting(4, "rollouts of each evaluation to log")
    concurrent: Literal["auto", "off", "on"] = setting(
        "off",
        "train during an evaluation; generators then hold the evaluated version's "
        "params beside the newest, and alternate between them; auto: on devices of "
        "machines/chips.py, if it makes the run shorter by forecast",
    )

    @property
    def beside(self) -> bool:
        """Return whether training continues during an evaluation."""
        return self.concurrent == "on"


@dataclasses.dataclass(frozen=True)
class ScalingConfig:
    """The run's own scaling curve, fitted during training; scaling/live.py."""

    live: bool = setting(False, "fit after each evaluation, in a thread")
    stop: Literal["never", "alarm", "plateau"] = setting(
        "never",
        "when to end the run: at an alarm, or at its plateau",
        needs=With("scaling.live", True),
    )
    patience: Count = setting(
        3,
        "evaluations in a row outside the forecast's band that raise an alarm",
        needs=With("scaling.live", True),
    )
    min_gain: NotNegative = setting(
        0.01,
        "plateau: gain in pass rate forecast for twice the compute is below this",
        needs=With("scaling.stop", "plateau"),
    )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run's whole state: how often, and how many are kept."""

    every: Steps = setting(50, "steps between two checkpoints")
    keep: Count = setting(3, "newest checkpoints to keep")
    background: bool = setting(
        True, "write in the background; training waits only for the copy to the host"
    )


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """Trackers of a run, beside the display and the files of its directory."""

    wandb_project: str = setting(
        "", "project at Weights & Biases; needs the extra [wandb]"
    )
    train_rollouts: bool = setting(
        False,
        "write train_rollouts.jsonl: every rollout that is trained on, with its token "
        "ids, from which `scalerl warmstart` can learn; docs/distillation.md",
    )
    profile_steps: tuple[int, ...] = setting(
        (),
        "first and last optimizer step of a profiler trace, for TensorBoard and "
        "Perfetto; empty: no trace",
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The learner's devices by mesh axis."""

    data: DevicesOr0 = setting(
        1, "replicas of the learner's state; 0: on the devices that fsdp = 0 leaves"
    )
    slices: Devices = setting(
        1,
        "TPU slices over which these replicas are spread, equally many on each; a "
        "divisor of data; gradients go between slices once a step",
    )
    fsdp: DevicesOr0 = setting(1, "shards of that state; 0: as many as fit")
    expert: Devices = setting(
        1,
        "parts into which a mixture's experts are divided, each on its own shards; a "
        "divisor of fsdp; 1: every shard has a part of each expert",
    )
    context: Devices = setting(1, "shards of the tokens of a row")
    tensor: DevicesOr0 = setting(
        1,
        "shards of heads and hidden units; 0: on devices of machines/chips.py the "
        "fewest with which the learner fits, else 1",
    )
    chip: str = setting("", "chip's name in the ledger; empty: JAX's device name")
    processes: Devices = setting(
        1,
        "learner processes, each with an equal share of its devices; with --ray; on "
        "TPUs one on each host of its chips, which 1 also means",
    )

    @property
    def num_devices(self) -> int:
        """Return the number of the learner's devices; 0 if an axis is 0."""
        return self.data * self.fsdp * self.context * self.tensor


@dataclasses.dataclass(frozen=True)
class GeneratorsConfig:
    """Replicas that generate, each with its own engine and verifiers."""

    count: CountOr0 = setting(
        1,
        "replicas; 0: as many as the devices allow, on those of machines/chips.py as "
        "in the split with the shortest step; planning/chooser.py",
    )
    devices: DevicesOr0 = setting(
        0,
        "devices of each replica, a divisor of the kv heads, or of a mixture's "
        "experts; 0: mesh.tensor, or, on devices of machines/chips.py with count = 0, "
        "the best number",
    )
    placement: Literal["auto", "apart", "shared"] = setting(
        "auto",
        "apart: on the last devices of the list; shared: on the learner's devices, one "
        "program after the other; auto: apart if generators.devices is set and there "
        "are enough",
    )
    processes: Devices = setting(
        1,
        "processes of each replica, each with an equal share of its devices; with "
        "--ray; on TPUs one on each host of its chips, which 1 also means",
    )
    versions: Versions = setting(
        2,
        "versions of the params on a replica's devices; 2: the one in use and the "
        "next; 1: the next replaces it between two decode calls, from host memory, "
        "with --ray; 0: on TPUs of several hosts the one with the shorter step, else 2",
    )
    start_timeout_s: Seconds = setting(600.0, "longest wait for a replica to start")
    silence_timeout_s: Seconds = setting(
        120.0, "a replica that does not answer for this long is replaced"
    )
    reissue_after_s: SecondsOr0 = setting(
        0.0,
        "a group older than this is started again on a free replica, and a second time "
        "at twice this age, and so on; 0: never",
    )
    base_every: Count = setting(
        20,
        "one in this many versions is published in full, the others as deltas; with "
        "--ray",
    )
    channel: Literal["directory", "objects"] = setting(
        "directory",
        "transport of published params, with --ray; directory: files in --workdir; "
        "objects: Ray's object store, and files if it has no room",
    )
    kept_gib: Gibibytes = setting(
        16.0,
        "controller memory for batches since the last checkpoint, on which restarted "
        "processes of the learner train again; when half of it is used, the next "
        "checkpoint is made early; with --ray",
    )
    losses: Count = setting(
        5,
        "losses in a row that a run survives: of replicas without a finished group in "
        "between or with the same part of an evaluation, or of the learner without a "
        "finished step; one more ends the run",
    )


@dataclasses.dataclass(frozen=True)
class DebugConfig:
    """Diagnostics of a run that seems wrong; each costs time."""

    trace_prompt: PromptOrNone = setting(
        -1,
        "number of a training prompt, from 0, whose first rollout is printed at each "
        "stage, whenever it is trained on; -1: none; controller/tracing.py",
    )


PACKAGES = "env:"  # prefix of the name of a package's environment and prompts


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: Large = setting(0, "seed of the prompts' order, sampling and random weights")
    environment: str = setting(
        "",
        "your own reward functions, FILE.py:FUNCTION or FILE.py:FUNCTION,FUNCTION; or "
        "an environment of several turns: FILE.py:MAKER, or a built-in name, such as "
        "tools; or a package for `verifiers` with prompts and rewards, "
        "env:PACKAGE(setting=value); empty: each prompt's own verifier; "
        "docs/environments.md",
    )
    compile_cache: str = setting(
        "~/.cache/scalerl_jax/programs",
        "directory of compiled programs, for faster starts, here or in a bucket "
        "(gs://BUCKET/PATH), which many machines can share; empty: no cache",
    )
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    episode: EpisodeConfig = setting(EpisodeConfig(), needs=_ENVIRONMENT)
    batch: BatchConfig = BatchConfig()
    sampler: SamplerConfig = SamplerConfig()
    interruption: InterruptionConfig = InterruptionConfig()
    queue: QueueConfig = QueueConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig = setting(
        CriticConfig(), needs=With("objective.advantage", "critic")
    )
    teacher: TeacherConfig = TeacherConfig()
    warmstart: WarmstartConfig = WarmstartConfig()
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
    def held_steps(self) -> int:
        """First steps of the run, which change only the critic; 0 without one."""
        critic = self.objective.advantage == "critic"
        return self.critic.pretrain_steps if critic else 0

    @property
    def short_rows(self) -> tuple[int, ...]:
        """Tokens that the last microbatch's rows may have, ascending; (): all alike."""
        batch = self.batch
        if not batch.short_rows or batch.shared_tokens or self.mesh.context > 1:
            return ()
        return tuple(batch.row_tokens * part // 4 for part in (1, 2, 3))

    @property
    def steps_per_window(self) -> int:
        """Return the number of optimizer steps on one window of rollouts."""
        batched = self.queue.mode == "batched"
        return self.queue.max_staleness if batched else self.batch.epochs


SETTINGS = settings_of(Config)  # by dotted name
