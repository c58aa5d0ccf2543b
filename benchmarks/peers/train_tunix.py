"""Tunix's RL `Trainer`: its jitted train step with the registered GRPO loss, AdamW.

Gradients are accumulated over microbatches of 8 sequences, within 2 % of the quickest
size.  Rows are padded to 288 positions, as its GRPO learner pads a batch.
"""

import run_tunix  # first: sets the environment

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax
import work
from flax import nnx
from tunix.rl import (
    algo_core,  # noqa: F401  registers the loss
    function_registry,
)
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

MICROBATCH = 8  # sequences


def make_trainer(model: nnx.Module, workload: str, algorithm: GRPOConfig) -> Trainer:
    """Return the actor's trainer as GRPOLearner makes it, without the RLCluster."""
    loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
    trainer = Trainer(
        model,
        optax.chain(
            optax.clip_by_global_norm(work.MAX_GRAD_NORM),
            optax.adamw(work.LEARNING_RATE, weight_decay=0.0),
        ),
        TrainingConfig(
            eval_every_n_steps=10**9,  # never
            gradient_accumulation_steps=work.UPDATE_SEQUENCES[workload] // MICROBATCH,
        ),
        custom_checkpoint_metadata_fn=dict,
    )
    trainer.with_loss_fn(
        lambda model, train_example, algo_config: loss(
            model,
            train_example,
            algo_config=algorithm,
            pad_id=work.PAD,
            eos_id=work.EOS,
        ),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(
        lambda example: {"train_example": example, "algo_config": algorithm}
    )
    return trainer


def main() -> None:
    """Measure and print one JSON line."""
    workload = (options := work.contender_options().parse_args()).workload
    model = run_tunix.load_model(options.weights, workload)
    algorithm = GRPOConfig(
        num_generations=work.GROUP, num_iterations=1, beta=0.0, epsilon=work.CLIP_RATIO
    )
    algorithm.temperature = 1.0
    trainer = make_trainer(model, workload, algorithm)
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)  # as Trainer.train
    prompts = np.asarray(work.repeated_prompts(workload), np.int32)
    advantages = np.asarray(work.rewards(), np.float32)
    padded = {
        kind: [np.asarray(x, np.int32) for x in work.padded_completions(workload, kind)]
        for kind in work.KINDS
    }

    def update(kind: str, first: int) -> None:
        completions, masks = padded[kind]
        for start in range(first, first + work.UPDATE_SEQUENCES[workload], MICROBATCH):
            rows = slice(start, start + MICROBATCH)
            found = step(
                TrainExample(
                    prompt_ids=jnp.asarray(prompts[rows]),
                    prompt_mask=jnp.ones(prompts[rows].shape, bool),
                    completion_ids=jnp.asarray(completions[rows]),
                    completion_mask=jnp.asarray(masks[rows]),
                    advantages=jnp.asarray(advantages[rows]),
                    ref_per_token_logps=None,
                    old_per_token_logps=None,
                )
            )
        jax.block_until_ready((found, nnx.state(trainer.optimizer), nnx.state(model)))
        assert np.isfinite(found[2]), "the gradient is not finite"

    work.report_training(
        "tunix",
        workload,
        packages=["google-tunix", "jax", "jaxlib", "flax", "optax"],
        update=update,
        microbatch=MICROBATCH,
    )


if __name__ == "__main__":
    main()
