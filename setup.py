"""Packaging. Settings of tools are in pyproject.toml; the exact versions that are tested are in constraints.txt, and
`make test-versions` tests both ends of the ranges here.
"""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megatron-hetero",
    version="0.1.0",
    description="Heterogeneous parallelism for multimodal training on Megatron-Core: each module in its own layout.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_hetero", "megatron_hetero.*"]),
    package_data={"megatron_hetero": ["py.typed"]},
    install_requires=[
        # Newer ones have not been tested.
        "torch>=2.11,<2.16",
        # Likewise. From 0.17 on it needs Python 3.12.
        "megatron-core>=0.16,<0.20",
        # Megatron-Core imports it without asking for it; torch for CUDA brings it.
        'triton>=3.6; python_version >= "3.12"',
        # 5.17 is the first whose configuration of the vision encoder has `rope_parameters`.
        "transformers>=5.17,<5.25",
        "tokenizers>=0.23.1",
        "safetensors>=0.8",
        # Chat templates; older ones let them out of the sandbox.
        "jinja2>=3.1.6",
        # Object stores; older ones run code that a file of references has. torch takes any.
        "fsspec>=2026.6",
        # JSON of a million records in seconds.
        "msgspec>=0.19",
        "numpy>=1.26",
        "packaging>=24.2",
        "pillow>=11",
        "pyyaml>=6",
        # Time limits on regular expressions of strangers; the version that transformers needs too.
        "regex>=2025.10.22",
        "rich>=13.8",
        "typing-extensions>=4.12.2",
    ],
    extras_require={
        # As in megatron_hetero/models/layers/packages.py; both build against an installed torch (docs/installation.md).
        "gpu": ["transformer-engine[pytorch]>=2.9,<2.21", "flash-attn>=2.1,<3"],
        # Kernels of gated delta nets, likewise.
        "delta": ["fla-core>=0.6,<0.7", "causal-conv1d>=1.6,<1.8"],
        # Wheels bring FFmpeg along. Newer ones have not been tested.
        "video": ["av>=15,<20"],
        "parquet": ["pyarrow>=26"],
        "tensorboard": ["tensorboard>=2.17"],
        "wandb": ["wandb>=0.19"],
        # einops is what Megatron-Core's own bridge needs, which is measured beside ours.
        "bench": ["matplotlib>=3.9", "einops>=0.8"],
        # pyright runs on node, which its extra brings along.
        "dev": [
            "pytest>=9",
            "pytest-timeout>=2.4",
            "hypothesis>=6.100",
            "psutil>=6",
            "peft>=0.21",
            "ruff>=0.12",
            "pyright[nodejs]>=1.1.400",
            "pre-commit>=4",
            # The classes of Kubernetes' and JobSet's schemas, which examples/kubernetes is read with.
            "kubeflow-trainer-api>=2.1",
        ],
    },
)
