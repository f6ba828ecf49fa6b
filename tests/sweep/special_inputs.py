"""Inputs that general rules cannot know, by the class of the model or of its configuration."""

from __future__ import annotations

from typing import Any

import torch

from tests.sweep.context import NUM_SAMPLES, Context, Maker

__all__ = ["SPECIAL"]

N = NUM_SAMPLES


def _normal(*shape: int) -> Maker:
    """Random numbers for each sample."""
    return lambda c: c.normal(N, *shape)


def _tokens(*shape: int) -> Maker:
    return lambda c: c.tokens(N, *shape)


def _images(*before: int) -> Maker:
    """Several images for each sample."""
    return lambda c: c.normal(N, *before, *c.image_shape)


def _frames(length: int) -> Maker:
    """Features of sounds, time before frequency."""

    def make(c: Context) -> Any:
        names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mel_bins")
        return c.normal(N, length, c.find(*names, default=16, within=c.audio))

    return make


def _constant(value: Any) -> Maker:
    return lambda c: value


def _ones(*shape: int) -> Maker:
    return lambda c: torch.ones(N, *shape, dtype=torch.long)


NONE = _constant(None)

_SERIES = {
    "past_values": _normal(10),
    "past_time_features": _normal(10, 0),
    "past_observed_mask": lambda c: torch.ones(N, 10),
    "future_values": _normal(4),
    "future_time_features": _normal(4, 0),
}
_SPEECH_LABELS = {
    "spectrogram_labels": _normal(8, 16),
    "duration_labels": _ones(8),
    "pitch_labels": _normal(8, 1),
    "energy_labels": _normal(8, 1),
}
_FRAMES = {"input_features": _frames(64)}
_SOUND = {"input_values": _normal(1, 1920)}
_IMAGES = {"pixel_values": _images(1)}
_PAIRS = {"pixel_values": _images(2)}
_VIDEO = {"pixel_values": _images(2)}
_PATCHES = {
    "pixel_values": _normal(16, 192),
    "pixel_attention_mask": _ones(16),
    "spatial_shapes": lambda c: torch.full((N, 2), 4),
}

