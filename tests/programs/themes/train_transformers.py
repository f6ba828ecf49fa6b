"""Models of transformers, from tiny random configurations, trained as people train them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs import program

VOCAB = 37


def tokens_for(smp: Any, shape: tuple[int, int], steps: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(41 + smp.dp_rank())
    return [torch.randint(3, VOCAB, shape, generator=generator) for _ in range(steps)]


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
    zero = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **zero, bos_token_id=1, eos_token_id=2, **changes))


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**given, **changes}))


def bert_config(**changes: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **changes,
    )


def train(
    smp: Any,
    out: Any,
    net: nn.Module,
    batches: list[dict[str, Tensor]],
    loss_of: Callable[[Any, dict[str, Tensor]], Tensor],
    lr: float = 0.01,
) -> Any:
    """The loop that the programs share where their twist lies in the model or in its loss."""
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=lr))

    @smp.step
    def train_step(model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    model.train()
    for batch in batches:
        optimizer.zero_grad()
        out.value("loss", train_step(model, batch).reduce_mean())
        optimizer.step()
    out.model(model)
    return model


# Causal language models -----------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,), replicas=(1, 2), static=True)
def gpt2_labels(smp: Any, out: Any) -> None:
    """GPT-2 with labels and use_cache=False."""
    batches = [{"input_ids": t, "labels": t.masked_fill(t < 6, -100)} for t in tokens_for(smp, (4, 8))]
    train(smp, out, gpt2(), batches, lambda model, b: model(**b, use_cache=False).loss)


@program(stages=(2,), ranks=(2,))
def gpt2_default_cache(smp: Any, out: Any) -> None:
    """use_cache is left at its default, as in most scripts; the loss is outputs[0]. Tied weights."""
    batches = [{"input_ids": t, "labels": t.clone()} for t in tokens_for(smp, (4, 8))]
    train(smp, out, gpt2(), batches, lambda model, b: model(**b)[0])


@program(stages=(2,), ranks=(2,))
def gpt2_hidden_states(smp: Any, out: Any) -> None:
    """output_hidden_states=True and a penalty on every hidden state, whose gradients meet."""

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        o = model(**b, use_cache=False, output_hidden_states=True, return_dict=True)
        return o["loss"] + 1e-2 * sum(h.pow(2).mean() for h in o.hidden_states)

    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    train(smp, out, gpt2(), batches, loss_of)


@program(stages=(2,), ranks=(2,))
def probed_layers(smp: Any, out: Any) -> None:
    """The size of every hidden state is logged in training, detached: a dashboard, not a loss."""
    net = llama()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> tuple[Tensor, int, Tensor]:
        o = model(tokens, labels=tokens, use_cache=False, output_hidden_states=True)
        model.backward(o.loss)
        sizes = [h.detach().norm() for h in o.hidden_states]
        return o.loss, len(sizes), sum(sizes)

    for tokens in tokens_for(smp, (4, 6)):
        optimizer.zero_grad()
        loss, count, sizes = train_step(model, tokens)
        optimizer.step()
        out.value("loss", loss.reduce_mean())
        out.value("count", [int(n) for n in count])
        out.value("sizes", sizes)
    out.model(model)


@program(stages=(2, 3), ranks=(2,))
def mixtral_alone(smp: Any, out: Any) -> None:
    """Mixtral without the auxiliary loss: experts chosen by data inside the blocks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    net = MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=4, use_cache=False, **sizes)
    )
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    train(smp, out, net, batches, lambda model, b: model(**b).loss)


@program(stages=(2,), ranks=(2,))
def llama_attentions(smp: Any, out: Any) -> None:
    """The entropy of the first layer's attention is part of the loss; gradients of residuals are summed."""

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        o = model(**b, use_cache=False, output_attentions=True)
        a = o.attentions[0]
        return o.loss + 1e-2 * (a * (a + 1e-9).log()).sum(-1).mean()

    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    train(smp, out, llama(attn_implementation="eager"), batches, loss_of)


