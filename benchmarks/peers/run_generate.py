"""Transformers `generate` on the static batch: dynamic cache, SDPA attention."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch  # after the environment is set
import transformers
import work

transformers.logging.set_verbosity_error()


def load_model(directory: os.PathLike[str]) -> transformers.PreTrainedModel:
    """The workload's model in float32."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )
    return model.eval()


def sampling(eos: int | None) -> transformers.GenerationConfig:
    """Temperature 1 over the whole vocabulary."""
    return transformers.GenerationConfig(
        max_new_tokens=work.MAX_NEW_TOKENS,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=work.PAD,
        eos_token_id=eos,
    )


def main() -> None:
    """Measure and print one JSON line."""
    options = work.contender_options().parse_args()
    model = load_model(options.weights)
    ids = torch.tensor(work.repeated_prompts(options.workload))
    settings = sampling(eos=None)  # every row runs to its 256th token

    @torch.inference_mode()
    def run() -> int:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        new_tokens = out.shape[1] - work.PROMPT_TOKENS
        assert new_tokens == work.MAX_NEW_TOKENS, "the batch stopped early"
        return out.shape[0] * new_tokens

    work.report(
        "transformers generate",
        options.workload,
        packages=["transformers", "torch"],
        useful=run,
        raw=None,
        static_batch=True,
    )


if __name__ == "__main__":
    main()
