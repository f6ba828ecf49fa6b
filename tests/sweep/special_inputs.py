"""Inputs that general rules cannot know, by the class of the model or of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.sweep.inputs import Context

__all__ = ["SPECIAL"]

Maker = Callable[["Context"], Any]

N = 4
"""Samples."""


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


SPECIAL: dict[str, dict[str, Maker]] = {
    "ASTConfig": {"input_values": _frames(64)},
    "AutoformerConfig": _SERIES,
    "Blip2QFormerConfig": {"query_embeds": _normal(8, 32), "encoder_hidden_states": _normal(5, 32)},
    "BltLocalDecoderConfig": {
        "inputs_embeds": _normal(8, 32),
        "patch_embeds": _normal(2, 32),
        "attention_mask": NONE,
    },
    "CanaryConfig": _FRAMES,
    "CohereAsrConfig": _FRAMES,
    "ColModernVBertConfig": _IMAGES,
    "ColQwen2Config": {
        "pixel_values": _normal(16, 384),
        "image_grid_thw": lambda c: torch.tensor([[1, 4, 4]] * N),
    },
    "CsmConfig": {"input_ids": _tokens(8, 4), "labels": NONE},
    "DacConfig": _SOUND,
    "DecisionTransformerConfig": {
        "states": _normal(5, 17),
        "actions": _normal(5, 4),
        "rewards": _normal(5, 1),
        "returns_to_go": _normal(5, 1),
        "timesteps": _tokens(5),
        "attention_mask": _ones(5),
    },
    "DeepseekVLHybridConfig": {"high_res_pixel_values": _images()},
    "DepthProConfig": {"pixel_values": _normal(3, 128, 128)},
    "DiaConfig": {"decoder_input_ids": _tokens(6, 9)},
    "Dots3NoteConfig": {"input_features": NONE},
    "EfficientLoFTRConfig": _PAIRS,
    "EncodecConfig": _SOUND,
    "EvollaConfig": {"protein_input_ids": _tokens(8), "protein_attention_mask": _ones(8)},
    "FuyuConfig": {"pixel_values": _normal(4, 192)},
    "Gemma3nAudioConfig": {
        "audio_mel": _normal(32, 32),
        "audio_mel_mask": lambda c: torch.zeros(N, 32, dtype=torch.bool),
    },
    "GraniteSpeechConfig": {"input_features": _normal(16, 32), "input_features_mask": NONE},
    "GraniteSpeechPlusConfig": {"input_features": _normal(16, 32), "input_features_mask": NONE},
    "Idefics2Config": _IMAGES,
    "Idefics2PerceiverConfig": {"context": _normal(8, 32), "attention_mask": _ones(8)},
    "Idefics3Config": _IMAGES,
    "IdeficsConfig": {**_IMAGES, "image_attention_mask": _ones(8, 1)},
    "InformerConfig": _SERIES,
    "InstructBlipConfig": {"qformer_input_ids": _tokens(5)},
    "InstructBlipVideoConfig": {"qformer_input_ids": _tokens(5), "pixel_values": _images(2)},
    "LasrCTCConfig": _FRAMES,
    "LasrEncoderConfig": _FRAMES,
    "LightGlueConfig": _PAIRS,
    "LlavaNextConfig": {"pixel_values": _images(3)},
    "LlavaNextVideoConfig": {"pixel_values": _images(3), "pixel_values_videos": NONE},
    "LlavaOnevisionConfig": {"pixel_values": _images(3), "pixel_values_videos": NONE},
    "LxmertConfig": {"visual_feats": _normal(4, 32), "visual_pos": _normal(4, 4), "labels": NONE},
    "MiniCPMV4_6VisionConfig": {"target_sizes": lambda c: torch.tensor([[4, 4]] * N)},
    "MllamaVisionConfig": {
        "pixel_values": _images(1, 4),
        "aspect_ratio_ids": _ones(1),
        "aspect_ratio_mask": _ones(1, 4),
    },
    "MllamaConfig": {
        "pixel_values": _images(1, 4),
        "aspect_ratio_ids": _ones(1),
        "aspect_ratio_mask": _ones(1, 4),
        "cross_attention_mask": _ones(8, 1, 4),
    },
    "MimiConfig": _SOUND,
    "ModernVBertConfig": _IMAGES,
    "Molmo2VisionConfig": {"pixel_values": _normal(16, 192)},
    "MoshiDepthConfig": {"last_hidden_state": _normal(8, 32)},
    "MusicgenDecoderConfig": {"input_ids": _tokens(4, 8)},
    "MusicgenMelodyDecoderConfig": {"input_ids": _tokens(4, 8)},
    "NemotronAsrStreamingConfig": _FRAMES,
    "NemotronAsrStreamingEncoderConfig": _FRAMES,
    "Nemotron3_5AsrConfig": _FRAMES,
    "ParakeetCTCConfig": _FRAMES,
    "ParakeetEncoderConfig": _FRAMES,
    "ParakeetRNNTConfig": _FRAMES,
    "ParakeetTDTConfig": _FRAMES,
    "PatchTSMixerConfig": {"past_values": _normal(32, 1)},
    "PatchTSTConfig": {"past_values": _normal(32, 1)},
    "PeAudioConfig": _SOUND,
    "PeAudioEncoderConfig": _SOUND,
    "PocketTTSAudioTokenizerConfig": _SOUND,
    "PPOCRV5ServerRecConfig": {"pixel_values": _normal(3, 48, 64)},
    "PPOCRV6SmallRecConfig": {"pixel_values": _normal(3, 48, 64)},
    "PPOCRV6TinyRecConfig": {"pixel_values": _normal(3, 48, 64)},
    "RagConfig": {
        "context_input_ids": lambda c: c.tokens(5 * N, 8),
        "context_attention_mask": lambda c: torch.ones(5 * N, 8, dtype=torch.long),
        "doc_scores": _normal(5),
    },
    "ReformerConfig": {"input_ids": _tokens(16)},
    "Siglip2Config": _PATCHES,
    "Siglip2VisionConfig": _PATCHES,
    "SmolVLMConfig": _IMAGES,
    "SpeechEncoderDecoderConfig": {"input_features": NONE},
    "SpeechT5HifiGanConfig": {"spectrogram": _normal(8, 32)},
    "SuperGlueConfig": _PAIRS,
    "TimeSeriesTransformerConfig": _SERIES,
    "TimesFmConfig": {"past_values": _normal(32), "freq": lambda c: torch.zeros(N, dtype=torch.long)},
    "TimesFm2_5Config": {"past_values": _normal(32)},
    "TimesformerConfig": {"pixel_values": _images(8)},
    "UltraVBertConfig": _IMAGES,
    "UnivNetConfig": {"input_features": _frames(8), "noise_sequence": _normal(8, 32)},
    "VideoLlama3Config": {"image_merge_sizes": _ones()},
    "VideoLlama3VisionConfig": {"merge_sizes": _ones()},
    "VideoMAEConfig": {"pixel_values": _images(16)},
    "VideoPrismConfig": {"pixel_values_videos": _images(16)},
    "VideoPrismVisionConfig": {"pixel_values_videos": _images(16)},
    "VivitConfig": {"pixel_values": _images(32)},
    "Wav2Vec2BertConfig": {"input_features": _normal(16, 32)},
    "XCLIPConfig": {"pixel_values": _images(8)},
    "XCLIPVisionConfig": {"pixel_values": lambda c: c.normal(8 * N, *c.image_shape)},
    "XcodecConfig": _SOUND,
    "BltLocalEncoderConfig": {
        "attention_mask": NONE,
        "num_patches": _constant(2),
        "patch_ids": lambda c: torch.tensor([[0] * 4 + [1] * 4] * N),
    },
    "ClapConfig": {"input_features": _normal(1, 64, 64)},
    "ClapAudioConfig": {"input_features": _normal(1, 64, 64)},
    "DeepseekOcr2VisionEncoderConfig": {"num_patches": _constant(4)},
    "DiaDecoderConfig": {"input_ids": _tokens(6, 9), "encoder_hidden_states": _normal(8, 32)},
    "Dots3NoteAudioConfig": {
        "input_features": _normal(16, 100),
        "chunk_sample_lengths": lambda c: torch.full((N,), 16000),
    },
    "EmbeddingGemma2Config": {"pixel_values": NONE, "input_features": NONE},
    "FastSpeech2ConformerConfig": _SPEECH_LABELS,
    "FastSpeech2ConformerWithHifiGanConfig": _SPEECH_LABELS,
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
    "Gemma4UnifiedConfig": {"pixel_values": NONE, "input_features": NONE},
    "GlmImageConfig": {"pixel_values": NONE, "image_grid_thw": NONE},
    "GraniteDoclingConfig": {"pixel_attention_mask": _ones(1)},
    "GraniteSpeech5CTCConfig": {"input_features": _normal(16, 64)},
    "GraniteSpeech5EncoderConfig": {"input_features": _normal(16, 64)},
    "InklingAudioConfig": {"audio_input_ids": _tokens(6, 16)},
    "BridgeTowerVisionConfig": {"image": _images()},
    "FastSpeech2ConformerHifiGanConfig": {"spectrogram": _normal(8, 16)},
    "Florence2VisionConfig": {"hidden_states": _images()},
    "FunAsrNanoConfig": {"input_features": _normal(16, 112), "input_features_mask": _ones(16)},
    "FunAsrNanoEncoderConfig": {"input_features": _normal(16, 112), "input_features_mask": _ones(16)},
    "InklingConfig": {"pixel_values": lambda c: c.normal(N * 2, 2, 8, 8, 3)},
    "InklingVisionConfig": {"pixel_values": lambda c: c.normal(N * 2, 2, 8, 8, 3)},
    "Inkling2Config": {
        "pixel_values": lambda c: c.normal(N * 16, 32, 3),
        "image_grid_thw": lambda c: torch.tensor([[1, 4, 4]] * N),
    },
    "Inkling2VisionConfig": {
        "pixel_values": lambda c: c.normal(N * 16, 32, 3),
        "image_grid_thw": lambda c: torch.tensor([[1, 4, 4]] * N),
    },
    "KimiK25Config": {"pixel_values": lambda c: c.normal(N * 16, 3, 8, 8)},
    "Kimi_K25Config": {"pixel_values": lambda c: c.normal(N * 16, 3, 8, 8)},
    "Kimi_K25VisionConfig": {"pixel_values": lambda c: c.normal(N * 16, 3, 8, 8)},
    "Kosmos2Config": {
        "input_ids": _tokens(12),
        "image_embeds_position_mask": lambda c: torch.tensor([[0] + [1] * 8 + [0] * 3] * N),
    },
    "Kosmos2_5VisionConfig": {"hidden_states": _normal(8, 32), "attention_mask": _ones(8)},
    "KyutaiSpeechToTextConfig": {"input_ids": _tokens(8, 9)},
    "MuseSparkAudioConfig": {"input_values": _normal(1920)},
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
    "Qwen2_5OmniThinkerConfig": {"input_features": NONE},
    "Qwen3OmniMoeThinkerConfig": {"input_features": NONE},
    "Qwen2_5OmniBigVGANConfig": {"mel_spectrogram": _normal(32, 8)},
    "Qwen2AudioConfig": {
        "feature_attention_mask": _ones(32),
        "input_ids": lambda c: torch.cat(
            [c.tokens(N, 7), torch.full((N, 1), c.find("audio_token_index"))], dim=1
        ),
    },
    "Sam3DETRDecoderConfig": {
        "vision_features": _normal(16, 32),
        "text_features": _normal(8, 32),
        "vision_pos_encoding": _normal(16, 32),
    },
    "Sam3LiteTextDETRDecoderConfig": {
        "vision_features": _normal(16, 32),
        "text_features": _normal(8, 32),
        "vision_pos_encoding": _normal(16, 32),
    },
    "Sam3MaskDecoderConfig": {
        "decoder_queries": _normal(8, 32),
        "backbone_features": lambda c: [c.normal(N, 32, 8, 8), c.normal(N, 32, 4, 4)],
        "encoder_hidden_states": _normal(16, 32),
    },
    "Sam3LiteTextMaskDecoderConfig": {
        "decoder_queries": _normal(8, 32),
        "backbone_features": lambda c: [c.normal(N, 32, 8, 8), c.normal(N, 32, 4, 4)],
        "encoder_hidden_states": _normal(16, 32),
    },
    "SegGptConfig": {
        "pixel_values": _normal(3, 32, 32),
        "prompt_pixel_values": _normal(3, 32, 32),
        "prompt_masks": _normal(3, 32, 32),
        "labels": NONE,
    },
    "T5Gemma2DecoderConfig": {"encoder_hidden_states": _normal(8, 32)},
    "VibeVoiceAcousticTokenizerConfig": {"input_values": _normal(1, 6400)},
    "MimiDecoderConfig": {"latents": _normal(32, 8)},
    "PocketTTSAudioTokenizerDecoderConfig": {"latents": _normal(32, 8)},
    "MimiEncoderConfig": _SOUND,
    "PocketTTSAudioTokenizerEncoderConfig": _SOUND,
    "NeoMMEConfig": {"pixel_values": lambda c: c.normal(N * 16, 192)},
    "Nemotron3_5TranscribeConfig": {"input_features": _frames(32), "input_features_mask": _ones(32)},
    "Nemotron3_5TranscribeAudioConfig": {"input_features": _frames(32), "input_features_mask": _ones(32)},
    "Nemotron3DiarizationConfig": {"input_features": _frames(32), "input_features_mask": _ones(32)},
    "Nemotron3DiarizationAudioConfig": {"input_features": _frames(32), "input_features_mask": _ones(32)},
    "Nemotron3_5TranscribeAsrAudioConfig": {"input_features": _frames(32), "input_features_mask": _ones(32)},
    "PaddleOCRVLConfig": {"pixel_values": lambda c: c.normal(N * 16, 3, 8, 8)},
    "Sam3DETREncoderConfig": {
        "vision_features": lambda c: [c.normal(N, 32, 4, 4)],
        "vision_pos_embeds": lambda c: [c.normal(N, 32, 4, 4)],
        "text_features": _normal(8, 32),
    },
    "Sam3LiteTextDETREncoderConfig": {
        "vision_features": lambda c: [c.normal(N, 32, 4, 4)],
        "vision_pos_embeds": lambda c: [c.normal(N, 32, 4, 4)],
        "text_features": _normal(8, 32),
    },
    "TvpConfig": {"pixel_values": _normal(2, 3, 128, 128)},
    "Lfm2VlConfig": _PATCHES,
    "NeuCodecConfig": {
        "input_values": _normal(1, 3200),
        "input_features": _normal(10, 32),
        "input_features_mask": _ones(10),
        "attention_mask": _ones(10),
    },
    "Xcodec2Config": {
        "input_values": _normal(1, 3200),
        "input_features": _normal(10, 32),
        "input_features_mask": _ones(10),
        "attention_mask": _ones(10),
    },
}
"""Makers of inputs by name; one that gives None leaves the input out."""