_SHARED: tuple[tuple[str, dict[str, Maker]], ...] = (
    ("AutoformerConfig InformerConfig TimeSeriesTransformerConfig", _SERIES),
    (
        "CanaryConfig CohereAsrConfig LasrCTCConfig LasrEncoderConfig Nemotron3_5AsrConfig "
        "NemotronAsrStreamingConfig NemotronAsrStreamingEncoderConfig ParakeetCTCConfig "
        "ParakeetEncoderConfig ParakeetRNNTConfig ParakeetTDTConfig",
        _FRAMES,
    ),
    ("ClapAudioConfig ClapConfig", {"input_features": _normal(1, 64, 64)}),
    (
        "ColModernVBertConfig Idefics2Config Idefics3Config ModernVBertConfig SmolVLMConfig UltraVBertConfig",
        _IMAGES,
    ),
    (
        "DacConfig EncodecConfig MimiConfig MimiEncoderConfig PeAudioConfig PeAudioEncoderConfig "
        "PocketTTSAudioTokenizerConfig PocketTTSAudioTokenizerEncoderConfig XcodecConfig",
        _SOUND,
    ),
    (
        "Dots3NoteConfig Qwen2_5OmniThinkerConfig Qwen3OmniMoeThinkerConfig SpeechEncoderDecoderConfig",
        {"input_features": NONE},
    ),
    ("EfficientLoFTRConfig LightGlueConfig SuperGlueConfig", _PAIRS),
    ("EmbeddingGemma2Config Gemma4UnifiedConfig", {"pixel_values": NONE, "input_features": NONE}),
    ("FastSpeech2ConformerConfig FastSpeech2ConformerWithHifiGanConfig", _SPEECH_LABELS),
    (
        "FunAsrNanoConfig FunAsrNanoEncoderConfig",
        {"input_features": _normal(16, 112), "input_features_mask": _ones(16)},
    ),
    ("GraniteSpeech5CTCConfig GraniteSpeech5EncoderConfig", {"input_features": _normal(16, 64)}),
    (
        "GraniteSpeechConfig GraniteSpeechPlusConfig",
        {"input_features": _normal(16, 32), "input_features_mask": NONE},
    ),
    (
        "Inkling2Config Inkling2VisionConfig",
        {
            "pixel_values": lambda c: c.normal(N * 16, 32, 3),
            "image_grid_thw": lambda c: torch.tensor([[1, 4, 4]] * N),
        },
    ),
    ("InklingConfig InklingVisionConfig", {"pixel_values": lambda c: c.normal(N * 2, 2, 8, 8, 3)}),
    (
        "Kimi_K25Config Kimi_K25VisionConfig KimiK25Config PaddleOCRVLConfig",
        {"pixel_values": lambda c: c.normal(N * 16, 3, 8, 8)},
    ),
    ("Lfm2VlConfig Siglip2Config Siglip2VisionConfig", _PATCHES),
    ("LlavaNextVideoConfig LlavaOnevisionConfig", {"pixel_values": _images(3), "pixel_values_videos": NONE}),
    ("MimiDecoderConfig PocketTTSAudioTokenizerDecoderConfig", {"latents": _normal(32, 8)}),
    ("MusicgenDecoderConfig MusicgenMelodyDecoderConfig", {"input_ids": _tokens(4, 8)}),
    (
        "Nemotron3_5TranscribeAsrAudioConfig Nemotron3_5TranscribeAudioConfig "
        "Nemotron3_5TranscribeConfig Nemotron3DiarizationAudioConfig Nemotron3DiarizationConfig",
        {"input_features": _frames(32), "input_features_mask": _ones(32)},
    ),
    (
        "NeuCodecConfig Xcodec2Config",
        {
            "input_values": _normal(1, 3200),
            "input_features": _normal(10, 32),
            "input_features_mask": _ones(10),
            "attention_mask": _ones(10),
        },
    ),
    ("PatchTSMixerConfig PatchTSTConfig", {"past_values": _normal(32, 1)}),
    (
        "PPOCRV5ServerRecConfig PPOCRV6SmallRecConfig PPOCRV6TinyRecConfig",
        {"pixel_values": _normal(3, 48, 64)},
    ),
    (
        "Sam3DETRDecoderConfig Sam3LiteTextDETRDecoderConfig",
        {
            "vision_features": _normal(16, 32),
            "text_features": _normal(8, 32),
            "vision_pos_encoding": _normal(16, 32),
        },
    ),
    (
        "Sam3DETREncoderConfig Sam3LiteTextDETREncoderConfig",
        {
            "vision_features": lambda c: [c.normal(N, 32, 4, 4)],
            "vision_pos_embeds": lambda c: [c.normal(N, 32, 4, 4)],
            "text_features": _normal(8, 32),
        },
    ),
    (
        "Sam3LiteTextMaskDecoderConfig Sam3MaskDecoderConfig",
        {
            "decoder_queries": _normal(8, 32),
            "backbone_features": lambda c: [c.normal(N, 32, 8, 8), c.normal(N, 32, 4, 4)],
            "encoder_hidden_states": _normal(16, 32),
        },
    ),
    ("TimesformerConfig XCLIPConfig", {"pixel_values": _images(8)}),
    ("VideoPrismConfig VideoPrismVisionConfig", {"pixel_values_videos": _images(16)}),
)
"""What several classes have in common: their names, and the makers."""