@program(stages=(2,), ranks=(2,))
def weighted_layers(smp: Any, out: Any) -> None:
    """ELMo's way with BERT: a learned mix of all hidden states feeds a tagger, inside one module."""
    from transformers import BertModel

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(bert_config(), add_pooling_layer=False)
            self.mix = nn.Parameter(torch.zeros(3))
            self.tag = nn.Linear(16, 5)

        def forward(self, input_ids: Tensor) -> Tensor:
            states = torch.stack(self.bert(input_ids, output_hidden_states=True).hidden_states)
            return self.tag((self.mix.softmax(0).view(-1, 1, 1, 1) * states).sum(0))

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["input_ids"]).permute(0, 2, 1), b["input_ids"] % 5)

    train(smp, out, Tagger(), [{"input_ids": t} for t in tokens_for(smp, (4, 6))], loss_of)


@program(stages=(2,), ranks=(2,))
def gpt2_shifted(smp: Any, out: Any) -> None:
    """The loss is shifted by hand with contiguous().view(), padded positions masked. Tied weights."""

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"], use_cache=False).logits
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = b["input_ids"][..., 1:].contiguous()
        losses = F.cross_entropy(
            shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), reduction="none"
        )
        keep = b["attention_mask"][:, 1:].reshape(-1).float()
        return (losses * keep).sum() / keep.sum()

    batches = []
    for t in tokens_for(smp, (4, 8)):
        mask = torch.ones_like(t)
        mask[1, 5:] = 0
        mask[3, 6:] = 0
        batches.append({"input_ids": t, "attention_mask": mask})
    train(smp, out, gpt2(), batches, loss_of)


@program(stages=(2, 3), ranks=(2,), replicas=(1, 2))
def llama_padded(smp: Any, out: Any) -> None:
    """Llama with left padding and an attention mask."""
    batches = []
    for t in tokens_for(smp, (4, 8)):
        mask = torch.ones_like(t)
        mask[0, :3] = 0
        batches.append(
            {"input_ids": t * mask, "attention_mask": mask, "labels": t.masked_fill(mask == 0, -100)}
        )
    train(smp, out, llama(), batches, lambda model, b: model(**b, use_cache=False).loss)


@program(stages=(2,), ranks=(2,))
def llama_default_cache(smp: Any, out: Any) -> None:
    """Llama without use_cache=False, with a z-loss. Residuals are summed."""

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        outputs = model(**b)
        return outputs.loss + 1e-4 * outputs.logits.logsumexp(-1).pow(2).mean()  # z-loss

    train(smp, out, llama(), [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 8))], loss_of)


@program(stages=(2,), ranks=(2,))
def llama_gradient_checkpointing(smp: Any, out: Any) -> None:
    """gradient_checkpointing_enable() with use_reentrant False, and enable_input_require_grads."""
    net = llama()
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.enable_input_require_grads()
    net.config.use_cache = False
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 8))]
    train(smp, out, net, batches, lambda model, b: model(**b).loss)


@program(stages=(2,), ranks=(2,))
def gpt2_gradient_checkpointing(smp: Any, out: Any) -> None:
    """GPT-2 with gradient_checkpointing_enable() as it is by default."""
    net = gpt2()
    net.gradient_checkpointing_enable()
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 8))]
    train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss)


