"""Networks over sequences, sets, graphs and sparse ids: attention of all kinds, recurrence, routing,
memory.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.programs import program


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Recurrence -------------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.rnn = nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(16, 8)

    def forward(self, src: Tensor) -> tuple[Tensor, Tensor]:
        outputs, hidden = self.rnn(self.embedding(src))
        return outputs, torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.v = nn.Linear(16 + 8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, hidden: Tensor, encoded: Tensor) -> Tensor:
        hidden = hidden.unsqueeze(1).repeat(1, encoded.shape[1], 1)
        return self.v(torch.tanh(self.attn(torch.cat((hidden, encoded), dim=2)))).squeeze(2).softmax(dim=1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.attention = Attention()
        self.rnn = nn.GRUCell(16 + 8, 8)
        self.fc_out = nn.Linear(16 + 8 + 8, 12)

    def forward(self, token: Tensor, hidden: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(token)
        weighted = torch.bmm(self.attention(hidden, encoded).unsqueeze(1), encoded).squeeze(1)
        hidden = self.rnn(torch.cat((embedded, weighted), dim=1), hidden)
        return self.fc_out(torch.cat((hidden, weighted, embedded), dim=1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, src: Tensor, trg: Tensor, teacher_forcing_ratio: float = 0.5) -> Tensor:
        outputs = torch.zeros(src.shape[0], trg.shape[1], self.decoder.fc_out.out_features)
        encoded, hidden = self.encoder(src)
        token = trg[:, 0]
        for t in range(1, trg.shape[1]):
            logits, hidden = self.decoder(token, hidden, encoded)
            outputs[:, t] = logits
            token = trg[:, t] if random.random() < teacher_forcing_ratio else logits.argmax(1)
        return outputs


@program(stages=(2, 3), ranks=(2,))
def seq2seq(smp: Any, out: Any) -> None:
    """Bahdanau attention; outputs are written into a zero tensor; random() in the container chooses
    teacher forcing.
    """
    model = smp.DistributedModel(Seq2Seq())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    criterion = nn.CrossEntropyLoss(ignore_index=0)

    @smp.step
    def train_step(model: Any, src: Tensor, trg: Tensor) -> Tensor:
        output = model(src, trg)
        loss = criterion(output[:, 1:].reshape(-1, output.shape[-1]), trg[:, 1:].reshape(-1))
        model.backward(loss)
        return loss

    @smp.step
    def eval_step(model: Any, src: Tensor, trg: Tensor) -> Tensor:
        return model(src, trg, 0).argmax(-1)

    g = numbers(1)
    for length in (5, 4, 6):
        src = torch.randint(1, 12, (4, length), generator=g)
        optimizer.zero_grad()
        loss = train_step(model, src, src.flip(1))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        out.value("perplexity", math.exp(loss.reduce_mean().item()))
    model.eval()
    with torch.no_grad():
        out.value("translated", eval_step(model, src, src.flip(1)).concat())
    out.model(model)


class PackedTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.mid = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.out = nn.Linear(16, 4)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        output, (h_n, _) = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=ids.shape[1])
        return self.out(self.mid(output)), h_n


@program(stages=(2, 3), ranks=(2,))
def packed_lstm(smp: Any, out: Any) -> None:
    """pack_padded_sequence in the container around a two-layer bidirectional LSTM; lengths differ each
    step.
    """
    model = smp.DistributedModel(PackedTagger())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.3))

    @smp.step
    def train_step(ids: Tensor, lengths: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        logits, h_n = model(ids, lengths)
        loss = F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=-100)
        model.backward(loss)
        return loss, h_n[-1].norm(dim=-1)

    g = numbers(2)
    for _ in range(3):
        lengths = torch.randint(1, 7, (4,), generator=g)
        lines = [torch.randint(1, 15, (int(n),), generator=g) for n in lengths]
        ids = pad_sequence(lines, batch_first=True)
        tags = pad_sequence([line % 4 for line in lines], batch_first=True, padding_value=-100)
        optimizer.zero_grad()
        loss, norms = train_step(ids, lengths, tags)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("norms", norms.concat())
    out.model(model)


class ConvLSTMCell(nn.Module):
    def __init__(self, before: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.conv = nn.Conv2d(before + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, o, g = torch.split(self.conv(torch.cat([x, h], dim=1)), self.hidden, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def init_hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = (x.shape[0], self.hidden, *x.shape[-2:])
        return torch.zeros(shape, device=self.conv.weight.device), torch.zeros(shape)


class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([ConvLSTMCell(1, 4), ConvLSTMCell(4, 4)])
        self.out = nn.Conv3d(4, 1, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, video: Tensor) -> Tensor:
        layer = video
        for cell in self.cells:
            state = cell.init_hidden(layer[:, 0])
            frames = []
            for t in range(video.size(1)):
                state = cell(layer[:, t], state)
                frames.append(state[0])
            layer = torch.stack(frames, dim=1)
        return self.out(layer.transpose(1, 2)).transpose(1, 2)


@program(
    stages=(2, 3),
    microbatches=4,
    parameters={"optimize": "speed", "active_microbatches": 1},
)
def convlstm(smp: Any, out: Any) -> None:
    """ConvLSTM cells over video, layer by layer, (h, c) as a tuple argument; the dtype of a weight is
    asked for.
    """
    model = smp.DistributedModel(ConvLSTM())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))

    @smp.step
    def train_step(video: Tensor) -> Tensor:
        loss = F.mse_loss(model(video[:, :-1]), video[:, 1:])
        model.backward(loss)
        return loss

    g = numbers(3)
    for frames in (4, 3):
        optimizer.zero_grad()
        out.value("loss", train_step(torch.randn(4, frames, 1, 5, 5, generator=g)).reduce_mean())
        optimizer.step()
    out.model(model)


class S4D(nn.Module):
    def __init__(self, width: int, states: int = 3) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(width) - 3)
        self.c = nn.Parameter(torch.view_as_real(torch.randn(width, states, dtype=torch.cfloat)))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.register_buffer("a_imag", math.pi * torch.arange(states).expand(width, -1).float())

    def forward(self, u: Tensor) -> Tensor:
        dt = self.log_dt.exp()
        a = -self.log_a_real.exp() + 1j * self.a_imag
        decay = (a * dt[:, None]).exp()
        c = torch.view_as_complex(self.c) * (decay - 1) / a
        state = torch.zeros(u.shape[0], *decay.shape, dtype=torch.cfloat)
        ys = []
        for t in range(u.shape[1]):
            state = decay * state + u[:, t, :, None]
            ys.append(2 * torch.einsum("hn,bhn->bh", c, state).real)
        return torch.stack(ys, 1)


class SSM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.layers = nn.ModuleList(S4D(8) for _ in range(3))
        self.mix = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, mix, norm in zip(self.layers, self.mix, self.norms):
            x = x + F.glu(mix(F.gelu(layer(norm(x)))), dim=-1)
        return self.head(x.mean(1))


@program(stages=(2, 3), ranks=(2,), static=True)
def state_space(smp: Any, out: Any) -> None:
    """Complex diagonal state spaces, scanned in Python; the blocks are spread over three lists."""
    model = smp.DistributedModel(SSM())
    special = [p for n, p in model.named_parameters() if n.endswith(("log_dt", "log_a_real"))]
    names = {id(p) for p in special}
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if id(p) not in names], "weight_decay": 0.01},
                {"params": special, "lr": 1e-3, "weight_decay": 0.0},
            ],
            lr=0.01,
        )
    )

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    g = numbers(4)
    for length in (6, 8, 6):
        optimizer.zero_grad()
        x = torch.randn(4, length, 2, generator=g)
        out.value("loss", train_step(x, torch.randint(0, 3, (4,), generator=g)).reduce_mean())
        optimizer.step()
    out.model(model)


# Attention --------------------------------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(14, 8), nn.Embedding(14, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(8, 14)
        position = torch.arange(10)[:, None] * torch.exp(-torch.arange(0, 8, 2) * math.log(1e4) / 8)
        pe = torch.zeros(10, 8)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position), torch.cos(position)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        padding = src == 0
        hidden = self.transformer(
            self.src_embed(src) * math.sqrt(8) + self.pe[: src.shape[1]],
            self.tgt_embed(tgt) * math.sqrt(8) + self.pe[: tgt.shape[1]],
            tgt_mask=causal,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=tgt == 0,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.generator(hidden)


def noam(step: int) -> float:
    return min((step + 1) ** -0.5, (step + 1) * 2**-1.5)


@program(stages=(2,), ranks=(2,), static=True)
def translation(smp: Any, out: Any) -> None:
    """torch.nn.Transformer with all its masks, split inside; greedy decoding by a growing sequence,
    train/eval. (Three stages would split its encoder, which is refused in evaluation: test_fused_layers.)
    """
    model = smp.DistributedModel(Translator())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.98)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, noam)

    @smp.step
    def train_step(src: Tensor, tgt: Tensor) -> Tensor:
        logits = model(src, tgt[:, :-1])
        loss = F.cross_entropy(
            logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1
        )
        model.backward(loss)
        return loss

    @smp.step
    def next_step(src: Tensor, tgt: Tensor) -> Tensor:
        return model(src, tgt)[:, -1].argmax(-1)

    g = numbers(5)
    for _ in range(3):
        src = torch.randint(1, 14, (4, 6), generator=g)
        src[1, 4:] = 0
        src[2, 5:] = 0
        optimizer.zero_grad()
        loss = train_step(src, src.flip(1).roll(1, 1).clamp(min=1))
        optimizer.step()
        scheduler.step()
        out.value("loss", loss.reduce_mean().item())
    model.eval()
    ys = torch.ones(4, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(4):
            ys = torch.cat([ys, next_step(src, ys).concat()[:, None]], dim=1)
    out.value("decoded", ys)
    out.model(model)


class DecoderLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 8)
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, activation="gelu", norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, num_layers=3, norm=nn.LayerNorm(8))
        self.memory = nn.Parameter(torch.randn(3, 1, 8))
        self.head = nn.Linear(8, 14, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length, batch = tokens.shape
        mask = torch.full((length, length), float("-inf")).triu(1)
        x = self.decoder(self.embed(tokens), self.memory.expand(-1, batch, -1), tgt_mask=mask)
        return self.head(x)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def decoder_batch_second(smp: Any, out: Any) -> None:
    """Time first, batch second (input_split_axes); tied head; a learnt memory parameter of the container."""
    model = smp.DistributedModel(DecoderLM())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step(input_split_axes={"tokens": 1, "targets": 1})
    def train_step(model: Any, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, 14), targets.reshape(-1))
        model.backward(loss)
        return loss, logits.argmax(-1)

    g = numbers(6 + smp.dp_rank())
    for _ in range(3):
        data = torch.randint(0, 14, (7, 4), generator=g)
        optimizer.zero_grad()
        loss, guess = train_step(model, data[:-1], data[1:])
        optimizer.step()
        out.value("loss", loss.reduce_mean().item())
        out.value("guess", torch.cat(guess.outputs, dim=1))
    out.model(model)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = rotate(self.q(x).view(b, t, 4, 4).transpose(1, 2), *rope)
        k, v = self.kv(x).view(b, t, 2, 4).transpose(1, 2).chunk(2, dim=1)
        k, v = rotate(k, *rope).expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.transpose(1, 2).reshape(b, t, 16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.attention = RotaryAttention()
        self.gate_up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, rope: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        x = x + self.attention(self.n1(x), rope, bias)
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class RelativeBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(15, 4)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).float())

    def forward(self, length: int) -> Tensor:
        relative = torch.arange(length)[None] - torch.arange(length)[:, None]
        bias = self.table(relative.clamp(-7, 7) + 7).permute(2, 0, 1)
        bias = bias + self.slopes[:, None, None] * -relative.abs()
        return bias.masked_fill(relative > 0, float("-inf"))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 16)
        self.bias = RelativeBias()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(16)
        angle = torch.arange(10)[:, None] * 1e4 ** -torch.arange(0, 1, 0.5)
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.size(-1)
        x, bias = self.embed(tokens), self.bias(t)
        for block in self.blocks:
            x = block(x, rope=(self.cos[:t], self.sin[:t]), bias=bias)
        return F.linear(self.norm(x), self.embed.weight)


@program(stages=(2, 3, 4), ranks=(2,), pipelines=("interleaved", "simple"), static=True)
def rotary_gqa(smp: Any, out: Any) -> None:
    """RoPE buffers, a relative bias shared over layers, keyword-only tensors, F.linear with embed.weight
    as the head.
    """
    model = smp.DistributedModel(Llama())
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=False, foreach=True)
    )

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        model.backward(loss)
        return loss

    g = numbers(7)
    for length in (7, 5, 7):
        optimizer.zero_grad()
        out.value("loss", train_step(model, torch.randint(0, 14, (4, length), generator=g)).reduce_mean())
        optimizer.step()
    out.model(model)


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        z = 1 / (torch.einsum("bthd,bthd->bth", q, k.cumsum(1)) + 1e-6)
        return self.out(torch.einsum("bthd,bthde,bth->bthe", q, kv, z).flatten(2))


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 6)
        self.up = nn.Linear(6, 12)
        self.shared = nn.ModuleList(
            [LinearAttention(), nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))]
        )
        self.norm = nn.LayerNorm(12)
        self.pooler = nn.Linear(12, 12)
        self.sop = nn.Linear(12, 2)

    def forward(self, ids: Tensor, depth: int = 3) -> dict[str, Tensor]:
        x = self.up(self.embed(ids))
        hidden = []
        for _ in range(depth):
            x = self.norm(x + self.shared[0](x))
            x = self.norm(x + self.shared[1](x))
            hidden.append(x)
        scores = F.linear(x, self.up.weight.t()) @ self.embed.weight.t()
        return {
            "mlm": scores,
            "sop": self.sop(torch.tanh(self.pooler(x[:, 0]))),
            "hidden": torch.stack(hidden),
        }


@program(stages=(2, 3), ranks=(2,))
def albert(smp: Any, out: Any) -> None:
    """One layer used at every depth, a factored embedding used again transposed, two heads, masked
    positions picked.
    """
    model = smp.DistributedModel(Albert())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(ids: Tensor, masked: Tensor, label: Tensor) -> tuple[Tensor, Tensor, float]:
        inputs = ids.masked_fill(masked, 0)
        result = model(inputs, depth=3)
        mlm = F.cross_entropy(result["mlm"][masked], ids[masked])
        sop = F.cross_entropy(result["sop"], label)
        model.backward(mlm + sop)
        return mlm, sop, result["hidden"].norm(dim=-1).mean().item()

    g = numbers(8)
    for _ in range(3):
        ids = torch.randint(1, 14, (4, 6), generator=g)
        masked = torch.rand(4, 6, generator=g) < 0.3
        masked[:, 2] = True
        optimizer.zero_grad()
        mlm, sop, norm = train_step(ids, masked, torch.randint(0, 2, (4,), generator=g))
        optimizer.step()
        out.value("losses", [mlm.reduce_mean(), sop.reduce_mean(), norm])
    out.model(model)


class UniversalTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 8)
        self.step = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
        self.halt = nn.Linear(8, 1)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        nn.init.constant_(self.halt.bias, 0.3)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.embed(ids)
        halting = torch.zeros(state.shape[:2])
        remainders, updates = torch.zeros_like(halting), torch.zeros_like(halting)
        previous = torch.zeros_like(state)
        step = 0
        while ((halting < 0.9) & (updates < 4)).byte().any():
            p = torch.sigmoid(self.halt(state)).squeeze(-1)
            running = (halting < 1.0).float()
            new_halted = (halting + p * running > 0.9).float() * running
            running = (halting + p * running <= 0.9).float() * running
            halting = halting + p * running
            remainders = remainders + new_halted * (1 - halting)
            halting = halting + new_halted * remainders
            updates = updates + running + new_halted
            weights = (p * running + new_halted * remainders).unsqueeze(-1)
            state = self.step(state + 0.1 * step)
            previous = state * weights + previous * (1 - weights)
            step += 1
        return self.head(previous.mean(1)), remainders, updates


@program(stages=(2, 3), ranks=(2,))
def universal_transformer(smp: Any, out: Any) -> None:
    """Adaptive computation time: `while ... .any()` on halting probabilities in the container."""
    model = smp.DistributedModel(UniversalTransformer())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits, remainders, updates = model(ids)
        ponder = (remainders + updates).mean()
        model.backward(F.cross_entropy(logits, y) + 0.01 * ponder)
        return ponder, updates

    g = numbers(9)
    for _ in range(3):
        optimizer.zero_grad()
        ponder, updates = train_step(
            torch.randint(0, 14, (4, 5), generator=g), torch.randint(0, 3, (4,), generator=g)
        )
        optimizer.step()
        out.value("ponder", ponder.reduce_mean().item())
        out.value("updates", updates.concat())
    out.model(model)


# Routing ----------------------------------------------------------------------------------------------------


class Top1MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs = F.softmax(self.router(flat), dim=-1)
        weight, expert = probs.max(dim=-1)
        self.aux_loss = 4 * (F.one_hot(expert, 4).float().mean(0) * probs.mean(0)).sum()
        result = torch.zeros_like(flat)
        for i, net in enumerate(self.experts):
            rows = torch.where(expert == i)[0]
            if rows.numel() == 0:
                continue
            result.index_add_(0, rows, net(flat[rows]) * weight[rows].unsqueeze(-1))
        return result.view_as(x)


class SwitchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(14, 8)
        self.layers = nn.ModuleList(Top1MoE() for _ in range(2))
        self.head = nn.Linear(8, 14)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@program(stages=(2, 3), ranks=(2,))
def switch_top1(smp: Any, out: Any) -> None:
    """Tokens dispatched to experts by index_add_, some expert gets none; the aux loss is stored on the
    layers.
    """
    net = SwitchNet()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(ids)
        aux = sum(m.aux_loss for m in net.modules() if isinstance(m, Top1MoE))
        lm = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        model.backward(lm + 0.01 * aux)
        return lm, aux

    g = numbers(10)
    for _ in range(3):
        optimizer.zero_grad()
        lm, aux = train_step(torch.randint(0, 14, (4, 5), generator=g))
        optimizer.step()
        out.value("losses", [lm.reduce_mean(), aux.reduce_mean()])
    out.model(model)


class Top2MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.w1, self.w2 = (
            nn.Parameter(torch.randn(3, 6, 12) * 0.3),
            nn.Parameter(torch.randn(3, 12, 6) * 0.3),
        )
        self.register_buffer("load", torch.zeros(3, dtype=torch.long))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.gate(x) if noise is None else self.gate(x) + 0.1 * noise
        top, index = logits.topk(2, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))
        if self.training:
            self.load += index.flatten().bincount(minlength=3)
        hidden = torch.einsum("bd,edh->ebh", x, self.w1).relu()
        y = torch.einsum("ebh,ehd,be->bd", hidden, self.w2, gates)
        importance = gates.sum(0)
        return y, importance.var() / (importance.mean() ** 2 + 1e-10)


class MoEStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Top2MoE(), Top2MoE(), Top2MoE()

    def forward(self, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        losses = []
        for layer in self.children():
            y, loss = layer(x, noise)
            x = x + y
            losses.append(loss)
        return x, losses


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def noisy_top2(smp: Any, out: Any) -> None:
    """Noisy top-2 gating with the noise passed in, an integer buffer of loads, a list of losses in the
    result.
    """
    model = smp.DistributedModel(MoEStack())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor, y: Tensor, noise: Tensor) -> list[Tensor]:
        guess, balance = model(x, noise)
        model.backward(F.mse_loss(guess, y) + 0.1 * torch.stack(balance).sum())
        return balance

    @smp.step
    def eval_step(x: Tensor) -> Tensor:
        return model(x)[0]

    g = numbers(11 + smp.dp_rank())
    for _ in range(3):
        x = torch.randn(8, 6, generator=g)
        optimizer.zero_grad()
        balance = train_step(x, x.sin(), torch.randn(8, 3, generator=g))
        optimizer.step()
        out.value("balance", [b.reduce_mean() for b in balance])
    model.eval()
    with torch.no_grad():
        out.value("guess", eval_step(x).concat())
    if smp.dp_size() == 1:
        out.model(model)
    else:
        out.value("weights", {n: p for n, p in model.state_dict().items() if "load" not in n})


# Sparse ids, graphs, sets -----------------------------------------------------------------------------------


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum", sparse=True) for n in (10, 6, 20))
        self.bot_l = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(4 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        t = torch.cat([x, *ly], dim=1).view(x.shape[0], -1, 4)
        z = torch.bmm(t, t.transpose(1, 2))
        li = torch.tensor([i for i in range(z.shape[1]) for j in range(i)])
        lj = torch.tensor([j for i in range(z.shape[2]) for j in range(i)])
        return torch.cat([x, z[:, li, lj]], dim=1)

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        ly = []
        for bag, ids in zip(self.emb_l, sparse):
            offsets = torch.arange(0, ids.numel(), ids.shape[1])
            ly.append(bag(ids.reshape(-1), offsets))
        return self.top_l(self.interact(x, ly)).squeeze(1)


@program(stages=(2, 3), ranks=(2,))
def dlrm(smp: Any, out: Any) -> None:
    """EmbeddingBags with offsets and sparse gradients; two optimizers, SparseAdam for the tables."""
    net = DLRM()
    model = smp.DistributedModel(net)
    dense_params = [*net.bot_l.parameters(), *net.top_l.parameters()]
    dense_optimizer = smp.DistributedOptimizer(torch.optim.Adagrad(dense_params, lr=0.1))
    sparse_optimizer = smp.DistributedOptimizer(torch.optim.SparseAdam(list(net.emb_l.parameters()), lr=0.1))

    @smp.step
    def train_step(dense: Tensor, sparse: list[Tensor], clicked: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(model(dense, sparse), clicked)
        model.backward(loss)
        return loss

    g = numbers(12)
    for _ in range(3):
        sparse = [torch.randint(0, n, (4, 2), generator=g) for n in (10, 6, 20)]
        dense_optimizer.zero_grad()
        sparse_optimizer.zero_grad()
        loss = train_step(
            torch.rand(4, 3, generator=g), sparse, torch.randint(0, 2, (4,), generator=g).float()
        )
        dense_optimizer.step()
        sparse_optimizer.step()
        out.value("loss", loss.reduce_mean())
    for name, parameter in model.local_named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        out.value(f"gradient of {name}", gradient.to_dense() if gradient.is_sparse else gradient)
        out.value(f"gradient of {name}: sparse", gradient.is_sparse)
    out.value("state", dict(model.state_dict()))


@dataclass
class Graph:
    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor


class GraphBatch:
    """Graphs that know how to split themselves: `smp_slice`, as SMP asks for."""

    def __init__(self, graphs: list[tuple[Tensor, Tensor, int]]) -> None:
        self.graphs = graphs

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Graph:
        size = len(self.graphs) // num_mb
        part = self.graphs[mb * size : (mb + 1) * size]
        starts = torch.tensor([0] + [len(x) for x, _, _ in part]).cumsum(0)
        return Graph(
            x=torch.cat([x for x, _, _ in part]),
            edge_index=torch.cat([e + s for (_, e, _), s in zip(part, starts)], dim=1),
            batch=torch.repeat_interleave(torch.arange(len(part)), starts.diff()),
            y=torch.tensor([y for _, _, y in part]),
        )


class GINConv(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.nn = nn.Sequential(
            nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Linear(after, after)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        gathered = torch.zeros_like(x).index_add_(0, target, x[source])
        return self.nn((1 + self.eps) * x + gathered)


class GIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GINConv(4, 8), GINConv(8, 8), GINConv(8, 8)])
        self.lin = nn.Linear(8, 2)

    def forward(self, data: Graph) -> Tensor:
        x = data.x
        for conv in self.convs:
            x = conv(x, data.edge_index).relu()
        num_graphs = int(data.batch.max()) + 1
        pooled = torch.zeros(num_graphs, x.shape[1]).scatter_reduce(
            0, data.batch[:, None].expand_as(x), x, reduce="amax", include_self=False
        )
        return self.lin(pooled)


@program(stages=(2, 3), ranks=(2,))
def graphs(smp: Any, out: Any) -> None:
    """GIN over graphs of different sizes that split themselves by smp_slice into a dataclass;
    scatter_reduce pools.
    """
    model = smp.DistributedModel(GIN())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(data: Any) -> tuple[Tensor, int]:
        logits = model(data)
        loss = F.cross_entropy(logits, data.y)
        model.backward(loss)
        return loss, int((logits.argmax(-1) == data.y).sum())

    g = numbers(13)
    for _ in range(3):
        made = []
        for _ in range(4):
            n = int(torch.randint(3, 7, (1,), generator=g))
            made.append((torch.randn(n, 4, generator=g), torch.randint(0, n, (2, 2 * n), generator=g), n % 2))
        optimizer.zero_grad()
        loss, correct = train_step(GraphBatch(made))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("correct", sum(correct))
    out.model(model)


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(2, 16), nn.ELU(), nn.Linear(16, 16))
        self.rho = nn.Sequential(nn.Linear(32, 12), nn.ELU(), nn.Linear(12, 1))

    def forward(self, sets: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(sets)
        total = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        top = h.masked_fill(~mask.bool().unsqueeze(-1), float("-inf")).amax(1)
        assert not torch.isnan(total).any(), "an empty set"
        return self.rho(torch.cat([total, top], -1)).squeeze(-1)


@program(stages=(2, 3), ranks=(2,))
def deep_sets(smp: Any, out: Any) -> None:
    """Masked sets; the model asserts that no mean is nan, and the step sorts by the guessed values."""
    model = smp.DistributedModel(DeepSets())
    optimizer = smp.DistributedOptimizer(torch.optim.Rprop(model.parameters(), lr=0.01))

    @smp.step
    def train_step(sets: Tensor, mask: Tensor, y: Tensor) -> tuple[Tensor, list[float]]:
        guess = model(sets, mask)
        loss = F.huber_loss(guess, y)
        model.backward(loss)
        return loss, sorted(guess.tolist())

    g = numbers(14)
    for _ in range(3):
        sets = torch.randn(4, 5, 2, generator=g)
        mask = (torch.arange(5) < torch.randint(1, 6, (4, 1), generator=g)).float()
        optimizer.zero_grad()
        loss, ordered = train_step(sets, mask, (sets * mask[..., None]).sum((1, 2)))
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("ordered", ordered)
    out.model(model)


class PointerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(2, 8, batch_first=True)
        self.decoder = nn.LSTMCell(2, 8)
        self.w1, self.w2, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        encoded, (h, c) = self.encoder(points)
        h, c = h.squeeze(0), c.squeeze(0)
        mask = torch.zeros(points.shape[:2], dtype=torch.bool)
        x = points.mean(1)
        logs, chosen = [], []
        for _ in range(points.shape[1]):
            h, c = self.decoder(x, (h, c))
            u = self.v(torch.tanh(self.w1(encoded) + self.w2(h).unsqueeze(1))).squeeze(-1)
            log = F.log_softmax(u.masked_fill(mask, -1e9), dim=-1)
            index = log.argmax(-1)
            mask = mask.scatter(1, index.unsqueeze(1), True)
            x = points.gather(1, index[:, None, None].expand(-1, 1, 2)).squeeze(1)
            logs.append(log)
            chosen.append(index)
        return torch.stack(logs, 1), torch.stack(chosen, 1)


@program(stages=(2, 3))
def pointer_network(smp: Any, out: Any) -> None:
    """The decoder's own choice is gathered from the input and fed back; an LSTM gives its state to an
    LSTMCell.
    """
    model = smp.DistributedModel(PointerNet())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(points: Tensor) -> tuple[Tensor, Tensor]:
        logs, chosen = model(points)
        target = points[..., 0].argsort(dim=1)
        loss = F.nll_loss(logs.flatten(0, 1), target.flatten())
        model.backward(loss)
        return loss, chosen

    g = numbers(15)
    for _ in range(3):
        optimizer.zero_grad()
        loss, chosen = train_step(torch.rand(4, 4, 2, generator=g))
        optimizer.step()
        out.value("loss", loss.reduce_mean().item())
        out.value("all chosen", all(sorted(row) == [0, 1, 2, 3] for row in chosen.concat().tolist()))
        out.value("chosen", chosen.concat())
    out.model(model)


class MemN2N(nn.Module):
    def __init__(self, hops: int = 3) -> None:
        super().__init__()
        self.hops = hops
        for hop in range(hops + 1):
            table = nn.Embedding(12, 6, padding_idx=0)
            nn.init.normal_(table.weight, 0, 0.5)
            self.add_module(f"C_{hop}", table)
        self.register_buffer("te", torch.linspace(0, 1, 5)[:, None].expand(5, 6).clone())

    def forward(self, story: Tensor, query: Tensor) -> Tensor:
        u = [getattr(self, "C_0")(query).sum(1)]  # noqa: B009 -- as its hops do
        for hop in range(self.hops):
            keys = getattr(self, f"C_{hop}")(story).sum(2) + self.te
            p = torch.softmax((keys * u[-1].unsqueeze(1)).sum(2), dim=1)
            values = getattr(self, f"C_{hop + 1}")(story).sum(2) + self.te
            u.append(u[-1] + (p.unsqueeze(2) * values).sum(1))
        return u[-1] @ getattr(self, f"C_{self.hops}").weight.t()


@program(stages=(2, 3, 4), ranks=(2,), microbatches=4)
def memory_network(smp: Any, out: Any) -> None:
    """End-to-end memory: adjacent hops share tables, found by getattr; the null word's gradient is zeroed
    outside.
    """
    net = MemN2N()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def train_step(story: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        loss = F.cross_entropy(model(story, query), answer)
        model.backward(loss)
        return loss

    g = numbers(16)
    for _ in range(3):
        story = torch.randint(0, 12, (8, 5, 3), generator=g)
        optimizer.zero_grad()
        loss = train_step(story, story[:, 0], story[:, -1, 0])
        for p in model.local_parameters():
            p.grad[0].zero_()
            p.grad.add_(torch.ones_like(p.grad), alpha=1e-3)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.model(model)


class StackRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.cell = nn.RNNCell(8 + 4, 12)
        self.action, self.value, self.out = nn.Linear(12, 3), nn.Linear(12, 4), nn.Linear(12, 5)

    def forward(
        self, ids: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b = ids.shape[0]
        hidden, stack = (torch.zeros(b, 12), torch.zeros(b, 6, 4)) if state is None else state
        logits = []
        for token in ids.unbind(1):
            hidden = self.cell(torch.cat([self.embed(token), stack[:, 0]], -1), hidden)
            push, pop, stay = self.action(hidden).softmax(-1)[:, :, None, None].unbind(1)
            pushed = torch.cat([self.value(hidden).sigmoid().unsqueeze(1), stack[:, :-1]], 1)
            popped = F.pad(stack[:, 1:], (0, 0, 0, 1))
            stack = push * pushed + pop * popped + stay * stack
            logits.append(self.out(hidden))
        return torch.stack(logits, 1), (hidden, stack)


@program(stages=(2, 3), ranks=(2,))
def stack_rnn(smp: Any, out: Any) -> None:
    """A differentiable stack, trained by truncated backpropagation: the state goes out of one step into
    the next.
    """
    model = smp.DistributedModel(StackRNN())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(ids: Tensor, state: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits, state = model(ids[:, :-1], state)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        model.backward(loss)
        return loss, state

    g = numbers(17)
    state = None
    for _ in range(3):
        optimizer.zero_grad()
        loss, (hidden, stack) = train_step(torch.randint(0, 5, (4, 5), generator=g), state)
        state = (hidden.concat().detach(), stack.concat().detach())
        optimizer.step()
        out.value("loss", loss.reduce_mean())
    out.value("state", state)
    out.model(model)


class DiscreteVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
        self.decoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x: Tensor, *, gumbels: Tensor, tau: float, hard: bool = False) -> tuple[Tensor, Tensor]:
        logits = self.encoder(x).view(-1, 3, 4)
        soft = ((logits + gumbels) / tau).softmax(-1)
        if hard:
            one_hot = torch.zeros_like(soft).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
            soft = one_hot - soft.detach() + soft
        return self.decoder(soft.flatten(1)), logits.softmax(-1)


@program(stages=(2, 3), ranks=(2,))
def gumbel_softmax(smp: Any, out: Any) -> None:
    """Gumbel noise drawn in the step function, a temperature that anneals, hard samples by
    straight-through.
    """
    model = smp.DistributedModel(DiscreteVAE())
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    @smp.step
    def train_step(x: Tensor, tau: float, hard: bool) -> tuple[Tensor, Tensor]:
        gumbels = -torch.empty(len(x), 3, 4).exponential_().log()
        guess, q = model(x, gumbels=gumbels, tau=tau, hard=hard)
        kl = (q * (q * 4 + 1e-20).log()).sum((-1, -2)).mean()
        model.backward(F.mse_loss(guess, x, reduction="sum") / len(x) + kl)
        return kl, gumbels.mean()

    g = numbers(18)
    for step in range(4):
        optimizer.zero_grad()
        kl, noise = train_step(torch.randn(4, 6, generator=g), tau=0.9**step, hard=step % 2 == 1)
        optimizer.step()
        out.value("kl", kl.reduce_mean())
        out.value("noise", noise)
    out.model(model)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, stride=2, padding=1)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.proj = nn.Sequential(nn.Linear(8, 16), nn.Hardtanh(0, 20), nn.Linear(16, 5))

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x).relu().transpose(1, 2)
        x, _ = self.rnn(x)
        return F.log_softmax(self.proj(x), -1).transpose(0, 1), (lengths + 1) // 2


@program(stages=(2, 3), ranks=(2,))
def speech_ctc(smp: Any, out: Any) -> None:
    """CTC: log-probabilities come out batch second, lengths halved by the model; greedy decoding to
    strings.
    """
    model = smp.DistributedModel(Speech())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    @smp.step
    def train_step(
        x: Tensor, lengths: Tensor, words: Tensor, word_lengths: Tensor
    ) -> tuple[Tensor, list[str]]:
        log_probs, halved = model(x, lengths)
        loss = ctc(log_probs, words, halved, word_lengths)
        model.backward(loss)
        paths = log_probs.argmax(-1).t()
        texts = [
            "".join("_abcd"[i] for i in torch.unique_consecutive(path[:n]).tolist() if i)
            for path, n in zip(paths, halved)
        ]
        return loss, texts

    g = numbers(19)
    for _ in range(3):
        optimizer.zero_grad()
        loss, texts = train_step(
            torch.randn(4, 4, 12, generator=g),
            torch.tensor([12, 10, 8, 12]),
            torch.randint(1, 5, (4, 3), generator=g),
            torch.tensor([3, 2, 1, 3]),
        )
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("texts", texts)
    out.model(model)
