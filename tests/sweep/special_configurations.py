"""Fields of configurations that general rules cannot know, by the name of the class."""

from __future__ import annotations

from typing import Any

__all__ = ["CONFIGURATIONS", "Part"]

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

_DIGITS = str.maketrans("0123456789", "ABCDEFGHIJ")
_IMAGE_TOKENS = {f"IMGIMG{str(i).translate(_DIGITS)}Z": 64 + i for i in range(32)}


class Part(str):
    """A model type whose tiny configuration becomes a part of another."""


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "AlignVisionConfig": {"width_coefficient": 1.0, "depth_coefficient": 0.5},
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
    "CHMv2Config": {
        "backbone_config": {
            "model_type": "dinov3_vit",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "out_indices": [1, 2, 3, 4],
            "return_class_token": True,
            "pos_embed_rescale": None,
            "reshape_hidden_states": True,
        },
        "patch_size": 8,
    },
    "ClapAudioConfig": {
        "patch_embeds_hidden_size": 16,
        "hidden_size": 128,
        "spec_size": 64,
        "num_mel_bins": 64,
    },
    "CodeGenConfig": {"n_head": 4, "rotary_dim": 4},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "ConditionalDetrConfig": {"backbone_config": RESNET},
    "Cosmos3EdgeVisionConfig": {"num_patches": 16},
    "CsmConfig": {"num_codebooks": 4, "codec_config": MIMI},
    "CsmDepthDecoderConfig": {"num_codebooks": 4, "max_position_embeddings": 8},
    "CvtConfig": {"depth": (1, 2, 3), "num_heads": (1, 2, 2)},
    "DabDetrConfig": {"backbone_config": RESNET},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DbrxFFNConfig": {"moe_num_experts": 4, "moe_top_k": 2},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "DeformableDetrConfig": {"backbone_config": RESNET, "num_queries": 8},
    "DepthProConfig": {"patch_size": 32},
    "DetrConfig": {"backbone_config": RESNET},
    "DiffLlamaConfig": {"num_key_value_heads": 2},
    "DiffusionGemmaTextConfig": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "global_head_dim": 16,
    },
    "DINOv3ViTConfig": {"pos_embed_rescale": None},
    "Dots1Config": {"n_shared_experts": 1},
    "EfficientLoFTRConfig": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "EfficientNetConfig": {"width_coefficient": 1.0, "depth_coefficient": 0.5, "hidden_dim": 1280},
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
    "Ernie4_5_VLMoeTextConfig": {"moe_k": 2, "moe_num_experts": 4},
    "EsmConfig": {"pad_token_id": 1, "mask_token_id": 5},
    "FalconH1Config": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "FastSpeech2ConformerHifiGanConfig": {"model_in_dim": 16},
    "FlavaImageCodebookConfig": {"freeze": False},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "Gemma4AssistantConfig": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size": 96,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "Gemma4Config": {"vision_config": Part("gemma4_vision")},
    "Gemma4TextConfig": {"global_head_dim": 16},
    "Gemma4UnifiedAssistantConfig": {
        "text_config": {
            "model_type": "gemma4_unified_text",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size": 96,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    },
    "Gemma4VisionConfig": {"pooling_kernel_size": 2},
    "Glm5NextTextConfig": {"index_kpool": 2},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[1, 0]],
        "spatial_target_layers": [1, 1, 1, 1],
        "downsample_rate": "1/2",
    },
    "GraniteMoeHybridConfig": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "GraniteSpeechConfig": {"window_size": 4, "downsample_rate": 2},
    "GraniteSpeechPlusConfig": {"window_size": 4, "downsample_rate": 2},
    "InformerConfig": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "InklingVisionConfig": {"n_layers": 8},
    "InstructBlipConfig": {"image_token_index": 70},
    "InstructBlipVideoConfig": {"video_token_index": 70},
    "JanusVQVAEConfig": {
        "base_channels": 32,
        "num_embeddings": 32,
        "channel_multiplier": (1, 1),
        "num_patches": 16,
    },
    "LayoutLMv3Config": {"coordinate_size": 6, "shape_size": 4},
    "Lfm2Config": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "LightGlueConfig": {"descriptor_dim": 32},
    "LiltConfig": {"hidden_size": 48, "num_attention_heads": 2},
    "Llama4VisionConfig": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "LongcatFlashConfig": {"qk_head_dim": 32},
    "LwDetrConfig": {"projector_scale_factors": [1.0]},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 2},
    "Mask2FormerConfig": {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
    "MaskFormerConfig": {"fpn_feature_size": 32, "mask_feature_size": 32},
    "MistralLarge4TextConfig": {
        "num_hidden_layers": 2,
        "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
        "no_rope_layers": [1, 1],
        "kv_source_layers": [0, 1],
    },
    "MllamaVisionConfig": {"intermediate_layers_indices": [1], "vision_output_dim": 64},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "Molmo2VisionConfig": {"num_position_embeddings": 16},
    "MoonshineStreamingConfig": {"num_key_value_heads": 2},
    "Nemotron3_5TranscribeAudioConfig": {"chunk_right_context": 1},
    "Nemotron3DiarizationConfig": {"chunk_right_context": 1},
    "NemotronHConfig": {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2},
    "NystromformerConfig": {"num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 5},
    "PaddleOCRTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    },
    "Pix2StructTextConfig": {"initializer_range": 0.02},
    "PvtConfig": {"num_encoder_blocks": 4, "image_size": 64, "sequence_reduction_ratios": [4, 2, 2, 1]},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 71, "vision_end_token_id": 72},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 32},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 71, "vision_end_token_id": 72},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
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
    "Sam2HieraDetConfig": {
        "hidden_size": 8,
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads": 1,
        "num_attention_heads_per_stage": [1, 1, 2, 2],
        "blocks_per_stage": [1, 1, 1, 1],
        "window_size_per_stage": [8, 4, 4, 4],
        "global_attention_blocks": [],
    },
    "Sam2VisionConfig": {
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]],
    },
    "SamHQVisionConfig": {"num_pos_feats": 16},
    "SamVisionConfig": {"num_pos_feats": 16},
    "SegGptConfig": {"image_size": [64, 32]},
    "ShieldGemma2Config": {"mm_tokens_per_image": 4},
    "Siglip2VisionConfig": {"num_patches": 16},
    "Step3p7TextConfig": {"sliding_window": 4},
    "SuperGlueConfig": {
        "keypoint_detector_config": {
            "model_type": "superpoint",
            "encoder_hidden_sizes": [16, 16, 32, 32],
            "decoder_hidden_size": 32,
            "descriptor_decoder_dim": 32,
        },
        "hidden_size": 32,
        "keypoint_encoder_sizes": [16, 32],
        "gnn_layers_types": ["self", "cross"],
        "num_attention_heads": 2,
        "sinkhorn_iterations": 3,
    },
    "SuperPointConfig": {"keypoint_decoder_dim": 65},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
    "T5Gemma2EncoderConfig": {"mm_tokens_per_image": 4},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "TableTransformerConfig": {"backbone_config": RESNET},
    "TimeSeriesTransformerConfig": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2]},
    "TvpConfig": {"visual_prompt_size": 8, "max_img_size": 128, "num_frames": 2},
    "UVDocBackboneConfig": {
        "resnet_head": ((3, 32), (32, 32)),
        "resnet_configs": (((32, 32, 1, False), (32, 32, 3, False)), ((32, 32, 1, True), (32, 32, 3, False))),
        "stage_configs": (((32, 1),), ((32, 2),), ((32, 1),), ((32, 1),), ((32, 1),), ((32, 1),)),
    },
    "VibeVoiceAsrConfig": {"acoustic_tokenizer_chunk_size": 3200},
    "VipLlavaConfig": {"vision_feature_layers": [-1, -2]},
    "VitMatteConfig": {"fusion_hidden_sizes": [32, 32, 16, 16]},
    "VoxtralConfig": {"audio_token_id": 70},
    "XLNetConfig": {"d_head": 16, "n_head": 2, "d_model": 32},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 32,
    },
    "VibeVoiceAcousticTokenizerConfig": {
        "num_filters": 4,
        "downsampling_ratios": (2, 2, 4),
        "depths": (1, 1, 1, 1),
    },
}
