"""Small models with the names of a Hugging Face Llama."""

from __future__ import annotations

from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(hidden, 1).weight[0].detach())


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class DecoderLayer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.self_attn = Attention(hidden)
        self.mlp = Mlp(hidden, inner)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)


class Decoder(nn.Module):
    def __init__(self, layers: int, hidden: int, inner: int, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, inner) for _ in range(layers))
        self.norm = RMSNorm(hidden)


class LlamaLike(nn.Module):
    def __init__(self, layers: int = 4, hidden: int = 16, inner: int = 32, vocab: int = 64) -> None:
        super().__init__()
        self.model = Decoder(layers, hidden, inner, vocab)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)


def llama() -> nn.Module:
    return LlamaLike()


def llama_tied() -> nn.Module:
    model = LlamaLike()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def odd() -> nn.Module:
    return LlamaLike(hidden=6, inner=9)


def no_model() -> int:
    return 3


def raising() -> nn.Module:
    raise KeyError("mine")
