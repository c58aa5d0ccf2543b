"""Low-rank factors that a run begins with, model.lora.adapter: refused, or loaded."""

from scalerl_jax.config import Config, naming
from scalerl_jax.model.adapter_files import read_adapter
from scalerl_jax.model.architecture import Architecture
from scalerl_jax.model.lora import factor_table
from scalerl_jax.parallel.multihost import put_global
from scalerl_jax.types import PyTree
from scalerl_jax.weights.publication import digest_of


def load_factors(
    config: Config, arch: Architecture, params: PyTree, shardings: PyTree
) -> PyTree:
    """Return the factors of model.lora.adapter, for a base of these params.

    Raises:
        ValueError: they are of another base.
    """
    with naming("model.lora.adapter"):
        files = read_adapter(config.model.lora.adapter, arch)
        files.check_base(digest_of(params))
        return put_global(files.factors(arch), shardings)


def check_adapter(config: Config, arch: Architecture) -> None:
    """Refuse an adapter that is not whole, or of another form than the settings say.

    Raises:
        ValueError: says what it is.
    """
    lora, dtype = config.model.lora, config.model.param_dtype
    with naming("model.lora.adapter"):
        files = read_adapter(lora.adapter, arch)
        theirs, own = factor_table(arch, files.lora), factor_table(arch, lora)
        if theirs != own:
            raise ValueError(
                f"{lora.adapter} has rank {files.lora.rank}, alpha "
                f"{files.lora.alpha:g} and the targets {sorted(theirs['layers'])}, and "
                f"the settings say "
                f"model.lora.rank = {lora.rank}, model.lora.alpha = {lora.alpha:g} and "
                f"{sorted(own['layers'])}; set those of the adapter"
            )
        if files.base_dtype not in ("", dtype):
            raise ValueError(
                f"{lora.adapter} was trained beside a base of {files.base_dtype}, and "
                f"model.param_dtype = {dtype!r}; set that to {files.base_dtype!r}"
            )
