"""A tiny Llama under Hugging Face's Trainer, with gradient accumulation and evaluations."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from nvprof_kit.integrations.huggingface import LayerCallback  # (1)

size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **size))
counting = [torch.arange(start, start + 32) % 128 for start in range(32)]
examples = [{"input_ids": tokens, "labels": tokens} for tokens in counting]
with tempfile.TemporaryDirectory() as folder:
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, save_strategy="no")
    evaluation = dict(eval_strategy="steps", eval_steps=3, report_to=[], disable_tqdm=True)
    arguments = TrainingArguments(folder, **options, **evaluation)
    callbacks = [LayerCallback()]  # (2) LayerCallback("3:5") records two steps, without nsys too
    Trainer(model, arguments, train_dataset=examples, eval_dataset=examples[:4], callbacks=callbacks).train()
