"""Installs megnorm and its command; the tested versions are pinned in launch/constraints.txt."""

from setuptools import find_packages, setup

PLOT = ["matplotlib", "scipy", "threadpoolctl"]
PREPROCESS = ["tokenizers", "tiktoken", "gigatoken", "zstandard", "pyarrow"]
# Tests compare with it; it has wheels for Linux only.
MEGATRON = 'megatron-core; sys_platform == "linux"'
HF = ["transformers", "tokenizers"]

setup(
    name="megnorm",
    version="0.1.0",
    description="Distributed pretraining of transformers in which the place of the norms is data",
    python_requires=">=3.10",
    packages=find_packages(include=["megnorm*"]),
    install_requires=[
        "torch>=2.13,<2.14",
        "deepspeed>=0.19.8,<0.20",
        "numpy",
        "sentencepiece",
        "tensorboard",
        "pydantic>=2",
        "PyYAML",
        "typer",
        "rich",
        "orjson",
        "safetensors",
        "psutil",
    ],
    extras_require={
        "preprocess": PREPROCESS,
        "hf": HF,
        "eval": ["lm-eval", *HF],
        "plot": PLOT,
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ruff", MEGATRON, *PREPROCESS, *HF, *PLOT],
    },
    entry_points={"console_scripts": ["megnorm = megnorm.cli:main"]},
)
