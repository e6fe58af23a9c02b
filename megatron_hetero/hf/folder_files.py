"""File names in a `transformers` folder."""

CONFIG = "config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json"),
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
COMPANIONS = (CONFIG, "generation_config.json", *TOKENIZER_FILES, *PROCESSOR_FILES)
"""Files other than weights: configuration, tokenizer, processor, chat template."""
ENCODERS = "encoders"
"""The subfolder of an exported model with one folder per additional encoder."""
