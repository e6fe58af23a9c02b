"""From records to tokens and patches, with the tokenizer and image processor of a `transformers` folder."""
