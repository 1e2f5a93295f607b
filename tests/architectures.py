"""Tiny configurations of Hugging Face architectures, each with a batch that gives a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
MIXTURE = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {
    "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PICTURE = {
    "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
SEQ2SEQ = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
Batch = dict[str, Any]


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(seed))


def text(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def answers(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed)[:, 0] % 2}


def translation(seed: int) -> Batch:
    return {"input_ids": tokens(seed), "labels": tokens(seed + 100)}


def pictures(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 8, 8, generator=draw),
        "labels": answers(seed)["labels"],
    }


def larger_pictures(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {**pictures(seed), "pixel_values": torch.randn(4, 3, 32, 32, generator=draw)}


def speech(seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(4, 4, 16, generator=draw), "labels": tokens(seed)}


@dataclass(frozen=True)
class Architecture:
    """What to build, how to feed it, and in how many microbatches its loss is a mean."""

    name: str  # of its class in transformers
    config: str
    sizes: dict[str, Any]
    batch: Callable[[int], Batch] = text


ARCHITECTURES = [
    Architecture("LlamaForCausalLM", "LlamaConfig", GROUPED),
    Architecture("MistralForCausalLM", "MistralConfig", GROUPED),
    Architecture("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    Architecture("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    Architecture("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "query_pre_attn_scalar": 8}),
    Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "query_pre_attn_scalar": 8}),
    Architecture("Phi3ForCausalLM", "Phi3Config", GROUPED),
    Architecture("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    Architecture("GraniteForCausalLM", "GraniteConfig", GROUPED),
    Architecture("CohereForCausalLM", "CohereConfig", GROUPED),
    Architecture("StableLmForCausalLM", "StableLmConfig", GROUPED),
    Architecture("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    Architecture("PhiForCausalLM", "PhiConfig", SMALL),
    Architecture("NemotronForCausalLM", "NemotronConfig", GROUPED),
    Architecture("SmolLM3ForCausalLM", "SmolLM3Config", GROUPED),
    Architecture("Glm4ForCausalLM", "Glm4Config", GROUPED),
    Architecture("BloomForCausalLM", "BloomConfig", {
        "vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }),
    Architecture("GPT2LMHeadModel", "GPT2Config", GPT2),
    Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    Architecture("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}),
    Architecture("OPTForCausalLM", "OPTConfig", {
        **SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16,
    }),
    Architecture("FalconForCausalLM", "FalconConfig", SMALL),
    Architecture("MptForCausalLM", "MptConfig", {
        "vocab_size": 64, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32,
    }),
    Architecture("MambaForCausalLM", "MambaConfig", {
        "vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2,
        "time_step_rank": 4,
    }),
    Architecture("MixtralForCausalLM", "MixtralConfig", {**MIXTURE, "num_local_experts": 4}),
    Architecture("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**MIXTURE, "num_experts": 4}),
    Architecture("OlmoeForCausalLM", "OlmoeConfig", {**MIXTURE, "num_experts": 4}),
    Architecture("DeepseekV2ForCausalLM", "DeepseekV2Config", {
        **MIXTURE, "head_dim": 4, "num_key_value_heads": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy",
    }),
    Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **MIXTURE, "head_dim": 4, "num_key_value_heads": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "n_group": 2, "topk_group": 1,
    }),
    Architecture("GptOssForCausalLM", "GptOssConfig", {**MIXTURE, "num_local_experts": 4}),
    Architecture("BertForMaskedLM", "BertConfig", SMALL),
    Architecture("BertForSequenceClassification", "BertConfig", SMALL, answers),
    Architecture("RobertaForMaskedLM", "RobertaConfig", SMALL),
    Architecture("ModernBertForMaskedLM", "ModernBertConfig", {**SMALL, "cls_token_id": 1,
        "sep_token_id": 2}),
    Architecture("DistilBertForMaskedLM", "DistilBertConfig", {
        "vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
        "max_position_embeddings": 32,
    }),
    Architecture("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0,
    }, translation),
    Architecture("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, translation),
    Architecture("ViTForImageClassification", "ViTConfig", PICTURE, pictures),
    Architecture("DeiTForImageClassification", "DeiTConfig", PICTURE, pictures),
    Architecture("SwinForImageClassification", "SwinConfig", {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
        "window_size": 2,
    }, larger_pictures),
    Architecture("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic",
    }, larger_pictures),
    Architecture("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 32,
    }, larger_pictures),
    Architecture("WhisperForConditionalGeneration", "WhisperConfig", {
        **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
        "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 32,
    }, speech),
]  # fmt: skip
