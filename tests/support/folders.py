"""Random small models and data sets on disk, as a user has them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from examples.demo.model import (
    DEEPSTACK,
    DELTA,
    EXPERTS,
    QWEN3,
    SYSTEM_PROMPTS,
    chat_template,
    train_tokenizer,
    write_processor,
)
from megatron_hetero.models.registry import FAMILIES
from tests.support.oracle import one_by_one

CORPUS = [
    "What is in the picture? A red disc on the left.",
    "Describe it. Two blue squares, system user assistant\n",
] * 4
WORDS = "red green blue disc square left right above two pictures describe what is it in the".split()


KINDS: dict[str, tuple[Any, Any]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
"""Classes of configurations and models, by family."""


@dataclass(frozen=True)
class ModelChoice:
    """What differs between the random models of the tests. `window` and `full_layers` mean something to `qwen2_5_vl`
    alone; `text_hidden` (0: what the heads are together) and `table_side` to all others; `deepstack` to those that have
    it; `experts`, `top_k` and `expert_ffn` to those with experts; `sparse_step` and `mlp_only_layers` to
    `qwen3_vl_moe`; what follows to those with delta nets, whose `head_dim` is a multiple of 8.
    """

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    vision_heads: int = 4
    vision_head_dim: int = 8
    vision_ffn: int = 52
    text_ffn: int = 74
    vision_layers: int = 3
    text_layers: int = 2
    full_layers: tuple[int, ...] = (1,)
    tied: bool = False
    window: int = 56
    seed: int = 0
    family: str = "qwen2_5_vl"
    text_hidden: int = 0
    deepstack: tuple[int, ...] = (0, 1)
    table_side: int = 6
    experts: int = 6
    top_k: int = 2
    expert_ffn: int = 20
    sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    attention_every: int = 2
    """Layers of which the last has softmax attention, the others delta nets."""
    delta_heads: tuple[int, int] = (2, 4)
    """Of keys and of values."""
    delta_dims: tuple[int, int] = (8, 12)
    taps: int = 4
    shared_ffn: int = 28

    @property
    def hidden(self) -> int:
        """Width of a token of the language model."""
        return self.text_hidden or self.heads * self.head_dim


def write_model(folder: Path, choice: ModelChoice) -> Path:
    """A model with random weights everywhere: biases, norms, embeddings; a vocabulary that tp does not divide."""
    tokenizer = train_tokenizer(CORPUS, 300, chat_template(SYSTEM_PROMPTS[choice.family]))
    config = model_config(choice, tokenizer)
    save_random(folder, KINDS[choice.family][1], config, tokenizer, choice.seed)
    write_processor(folder, choice.family)
    return folder


def save_random(folder: Path, kind: Any, config: Any, tokenizer: Any, seed: int) -> None:
    """A model of this kind with random weights, and its tokenizer, in `folder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
        randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def model_config(choice: ModelChoice, tokenizer: Any) -> Any:
    """The configuration of a model with this tokenizer."""
    token_id: Any = tokenizer.convert_tokens_to_ids
    vision: dict[str, Any] = {
        "depth": choice.vision_layers,
        "hidden_size": choice.vision_heads * choice.vision_head_dim,
        "intermediate_size": choice.vision_ffn,
        "num_heads": choice.vision_heads,
        "out_hidden_size": choice.hidden,
    }
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer) + 3,
        "hidden_size": choice.hidden,
        "intermediate_size": choice.text_ffn,
        "num_hidden_layers": choice.text_layers,
        "num_attention_heads": choice.heads,
        "num_key_value_heads": choice.kv_heads,
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if choice.family in QWEN3:
        vision |= {"patch_size": 16, "num_position_embeddings": choice.table_side**2}
        text["head_dim"] = choice.head_dim
        if choice.family in DEEPSTACK:
            vision["deepstack_visual_indexes"] = list(choice.deepstack)
        if choice.family in DELTA:
            text |= {
                "full_attention_interval": choice.attention_every,
                "linear_num_key_heads": choice.delta_heads[0],
                "linear_num_value_heads": choice.delta_heads[1],
                "linear_key_head_dim": choice.delta_dims[0],
                "linear_value_head_dim": choice.delta_dims[1],
                "linear_conv_kernel_dim": choice.taps,
            }
        if choice.family in EXPERTS:
            text |= {
                "num_experts": choice.experts,
                "num_experts_per_tok": choice.top_k,
                "moe_intermediate_size": choice.expert_ffn,
            }
        if choice.family == "qwen3_vl_moe":
            text |= {"decoder_sparse_step": choice.sparse_step, "mlp_only_layers": list(choice.mlp_only_layers)}
        if choice.family == "qwen3_5_moe":
            del text["intermediate_size"]  # All layers have experts.
            text["shared_expert_intermediate_size"] = choice.shared_ffn
    else:
        vision |= {
            "patch_size": 14,
            "window_size": choice.window,
            "fullatt_block_indexes": [layer for layer in choice.full_layers if layer < choice.vision_layers],
        }
    text["rope_parameters"] = rope | FAMILIES[choice.family].rope_settings(choice.head_dim)
    return KINDS[choice.family][0](
        vision_config=vision,
        text_config=text,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=choice.tied,
    )


def rewrite(folder: Path, edit: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]) -> Path:
    """Replace each tensor in the one file of a folder by those that `edit` returns."""
    path = folder / "model.safetensors"
    tensors = {new: t.contiguous() for n, old in load_file(path).items() for new, t in edit(n, old).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def write_transposed(source: Path, folder: Path) -> Path:
    """Copy a `qwen3_vl_moe` as it is published: the tensors of experts transposed, and older keys."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {"num_experts": config["text_config"].pop("num_local_experts"), "norm_topk_prob": True}
    path.write_text(json.dumps(config))
    return rewrite(folder, lambda name, t: {name: t.mT if ".experts." in name else t})


def write_published(source: Path, folder: Path) -> Path:
    """Copy a `qwen3_5` or `qwen3_5_moe` as it is published: with keys that its code does not read, one tensor for all
    experts of a layer, and tensors of a layer that predicts a further token.
    """
    shutil.copytree(source, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text, experts = config["text_config"], dict[str, dict[int, dict[str, torch.Tensor]]]()
    text |= {"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"}
    text |= {"mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    config["vision_config"] |= {"deepstack_visual_indexes": [], "model_type": config["model_type"]}
    path.write_text(json.dumps(config))

    def without_experts(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        before, found, after = name.partition(".experts.")
        if not found:
            return {name: tensor}
        number, kind, _ = after.split(".")
        experts.setdefault(before, {}).setdefault(int(number), {})[kind] = tensor
        return {}

    rewrite(folder, without_experts)
    hidden, generator = text["hidden_size"], torch.Generator().manual_seed(7)
    new = {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden, generator=generator),
        "mtp.norm.weight": torch.randn(hidden, generator=generator),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 6, hidden, generator=generator).bfloat16(),
    }
    for before, found in experts.items():
        every = [found[number] for number in sorted(found)]
        wide = [torch.cat([each["gate_proj"], each["up_proj"]]) for each in every]
        new[f"{before}.experts.gate_up_proj"] = torch.stack(wide)
        new[f"{before}.experts.down_proj"] = torch.stack([each["down_proj"] for each in every])
    save_file(load_file(folder / "model.safetensors") | new, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_language_model(source: Path, folder: Path) -> Path:
    """Copy the language model of a `qwen3_vl_moe` as the `qwen3_moe` that it is alone, with tensors for each expert."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*preprocessor_config.json"))
    path = folder / "config.json"
    text = json.loads(path.read_text())["text_config"]
    rope = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    text |= {"model_type": "qwen3_moe", "norm_topk_prob": True, "rope_parameters": rope}
    path.write_text(json.dumps(text | {"architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}))
    nested = "model.language_model."

    def alone(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if name.startswith("model.visual."):
            return {}
        return one_by_one(name.replace(nested, "model."), tensor)

    return rewrite(folder, alone)


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights such that every parameter matters, activations stay of order one, and routers prefer some experts by far
    more than rounding.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.uniform_(0.01, 1).log_()  # States last for some tokens to many.
        elif parameter.dim() == 1:
            parameter.normal_(std=0.2)
        elif name.endswith(".mlp.gate.weight"):
            parameter.normal_(std=0.5)
        else:  # Of three dims: all experts of a layer.
            inputs = parameter.shape[-1] if parameter.dim() == 3 else parameter[0].numel()
            parameter.normal_(std=(1.0 / inputs) ** 0.5)
    centred: Any = model.config
    for name, parameter in model.named_parameters():
        at_zero = "qwen3_5" in centred.model_type and "visual." not in name and ".linear_attn." not in name
        if ("norm" in name or "ln_q" in name) and not at_zero:
            parameter.add_(1.0)


def write_data(
    folder: Path,
    samples: int,
    seed: int = 0,
    pictures: tuple[int, ...] = (1, 2, 0, 1),
    turns: int = 1,
    details: tuple[int, ...] = (0,),
) -> Path:
    """`folder/data.jsonl` and `folder/images`: sample i has `pictures[i % len]` noise pictures of several sizes, and
    `details[i % len]` for the encoder `detail`, shown after the first.
    """
    rng = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for i in range(samples):
        images = [_picture(folder, f"{i}_{k}.png", rng) for k in range(pictures[i % len(pictures)])]
        more = [_picture(folder, f"{i}_detail_{k}.png", rng) for k in range(details[i % len(details)])]
        records.append(_record(images, more, turns, rng))
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _picture(folder: Path, name: str, rng: random.Random) -> str:
    size = rng.choice([(56, 56), (84, 56), (140, 84), (112, 196), (61, 200)])
    Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(folder / "images" / name)
    return name


def _record(images: list[str], details: list[str], turns: int, rng: random.Random) -> dict[str, object]:
    def say(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    conversations = []
    for turn in range(turns):
        shown = ["<image>\n"] * len(images)
        shown[1:1] = ["<detail>\n"] * len(details)
        marks = "".join(shown) if turn == 0 else ""
        conversations += [{"from": "human", "value": marks + say(2, 6)}, {"from": "gpt", "value": say(1, 8)}]
    record: dict[str, object] = {"conversations": conversations}
    if images:
        record["image"] = images if len(images) > 1 else images[0]
    if details:
        record["detail"] = details if len(details) > 1 else details[0]
    return record


def write_long(data: Path, long: set[int]) -> None:
    """Make the questions of these samples long."""
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for i in long:
        records[i]["conversations"][0]["value"] += " what is it" * 100
    data.write_text("".join(json.dumps(record) + "\n" for record in records))


PLAIN_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_qwen2(folder: Path, *, tied: bool = False) -> Path:
    """A Qwen2 language model alone, with a template that shows no images."""
    tokenizer = train_tokenizer(CORPUS, vocab_size=300)
    tokenizer.chat_template = PLAIN_TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 3,
        hidden_size=48,
        intermediate_size=74,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    save_random(folder, Qwen2ForCausalLM, config, tokenizer, seed=5)
    return folder
