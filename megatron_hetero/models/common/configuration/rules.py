"""What `config.json` may say in the families' terms, key by key; how its values fit together is checked in their
`checks`. Looked at before transformers reads the file, which makes tables as long as some of the numbers say.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.files.json_objects import FLAG, TEXT, Rule, Table, either, list_of, number, one_of, whole

SIZE = whole(1, 2**24)
LAYERS = whole(1, 10_000)
SOME_LAYERS = list_of(whole(0, 9_999))
TOKEN = whole(0, 2**27)
THETA = number(0, 1e18, above=True)
STD = number(0, 1e3)
DTYPE = one_of("float32", "bfloat16", "float16", "float64", "auto", None)
_NONE = Rule("none", lambda value: value in (None, {}))
NOT_QUANTISED = replace(
    _NONE,
    because="quantised weights cannot be trained",
    fix="use the unquantised model; if the weights have been dequantised, remove the key",
)
NO_DROPOUT = replace(
    one_of(0, None),
    because="attention is computed without dropout",
    fix="set it to 0",
)
RGB = replace(one_of(3), because="pictures are read as red, green and blue", fix="use a model for RGB pictures")

ROPE: Table = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": THETA,
    "mrope_section": list_of(whole(0, 2**16), 3),
    "partial_rotary_factor": replace(one_of(1, None), because="all of a head is rotated"),
}
_EVERYWHERE: Table = {
    "model_type": TEXT,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "head_dim": SIZE.or_null(),
    "hidden_act": TEXT,
    "initializer_range": STD,
    "rope_theta": THETA,
    "rope_scaling": ROPE,
    "rope_parameters": ROPE,
    "partial_rotary_factor": ROPE["partial_rotary_factor"],
    "dtype": DTYPE,
    "torch_dtype": DTYPE,
    "tie_word_embeddings": FLAG,
    "num_labels": whole(0, 10_000).or_null(),
    "quantization_config": NOT_QUANTISED,
    "compression_config": NOT_QUANTISED,
    "per_layer_config": replace(_NONE, because="all layers of a module are built the same way"),
}
VISION: Table = {
    **_EVERYWHERE,
    "depth": LAYERS,
    "num_heads": SIZE,
    "in_channels": RGB,
    "patch_size": whole(1, 128),
    "temporal_patch_size": whole(1, 16),
    "spatial_merge_size": whole(1, 16),
    "out_hidden_size": SIZE,
}
LANGUAGE: Table = {
    **_EVERYWHERE,
    "vocab_size": TOKEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE.or_null(),
    "max_position_embeddings": whole(1, 2**40),
    "rms_norm_eps": number(0, 1, above=True),
    "attention_dropout": NO_DROPOUT,
    "use_sliding_window": FLAG.or_null(),
    "sliding_window": whole(0, 2**40).or_null(),
    "max_window_layers": whole(0, 2**40).or_null(),
    "layer_types": list_of(TEXT).or_null(),
    "pad_token_id": whole(-1, 2**27).or_null(),
    "bos_token_id": TOKEN.or_null(),
    "eos_token_id": either(TOKEN, list_of(TOKEN)).or_null(),
}


def whole_model(vision: Table, language: Table) -> Table:
    """Of a whole model, or of its language model alone, from those of its modules."""
    tokens: Table = {f"{name}_token_id": TOKEN for name in ("image", "video", "vision_start", "vision_end")}
    # Where there is no text_config, its settings are outside.
    return {**language, "text_config": language, "vision_config": vision, **tokens}