@program(stages=(2,), ranks=(2,))
def mixtral(smp: Any, out: Any) -> None:
    """Mixtral with its router's auxiliary loss; the experts are chosen by data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    net = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
            output_router_logits=True,
            router_aux_loss_coef=0.05,
            use_cache=False,
        )
    )
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    train(smp, out, net, batches, lambda model, b: model(**b).loss)


@program(stages=(2,), ranks=(2,))
def preference_pairs(smp: Any, out: Any) -> None:
    """DPO: chosen and rejected in one batch by chunk, a frozen plain copy as reference."""
    net = gpt2()
    reference = copy.deepcopy(net).eval().requires_grad_(False)

    def logps(model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(-1).sum(-1)

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        both = b["pairs"].flatten(0, 1)
        with torch.no_grad():
            ref = logps(reference, both)
        margin = (logps(model, both) - ref).view(-1, 2)
        return -F.logsigmoid(0.5 * (margin[:, 0] - margin[:, 1])).mean()

    batches = [{"pairs": t.view(4, 2, 6)} for t in tokens_for(smp, (8, 6))]
    train(smp, out, net, batches, loss_of)


# Surgery and saving ---------------------------------------------------------------------------------------


@program(stages=(2,), ranks=(2,))
def resized_embeddings(smp: Any, out: Any) -> None:
    """resize_token_embeddings and a mean for the new rows, before wrapping; tied weights stay tied."""
    net = gpt2()
    net.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    table = net.get_input_embeddings().weight
    with torch.no_grad():
        table[-3:] = table[:-3].mean(0, keepdim=True)
    assert net.get_output_embeddings().weight is table
    batches = [{"input_ids": t + 3, "labels": t + 3} for t in tokens_for(smp, (4, 6))]
    model = train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss)
    out.value("tied", "lm_head.weight" in dict(model.named_parameters()))


@program(stages=(2,), ranks=(2,))
def embeddings_passed_in(smp: Any, out: Any) -> None:
    """Soft prompts: get_input_embeddings() is called by the step function, and inputs_embeds passed."""
    net = llama()
    net.requires_grad_(False)
    net.prompt = nn.Parameter(torch.randn(2, 16) * 0.1)

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        words = net.get_input_embeddings()(b["input_ids"])
        prompt = net.prompt.unsqueeze(0).expand(len(words), -1, -1)
        labels = torch.cat([torch.full((len(words), 2), -100), b["input_ids"]], 1)
        return model(inputs_embeds=torch.cat([prompt, words], 1), labels=labels, use_cache=False).loss

    train(smp, out, net, [{"input_ids": t} for t in tokens_for(smp, (4, 6))], loss_of, lr=0.1)


@program(stages=(2,), ranks=(2,))
def save_pretrained(smp: Any, out: Any) -> None:
    """save_pretrained with the gathered state dict, from_pretrained, generate() by the plain copy."""
    from transformers import LlamaForCausalLM

    net = llama()
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    model = train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss)
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder, state_dict=state)
        loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    out.value("generated", loaded.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False))


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def save_pretrained_directly(smp: Any, out: Any) -> None:
    """net.save_pretrained(folder) without a state dict, as every script of transformers does."""
    from transformers import LlamaForCausalLM

    net = llama()
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6))]
    train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss)
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        out.value("logits", loaded(batches[0]["input_ids"]).logits)


@program(stages=(2,), ranks=(2,), refused_on_ranks="lives on stage")
def generate_between(smp: Any, out: Any) -> None:
    """model.module.generate() on the trained network itself, between steps, outside of a step function."""
    net = gpt2()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> Tensor:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        model.backward(loss)
        return loss

    for tokens in tokens_for(smp, (4, 6)):
        model.train()
        optimizer.zero_grad()
        out.value("loss", train_step(model, tokens).reduce_mean())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            sample = net.generate(
                tokens[:1, :3],
                attention_mask=torch.ones(1, 3),
                max_new_tokens=4,
                do_sample=False,
                pad_token_id=0,
            )
        out.value("sample", sample)
    out.model(model)


@program(stages=(2,), ranks=(2,))
def evaluation_loop(smp: Any, out: Any) -> None:
    """Perplexity and accuracy of a held-out batch in a second step function."""
    net = llama()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.02))

    @smp.step
    def train_step(model: Any, tokens: Tensor) -> Any:
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        model.backward(output.loss)
        return output

    @smp.step
    def eval_step(model: Any, tokens: Tensor) -> dict[str, Tensor]:
        output = model(input_ids=tokens, labels=tokens, use_cache=False)
        return {"loss": output.loss, "predictions": output.logits.argmax(-1)}

    held = tokens_for(smp, (4, 8), 3)[-1]
    for tokens in tokens_for(smp, (4, 8)):
        optimizer.zero_grad()
        output = train_step(model, tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        out.value("train loss", output["loss"].reduce_mean() if isinstance(output, dict) else output.loss)
        with torch.no_grad():
            result = eval_step(model, held)
        out.value("perplexity", result["loss"].reduce_mean().exp())
        out.value("predictions", result["predictions"].concat())
    out.model(model)


# Others -----------------------------------------------------------------------------------------------------


@program(stages=(2, 3), ranks=(2,))
def bert_classifier(smp: Any, out: Any) -> None:
    """A sequence classifier with token types and a mask; layer-wise groups; a schedule of transformers."""
    from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

    net = BertForSequenceClassification(bert_config(num_labels=3))
    model = smp.DistributedModel(net)
    groups = [
        {"params": [p for n, p in net.named_parameters() if n.startswith("bert.embeddings")], "lr": 1e-3},
        {"params": [p for n, p in net.named_parameters() if "encoder" in n], "lr": 5e-3},
        {"params": [p for n, p in net.named_parameters() if "pooler" in n or "classifier" in n], "lr": 1e-2},
    ]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups))
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)

    @smp.step
    def train_step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = model(**batch)
        model.backward(output.loss)
        return output.loss, output.logits

    for tokens in tokens_for(smp, (4, 8), 3):
        batch = {
            "input_ids": tokens,
            "token_type_ids": (torch.arange(8) > 3).long().expand(4, 8),
            "attention_mask": (torch.arange(8) < torch.tensor([[8], [6], [7], [5]])).long(),
            "labels": tokens[:, 0] % 3,
        }
        optimizer.zero_grad()
        loss, logits = train_step(model, batch)
        optimizer.step()
        schedule.step()
        out.value("loss", loss.reduce_mean())
        out.value("accuracy", (logits.concat().argmax(-1) == batch["labels"]).float().mean())
        out.value("rates", schedule.get_last_lr())
    out.model(model)


@program(stages=(2,), ranks=(2,))
def bert_masked(smp: Any, out: Any) -> None:
    """Masked language modelling with the masking drawn in the step function. Tied weights."""
    from transformers import BertForMaskedLM

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        tokens = b["input_ids"].clone()
        chosen = torch.rand(tokens.shape) < 0.3
        chosen[:, 0] = True
        labels = tokens.masked_fill(~chosen, -100)
        tokens[chosen] = 2
        return model(input_ids=tokens, labels=labels).loss

    train(
        smp, out, BertForMaskedLM(bert_config()), [{"input_ids": t} for t in tokens_for(smp, (4, 8))], loss_of
    )


@program(stages=(2,), ranks=(2,))
def bert_frozen_body(smp: Any, out: Any) -> None:
    """A plain module around a frozen BertModel: mean pooling under no_grad, a new head, [CLS] too."""
    from transformers import BertModel

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(bert_config(), add_pooling_layer=False)
            self.head = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
            m = attention_mask.unsqueeze(-1).float()
            pooled = (h * m).sum(1) / m.sum(1).clamp(min=1e-9)
            return self.head(torch.cat([pooled, h[:, 0]], -1))

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["input_ids"], b["attention_mask"]), b["labels"])

    batches = [
        {
            "input_ids": t,
            "attention_mask": (torch.arange(8) < torch.tensor([[8], [6], [7], [5]])).long(),
            "labels": t[:, 0] % 3,
        }
        for t in tokens_for(smp, (4, 8))
    ]
    train(smp, out, Classifier(), batches, loss_of)


@program(stages=(2, 3), ranks=(2,))
def t5(smp: Any, out: Any) -> None:
    """An encoder-decoder: T5 with labels, shared embeddings and relative biases."""
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    batches = [
        {
            "input_ids": t[:, :5],
            "attention_mask": torch.ones(4, 5, dtype=torch.long),
            "labels": t[:, 5:].contiguous(),
        }
        for t in tokens_for(smp, (4, 9))
    ]
    train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss)


@program(stages=(2,), ranks=(2,))
def t5_default_cache(smp: Any, out: Any) -> None:
    """T5 with the cache as it is by default, the loss by hand with label smoothing."""
    from transformers import T5Config, T5ForConditionalGeneration

    net = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    )

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        o = model(input_ids=b["source"], labels=b["target"])
        return F.cross_entropy(o.logits.flatten(0, 1), b["target"].flatten(), label_smoothing=0.1)

    batches = [{"source": t[:, :5], "target": t[:, 5:].contiguous()} for t in tokens_for(smp, (4, 9))]
    train(smp, out, net, batches, loss_of)


@program(stages=(2, 3), ranks=(2,))
def vit(smp: Any, out: Any) -> None:
    """ViT for images, with its position embeddings interpolated for a second size."""
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            image_size=8,
            patch_size=4,
            num_channels=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )
    generator = torch.Generator().manual_seed(3)
    batches = [
        {
            "pixel_values": torch.randn(4, 1, size, size, generator=generator),
            "labels": torch.tensor([0, 1, 2, 1]),
        }
        for size in (8, 12)
    ]
    train(smp, out, net, batches, lambda model, b: model(**b, interpolate_pos_encoding=True).loss)


@program(stages=(2,), ranks=(2,))
def whisper(smp: Any, out: Any) -> None:
    """Whisper: spectrograms in, decoder tokens by labels. Its projection is tied."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    net = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=4,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=8,
            max_target_positions=8,
            dropout=0.0,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    )
    generator = torch.Generator().manual_seed(3)
    batches = [
        {"input_features": torch.randn(4, 4, 16, generator=generator), "labels": t}
        for t in tokens_for(smp, (4, 6))
    ]
    train(smp, out, net, batches, lambda model, b: model(**b).loss)


