"""What mutations put into texts, by kind of text."""

from __future__ import annotations

LAYOUT = (
    "tp", "sp", "cp", "dp", "pp", "ep", "TP", ":", ",", "@", "-", "|", " ", "0", "1", "2", "3", "8", "64", "9999999999",
    "-1", "1.5", "tp:2", "@0-3", "@4-7", "²", "٣", "１", "", "\0", "\n", "x" * 300, "dp:1,dp:1", "tp:2,tp:2", "sp:8",
)  # fmt: skip
WORLDS = (*["8"] * 20, "1", "2", "4", "6", "16", "64", "0", "-1", "1000", "20000", "99999999999", "x", "")
YAML = (
    ":", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "<<: ", "!!python/object/apply:os.system [id]", "!!binary x",
    "\t", "|", ">", "#", "? ", "%YAML 1.1\n", "---\n", "...\n", "'", '"', "\0", "yes", "0o7", "1e3", "2024-01-01", "~",
    "\ufeff", "a: &a [*a]\n", "[" * 500, "\u2028", "é",
)  # fmt: skip
RECORD = (
    "\x1b[2J", "\ud83d", "a\0b", "\u202e", "../x", "../../model/config.json", "/etc/passwd", "/dev/zero", "~",
    "good.png/", "<image>", "<image><image>", "<video>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>",
    "{{ 1 / 0 }}", "good.PNG\n", ".", "human", "gpt", "x" * 100_000, "n\u0303",
)  # fmt: skip
JSON = (
    "{", "}", "[", "]", ",", ":", '"', "\\", "\\u", "\\ud83d", "\n", "\0", "9" * 5000, "[" * 3000,
    '{"a":' * 3000, "NaN", "1e999", "\ufeff", "\u2028", '"image": 1,', '"image": "x", "image": "y",',
)  # fmt: skip
NAMES = (
    "{", "}", ",", "..", "/", "*", "?", "[a]", "://", "::", "{reference}", "{ftp}", "{tar}", "s3", "127.0.0.1:9/*",
    "{..}", "file:///etc/passwd", "{/etc/passwd}", "{/etc}/*", "{0..99}", "{0..999999}", "data-00.tar", "a", "\0",
    "\ud800", "é", "{" * 3000, "}" * 3000, "{a}" * 90, "x" * 5000, "{0..%s}" % ("9" * 5000), "data:,", "\n",
)  # fmt: skip
TEMPLATES = (
    "{{ 1 / 0 }}", "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}", "{{ x.y.z }}",
    "{%", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os.system('id') }}", "",
    "{{ raise_exception('no') }}", "{% include '/etc/passwd' %}", "{{ messages }}",
)  # fmt: skip
PATTERNS = (
    r"(\\w+\\.?)+!", "(a|.)*", "(?i)Q", "(", "[", "a**", ".*" * 30, "bias", "use_dora", "^", "", "x" * 999, "(((a)))",
    "|", "a{999}", "[^.]*q_proj", "(q|k)_proj",
)  # fmt: skip
"""What layers are named by in the configuration of an adapter, as JSON."""
TOOLS: dict[str, tuple[str, ...]] = {
    "megatron_hetero.cli.export": ("--dtype", "--model", "--vision", "--encoder", "--shard-gb"),
    "megatron_hetero.cli.import": ("--vision", "--encoder", "--fresh-projector", "--seed"),
    "examples.make_demo": ("--model", "--train-pictures", "--heldout-questions", "--seed", "--force"),
    "megatron_hetero.cli.inspect_data": (
        "-n",
        "--config",
        "--statistics",
        "--data.datasets",
        "--model.hf_path",
        "--data.max_pixels",
    ),
}
SMALL = {"examples.make_demo": ("--train-pictures", "4", "--heldout-questions", "4")}
VALUES = (
    "", "0", "1", "-1", "3", "1e9", "1e400", "nan", "inf", "-inf", "true", "false", "null", "none", "x", "[]", "{}",
    "999999999999999999999", "0.5", "1_000", "0x10", "0400", "4:16", "/", ".", "~", "/dev/zero", "/dev/null", "\0",
    "/proc/self/mem", "a", "b%0", "a%1e9", "a b", "--", "vision", "text", "projector", "auto", "adamw", "sgd",
    "bfloat16", "float16", "é" * 200, "x" * 5000, "\x1b[2J", "\ud800", "sp:8", "latest", "never",
)  # fmt: skip
NOT_RUN = ("--data.workers", "--train.iters", "--train.global_batch_size")
ENDLESS = ("1e9", "999999999999999999999")
"""Values that have a run take for ever, rightly; `NOT_RUN`: flags with which others do, or that start processes."""
FITTING = {
    "integer": ("0", "1", "2", "3", "7", "64", "10000", "-1"),
    "number": ("0", "1", "0.5", "1e-30", "1e30", "-1", "2", "0.999"),
    "true": ("true", "false"),
}
"""By a word of what a flag's help says of its values."""
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TERM", "COLUMNS")
