"""Fields of configurations that general rules cannot know, by the name of the class."""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGURATIONS"]

RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_indices": [2, 3, 4],
}
"""Instead of a backbone of the package timm."""

MIMI = {
    "model_type": "mimi",
    "hidden_size": 32,
    "num_filters": 8,
    "upsampling_ratios": [4, 2],
    "codebook_size": 16,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
    "upsample_groups": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 4,
}

_IMAGE_TOKENS = {f"IMGIMG{chr(65 + i // 26)}{chr(65 + i % 26)}Z": 64 + i for i in range(32)}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "AlignVisionConfig": {"width_coefficient": 0.05, "depth_coefficient": 0.5, "hidden_dim": 64},
    "AriaConfig": {"projector_patch_to_query_dict": {16: 8}},
    "ASTConfig": {"max_length": 64},
    "AutoformerConfig": {
        "prediction_length": 4,
        "context_length": 8,
        "lags_sequence": [1, 2],
        "label_length": 4,
    },
    "BambaConfig": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 60, **_IMAGE_TOKENS}},
    "ChameleonVQVAEConfig": {"base_channels": 32, "num_embeddings": 32, "channel_multiplier": (1, 1)},
    "CodeGenConfig": {"n_head": 4, "rotary_dim": 4},
    "ConditionalDetrConfig": {"backbone_config": RESNET},
    "CsmConfig": {"num_codebooks": 4, "codec_config": MIMI},
    "CsmDepthDecoderConfig": {"num_codebooks": 4, "max_position_embeddings": 8},
    "CvtConfig": {"depth": (1, 2, 3), "num_heads": (1, 2, 2)},
    "DabDetrConfig": {"backbone_config": RESNET},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "DeformableDetrConfig": {"backbone_config": RESNET, "num_queries": 8},
    "DetrConfig": {"backbone_config": RESNET},
    "DiffLlamaConfig": {"num_key_value_heads": 2},
    "EfficientNetConfig": {"width_coefficient": 0.05, "depth_coefficient": 0.5, "hidden_dim": 64},
    "Emu3Config": {
        "vocabulary_map": {
            "<image>": 60,
            "<|extra_200|>": 61,
            **{f"<|visual token {i:06}|>": 64 + i for i in range(32)},
        }
    },
    "Emu3VQVAEConfig": {
        "base_channels": 32,
        "channel_multiplier": (1, 1),
        "codebook_size": 32,
        "attn_resolutions": (3,),
    },
    "Ernie4_5_MoeConfig": {"moe_k": 2, "moe_num_experts": 4},
    "FalconH1Config": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "Gemma4TextConfig": {"global_head_dim": 16},
    "GlmMoeDsaConfig": {},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "InformerConfig": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "LightGlueConfig": {},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "NemotronHConfig": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "ReformerConfig": {
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ["local", "lsh"],
        "max_position_embeddings": 16,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "hash_seed": 0,
    },
    "TableTransformerConfig": {"backbone_config": RESNET},
    "TimeSeriesTransformerConfig": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "XLNetConfig": {"d_head": 16, "n_head": 2, "d_model": 32},
}