SPECIAL: dict[str, dict[str, Maker]] = {
    **{name: makers for names, makers in _SHARED for name in names.split()},
    "ASTConfig": {"input_values": _frames(64)},
    "Blip2QFormerConfig": {"query_embeds": _normal(8, 32), "encoder_hidden_states": _normal(5, 32)},
    "BltLocalDecoderConfig": {
        "inputs_embeds": _normal(8, 32),
        "patch_embeds": _normal(2, 32),
        "attention_mask": NONE,
    },
    "BltLocalEncoderConfig": {
        "attention_mask": NONE,
        "num_patches": _constant(2),
        "patch_ids": lambda c: torch.tensor([[0] * 4 + [1] * 4] * N),
    },
    "BridgeTowerVisionConfig": {"image": _images()},
    "ColQwen2Config": {
        "pixel_values": _normal(16, 384),
        "image_grid_thw": lambda c: torch.tensor([[1, 4, 4]] * N),
    },
    "CsmConfig": {"input_ids": _tokens(8, 4), "labels": NONE},
    "DecisionTransformerConfig": {
        "states": _normal(5, 17),
        "actions": _normal(5, 4),
        "rewards": _normal(5, 1),
        "returns_to_go": _normal(5, 1),
        "timesteps": _tokens(5),
        "attention_mask": _ones(5),
    },
    "DeepseekOcr2VisionEncoderConfig": {"num_patches": _constant(4)},
    "DeepseekVLHybridConfig": {"high_res_pixel_values": _images()},
    "DepthProConfig": {"pixel_values": _normal(3, 128, 128)},
    "DiaConfig": {"decoder_input_ids": _tokens(6, 9)},
    "DiaDecoderConfig": {"input_ids": _tokens(6, 9), "encoder_hidden_states": _normal(8, 32)},
    "Dots3NoteAudioConfig": {
        "input_features": _normal(16, 100),
        "chunk_sample_lengths": lambda c: torch.full((N,), 16000),
    },
    "EvollaConfig": {"protein_input_ids": _tokens(8), "protein_attention_mask": _ones(8)},
    "FastSpeech2ConformerHifiGanConfig": {"spectrogram": _normal(8, 16)},
    "Florence2VisionConfig": {"hidden_states": _images()},
    "FuyuConfig": {"pixel_values": _normal(4, 192)},
    "Gemma3nAudioConfig": {
        "audio_mel": _normal(32, 32),
        "audio_mel_mask": lambda c: torch.zeros(N, 32, dtype=torch.bool),
    },
    "Gemma4Config": {
        "pixel_values": _normal(16, 192),
        "image_position_ids": lambda c: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(
            N, 16, 2
        ),
        "input_features": NONE,
    },
    "Gemma4VisionConfig": {
        "pixel_values": _normal(16, 192),
        "pixel_position_ids": lambda c: torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(
            N, 16, 2
        ),
    },
    "GlmImageConfig": {"pixel_values": NONE, "image_grid_thw": NONE},
    "GraniteDoclingConfig": {"pixel_attention_mask": _ones(1)},
    "Idefics2PerceiverConfig": {"context": _normal(8, 32), "attention_mask": _ones(8)},
    "IdeficsConfig": {**_IMAGES, "image_attention_mask": _ones(8, 1)},
    "InklingAudioConfig": {"audio_input_ids": _tokens(6, 16)},
    "InstructBlipConfig": {"qformer_input_ids": _tokens(5)},
    "InstructBlipVideoConfig": {"qformer_input_ids": _tokens(5), "pixel_values": _images(2)},
    "Kosmos2_5VisionConfig": {"hidden_states": _normal(8, 32), "attention_mask": _ones(8)},
    "Kosmos2Config": {
        "input_ids": _tokens(12),
        "image_embeds_position_mask": lambda c: torch.tensor([[0] + [1] * 8 + [0] * 3] * N),
    },
    "KyutaiSpeechToTextConfig": {"input_ids": _tokens(8, 9)},
    "LlavaNextConfig": {"pixel_values": _images(3)},
    "LxmertConfig": {"visual_feats": _normal(4, 32), "visual_pos": _normal(4, 4), "labels": NONE},
    "MiniCPMV4_6VisionConfig": {"target_sizes": lambda c: torch.tensor([[4, 4]] * N)},
    "MllamaConfig": {
        "pixel_values": _images(1, 4),
        "aspect_ratio_ids": _ones(1),
        "aspect_ratio_mask": _ones(1, 4),
        "cross_attention_mask": _ones(8, 1, 4),
    },
    "MllamaVisionConfig": {
        "pixel_values": _images(1, 4),
        "aspect_ratio_ids": _ones(1),
        "aspect_ratio_mask": _ones(1, 4),
    },
    "Molmo2VisionConfig": {"pixel_values": _normal(16, 192)},
    "MoshiDepthConfig": {"last_hidden_state": _normal(8, 32)},
    "MuseSparkAudioConfig": {"input_values": _normal(1920)},
    "NeoMMEConfig": {"pixel_values": lambda c: c.normal(N * 16, 192)},
    "PaddleOCRVisionConfig": {"pixel_values": _normal(16, 3, 8, 8)},
    "Phi4MultimodalAudioConfig": {
        "hidden_states": _normal(32, 32),
        "mask": lambda c: torch.ones(N, 32, dtype=torch.bool),
    },
    "PI0Config": {
        "state": _normal(32),
        "noise": _normal(4, 32),
        "timestep": lambda c: torch.full((N,), 0.3),
        "actions": _normal(4, 32),
        "pixel_values": _images(1),
        "pixel_attention_mask": lambda c: torch.ones(N, 1, dtype=torch.bool),
    },
    "Pix2StructConfig": {
        "flattened_patches": lambda c: torch.cat([torch.ones(N, 6, 2), c.normal(N, 6, 32)], dim=-1),
        "attention_mask": NONE,
    },
    "Pix2StructVisionConfig": {
        "flattened_patches": lambda c: torch.cat([torch.ones(N, 6, 2), c.normal(N, 6, 32)], dim=-1)
    },
    "PPOCRV5MobileRecConfig": {"pixel_values": _normal(3, 96, 128)},
    "Qwen2_5OmniBigVGANConfig": {"mel_spectrogram": _normal(32, 8)},
    "Qwen2AudioConfig": {
        "feature_attention_mask": _ones(32),
        "input_ids": lambda c: torch.cat(
            [c.tokens(N, 7), torch.full((N, 1), c.find("audio_token_index"))], dim=1
        ),
    },
    "RagConfig": {
        "context_input_ids": lambda c: c.tokens(5 * N, 8),
        "context_attention_mask": lambda c: torch.ones(5 * N, 8, dtype=torch.long),
        "doc_scores": _normal(5),
    },
    "ReformerConfig": {"input_ids": _tokens(16)},
    "SegGptConfig": {
        "pixel_values": _normal(3, 32, 32),
        "prompt_pixel_values": _normal(3, 32, 32),
        "prompt_masks": _normal(3, 32, 32),
        "labels": NONE,
    },
    "SpeechT5HifiGanConfig": {"spectrogram": _normal(8, 32)},
    "T5Gemma2DecoderConfig": {"encoder_hidden_states": _normal(8, 32)},
    "TimesFm2_5Config": {"past_values": _normal(32)},
    "TimesFmConfig": {"past_values": _normal(32), "freq": lambda c: torch.zeros(N, dtype=torch.long)},
    "TvpConfig": {"pixel_values": _normal(2, 3, 128, 128)},
    "UnivNetConfig": {"input_features": _frames(8), "noise_sequence": _normal(8, 32)},
    "VibeVoiceAcousticTokenizerConfig": {"input_values": _normal(1, 6400)},
    "VideoLlama3Config": {"image_merge_sizes": _ones()},
    "VideoLlama3VisionConfig": {"merge_sizes": _ones()},
    "VideoMAEConfig": {"pixel_values": _images(16)},
    "VivitConfig": {"pixel_values": _images(32)},
    "Wav2Vec2BertConfig": {"input_features": _normal(16, 32)},
    "XCLIPVisionConfig": {"pixel_values": lambda c: c.normal(8 * N, *c.image_shape)},
}
"""Makers of inputs by name; one that gives None leaves the input out."""
