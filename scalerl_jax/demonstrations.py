"""Makes the demo's base checkpoint by supervised learning on worked solutions.

    python -m scalerl_jax.demonstrations --config=configs/tiny_base.py [--out=DIR]

Writes a Hugging Face directory (config.json, model.safetensors, tokenizer.json,
generation_config.json) and the log of its making, warmstart.json.

A base model is able to do better than it does: its samples mix sound methods with
slips and guesses.  So do the worked solutions: each is what follows `<think>`, a
scratchpad, `</think>` and an answer.  With them this file is above 400 lines.
"""

import dataclasses
import functools
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tokenizers
from absl import flags, logging
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import decoders, models

from scalerl_jax import config as config_lib
from scalerl_jax.algo.losses import reinforce_loss
from scalerl_jax.batching.answers import answered, pack_answers
from scalerl_jax.batching.packing import TrainSequence, abstract_microbatch, pack
from scalerl_jax.config.sections import Dtype
from scalerl_jax.data import tasks
from scalerl_jax.data.questions import Question
from scalerl_jax.learner.forward import Forward
from scalerl_jax.learner.optimizer import make_optimizer, make_schedule
from scalerl_jax.learner.step import (
    Objective,
    TrainState,
    TrainStep,
    init_state,
    make_accumulate,
    make_update,
)
from scalerl_jax.model.architecture import Architecture, Experts
from scalerl_jax.model.hugging_face import read_architecture
from scalerl_jax.model.saving import check_place, save_params
from scalerl_jax.model.transformer import init_params
from scalerl_jax.model.upcycling import upcycle
from scalerl_jax.model.weights import load_params
from scalerl_jax.parallel.mesh import make_mesh
from scalerl_jax.process.ending import answer
from scalerl_jax.types import PyTree

EOS, PAD, UNKNOWN, THINK = "<eos>", "<pad>", "<unk>", "<think>"
END_OF_THINKING = "</think>"
# Wording that prompts share is one token each; everything else is a character.
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Spell this word backward (example: sun -> nus): ",
    'How many times does the letter "',
    '" appear in the text: "',
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
    "hm ",
    "time is up.",
)
# In the vocabulary where demonstrations call a tool; none of them is special.
CALL = (
    '<tool_call>{"name": "calculator", "arguments": {"expression": "',
    '"}}</tool_call>',
)
OBSERVATION = ("<tool_response>", "</tool_response>")
_RECORD = "warmstart.json"  # how a checkpoint of ours was made
_MOST = 1_000_000  # of any setting: more is a slip of the hand
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=;:.,?!\"'()<>#"


@dataclasses.dataclass(frozen=True)
class DemonstrationsConfig:
    """Settings by which the base checkpoint is made."""

    seed: int = 0
    init_from: str = ""  # dense decoder to go on from, or to cut into experts
    held_out_prompts: int = 300  # `eval.num_prompts` of the runs to come: not shown
    tasks: tuple[str, ...] = (
        "chain_sum",
        "letter_counting",
        "spell_backward",
    )
    questions_per_task: int = 6000
    template: str = "{question}<think>"
    phrase: str = "time is up.</think>"
    interruption_min_tokens: int = 32
    interruption_max_tokens: int = 40
    careful: float = 0.08
    careless: float = 0.4
    slip: float = 0.6
    hesitation: float = 0.3
    tool_calls: float = 0.0  # share that asks a calculator, in a turn of its own
    hidden_size: int = 128
    ffn_size: int = 384  # of one expert, if there are any
    num_experts: int = 0  # 0: a feed-forward that is no mixture
    experts_per_token: int = 2
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    skill_steps: int = 1500  # careful work alone
    num_steps: int = 1750  # with the mixture above in the rest
    demonstrations_per_step: int = 128
    row_tokens: int = 128
    rows_per_microbatch: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    file_dtype: Dtype = "float32"  # of the checkpoint


def defaults() -> ml_collections.ConfigDict:
    """The defaults above, as what `configs/tiny_base.py` edits."""
    return ml_collections.ConfigDict(dataclasses.asdict(DemonstrationsConfig()))


