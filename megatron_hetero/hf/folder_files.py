"""What the files of a `transformers` folder are called, and where an export puts it together."""

from pathlib import Path

CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANIONS = (CONFIG, "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Files beside the weights that make a folder complete: configuration, tokenizer, processor, chat template."""
ENCODERS = "encoders"
"""The folder in an exported model that has a folder for each further encoder."""


def partial_of(target: Path) -> Path:
    """Where an exported folder is while it is written."""
    return target.parent / f".{target.name}.partial"


def replaced_of(target: Path) -> Path:
    """Where the earlier export is while the new one takes its place."""
    return target.parent / f".{target.name}.replaced"


def lock_of(target: Path) -> Path:
    """What an export has locked while it writes: two would mix what they write."""
    return target.parent / f".{target.name}.lock"
