"""From records to tokens and patches, with the files of a `transformers` folder."""
