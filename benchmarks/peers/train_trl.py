"""TRL's `GRPOTrainer`: its `compute_loss`, its backward pass, clipping and AdamW.

Gradients are accumulated over microbatches of 8 sequences, within 2 % of the quickest
size.  Rows are padded to 288 positions, as the trainer pads a batch.
"""

import tempfile

import run_generate  # first: sets the environment

# isort: split
import torch
import transformers
import work
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

MICROBATCH = 8  # sequences


def make_tokenizer(workload: str) -> transformers.PreTrainedTokenizerFast:
    """Text is the decimal token ids; nothing is fetched."""
    ids = range(work.WORKLOADS[workload]["vocab"])
    tokenizer = Tokenizer(
        models.WordLevel({str(token): token for token in ids}, unk_token=str(work.PAD))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=str(work.PAD), eos_token=str(work.EOS)
    )


def make_trainer(
    model: transformers.PreTrainedModel, workload: str, directory: str
) -> GRPOTrainer:
    """Return a trainer that saves nothing in `directory`."""
    settings = GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=work.SEED,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=work.UPDATE_SEQUENCES[workload] // MICROBATCH,
        num_generations=work.GROUP,
        max_completion_length=work.MAX_NEW_TOKENS,
        num_iterations=1,
        beta=0.0,
        epsilon=work.CLIP_RATIO,
        loss_type="grpo",
        learning_rate=work.LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=work.MAX_GRAD_NORM,
        gradient_checkpointing=False,  # memory suffices
    )
    texts = [" ".join(map(str, ids)) for ids in work.prompts(workload)]
    return GRPOTrainer(
        model=model,
        args=settings,
        processing_class=make_tokenizer(workload),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": texts}),
    )


def main() -> None:
    """Measure and print one JSON line."""
    workload = (options := work.contender_options().parse_args()).workload
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(
            run_generate.load_model(options.weights), workload, directory
        )
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    sequences = work.UPDATE_SEQUENCES[workload]
    trainer.current_gradient_accumulation_steps = sequences // MICROBATCH
    prompts = torch.tensor(work.repeated_prompts(workload))
    advantages = torch.tensor(work.rewards())
    padded = {
        kind: [torch.tensor(x) for x in work.padded_completions(workload, kind)]
        for kind in work.KINDS
    }

    def update(kind: str, first: int) -> None:
        model.train()
        completions, masks = padded[kind]
        for start in range(first, first + sequences, MICROBATCH):
            rows = slice(start, start + MICROBATCH)
            loss = trainer.compute_loss(  # divided by the microbatches
                model,
                {
                    "prompt_ids": prompts[rows],
                    "prompt_mask": torch.ones_like(prompts[rows]),
                    "completion_ids": completions[rows],
                    "completion_mask": masks[rows],
                    "advantages": advantages[rows],
                },
            )
            trainer.accelerator.backward(loss)
        norm = trainer.accelerator.clip_grad_norm_(
            model.parameters(), work.MAX_GRAD_NORM
        )
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(norm), "the gradient is not finite"

    work.report_training(
        "trl",
        workload,
        packages=["trl", "transformers", "torch", "accelerate"],
        update=update,
        microbatch=MICROBATCH,
    )


if __name__ == "__main__":
    main()