@program(stages=(2,), ranks=(2,))
def clip(smp: Any, out: Any) -> None:
    """CLIP with return_loss=True: two towers and logit_scale; the text's end is found by argmax."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    common = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = CLIPTextConfig(vocab_size=VOCAB, max_position_embeddings=8, eos_token_id=2, **common)
    vision = CLIPVisionConfig(image_size=8, patch_size=4, num_channels=3, **common)
    net = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    generator = torch.Generator().manual_seed(3)
    batches = [
        {"input_ids": t, "pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
        for t in tokens_for(smp, (4, 6))
    ]
    train(smp, out, net, batches, lambda model, b: model(**b, return_loss=True).loss)


@program(stages=(2,), ranks=(2,))
def lora_on_llama(smp: Any, out: Any) -> None:
    """peft by hand: q_proj and v_proj replaced by name through get_submodule, merged after."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_A = nn.Linear(base.in_features, 2, bias=False)
            self.lora_B = nn.Linear(2, base.out_features, bias=False)
            nn.init.zeros_(self.lora_B.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))

    net = llama()
    net.requires_grad_(False)
    for name, module in list(net.named_modules()):
        if name.endswith(("q_proj", "v_proj")):
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, Lora(module))
    out.value("trainable", sum(p.numel() for p in net.parameters() if p.requires_grad))
    batches = [{"input_ids": t, "labels": t} for t in tokens_for(smp, (4, 6), 3)]
    model = train(smp, out, net, batches, lambda model, b: model(**b, use_cache=False).loss, lr=0.1)
    state = model.state_dict()
    merged = {}
    for name in [n for n in state if n.endswith("base_layer.weight")]:
        stem = name.removesuffix("base_layer.weight")
        merged[stem + "weight"] = (
            state[name] + 2.0 * state[stem + "lora_B.weight"] @ state[stem + "lora_A.weight"]
        )
    plain = llama()
    rest = {n: v for n, v in state.items() if "lora_" not in n and "base_layer" not in n}
    out.value("loaded", str(plain.load_state_dict({**rest, **merged})))
    with torch.no_grad():
        out.value("logits", plain.eval()(batches[0]["input_ids"]).logits)


@program(stages=(2,), ranks=(2,))
def distil_gpt2(smp: Any, out: Any) -> None:
    """DistilGPT2's recipe in one module: a teacher, a student, cosine of hidden states."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = gpt2().eval().requires_grad_(False), gpt2()

        def forward(self, tokens: Tensor) -> tuple[Any, Any]:
            with torch.no_grad():
                t = self.teacher(tokens, use_cache=False, output_hidden_states=True)
            return self.student(tokens, use_cache=False, output_hidden_states=True), t

    def loss_of(model: Any, b: dict[str, Tensor]) -> Tensor:
        s, t = model(b["input_ids"])
        kd = F.kl_div((s.logits / 2).log_softmax(-1), (t.logits / 2).softmax(-1), reduction="batchmean") * 4
        hs, ht = s.hidden_states[-1].view(-1, 16), t.hidden_states[-1].view(-1, 16)
        cosine = F.cosine_embedding_loss(hs, ht, torch.ones(hs.size(0)))
        return kd + cosine

    train(smp, out, Pair(), [{"input_ids": t} for t in tokens_for(smp, (4, 6))], loss_of)
