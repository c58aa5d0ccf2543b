"""Eight CPU devices for every test, whatever the machine has."""

import jax

# Before the backend starts, which happens at the first array.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