def make_tokenizer(more: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Characters, and one token for each phrase that prompts share, and of `more`."""
    names = [PAD, EOS, UNKNOWN, THINK, "</think>", *PHRASES, *CHARACTERS, *more]
    vocabulary = {name: place for place, name in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN)
    )
    backend.add_special_tokens([PAD, EOS, UNKNOWN])
    added = [
        tokenizers.AddedToken(name, special=False, normalized=False)
        for name in (THINK, "</think>", *PHRASES, *more)
    ]
    backend.add_tokens(added)
    backend.decoder = decoders.Fuse()
    return backend


def make_architecture(config: DemonstrationsConfig, *, vocab_size: int) -> Architecture:
    """A small Qwen3 decoder with tied embeddings, with experts or without."""
    experts = None
    if config.num_experts:
        experts = Experts(config.num_experts, config.experts_per_token, "normalized")
    return Architecture(
        family="qwen3_moe" if experts else "qwen3",
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        ffn_size=config.ffn_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rope_theta=10_000.0,
        rms_eps=1e-6,
        tied_embeddings=True,
        max_positions=512,
        qk_norm=True,
        experts=experts,
    )


def make_params(config: DemonstrationsConfig, arch: Architecture) -> PyTree:
    """Parameters to begin with: random, or those of `init_from` and a random router."""
    start = init_params(arch, jax.random.key(config.seed), dtype=jnp.float32)
    if not config.init_from:
        return start
    dense = read_architecture(config.init_from)
    params = load_params(config.init_from, dense, dtype=jnp.float32)
    if not config.num_experts:
        if dense != arch:
            raise ValueError(
                f"init_from = {config.init_from!r} is a decoder of other sizes; leave "
                f"hidden_size and the others as they are there"
            )
        return params
    try:
        return upcycle(params, dense, start, arch, seed=config.seed)
    except ValueError as error:
        raise ValueError(f"init_from = {config.init_from!r}: {error}") from error


def make_questions(config: DemonstrationsConfig) -> list[Question]:
    """Questions to solve, none of them held out from the runs to come."""
    exclude: set[str] = set()  # gets the texts that are held out
    shares = tasks.equal_shares(config.tasks, config.held_out_prompts)
    tasks.draw_questions(shares, used=exclude)
    return [
        question
        for task in config.tasks
        for question in tasks.make_questions(
            task,
            count=config.questions_per_task,
            seed=1_000_000 + config.seed,
            exclude=exclude,
        )
    ]


def demonstration_stream(
    config: DemonstrationsConfig,
    questions: Sequence[Question],
    backend: tokenizers.Tokenizer,
) -> Iterator[TrainSequence]:
    """Demonstrations of random questions: careful ones, and then the mixture."""
    rng = np.random.default_rng(config.seed)
    eos = backend.token_to_id(EOS)
    skill = Styles(careful=1.0, careless=0.0, slip=0.0, hesitation=0.0)
    mixture = Styles(
        careful=config.careful,
        careless=config.careless,
        slip=config.slip,
        hesitation=config.hesitation,
    )
    careful_demonstrations = config.skill_steps * config.demonstrations_per_step

    def interruption(rng: np.random.Generator) -> str:
        tokens = rng.integers(
            config.interruption_min_tokens, config.interruption_max_tokens + 1
        )
        return "hm " * int(tokens) + config.phrase

    for number in itertools.count():
        styles = skill if number < careful_demonstrations else mixture
        question = questions[int(rng.integers(len(questions)))]
        told = (question.task, question.text, question.reference)
        if config.tool_calls and rng.random() < config.tool_calls:
            parts = demonstrate_call(*told, slip=config.slip, rng=rng)
        else:
            text = demonstrate(*told, styles=styles, interruption=interruption, rng=rng)
            parts = [(text, True)]
        prompt = backend.encode(config.template.replace("{question}", question.text))
        tokens, mask = [*prompt.ids], [False] * len(prompt.ids)
        for text, sampled in parts:
            own = [*backend.encode(text).ids, *([eos] if sampled else [])]
            tokens += own
            mask += [sampled] * len(own)
        yield answered(np.array(tokens, np.int32), np.array(mask))


def train(
    config: DemonstrationsConfig, backend: tokenizers.Tokenizer, arch: Architecture
) -> tuple[TrainState, list[dict[str, float]]]:
    """Next-token loss on demonstrations; the state and a log of the loss.

    Raises:
        RuntimeError: a step's loss, gradient, params or moments were not finite.
    """
    stream = demonstration_stream(config, make_questions(config), backend)
    forward = Forward(arch=arch, dtype=jnp.float32)
    optimizer = make_optimizer(
        make_schedule(
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=config.num_steps,
        ),
        beta1=0.9,
        beta2=0.95,
        eps=1e-15,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )
    mesh = make_mesh(jax.devices()[:1])
    state = jax.device_put(
        init_state(make_params(config, arch), optimizer),
        NamedSharding(mesh, PartitionSpec()),
    )
    rows = {
        "row_tokens": config.row_tokens,
        "rows_per_microbatch": config.rows_per_microbatch,
    }
    step = TrainStep(
        make_accumulate(forward, Objective(token_loss=reinforce_loss)),
        make_update(optimizer),
        state=state,
        batch=abstract_microbatch(**rows),
        mesh=mesh,
    )
    lay_out = functools.partial(pack, **rows)
    log, started, skipped = [], time.monotonic(), jnp.int32(0)
    for number in range(1, config.num_steps + 1):
        sequences = [next(stream) for _ in range(config.demonstrations_per_step)]
        state, metrics = step(state, pack_answers(sequences, lay_out))
        skipped += metrics["skipped"]
        if number % 100 == 0 or number == config.num_steps:
            _require_finite(int(skipped), number, config)
            seconds = time.monotonic() - started
            row = {"step": number, "loss": float(metrics["loss"]), "seconds": seconds}
            logging.info("step %(step)d  loss %(loss).4f  %(seconds).0f s", row)
            log.append(row)
    return state, log


def _require_finite(skipped: int, number: int, config: DemonstrationsConfig) -> None:
    if skipped:
        raise RuntimeError(
            f"{skipped} of the first {number} steps had a loss, a gradient, params or "
            f"moments that are not finite; nothing is written: lower learning_rate = "
            f"{config.learning_rate:g}"
        )


def save(
    directory: Path,
    state: TrainState,
    *,
    config: DemonstrationsConfig,
    arch: Architecture,
    backend: tokenizers.Tokenizer,
    log: list[dict[str, float]],
) -> None:
    """The checkpoint as a Hugging Face directory, and how it came about."""
    names = ("jax", "numpy", "optax", "reasoning_gym", "tokenizers")
    record = {
        "config": dataclasses.asdict(config),
        "versions": {name: metadata.version(name) for name in names},
        "device": jax.devices()[0].device_kind,
        "num_params": arch.num_params,
        "num_active_params": arch.num_active_params,
        "log": log,
    }
    ids = {"eos_token_id": backend.token_to_id(EOS), "pad_token_id": 0}
    companions = {
        "tokenizer.json": backend.to_str(pretty=True),
        "generation_config.json": json.dumps(ids) + "\n",
        _RECORD: json.dumps(record, indent=1) + "\n",
    }
    save_params(
        directory,
        state.params,
        arch,
        dtype=jnp.dtype(config.file_dtype),
        companions={name: text.encode() for name, text in companions.items()},
    )


def main(settings: ml_collections.ConfigDict, out: Path) -> None:
    """Train and save."""
    config = config_lib.build(DemonstrationsConfig, settings.to_dict())
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, int | float) and not 0 <= value <= _MOST:
            raise ValueError(f"{name} = {value} must be from 0 to {_MOST:,}")
    backend = make_tokenizer((*CALL, *OBSERVATION) if config.tool_calls else ())
    # A multiple of 8 keeps the head's matmul aligned; the extra ids are never used.
    vocab_size = -(-backend.get_vocab_size(with_added_tokens=True) // 8) * 8
    arch = make_architecture(config, vocab_size=vocab_size)
    _check_out(out, config, arch)
    logging.info("%d parameters, vocabulary %d", arch.num_params, vocab_size)
    state, log = train(config, backend, arch)
    save(out, state, config=config, arch=arch, backend=backend, log=log)
    logging.info("wrote %s", out)


def _check_out(out: Path, config: DemonstrationsConfig, arch: Architecture) -> None:
    """Refuse a directory that the checkpoint could not be written to at the end.

    Raises:
        ValueError: it holds what no warm start has made.
        RuntimeError: it cannot be written, or there is too little room.
    """
    size = jnp.dtype(config.file_dtype).itemsize
    try:
        check_place(out, num_bytes=arch.num_params * size)
        if out.exists() and any(out.iterdir()) and not (out / _RECORD).is_file():
            raise ValueError(
                f"{out} holds a checkpoint without a {_RECORD}, which no warm start "
                f"has made; name a new directory"
            )
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"--out={out}: {error}") from error


def run(argv: Sequence[str]) -> int:
    """Do what the command line asks for; the exit status."""
    values = flags.FlagValues()
    config = config_lib.define_config(values, argv)
    out = flags.DEFINE_string(
        "out",
        str(Path(__file__).parent / "assets" / "tiny_base"),
        "Directory of the checkpoint.",
        flag_values=values,
    )

    def make() -> None:
        if extra := config_lib.read_flags(
            values, argv, settings=DemonstrationsConfig, about=__doc__
        )[1:]:
            raise ValueError(f"unknown arguments {extra}")
        config_lib.check(config.value)
        main(config.value, Path(out.value))

    return answer(make)


# Worked solutions, careful and careless.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Styles:
    """Shares of demonstrations by how they go about it, in [0, 1]."""

    careful: float  # every step right
    careless: float  # each step goes wrong with probability `slip`
    slip: float
    hesitation: float  # share that opens with some "hm" tokens
    # The rest guesses: no steps, and an answer that looks right.


def demonstrate(
    task: str,
    text: str,
    reference: dict[str, Any],
    *,
    styles: Styles,
    interruption: Callable[[np.random.Generator], str],
    rng: np.random.Generator,
) -> str:
    """Write a completion of the prompt of `text`, in a style drawn from `styles`.

    `interruption` gives the text of a thinking that was cut short, which now and then
    precedes a guess: the policy must be able to answer after one.
    """
    draw = rng.random()
    hesitation = (
        "hm " * int(rng.geometric(0.3)) if rng.random() < styles.hesitation else ""
    )
    if draw < styles.careful + styles.careless:
        slip = 0.0 if draw < styles.careful else styles.slip
        scratch, answer = SOLVERS[task](text, slip, rng)
        return f"{hesitation}{scratch}{END_OF_THINKING}{answer}"
    _, answer = SOLVERS[task](text, 1.0, rng)
    if rng.random() < 0.2:
        return f"{interruption(rng)}{answer}"
    return f"{hesitation}{END_OF_THINKING}{answer}"


def demonstrate_call(
    task: str,
    text: str,
    reference: dict[str, Any],
    *,
    slip: float,
    rng: np.random.Generator,
) -> list[tuple[str, bool]]:
    """Write the turns of an episode that asks a calculator, and whose words they are.

    With probability `slip` a sign of what is asked is copied wrongly, and so is one of
    the answer.
    """
    asked = text.split(":")[1].split(".")[0].strip()
    call = _miscopied(asked, slip, rng)
    found = reference["answer"] if call == asked else str(rng.integers(10, 10_000))
    return [
        (f"{CALL[0]}{call}{CALL[1]}", True),
        (f"{OBSERVATION[0]}{found}{OBSERVATION[1]}", False),
        (f"{END_OF_THINKING}{_miscopied(found, slip, rng)}", True),
    ]


def _miscopied(text: str, slip: float, rng: np.random.Generator) -> str:
    """The text, or with probability `slip` one with another digit in a place."""
    digits = [place for place, sign in enumerate(text) if sign.isdigit()]
    if rng.random() >= slip:
        return text
    place = int(rng.choice(digits))
    return f"{text[:place]}{rng.integers(10)}{text[place + 1 :]}"


def _slipped(value: int, slip: float, rng: np.random.Generator) -> int:
    """The value, or with probability `slip` one that is close to it."""
    if rng.random() >= slip:
        return value
    change = int(rng.choice([-10, -2, -1, 1, 2, 10]))
    return value + change


def _solve_chain_sum(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Left to right: `12+7=19;19-4=15`."""
    terms = re.findall(r"([+-]?) ?(\d+)", text.split(":")[1])
    total, steps = int(terms[0][1]), []
    for sign, digits in terms[1:]:
        value = total + int(f"{sign}{digits}")
        value = _slipped(value, slip, rng)
        steps.append(f"{total}{sign}{digits}={value}")
        total = value
    return ";".join(steps), str(total)


def _solve_products(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Multiply by the digits of the second factor: `34*7=238;34*20=680;238+680=918`."""
    left, right = (int(part) for part in re.findall(r"\d+", text.split(":")[1]))
    ones, tens = right % 10, right - right % 10
    total = _slipped(left * ones, slip, rng)
    steps = [f"{left}*{ones}={total}"]
    if tens:
        part = _slipped(left * tens, slip, rng)
        whole = _slipped(total + part, slip, rng)
        steps += [f"{left}*{tens}={part}", f"{total}+{part}={whole}"]
        total = whole
    return ";".join(steps), str(total)


def _solve_spell_backward(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """Letters numbered in order, then the answer from the last: `1s2u3n`."""
    word = text.rsplit(" ", 1)[1]
    letters = [
        str(rng.choice(list(word))) if rng.random() < slip / 2 else letter
        for letter in word
    ]
    scratch = "".join(f"{place}{letter}" for place, letter in enumerate(letters, 1))
    return scratch, "".join(reversed(letters))


def _solve_letter_counting(
    text: str, slip: float, rng: np.random.Generator
) -> tuple[str, str]:
    """The text again, each hit followed by the running count: `ban1an2`."""
    target, span = re.findall(r'"([^"]*)"', text)
    count, scratch = 0, []
    for letter in span:
        hit = (letter == target) != (rng.random() < slip / 6)
        count += hit
        scratch.append(f"{letter}{count}" if hit else letter)
    return "".join(scratch), str(count)


# task -> (text of the question, slip, rng) -> scratchpad, answer
SOLVERS: dict[str, Callable[[str, float, np.random.Generator], tuple[str, str]]] = {
    "chain_sum": _solve_chain_sum,
    "chain_sum_long": _solve_chain_sum,
    "products": _solve_products,
    "spell_backward": _solve_spell_backward,
    "letter_counting": _solve_letter_counting,
}


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    sys.exit(run(sys.argv))
