"""Transformers continuous batching: paged cache, each request with its own limit.

On CPU its attention is one masked matrix over all running requests: it grows with the
square of their number.  `RUNNING` is the best of 32, 64 and 128 for each workload.
"""

from collections.abc import Sequence

import run_generate  # first: sets the environment
import work
from transformers import ContinuousBatchingConfig, PreTrainedModel

PAGE = 32  # tokens
RUNNING = {"W1": 64, "W2": 128}  # requests at a time, at the real lengths
RUNNING_RAW = 32  # at 256 tokens each
RESULT_TIMEOUT_S = 1800  # for the first sequence that is done


def complete(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    running: int,
) -> int:
    """Every prompt at its length, `running` at a time; returns the tokens decoded."""
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        # Room for all at their longest; the default pool takes half the memory.
        num_blocks=running * (work.PROMPT_TOKENS + work.MAX_NEW_TOKENS) // PAGE,
        max_batch_tokens=running * work.PROMPT_TOKENS,
        max_requests_per_batch=running,
    )
    done: list[int] = []
    with model.continuous_batching_context_manager(
        generation_config=run_generate.sampling(eos=-1),  # an id never drawn
        continuous_batching_config=batching,
        persistent_manager=True,
    ) as manager:
        for ids, length in zip(prompts, lengths, strict=True):
            manager.add_request(ids, max_new_tokens=length)
        while len(done) < len(prompts):
            out = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if out is None or out.error:
                raise RuntimeError(f"continuous batching gave up: {out}")
            if out.is_finished():
                done.append(len(out.generated_tokens))
    assert sorted(done) == sorted(lengths), "a request stopped at another length"
    return sum(done)


def main() -> None:
    """Measure and print one JSON line."""
    parser = work.contender_options()
    parser.add_argument("--raw", action="store_true", help="measure that rate too")
    options = parser.parse_args()
    model = run_generate.load_model(options.weights)
    prompts = work.repeated_prompts(options.workload)

    def useful() -> int:
        running = RUNNING[options.workload]
        return complete(model, prompts, work.completion_lengths(), running=running)

    def raw() -> int:
        # The manager is kept from run to run, and this one has another size.
        model.destroy_cached_continuous_batching_manager()
        lengths = [work.MAX_NEW_TOKENS] * work.SEQUENCES
        return complete(model, prompts, lengths, running=RUNNING_RAW)

    work.report(
        "transformers continuous",
        options.workload,
        packages=["transformers", "torch"],
        useful=useful,
        raw=raw if options.raw else None,
    )
    model.destroy_cached_continuous_batching_manager()


if __name__ == "__main__":
    main()
